"""Benchmark of the engine on fixed workloads with random weights: output tokens per second of wall time, prefill included.

    W1  256 requests, each 100 to 1024 tokens in and 100 to 1024 out (uniform), all submitted at once: the lengths of
        nano-vllm's benchmark, 142,827 tokens in and 133,966 out
    W2  256 requests of exactly 1024 in and 1024 out
    B1  one request, 128 in, 256 out, decode only: the time from the first token to the last
    B8, B64 the same for 8 and 64 requests at once; models with random weights soon repeat themselves, so with `speculate`
        most guesses are right
    S64 64 requests that are sampled: they do not repeat themselves, so no guess is right

    E0  128 requests, 128 in, 256 out, decode only, sampled: the time of a plain step (median_step_ms)
    E50 the same, half of the requests with penalties, a bias, log-probabilities and min_tokens: the aim is at most 5 % more
    E50L, E50P the same with half of the requests asking for log-probabilities alone, or for penalties alone

    P4096  16 prompts of 4095 tokens, one token out of each: the relevant figure is input_tok_per_s
    R2000  2000 requests of 1 to 2048 tokens in and 1 to 32 out, with sampling, penalties, biases and log-probabilities at
           random: do any kernels compile after the engine is ready?

Every request generates its full length (`ignore_eos`), except in R2000 greedily. A warm run repeats the workload in the
same process with other prompts, so that the prefix cache does not help. Each row also has lower bounds of its time by the
card's memory bandwidth and arithmetic (`engine_limits`).
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.asm.jit import CompileCounter
from tilewright.bench.engine_limits import Pass, limits, shares, step_limit, weights_of
from tilewright.bench.provenance import chosen_kernels, forget
from tilewright.engine.llm import EngineConfig, load_engine
from tilewright.engine.request import SamplingParams
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_of
from tilewright.models import SHAPES, ModelConfig

__all__ = ["WORKLOADS", "Workload", "any_params", "public_lengths", "run_engine"]


@dataclass(frozen=True)
class Workload:
    """Requests as (tokens in, tokens out)."""

    name: str
    lengths: Callable[[random.Random], list[tuple[int, int]]]
    decode_only: bool = False
    params: Callable[[random.Random, int], SamplingParams] = lambda rng, out: SamplingParams(
        max_tokens=out, temperature=0.0, ignore_eos=True
    )


def public_lengths() -> list[tuple[int, int]]:
    """(tokens in, tokens out) of the 256 requests of nano-vllm's bench.py, which draws with Python's `random` from seed 0.

    It draws each prompt's length and then its tokens, 0 to 10000, all prompts before the first length of an answer.
    """
    rng = random.Random(0)
    told = []
    for _ in range(256):
        told.append(rng.randint(100, 1024))
        for _ in range(told[-1]):
            rng.randint(0, 10000)
    return [(length, rng.randint(100, 1024)) for length in told]


def any_params(rng: random.Random, out: int) -> SamplingParams:
    """Random sampling parameters for a request with `out` output tokens."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 20, "top_p": 0.95},
        {"min_p": 0.1},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {7: 2.0}},
        {"logprobs": 5},
        {"prompt_logprobs": 0},
        {"stop_token_ids": (3,), "min_tokens": out},
    ]
    return SamplingParams(max_tokens=out, ignore_eos=True, seed=rng.randrange(1 << 30), **rng.choice(extras))


_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
_BIASES = {"logit_bias": {7: 2.0, 11: -5.0}, "stop_token_ids": (3,)}
_LOGPROBS = {"logprobs": 5}


def half_edited(*asked: dict[str, Any]) -> Callable[[random.Random, int], SamplingParams]:
    """Sampling parameters of which every other request, at random, has the options `asked`.

    If a bias is among them, `min_tokens` is the full length, which bans the end of text for the whole answer.
    """
    extras: dict[str, Any] = {name: value for one in asked for name, value in one.items()}

    def params(rng: random.Random, out: int) -> SamplingParams:
        seed, edits = rng.randrange(1 << 30), extras if rng.random() < 0.5 else {}
        return SamplingParams(
            max_tokens=out, min_tokens=out if "logit_bias" in edits else 0, ignore_eos=True, seed=seed, **edits
        )

    return params


WORKLOADS = {
    "W1": Workload("W1", lambda rng: public_lengths()),
    "W2": Workload("W2", lambda rng: [(1024, 1024)] * 256),
    "B1": Workload("B1", lambda rng: [(128, 256)], decode_only=True),
    "B8": Workload("B8", lambda rng: [(128, 256)] * 8, decode_only=True),
    "S64": Workload(
        "S64",
        lambda rng: [(128, 256)] * 64,
        decode_only=True,
        params=lambda rng, out: SamplingParams(max_tokens=out, ignore_eos=True, seed=rng.randrange(1 << 30)),
    ),
    "B64": Workload("B64", lambda rng: [(128, 256)] * 64, decode_only=True),
    "E0": Workload(
        "E0",
        lambda rng: [(128, 256)] * 128,
        decode_only=True,
        params=lambda rng, out: SamplingParams(max_tokens=out, ignore_eos=True, seed=rng.randrange(1 << 30)),
    ),
    **{
        name: Workload(name, lambda rng: [(128, 256)] * 128, decode_only=True, params=half_edited(*asked))
        for name, asked in {
            "E50": (_PENALTIES, _BIASES, _LOGPROBS),
            "E50L": (_LOGPROBS,),
            "E50P": (_PENALTIES,),
        }.items()
    },
    "P4096": Workload("P4096", lambda rng: [(4095, 1)] * 16),
    "R2000": Workload(
        "R2000", lambda rng: [(rng.randint(1, 2048), rng.randint(1, 32)) for _ in range(2000)], params=any_params
    ),
}


