"""Loads a model by its name and options: plans the memory, loads the weights, and warms up every kernel that a step can launch.
The kernels may come from a bundle that was made without a GPU.
"""

import json
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tilewright.asm import bundle
from tilewright.asm.compile import compile_only
from tilewright.asm.jit import CompileCounter, Compiled, log_late, raise_late
from tilewright.engine.adapters import Adapters, beside, held_adapters, read_adapters
from tilewright.engine.config import EngineConfig
from tilewright.engine.draft_loading import found_draft
from tilewright.engine.places import dtype_of, place_of
from tilewright.engine.plan import MemoryPlan, cache_dtype, page_size_of, plan_memory
from tilewright.engine.runner import ModelRunner, Progress, on_device
from tilewright.engine.share import Share
from tilewright.engine.team import Team
from tilewright.engine.tokenizer import Tokenizer
from tilewright.hw.device import Device, device_of
from tilewright.models import Convert, Model, empty_model, load_config, load_model, random_model, resolve
from tilewright.models.config import ModelConfig
from tilewright.nn import ExpertLinear, Linear
from tilewright.op import on_card
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.plan import Plan
from tilewright.quant import check_card, convert_layer, quantize

__all__ = ["Loaded", "facts_of", "load", "make_bundle"]


def _found(model: str | Path, report: Progress) -> tuple[Path, ModelConfig]:
    folder = resolve(model)
    config = load_config(folder)
    _say_what_is_left_out(config, report)
    return folder, config


def _say_what_is_left_out(config: ModelConfig, report: Progress) -> None:
    if config.text_part_of is not None:
        report(f"{config.text_part_of}: only the text part is loaded; images in prompts are refused")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run."""

    runner: ModelRunner
    tokenizer_path: Path | None
    """The model's folder; None for random weights, which have no tokenizer."""
    tokenizer: Tokenizer | None = None
    """Read before the weights, so that a damaged file is noticed early; None if the folder has no tokenizer.json."""
    config: ModelConfig
    plan: MemoryPlan
    adapters: Adapters | None
    """The loaded adapters; None if the model has no room for adapters."""
    draft: ModelRunner | None = None
    """The runner of the draft model or draft head; its pages have the same numbers and size as those of the model."""
    draft_head: bool = False
    """Whether `draft` runs a draft head."""


