"""The engine's options: one frozen dataclass. The command line is made from its fields and their help texts."""

from dataclasses import dataclass, field
from typing import Any

from tilewright.parallel.plan import Plan

__all__ = ["KV_CACHE", "QUANTIZE", "SPECULATE", "EngineConfig", "option"]

QUANTIZE = ("int8", "fp8", "fp8-block", "mxfp8", "int4", "int8-weight")
"""The formats of `quantize`. A test compares them with those of `tilewright.ops.weights`, which imports torch."""

SPECULATE = ("grammar", "mtp", "ngram")
"""Ways to guess tokens ahead without a draft model. "ngram" finds an earlier occurrence of the last tokens and guesses what
followed it. "mtp" uses the model's own layer that predicts a second token. Tokens that a grammar leaves no choice about are
tried in each case; with "grammar" only these are tried."""

KV_CACHE = ("int8", "fp8")
"""8-bit formats of the KV cache."""


MOST_DRAFTS = 15
"""The attention kernel for few queries processes at most 16 tokens per request: the last token and 15 drafts."""
MOST_RANKS = 64
LEAST_SAMPLES = 64
"""With speculative decoding, a step may have at least this many samples, even if `max_seqs` is smaller."""


def option(default: Any, help: str) -> Any:
    """A field that is also an option of the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of `LLM`. None means: decide by the model and the device. The loaded plan contains the decisions.

    Raises ValueError for a value that is wrong on every device and for every model.
    """

    model: str = option("bookworm", "bookworm (the embedded model), a model folder, or a name on the Hugging Face hub")
    device: str | None = option(
        None, "torch device, such as cuda:0 or cpu; default: the first GPU, or the CPU if there is none"
    )
    dtype: str | None = option(None, "bfloat16, float16 or float32; default: the model's own dtype if the device supports it")
    quantize: str | None = option(
        None, f"quantise the weights while loading: {', '.join(QUANTIZE)}; default: the format in the model's folder"
    )
    max_model_len: int | None = option(None, "most tokens of prompt and answer together; default: the model's context length")
    max_seqs: int = option(256, "most requests that run at once; on a CPU at most 64")
    page_size: int | None = option(None, "tokens in a page of the KV cache; default: 64 for an MLA or 8-bit cache, else 16")
    kv_cache: str | None = option(None, f"format of the KV cache: {' or '.join(KV_CACHE)}; default: the model's dtype")
    kv_cache_bytes: int | None = option(None, "size of the KV cache in bytes; default: follows from memory_fraction")
    host_cache_bytes: int | None = option(None, "bytes of host memory that keep pages evicted from the KV cache; default: none")
    memory_fraction: float = option(
        0.9, "share of the device's memory for weights, workspace and KV cache together, above 0 and at most 1"
    )
    max_tokens_per_step: int = option(8192, "most tokens in one pass of the model, at least max_seqs; on a CPU at most 256")
    prefill_chunk: int | None = option(None, "most prompt tokens of one request in one pass; default: max_tokens_per_step")
    max_waiting: int = option(4096, "most requests that may wait; further requests are refused")
    prefix_cache: bool = option(True, "share pages of the KV cache between requests whose prompts begin with the same tokens")
    prompt_graphs: bool = option(
        False, "also capture steps as CUDA graphs that process prompts and decode together, up to 1,024 tokens"
    )
    speculate: str | None = option(
        None,
        f"speculative decoding without a draft model, by {' or '.join(SPECULATE)}; the results stay the same; see also draft",
    )
    draft: str | None = option(
        None, "speculative decoding with this draft model (same vocabulary) or draft head: a folder or hub name"
    )
    draft_tokens: int = option(8, "speculative decoding: most tokens guessed for a request in one pass, 1 to 15")
    adapters: tuple[str, ...] | None = option(
        None, "NAME=FOLDER: load a LoRA adapter that requests select by NAME; may be given several times"
    )
    max_adapters: int = option(0, "most LoRA adapters loaded at once; default: the number given at the start")
    max_adapter_rank: int = option(16, "largest rank that a LoRA adapter may have")
    invariant: bool = option(False, "a request gets identical bits whatever else is in its batch; slower")
    tp: int = option(1, "tensor parallelism: number of GPUs that share each layer")
    pp: int = option(1, "pipeline parallelism: number of GPUs that the layers are divided among")
    slices: int = option(
        0,
        "parts into which each layer's sums are cut; runs with equal slices give identical bits for every tp; 0: as many as tp",
    )
    bundle: str | None = option(
        None, "folder written by `tilewright warmup` with compiled kernels, so that the server compiles none"
    )
    strict: bool = option(False, "fail a step that compiles a kernel after the start; by default this is only logged")

    def __post_init__(self) -> None:
        least = {"max_seqs": 1, "page_size": 1, "max_tokens_per_step": self.max_seqs, "max_waiting": 1}
        least |= {
            "max_model_len": 2,
            "kv_cache_bytes": 1,
            "host_cache_bytes": 0,
            "prefill_chunk": 1,
            "max_adapters": 0,
            "max_adapter_rank": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                also = ", max_seqs" if name == "max_tokens_per_step" else ""
                raise ValueError(f"{name} is {value}, wanted {low}{also} or more")
        if self.host_cache_bytes and not self.prefix_cache:
            raise ValueError("host_cache_bytes is set without the prefix cache, whose pages it keeps; leave one of them out")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise ValueError(f"quantize is {self.quantize!r}, wanted one of {', '.join(QUANTIZE)}")
        if self.kv_cache is not None and self.kv_cache not in KV_CACHE:
            raise ValueError(f"kv_cache is {self.kv_cache!r}, wanted one of {', '.join(KV_CACHE)}")
        if self.speculate is not None and self.speculate not in SPECULATE:
            raise ValueError(f"speculate is {self.speculate!r}, wanted {' or '.join(SPECULATE)}")
        if self.speculate is not None and self.draft is not None:
            raise ValueError(f"speculate is {self.speculate!r} and draft is {self.draft!r}, wanted one of them")
        if (self.draft is not None or self.speculate == "mtp") and self.bundle is not None:
            raise ValueError(f"bundle is {self.bundle!r}, which has no kernels of a draft model; leave draft or bundle out")
        if not 1 <= self.draft_tokens <= MOST_DRAFTS:
            raise ValueError(f"draft_tokens is {self.draft_tokens}, wanted 1 to {MOST_DRAFTS}")
        object.__setattr__(self, "adapters", tuple(self.adapters or ()) or None)
        for name, high in (("max_adapters", 4096), ("max_adapter_rank", 1024)):
            if getattr(self, name) > high:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at most {high}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}, wanted above 0 and at most 1")
        self._check_plan()

    def _check_plan(self) -> None:
        for name in ("tp", "pp", "slices"):
            if not 0 <= getattr(self, name) <= MOST_RANKS or (name != "slices" and not getattr(self, name)):
                least = 0 if name == "slices" else 1
                raise ValueError(f"{name} is {getattr(self, name)}, wanted {least} to {MOST_RANKS}")
        if self.plan == Plan():
            return
        held = {"max_adapters": self.adapter_places, "quantize": self.quantize, "draft": self.draft, "bundle": self.bundle}
        held["host_cache_bytes"] = self.host_cache_bytes
        held["speculate"] = self.speculate if self.speculate == "mtp" else None
        for name, value in held.items():
            if value:
                raise ValueError(f"{name} is {value!r}, which does not go with tp, pp and slices; leave one of them out")
        if self.plan.ranks > 1 and self.device not in (None, "cpu", "cuda", "cuda:0"):
            raise ValueError(
                f"device is {self.device!r}, and the ranks of tp and pp take the cards from cuda:0 on; leave it out"
            )

    @property
    def plan(self) -> Plan:
        """How the model is distributed over ranks."""
        return Plan(tp=self.tp, pp=self.pp, slices=self.slices)

    @property
    def ordered(self) -> bool:
        """Whether partial sums of ranks and slices are added in a fixed tree order, for identical bits."""
        return self.invariant or self.slices > 0

    @property
    def adapter_places(self) -> int:
        """Number of LoRA adapters that can be loaded at once."""
        return max(self.max_adapters, len(self.adapters or ()))

    @property
    def row_tokens(self) -> int:
        """Most tokens of a decoding request in one step: its last token and its drafts."""
        return 1 if self.speculate is None and self.draft is None else 1 + self.draft_tokens

    @property
    def max_samples(self) -> int:
        """Most samples in one step."""
        return self.max_seqs if self.speculate is None and self.draft is None else max(self.max_seqs, LEAST_SAMPLES)
