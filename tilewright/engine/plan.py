"""Plans the memory of a device before anything is loaded: weights, tables, working memory, and pages of the KV cache.

All sizes are in bytes. Weights, tables and pages are exact. Working memory is an upper bound for the largest step. The reserve
is for the driver, compiled kernels, cuBLAS and captured graphs.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tilewright.engine.adapters import adapter_bytes
from tilewright.engine.config import EngineConfig
from tilewright.engine.tier import buffer_bytes
from tilewright.engine.windows import Windows
from tilewright.hw.device import free_bytes, memory_bytes
from tilewright.models import Model, ModelConfig, kv_bytes_per_token, weight_bytes_of
from tilewright.models.draft_heads import DraftHead
from tilewright.nn import ExpertLinear, Linear, LoraStack, Rope
from tilewright.ops.weights import MixedWeight, QuantizedWeight
from tilewright.parallel.plan import Plan

__all__ = ["MemoryPlan", "NoMemory", "cache_dtype", "page_size_of", "plan_memory", "weights_format"]

_CPU_CACHE_BYTES = 1 << 30
_CUDA_RESERVE_BYTES = 3 << 29  # 1.5 GiB: context 0.5, graphs of 36 batch sizes 0.5, cuBLAS workspaces and slack 0.5


class NoMemory(ValueError):
    """The plan leaves too little memory for the KV cache of one request of full length."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose. `limit_bytes`: the most that the engine may use in total; None on a CPU (only the cache is limited)."""

    device: str
    limit_bytes: int | None
    weights_bytes: int
    weights_format: str
    """Format of the linear layers: a dtype, or an 8-bit or 4-bit format. The embedding always has the model's dtype."""
    tables_bytes: int
    """The rope table for all positions of the model: 64 MiB for 131072 positions with head dim 128."""
    working_bytes: int
    reserve_bytes: int
    adapters_bytes: int = 0
    page_bytes: int
    page_size: int
    num_pages: int
    window_page_bytes: int = 0
    window_pages: int = 0
    """Pages of layers with a window, which are then not part of `page_bytes`; 0: all layers have the same pages."""
    window: int = 0
    """The window of those layers in tokens."""
    host_pages: int = 0
    """Pages of host memory, which are not part of `limit_bytes`."""
    max_model_len: int
    warnings: tuple[str, ...] = ()
    """Requested values, or abilities of the model, that the plan reduces."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.num_pages * self.page_bytes + self.window_pages * self.window_page_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        held = self.weights_bytes + self.adapters_bytes + self.tables_bytes
        return held + self.working_bytes + self.reserve_bytes + self.cache_bytes

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights_bytes, self.weights_format),
            *([("adapters", self.adapters_bytes, "room for LoRA adapters")] if self.adapters_bytes else []),
            ("rope table", self.tables_bytes, ""),
            ("working memory", self.working_bytes, ""),
            ("reserve", self.reserve_bytes, ""),
            ("KV cache", self.cache_bytes, f"{self.num_pages} pages of {self.page_size} tokens, {self.page_bytes} bytes each"),
        ]
        if self.window_pages:
            note = f"of it {self.window_pages} pages of layers that see {self.window} tokens"
            rows.append(("", self.window_pages * self.window_page_bytes, note))
        if self.host_pages:
            rows.append(("host memory", self.host_pages * self.page_bytes, f"{self.host_pages} pages, not of the device"))
        lines = [f"memory plan for {self.device}, contexts up to {self.max_model_len} tokens"]
        lines += [f"  {name:<15}{size:>16,} bytes  {note}".rstrip() for name, size, note in rows]
        limit = "" if self.limit_bytes is None else f" of {self.limit_bytes:,} allowed"
        lines.append(f"  {'in all':<15}{self.total_bytes:>16,} bytes{limit}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def weights_format(model: Model) -> str:
    """The formats of the weights of a model's linear layers: "bfloat16", "int8", "int4 and bfloat16"."""
    weights = [module.weight for module in model.blocks.modules() if isinstance(module, (Linear, ExpertLinear))]
    found = {w.format if isinstance(w, QuantizedWeight) else str(w.dtype).removeprefix("torch.") for w in weights}
    return " and ".join(sorted(found, key=lambda name: ("float" in name, name)))