def load(model: str | Path | ModelConfig, options: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Plan, load and warm up a model.

    Args:
        model: "bookworm", a folder, a hub name, or a config, for random weights of that shape. It replaces `options.model`.
        progress: called with a text before each slow step, first with the memory plan.

    Raises:
        BundleRefused: `options.bundle` is damaged, or was made for another model, card, toolchain or other options.
        ModelError: the model cannot be found, read, or run.
        NoMemory: the memory plan does not fit.
        ValueError: `max_model_len` exceeds the model's positions; there is no such device or dtype; or the model or the card
            does not support the format of `quantize`.
    """
    report = progress or (lambda text: None)
    if options.plan != Plan():
        return _load_spread(model, options, report)
    on, wanted = place_of(options)
    folder, config = (None, model) if isinstance(model, ModelConfig) else _found(model, report)
    tokenizer = None if folder is None or not (folder / "tokenizer.json").exists() else Tokenizer.load(folder)
    dtype = wanted or (config.dtype if on.type == "cuda" else torch.float32)
    shape, convert = _shape(config, dtype, options.quantize, device_of(-1 if on.index is None else on.index))
    draft = found_draft(options, folder, config, tokenizer)
    drafting = None if draft is None else draft.empty(dtype)
    beside(shape, options)
    read = read_adapters(shape, options)  # before the weights, so that a damaged file is noticed early
    plan = plan_memory(shape, options, device=on, dtype=dtype, draft=drafting)
    report(str(plan))
    config = config.limited(plan.max_model_len)
    if options.bundle is not None:
        if on.type != "cuda":
            raise ValueError(f"a bundle holds kernels for a GPU, and the model goes to {on}; leave --bundle out")
        bundle.use(Path(options.bundle), arch=device_of(on.index).arch, facts=facts_of(config, dtype, options))
    with on_device(on):
        if folder is None:
            built = random_model(config, device=on, dtype=dtype, convert=convert)
        else:
            built = load_model(
                folder,
                device=on,
                dtype=dtype,
                progress=lambda done, total: report(f"loading weights {done:,}/{total:,}"),
                convert=convert,
                max_positions=plan.max_model_len,
            )
        adapters = held_adapters(built, options, read)
        runner = _planned_runner(built, plan, options)
        guesses = None
        if draft is not None:
            report(f"loading the draft {draft.kind} {draft.name}")
            guesses = draft.beside(runner, plan, lambda model: _guessing(model, plan, options))
        compiles = _watched(runner, strict=options.strict)
        runner.warmup(report)
        if guesses is not None:
            guesses.warmup(report)
    compiles.mark_ready()
    return Loaded(
        runner=runner, tokenizer_path=folder, tokenizer=tokenizer, config=config, plan=plan, adapters=adapters, draft=guesses,
        draft_head=draft is not None and draft.head is not None
    )  # fmt: skip


def _load_spread(model: str | Path | ModelConfig, options: EngineConfig, report: Progress) -> Loaded:
    """`load` for several ranks, of which this is the first, or for one rank with slices."""
    share, team = Share.of(model, options, 0), None
    _say_what_is_left_out(share.config, report)
    if options.plan.ranks > 1:
        if isinstance(model, ModelConfig):
            raise ValueError("tp and pp take a model by its name or folder; random weights of a shape are for one rank")
        team = Team(options.plan, str(model), options, share.device)
    try:
        mesh = Mesh() if team is None else team.join(invariant=options.ordered)
        plan = share.planned()
        if team is not None:
            found = [json.loads(text) for text in team.said("plan")]
            pages, length = (min(numbers) for numbers in zip((plan.num_pages, plan.max_model_len), *found))
            plan = replace(plan, num_pages=pages, max_model_len=length)
            team.say("agreed", json.dumps([pages, length]))
        report(f"rank 0 of {options.plan.ranks}: {plan}")
        with on_device(share.device):
            built = share.loaded(mesh, plan.max_model_len, report)
            if team is not None:
                team.said("loaded")
            runner = runner_of(built, plan.num_pages, plan.max_model_len, options, plan.page_size, team=team)
            compiles = _watched(runner, strict=options.strict)
            runner.warmup(report)
        compiles.mark_ready()
    except BaseException:
        if team is not None:
            team.end()
        raise
    folder, config = share.folder, share.config.limited(plan.max_model_len)
    tokenizer = None if folder is None or not (folder / "tokenizer.json").exists() else Tokenizer.load(folder)
    return Loaded(runner=runner, tokenizer_path=folder, tokenizer=tokenizer, config=config, plan=plan, adapters=None)


def _shape(config: ModelConfig, dtype: torch.dtype, format: str | None, card: Device) -> tuple[Model, Convert | None]:
    """(the model on "meta" as it will be in memory, the function that quantises a loaded layer or None)

    Raises:
        ValueError: the checkpoint is already quantised, or a layer or the card does not support the format.
    """
    model = empty_model(config, device="meta", dtype=dtype)
    if format is None:
        return model, None
    if config.quantization is not None:
        raise ValueError(
            f"quantize is {format!r}, but the model's folder has quantised weights already ({config.quantization.method}); "
            "leave it out, or take the folder of the unquantised model"
        )
    check_card(format, card, dtype)
    report = quantize(model, format)
    chosen = {layer.name for layer in report.quantized}

    def convert(name: str, layer: Linear | ExpertLinear) -> None:
        if name in chosen:
            convert_layer(name, layer, format)

    return model, convert


def _watched(runner: ModelRunner, *, strict: bool) -> CompileCounter:
    """Counts compiles until the process ends. Only compiles during the runner's steps are late: other models may be loading."""
    say, held = raise_late if strict else log_late, weakref.ref(runner)  # a counter must not keep a model alive

    def late(event: Compiled) -> None:
        owner = held()
        if owner is not None and owner.launching:
            say(event)

    return CompileCounter(on_late=late).start()


def runner_of(
    model: Model,
    num_pages: int,
    max_model_len: int,
    options: EngineConfig,
    page_size: int | None = None,
    *,
    guesses: bool = False,
    host_pages: int = 0,
    window_pages: int = 0,
    explains_draws: bool = False,
    columns: bool = False,
    team: Team | None = None,
) -> ModelRunner:
    """A runner of a model, by the engine's options.

    guesses: the model is a draft model, whose rows have no drafts. window_pages, explains_draws, columns: see `ModelRunner`.
    team: the other ranks that have shares of the model.
    """
    return ModelRunner(
        model,
        num_pages=num_pages,
        page_size=page_size or page_size_of(model.config, options),
        max_seqs=options.max_seqs,
        max_model_len=max_model_len,
        max_tokens_per_step=options.max_tokens_per_step,
        max_samples=options.max_samples,
        row_tokens=1 if guesses else options.row_tokens,
        batch_invariant=options.invariant,
        cache_dtype=cache_dtype(model, options),
        host_pages=host_pages,
        window_pages=window_pages,
        prompt_graphs=options.prompt_graphs,
        explains_draws=explains_draws,
        columns=columns,
        masks=not guesses,
        team=team,
    )


def _planned_runner(model: Model, plan: MemoryPlan, options: EngineConfig) -> ModelRunner:
    """The runner of a model on one device."""
    return runner_of(
        model, plan.num_pages, plan.max_model_len, options, host_pages=plan.host_pages, window_pages=plan.window_pages
    )


def _guessing(model: Model, plan: MemoryPlan, options: EngineConfig) -> ModelRunner:
    """The runner of a draft model or draft head."""
    return runner_of(model, plan.num_pages, plan.max_model_len, options, page_size=plan.page_size, guesses=True)


# ---- bundles


_SHAPE_FIELDS = ("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_SHAPE_FIELDS += ("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "partial_rotary_factor")
_SHAPE_FIELDS += ("attention_softcap", "logit_softcap")


def facts_of(config: ModelConfig, dtype: torch.dtype, options: EngineConfig) -> dict[str, Any]:
    """All values that decide which kernels can be launched when a model is served, as a bundle records them."""
    shape = {name: getattr(config, name) for name in _SHAPE_FIELDS}
    shape["windows"] = sorted({str(window) for window in config.windows})
    shape |= {name: asdict(part) for name, part in (("latent", config.latent), ("experts", config.experts)) if part is not None}
    engine = {
        name: getattr(options, name)
        for name in ("max_seqs", "max_samples", "row_tokens", "max_tokens_per_step", "invariant", "kv_cache")
    }
    engine["page_size"] = page_size_of(config, options)
    if options.adapter_places:
        engine["max_adapter_rank"] = options.max_adapter_rank
    stored = options.quantize or (config.quantization and config.quantization.format)
    return {"model": shape, "dtype": str(dtype).removeprefix("torch."), "quantize": stored, **engine}


def make_bundle(
    folder: Path, config: ModelConfig, options: EngineConfig, *, card: Device, jobs: int, progress: Progress
) -> bundle.Bundle:
    """Compile every kernel that serving a model on `card` launches, without a GPU: the warm-up runs on tensors without memory.

    Args:
        folder: new or empty.
        jobs: number of kernels compiled at a time.

    Raises:
        CompileFailed: a kernel does not compile for the card.
        FileExistsError: the folder is not empty.
    """
    dtype = dtype_of(options.dtype) or config.dtype
    model, _ = _shape(config, dtype, options.quantize, card)
    beside(model, options)
    runner = runner_of(model, 1024, options.max_model_len or config.max_position_embeddings, options)

    def compile() -> None:
        with on_card(card), compile_only(card.arch, jobs):
            runner.warmup(progress)

    return bundle.write(folder, arch=card.arch, use=facts_of(config, dtype, options), compile=compile)
