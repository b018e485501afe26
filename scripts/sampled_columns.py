"""Compare two ways of returning sampled log-probabilities from the engine: as columns, and as one Python value per token.

    python scripts/sampled_columns.py --running 1024

No device is used: the runner answers every step with the same tokens and log-probabilities, and reads them from tensors as the
real one does. Columns are joined as in `rl.rollout.Sampler`, values as in `LLM`. The figures are microseconds of processor time
per step for scheduling, packing and reading; the two ways take turns, and the least of the turns is shown.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.bench.engine_host import HostSteps
from tilewright.engine.core import Engine
from tilewright.engine.outputs import Transcript
from tilewright.engine.request import SamplingParams
from tilewright.engine.sampler import LogprobTensors
from tilewright.engine.step import Step, StepResult
from tilewright.rl.output_collector import OutputCollector

CONTEXT, ANSWERS, WIDTH = 64, 8, 65


def engine_of(running: int, tokens: int, read: Callable[[Step, LogprobTensors, np.ndarray], StepResult]) -> Engine:
    """An engine without a device that reads its log-probabilities by `read`."""
    engine = HostSteps(running=running, context=CONTEXT, steps=tokens).engine
    numbers = torch.arange(running) + 1
    arrived = LogprobTensors(torch.zeros(running, WIDTH, dtype=torch.int32), -1 / numbers, numbers)
    engine.runner.collect = lambda step: read(step, arrived, np.minimum(step.samples, 1))
    return engine


def prompts_of(running: int) -> list[list[int]]:
    return [[i] * CONTEXT for i in range(running // ANSWERS)]


def by_columns(running: int, tokens: int) -> Callable[[], list[tuple[Any, ...]]]:
    """A function that samples, and returns (tokens, log-probabilities, drawn, kept) of each sample."""

    def read(step: Step, arrived: LogprobTensors, counts: np.ndarray) -> StepResult:
        count = int(counts.sum())
        return StepResult(np.full(count, 7, np.int64), counts, columns=arrived.columns(count))

    engine = engine_of(running, tokens, read)

    def sample() -> list[tuple[Any, ...]]:
        engine.reset()
        collector, params = OutputCollector(), SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, n=ANSWERS)
        for i, prompt in enumerate(prompts_of(running)):
            engine.submit(prompt, params, streams=range(i * ANSWERS, (i + 1) * ANSWERS))
        while engine.has_work:
            collector.add(engine.advance())
        return [output[:4] for output in collector.outputs(running)]

    return sample


def by_values(running: int, tokens: int) -> Callable[[], list[tuple[Any, ...]]]:
    """The same with a value a token."""

    def read(step: Step, arrived: LogprobTensors, counts: np.ndarray) -> StepResult:
        asked: Sequence[int | None] = [r.params.logprobs for r, n in zip(step.requests, counts.tolist()) for _ in range(n)]
        return StepResult(np.full(len(asked), 7, np.int64), counts, arrived.read(asked))

    engine = engine_of(running, tokens, read)

    def sample() -> list[tuple[Any, ...]]:
        engine.reset()
        collector, params = dict[str, Transcript](), SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, n=ANSWERS)
        for prompt in prompts_of(running):
            collector[engine.submit(prompt, params)] = Transcript(prompt, ANSWERS)
        while engine.has_work:
            for delta in engine.step():
                collector[delta.request_id].add(delta)
        outputs = [output for transcript in collector.values() for output in transcript.completion().outputs]
        entries = [(output.token_ids, output.logprobs or []) for output in outputs]
        return [
            (ids, *([getattr(entry, name) for entry in found] for name in ("logprob", "drawn", "kept")))
            for ids, found in entries
        ]

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=1024, help="number of samples at once, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=200, help="length of each sample in tokens")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    ways = {"columns": by_columns(args.running, args.tokens), "values": by_values(args.running, args.tokens)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.turns):
        for name, sample in ways.items():
            start = time.process_time()
            sample()
            times[name].append(time.process_time() - start)
    for name, seconds in times.items():
        print(f"{name:<8} {1e6 * min(seconds) / args.tokens:9.1f} us a step")


if __name__ == "__main__":
    main()
