"""A comparison as a timeline in Chrome's trace event format (chrome://tracing, ui.perfetto.dev).

There are two processes: the layers of one call with their estimated times, one track per engine; and the measuring runs when
they ran, one track per engine. Layers were not observed one by one: their positions are running sums of their times.
"""

from collections.abc import Iterator
from typing import Any

from tilewright.bench.compare.figures import between, ratio
from tilewright.bench.compare.results import Comparison, Side

__all__ = ["timeline"]

_MICRO = 1e6
_LAYERS, _RUNS = 1, 2


def timeline(comparison: Comparison) -> dict[str, Any]:
    """The object that the viewers load; times in microseconds."""
    events = [*_names(_LAYERS, "one call, inferred", comparison), *_names(_RUNS, "measuring runs", comparison)]
    for track, which in enumerate(("ours", "baseline"), 1):
        events += _layers(comparison, which, track)
        events += _runs(getattr(comparison, which), track)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"model": comparison.model, "claim": comparison.claim}}


def _names(process: int, name: str, comparison: Comparison) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for track, side in enumerate((comparison.ours, comparison.baseline), 1):
        label = f"{'ours' if track == 1 else 'baseline'}: {side.engine}"
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": label}}


def _layers(comparison: Comparison, which: str, track: int) -> Iterator[dict[str, Any]]:
    side: Side = getattr(comparison, which)
    at = side.overhead.value
    yield _event(_LAYERS, track, "overhead", 0.0, at, {})
    for segment in comparison.segments:
        took = getattr(segment, which).value
        told = {"speed-up": ratio(segment.ratio.value), "interval": between(segment.ratio), "verdict": segment.verdict}
        yield _event(_LAYERS, track, segment.name, at, took, {**told, "layers": segment.layers})
        at += max(took, 0.0)


def _runs(side: Side, track: int) -> Iterator[dict[str, Any]]:
    for run in side.runs:
        yield _event(_RUNS, track, run.variant, run.at, run.seconds, {})


def _event(process: int, track: int, name: str, at: float, took: float, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": track, "name": name, "ts": at * _MICRO, "dur": max(took, 0.0) * _MICRO, "args": told,
    }  # fmt: skip