def _tables_bytes(model: Model) -> int:
    return sum(module.cos_sin.nbytes for module in model.modules() if isinstance(module, Rope))


def _working_bytes(model: Model, dtype: torch.dtype, max_tokens_per_step: int, max_samples: int) -> int:
    """Upper bound of the memory that one step allocates besides weights and cache.

    These are live at the same time: the residual stream twice; the input and output of a projection; the logits of every row in
    the model's dtype, with a float32 copy and counts of 2 bytes. Captured graphs keep another such copy. For a quantised
    layer, add its 8-bit input with one scale per 128 values, or its weight converted to the model's dtype for a product with
    many rows. Expanded latents are needed for up to twice the step's tokens.
    """
    config = model.config
    widest = max(_attention_numbers(config), 3 * config.intermediate_size, _expert_numbers(config))
    tokens = max_tokens_per_step * (4 * config.hidden_size + widest) * dtype.itemsize
    weights = (w for m in model.modules() if isinstance(m, Linear) for w in (m.weight, m.quantized_weight))
    quantised = [w for w in weights if isinstance(w, QuantizedWeight)]
    input_bytes = max((weight.shape[1] for weight in quantised if not isinstance(weight, MixedWeight)), default=0)
    input_bytes = max(input_bytes, _expert_input_bytes(model))
    widened = max((weight.shape.numel() for weight in quantised if isinstance(weight, MixedWeight)), default=0)
    extra = max(max_tokens_per_step * input_bytes * 33 // 32, widened * dtype.itemsize)
    stacks = [module for module in model.modules() if isinstance(module, LoraStack)]
    shrunk = max((-(-stack.a.shape[2] // 512) * stack.a.shape[1] for stack in stacks), default=0)
    extra += max_tokens_per_step * (4 * shrunk + dtype.itemsize * (config.intermediate_size if stacks else 0))
    return tokens + extra + max_samples * config.vocab_size * (dtype.itemsize + 14)


def _attention_numbers(config: ModelConfig) -> int:
    """Most values per token that an attention layer uses at the same time."""
    heads, latent = config.num_attention_heads, config.latent
    if latent is None:
        return (heads + 2 * config.num_key_value_heads) * config.head_dim + heads * config.head_dim
    absorbed = heads * (config.head_dim + 2 * latent.cached + latent.kv_rank)
    return max(absorbed, heads * (2 * config.head_dim + 2 * (2 * config.head_dim + 2 * latent.value_dim)))


def _expert_numbers(config: ModelConfig) -> int:
    """Most values per token that a mixture of experts uses at the same time; each chosen expert has its own."""
    if config.experts is None:
        return 0
    each = 3 * config.experts.inner + 3 * config.hidden_size
    return config.experts.routing.chosen * each + 3 * config.experts.shared


def _expert_input_bytes(model: Model) -> int:
    """Bytes per token of the quantised inputs of all chosen 8-bit experts. Their weights are never converted."""
    experts = model.config.experts
    weights = [module.weight for module in model.modules() if isinstance(module, ExpertLinear)]
    widths = [w.shape[1] for w in weights if isinstance(w, QuantizedWeight) and not isinstance(w, MixedWeight)]
    return 0 if experts is None else experts.routing.chosen * max(widths, default=0)


def cache_dtype(model: Model, options: EngineConfig) -> torch.dtype | None:
    """The dtype of an 8-bit KV cache; None for the model's own dtype.

    Raises:
        ValueError: the model's cache does not store keys and values, or its attention cannot read 8-bit values.
    """
    if options.kv_cache is None:
        return None
    if model.config.latent is not None:
        raise ValueError(f"kv_cache is {options.kv_cache!r}, but latent attention stores no keys and values; leave it out")
    if model.config.attention_softcap is not None:
        raise ValueError(f"kv_cache is {options.kv_cache!r}, but capped scores read no codes of 8 bits; leave it out")
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[options.kv_cache]


def page_size_of(config: ModelConfig, options: EngineConfig) -> int:
    """Tokens per page: the option, or else the size that the model's attention reads fastest.

    The Hopper kernel for latents loads tiles of 64 rows from one page. The portable kernel reads an 8-bit cache 1.8 times as
    fast as bf16 from pages of 64 tokens, and 1.55 times as fast from pages of 16. The Hopper kernel (head dims 64 and 128)
    reads it 1.85 times as fast from both (docs/experiments/paged-decode.md). With smaller pages, more of a prefix is shared.
    """
    if options.page_size is not None:
        return options.page_size
    return 64 if config.latent is not None or options.kv_cache is not None else 16


def _cuts(config: ModelConfig, options: EngineConfig, plan: MemoryPlan, *, all_useful: bool) -> tuple[str, ...]:
    """Warnings about a cache smaller than requested, and about contexts shorter than the model supports."""
    found = []
    asked, cache_bytes, max_model_len = options.kv_cache_bytes, plan.cache_bytes, plan.max_model_len
    seen = max((window for window in config.windows if window is not None), default=max_model_len)
    if not _divides(options) and seen < max_model_len:
        why = "host_cache_bytes wants" if options.host_cache_bytes else "tp, pp and slices want"
        found.append(f"layers that see {seen} tokens keep the pages of all tokens, as {why} it")
    if asked is not None and all_useful and cache_bytes < asked:
        found.append(
            f"kv_cache_bytes is {asked:,}, but {options.max_seqs} requests (max_seqs) of {max_model_len} tokens need no more "
            f"than {cache_bytes:,}; the cache has that"
        )
    if options.max_model_len is None and max_model_len < config.max_position_embeddings:
        found.append(
            f"contexts are cut to {max_model_len} tokens, what the KV cache holds; the model could take "
            f"{config.max_position_embeddings}"
        )
    return tuple(found)


class _Pools(NamedTuple):
    """Numbers of pages, and bytes per page."""

    pages: int
    page_bytes: int
    window_pages: int = 0
    window_page_bytes: int = 0
    window: int = 0


_PLANNED_WINDOWS = 4
"""Memory is divided between layers with full attention and layers with a window for contexts of this many windows. Longer
contexts run out of full pages first, shorter contexts run out of window pages first; both still run."""


def _divides(options: EngineConfig) -> bool:
    """Whether layers with a window may have pages of their own. With host memory, tp, pp or slices, a page holds all layers."""
    return not options.host_cache_bytes and options.plan == Plan()


def _pools(
    config: ModelConfig, held: torch.dtype, options: EngineConfig, room: int, page_bytes: int, page_size: int, longest: int
) -> _Pools:
    """Divide the memory of the KV cache.

    If some layers have a window, these layers get pages of their own, provided that this leaves more pages for the others.
    Their number is what requests of `_PLANNED_WINDOWS` windows need, but at most what all running requests can use.
    """
    pages = -(-longest // page_size)
    useful = options.max_seqs * pages
    alike = _Pools(min(room // page_bytes, useful), page_bytes)
    windows = [window for window in config.windows if window is not None]
    if not windows or config.latent is not None or not _divides(options):
        return alike
    windowed = page_size * kv_bytes_per_token(config, held) // config.num_hidden_layers * len(windows)
    full, seen = page_bytes - windowed, Windows.pages_seen(max(windows), page_size) + 2
    if min(pages, alike.pages) <= seen:
        return alike  # no page ever leaves the window
    planned = min(pages, _PLANNED_WINDOWS * -(-max(windows) // page_size))
    most = options.max_seqs * seen + -(-options.max_tokens_per_step // page_size)
    window_pages = max(seen, min(most, room * seen // (planned * full + seen * windowed)))
    left = room - window_pages * windowed
    num_pages = max(0, min(useful, left // full if full else useful))
    window_pages = min(useful, (room - num_pages * full) // windowed) if num_pages == useful else window_pages
    if num_pages <= alike.pages:
        return alike
    return _Pools(num_pages, full, window_pages, windowed, max(windows))


def _host_pages(options: EngineConfig, page_bytes: int, device: torch.device) -> tuple[int, int]:
    """(pages of host memory, bytes of the transfer buffers on the device)"""
    pages = (options.host_cache_bytes or 0) // page_bytes
    return pages, buffer_bytes(page_bytes) if pages and device.type == "cuda" else 0


def _draft_bytes_per_token(draft: Model, options: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes per token of a draft model: its keys and values, and the hidden states that a draft head reads."""
    kept = draft.kept_numbers * dtype.itemsize if isinstance(draft, DraftHead) else 0
    return kv_bytes_per_token(draft.config, cache_dtype(draft, options) or dtype) + kept


def plan_memory(
    model: Model, options: EngineConfig, *, device: torch.device, dtype: torch.dtype, draft: Model | None = None
) -> MemoryPlan:
    """Divide the memory of a device between a model, which may be on "meta", and everything needed to run it. `draft`: a draft
    model or draft head. For each page of the model it has a page for its own keys and values.

    Without the option `max_model_len`, the limit is the model's own, or the capacity of the cache if that is smaller. Without
    `kv_cache_bytes`, the cache gets the rest of the share `memory_fraction` of a GPU; on a CPU it gets 1 GiB.

    Raises:
        NoMemory: not even one request of `max_model_len` tokens fits; the message contains the plan and possible solutions.
        ValueError: `max_model_len` exceeds the model's positions.
    """
    config = model.config
    held = cache_dtype(model, options) or dtype
    longest, wanted, page_size = config.max_position_embeddings, options.max_model_len, page_size_of(config, options)
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len is {wanted}, but the model's positions end at {longest}")
    page_bytes = page_size * kv_bytes_per_token(config, held)
    host_pages, buffers = _host_pages(options, page_bytes, device)
    weights, tables, adapters = weight_bytes_of(model), _tables_bytes(model), adapter_bytes(model)
    working = buffers + _working_bytes(model, dtype, options.max_tokens_per_step, options.max_samples)
    if draft is not None:
        page_bytes += page_size * _draft_bytes_per_token(draft, options, dtype)
        weights, tables = weights + weight_bytes_of(draft), tables + _tables_bytes(draft)
        working += _working_bytes(draft, dtype, options.max_tokens_per_step, options.max_samples)
    limit, reserve = None, 0
    if device.type == "cuda":
        limit = min(int(memory_bytes(device) * options.memory_fraction), free_bytes(device))
        reserve = _CUDA_RESERVE_BYTES
    useful, room = options.max_seqs * -(-(wanted or longest) // page_size), options.kv_cache_bytes
    if room is None:
        room = _CPU_CACHE_BYTES if limit is None else max(0, limit - weights - adapters - tables - working - reserve)
    pools = _pools(config, held, options, room, page_bytes, page_size, wanted or longest)
    num_pages = pools.pages
    fitting = wanted or min(longest, num_pages * page_size)
    plan = MemoryPlan(
        device=str(device),
        limit_bytes=limit,
        weights_bytes=weights,
        weights_format=weights_format(model),
        tables_bytes=tables,
        working_bytes=working,
        reserve_bytes=reserve,
        adapters_bytes=adapters,
        page_bytes=pools.page_bytes,
        page_size=page_size,
        num_pages=num_pages,
        window_page_bytes=pools.window_page_bytes,
        window_pages=pools.window_pages,
        window=pools.window,
        host_pages=host_pages,
        max_model_len=fitting,
    )
    return _checked(replace(plan, warnings=_cuts(config, options, plan, all_useful=num_pages == useful)))


def _checked(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan if one request of its length fits. Raises NoMemory."""
    over = plan.limit_bytes is not None and plan.total_bytes > plan.limit_bytes
    least = -(-max(plan.max_model_len, 1) // plan.page_size)
    if plan.num_pages < least or over:
        raise NoMemory(
            f"{plan}\nno memory for the cache: one request of {plan.max_model_len or plan.page_size} tokens needs "
            f"{least} pages and {plan.num_pages} fit. Four ways out: a shorter --max-model-len; "
            "a smaller --max-tokens-per-step or --max-seqs (less working memory); a larger share of the device "
            "(--memory-fraction, --kv-cache-gib) or a device with more memory; or smaller weights (--quantize)"
        )
    return plan
