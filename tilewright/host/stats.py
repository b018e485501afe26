"""Counts and times of one version of a model, as the protocol's statistics extension names them."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tilewright.host.arena import NO_TRAFFIC, Traffic

__all__ = ["Duration", "Shadow", "Stats"]


@dataclass(slots=True)
class Duration:
    """A number of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` events that took `seconds` together."""
        self.count += count
        self.ns += max(0, round(seconds * 1e9))

    def json(self) -> dict[str, int]:
        """The values in the form of the protocol."""
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class Shadow:
    """The comparison of a shadow version's answers with those that were sent."""

    compared: int = 0
    different: int = 0
    """Answers that differ in a byte, in shape or in datatype."""
    failed: int = 0
    largest_difference: float = 0.0
    """Largest difference of a number, relative to the largest number of the answer that was sent."""


NAMES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass
class Stats:
    """Statistics of one version. Times of the protocol are those of requests, except in `batches`."""

    last_ms: int = 0
    inferences: int = 0
    executions: int = 0
    refused: int = 0
    expired: int = 0
    restarts: int = 0
    times: dict[str, Duration] = field(default_factory=lambda: {name: Duration() for name in NAMES})
    batches: dict[int, tuple[Duration, Duration]] = field(default_factory=lambda: defaultdict(lambda: (Duration(), Duration())))
    """Number of rows -> batches with so many rows: the time of transfers, and the model's time."""
    shadow: Shadow = field(default_factory=Shadow)
    traffic: Traffic = NO_TRAFFIC
    """How inputs came from shared memory, of all batches; locked: by the process that computed the last one."""

    def answered(self, count: int, queued_s: float, began_s: float, ended_s: float, model_s: float) -> None:
        """Add the answered requests of one batch. `queued_s`: their time in the queue, summed; other times are the batch's."""
        self.times["queue"].add(queued_s, count)
        # The time that is neither the model's nor spent on the answers is that of transfers.
        for kind, seconds in (
            ("compute_infer", model_s),
            ("compute_input", ended_s - began_s - model_s),
            ("compute_output", time.monotonic() - ended_s),
        ):
            self.times[kind].add(seconds * count, count)

    def batch(self, rows: int, whole_s: float, model_s: float, traffic: Traffic = NO_TRAFFIC) -> None:
        """Add a batch."""
        self.executions += 1
        self.traffic = Traffic(self.traffic.direct + traffic.direct, self.traffic.read + traffic.read, traffic.locked)
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