def run_engine(
    shape: str, workloads: list[str], *, runs: int, config: EngineConfig, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield one row for each workload and run when it ends: output tokens per second, wall time, steps, preemptions."""
    began = time.perf_counter()
    forget()
    compiles = CompileCounter().start()
    try:
        engine = load_engine(SHAPES[shape], config, progress)
        compiles.mark_ready()
        ready_s = time.perf_counter() - began
        card = _Card(engine, SHAPES[shape], config)
        for name in workloads:
            for run in range(runs):
                progress(f"{shape} {name} run {run}")
                row = _run(engine, WORKLOADS[name], seed=run, vocab=SHAPES[shape].vocab_size, card=card)
                row |= {
                    "compiles_after_ready": compiles.after_ready,
                    "late_kernels": sorted({late.kernel for late in compiles.late}),
                }
                progress(f"  {row['output_tok_per_s']} output tokens/s, {row['input_tok_per_s']} input, {row['seconds']} s")
                progress(
                    f"  {row['of_bytes_limit']:.0%} of the limit by bytes, {row['of_flops_limit']:.0%} of that by FLOP, "
                    f"{row['of_steps_limit']:.0%} of that of products and attention one after the other"
                )
                yield {
                    "shape": shape,
                    "weights": config.quantize or config.dtype,
                    "kv_cache": config.kv_cache or config.dtype,
                    "speculate": config.speculate,
                    "workload": name,
                    "run": run,
                    "start_to_ready_s": round(ready_s, 2),
                    **row,
                    "kernels": chosen_kernels(),
                }
    finally:
        compiles.stop()


class _Card:
    """The facts from which the limits of a run are computed."""

    def __init__(self, engine: Any, shape: ModelConfig, config: EngineConfig) -> None:
        self.shape, self.config, self.weights = shape, config, weights_of(engine.runner.model)
        self.dtype = engine.runner.model.embed.weight.dtype
        self.found = ceilings(device_of(engine.runner.model.embed.weight.get_device()))

    def shares(
        self, workload: Workload, lengths: list[tuple[int, int]], steps: int, seconds: float, passes_made: list[Pass]
    ) -> dict[str, float]:
        """Columns of a run's row: the run's lower bounds as shares of its time."""
        # The last step only returns the results of the step launched before it.
        passes = max(out for _, out in lengths) - 1 if workload.decode_only else steps - 1
        formats: dict[str, Any] = {
            "dtype": self.dtype, "cache_dtype": self.dtype if self.config.kv_cache is None else torch.int8,
            "format": self.config.quantize,
        }  # fmt: skip
        found = limits(self.shape, self.weights, lengths, passes, self.found, decode_only=workload.decode_only, **formats)
        counted = [one for one in passes_made if not workload.decode_only or int(one.counts.max()) == 1]
        least_s = step_limit(self.shape, self.weights, counted, self.found, **formats)
        return shares(found, seconds) | {"steps_limit_s": round(least_s, 4), "of_steps_limit": round(least_s / seconds, 3)}


def _run(engine: Any, workload: Workload, *, seed: int, vocab: int, card: _Card) -> dict[str, Any]:
    rng = random.Random(seed + 1000)
    lengths = workload.lengths(rng)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length, _ in lengths]
    before = engine.stats()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt, (_, out) in zip(prompts, lengths, strict=True):
        engine.submit(prompt, workload.params(rng, out), whole=True)
    produced, first_s = 0, 0.0
    stamps, passes = [], list[Pass]()
    schedule = engine.scheduler.schedule

    def noted() -> Any:
        step = schedule()
        if step is not None:
            passes.append(Pass(step.starts.copy(), step.counts.copy(), int(step.samples.sum())))
        return step

    engine.scheduler.schedule = noted
    while engine.has_work:
        deltas = engine.step()
        produced += sum(len(delta.token_ids) for delta in deltas)
        stamps.append(time.perf_counter())
        if produced and not first_s:
            first_s = stamps[-1]
    end = time.perf_counter()
    del engine.scheduler.schedule  # the class has the real one
    expected = sum(out for _, out in lengths)
    if produced != expected:
        raise RuntimeError(f"{workload.name}: {produced} tokens were generated, wanted {expected}")
    seconds = end - first_s if workload.decode_only else end - start
    counted = produced - len(lengths) if workload.decode_only else produced
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    return {
        "requests": len(lengths),
        "tokens_in": sum(n for n, _ in lengths),
        "tokens_out": produced,
        "seconds": round(seconds, 4),
        "output_tok_per_s": round(counted / seconds, 1),
        "input_tok_per_s": None if workload.decode_only else round(sum(n for n, _ in lengths) / seconds, 1),
        "steps": len(stamps),
        "median_step_ms": round(1e3 * statistics.median(gaps), 3) if gaps else None,
        "preemptions": engine.stats().preemptions - before.preemptions,
        "drafted": engine.stats().drafted_tokens - before.drafted_tokens,
        "accepted": engine.stats().accepted_tokens - before.accepted_tokens,
        **card.shares(workload, lengths, len(stamps), seconds, passes),
    }
