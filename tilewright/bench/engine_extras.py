"""What grammars and LoRA adapters cost: output tokens per second of the same requests with and without them, in turns.

All runs use one engine with random weights. Prompts are random tokens, different in each run, so that the prefix cache does not
help. Answers are sampled and have their full length; the time includes the prompts.

With random weights an answer that has to be JSON consists of random tokens that the grammar allows. The schema asks for 1,000
objects, so no answer ends early.

For steps with masks, a row also says what the engine's thread spent on them, in milliseconds per such step: `wait_ms` for the
step before (with the device's time; near 0, the host is slower than the device), `accept_ms` for its samples, `commit_ms` for
following the grammars along the new tokens, `fill_ms` for the masks, and `send_ms` for sending them and launching the sampling.
`late` is the share of these steps in which a GPU had ended the model's pass before the masks were filled.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.llm import load_engine
from tilewright.engine.mask_times import MaskTimes
from tilewright.engine.request import SamplingParams
from tilewright.engine.runner import ModelRunner
from tilewright.engine.tokenizer import Tokenizer
from tilewright.models import ModelConfig
from tilewright.models.adapter_config import AdapterConfig
from tilewright.models.adapters import Adapter, Pair

__all__ = ["SCHEMA", "Sizes", "run_adapters", "run_structured"]

SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["person", "place", "thing"]},
            "count": {"type": "integer"},
            "weights": {"type": "array", "items": {"type": "number"}},
            "known": {"type": "boolean"},
        },
        "required": ["name", "kind", "count", "weights", "known"],
        "additionalProperties": False,
    },
}

Params = Callable[[random.Random, int], dict[str, Any]]
"""(random numbers, index of the request) -> options of its sampling parameters."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The requests of a run: how many at once, tokens in and out of each."""

    streams: int
    tokens_in: int
    tokens_out: int


def run_structured(
    model: ModelConfig, tokenizer: Tokenizer, shares: list[float], sizes: Sizes, *, runs: int, config: EngineConfig,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row for each run and share of structured requests: `of_plain` compares it with the same run's share of 0.

    Args:
        model: the shape; its vocabulary has at least the tokenizer's tokens.
        shares: of the requests that have to follow `SCHEMA`, 0 to 1; 0 is added.

    Raises:
        ValueError: the tokenizer has more tokens than the model.
        GrammarError: llguidance is missing.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}")
    engine = load_engine(model, config, progress)
    # The engine itself reads no text: answers stay token ids, as in the other benchmarks.
    engine.tokenizer, engine.eos_ids = tokenizer, tokenizer.eos_ids
    engine.vocab_size = tokenizer.vocab_size
    grammar = Grammar.json_schema(SCHEMA)
    progress("reading the vocabulary, compiling the grammar")
    engine.grammars.start(grammar)

    def asked(share: float) -> Params:
        few = round(share * sizes.streams)
        return lambda rng, i: {"grammar": grammar} if i < few else {}

    wanted = {f"{share:g}": asked(share) for share in sorted({0.0, *shares})}
    for label, row in _turns(engine, wanted, sizes, runs, progress):
        yield {"structured": float(label), **row}


def run_adapters(
    model: ModelConfig, adapters: int, rank: int, sizes: Sizes, *, runs: int, config: EngineConfig,
    progress: Callable[[str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row for each run without adapters, and with them: request i then uses adapter i modulo `adapters`.

    Each adapter has `rank` for every linear layer of the blocks, with random values. The engine has `config.max_adapters`
    places of rank `config.max_adapter_rank`, which must suffice. Requests without an adapter run the same captured steps as in
    an engine that has no room for adapters.
    """
    engine = load_engine(model, config, progress)
    if engine.adapters is None:
        raise ValueError("the engine has no room for adapters: set max_adapters")
    generator = torch.Generator().manual_seed(0)
    for number in range(adapters):
        engine.adapters.put(f"a{number}", _random_adapter(engine, rank, generator), "", tuple)
    wanted: dict[str, Params] = {"0": lambda rng, i: {}, str(adapters): lambda rng, i: {"adapter": f"a{i % adapters}"}}
    for label, row in _turns(engine, wanted, sizes, runs, progress):
        yield {"adapters": int(label), "rank": rank, **row}


def _random_adapter(engine: Engine, rank: int, generator: torch.Generator) -> Adapter:
    assert engine.adapters is not None
    targets = engine.adapters.targets
    pairs = {
        name: Pair(
            torch.randn(rank, target.cols, generator=generator) * target.cols**-0.5,
            torch.randn(target.rows, rank, generator=generator) * 0.01,
            1.0,
        )
        for name, target in targets.items()
    }
    return Adapter(config=AdapterConfig(rank=rank, alpha=rank, targets=tuple(targets)), pairs=pairs)


def _turns(
    engine: Engine, wanted: Mapping[str, Params], sizes: Sizes, runs: int, progress: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, row) of each kind of requests in turns; the first kind is what the others are compared with."""
    for run in range(runs):
        plain = 0.0
        for place, (label, params) in enumerate(wanted.items()):
            before, late = engine.mask_times.copy(), _late(engine)
            seconds, tokens, steps = _run(engine, params, sizes, seed=1000 * run + place)
            masks = _mask_columns(engine.mask_times.since(before), _late(engine) - late)
            rate = tokens / seconds
            plain = plain or rate
            row = {
                "run": run, "streams": sizes.streams, "tokens_in": sizes.tokens_in, "tokens_out": tokens,
                "seconds": round(seconds, 4), "output_tok_per_s": round(rate, 1), "steps": steps,
                "of_plain": round(rate / plain, 4), **masks,
            }  # fmt: skip
            progress(f"run {run}, {label}: {rate:,.0f} tokens/s, {rate / plain:.3f} of the plain requests' rate")
            if masks:
                progress(", ".join(f"{name} {value}" for name, value in masks.items()))
            yield label, row


def _late(engine: Engine) -> int:
    """Number of steps so far whose masks came late."""
    return engine.runner.masks.late if isinstance(engine.runner, ModelRunner) else 0


def _mask_columns(times: MaskTimes, late: int) -> dict[str, float]:
    """What masks cost per step that had any; {} if none had."""
    steps = times.steps
    if not steps:
        return {}
    parts = {
        "wait": times.wait_s, "accept": times.accept_s, "commit": times.commit_s, "fill": times.fill_s, "send": times.send_s,
    }  # fmt: skip
    each = {f"{name}_ms": round(1e3 * seconds / steps, 3) for name, seconds in parts.items()}
    return {"masks_per_step": round(times.masks / steps, 1), **each, "late": round(late / steps, 4)}


def _run(engine: Engine, params: Params, sizes: Sizes, seed: int) -> tuple[float, int, int]:
    """(seconds, tokens that came out, steps) of one set of requests."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(sizes.tokens_in)] for _ in range(sizes.streams)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        options = {"max_tokens": sizes.tokens_out, "ignore_eos": True, "seed": rng.randrange(1 << 30), **params(rng, i)}
        engine.submit(prompt, SamplingParams(**options), whole=True)
    tokens = steps = 0
    while engine.has_work:
        for delta in engine.step():
            tokens += len(delta.token_ids)
            if delta.error is not None:
                raise RuntimeError(f"a request failed: {delta.error}")
        steps += 1
    return time.perf_counter() - start, tokens, steps
