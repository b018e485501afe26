"""Counts and times of one version of a model, as the protocol's statistics extension names them."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Duration", "Shadow", "Stats"]


@dataclass(slots=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` more, which took so long together."""
        self.count += count
        self.ns += max(0, round(seconds * 1e9))

    def json(self) -> dict[str, int]:
        """As the protocol has it."""
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class Shadow:
    """What a shadow version's answers were beside the ones that were given."""

    compared: int = 0
    different: int = 0
    """Answers with another byte, shape or datatype."""
    failed: int = 0
    largest_difference: float = 0.0
    """Of a number, relative to the largest number of the answer that was given."""


NAMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass
class Stats:
    """Of one version. Times of the protocol are those of requests, except in `batches`."""

    last_ms: int = 0
    inferences: int = 0
    executions: int = 0
    refused: int = 0
    expired: int = 0
    restarts: int = 0
    times: dict[str, Duration] = field(default_factory=lambda: {name: Duration() for name in NAMES})
    batches: dict[int, tuple[Duration, Duration]] = field(default_factory=lambda: defaultdict(lambda: (Duration(), Duration())))
    """Rows -> batches of so many rows: the way there and back, and the model's time."""
    shadow: Shadow = field(default_factory=Shadow)

    def answered(self, count: int, queued_s: float, began_s: float, ended_s: float, model_s: float) -> None:
        """Requests of one batch were answered: `queued_s` together, the rest is the batch's, and each of them waited for it."""
        self.times["queue"].add(queued_s, count)
        # What is neither the model's nor spent on the answers is the way there and back.
        for kind, seconds in (
            ("compute_infer", model_s),
            ("compute_input", ended_s - began_s - model_s),
            ("compute_output", time.monotonic() - ended_s),
        ):
            self.times[kind].add(seconds * count, count)

    def batch(self, rows: int, whole_s: float, model_s: float) -> None:
        """A batch was computed."""
        self.executions += 1
        self.last_ms = int(time.time() * 1e3)
        way, model = self.batches[rows]
        way.add(whole_s - model_s)
        model.add(model_s)

    def json(self, name: str, version: int) -> dict[str, Any]:
        """The protocol's `$model_stat`."""
        return {
            "name": name,
            "version": str(version),
            "last_inference": self.last_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {kind: duration.json() for kind, duration in self.times.items()},
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": way.json(),
                    "compute_infer": model.json(),
                    "compute_output": {"count": model.count, "ns": 0},
                }
                for rows, (way, model) in sorted(self.batches.items())
            ],
        }
