"""The fairness card: the conditions that must be equal on both sides for a comparison to mean anything, point by point.

A point is either closed with a reason, or open; while one is open, the headline is withheld. Differences that a user of both
engines would have too (16 bits against 32, a captured graph against single launches) are not unfair, but they are stated. A
point is open if it cannot be known (an engine does not report what its call copies), or if an engine's statement is wrong (it
computes in fewer bits).

Precision is not taken from an engine's statement but from the distance of its output to the same model in float64. Operands
rounded to a significand of p bits have a relative RMS error of 0.425 * 2^-p (uniform rounding, significands by Benford's law),
a sum of products of two of them 0.6 * 2^-p: 3.6e-8 for float32, 2.9e-4 for float16 and tf32 (both 11 bits, so no distance
distinguishes them), 2.3e-3 for bfloat16; 1e-2 and more for 8-bit quantised values. Errors of layers add up like a random walk:
times sqrt(depth); skips and biases dilute them (cf. Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). More
precise than theory are the `yardsticks`: the errors of this same model when PyTorch runs it in each type.
"""

import copy
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilewright.bench.compare.results import Point, Run, Side
from tilewright.hw.state import State, others_share
from tilewright.hw.tf32 import exact_float32

__all__ = ["CLASSES", "DRIFT", "by_variant", "card", "drifted_apart", "precision_of", "relative_error", "yardsticks"]

CLASSES = ("fp64", "fp32", "fp16/tf32", "bf16", "8-bit", "4-bit", "wrong")
"""Classes of precision that an output error can be told to be of, finest first."""

# Largest error of each class but the last, for one layer. Between neighbours the geometric mean of the coarsest error of the
# finer and the finest of the coarser one, seen over residual, encoder and plain nets of 2 to 72 layers: fp16 5e-5 to 2.8e-4,
# bf16 4e-4 to 2.4e-3, int8 7e-4 (diluted) to 8.5e-3, fp8 4e-3 to 3.5e-2.
_LARGEST = (1e-10, 4e-6, 3.4e-4, 3.0e-3, 6e-2, 0.15)
_WRONG = 0.5
"""An output this far from the truth is another function's, whatever the depth."""

_NAMES = {
    "fp64": "fp64", "float64": "fp64", "double": "fp64",
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "tf32": "fp16/tf32", "fp16": "fp16/tf32", "float16": "fp16/tf32", "half": "fp16/tf32",
    "bf16": "bf16", "bfloat16": "bf16",
    "int8": "8-bit", "uint8": "8-bit", "fp8": "8-bit", "float8": "8-bit", "mxfp8": "8-bit",
    "int4": "4-bit", "fp4": "4-bit", "mxfp4": "4-bit", "nvfp4": "4-bit",
}  # fmt: skip

_LEAST_RUNS = 5
"""Of a variant: fewer have no spread worth the name."""
DRIFT = 0.05
"""Difference between the two sides' drifts that the intervals do not cover."""
_OTHERS_CPU, _OTHERS_GPU = 0.2, 0.8
"""Share of all processors that others may use meanwhile: where the engines compute on them, and where they only launch."""


def apart(got: Tensor, wanted: Tensor) -> Tensor:
    """got - wanted in float64; 0 where both are the same infinity or NaN."""
    a, b = got.double(), wanted.double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def relative_error(outputs: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """|| outputs - truth || / || truth || over all tensors together, in float64. The truth's infinities and NaNs count for
    nothing; inf where an output has others, or is missing."""
    if len(outputs) != len(truth) or any(a.shape != b.shape for a, b in zip(outputs, truth)):
        return math.inf
    off = sum(float(apart(a, b).square().sum()) for a, b in zip(outputs, truth))
    size = sum(float(b.double().nan_to_num(0.0, 0.0, 0.0).square().sum()) for b in truth)
    if not math.isfinite(off):
        return math.inf
    return math.sqrt(off / size) if size else (0.0 if off == 0 else math.inf)


def precision_of(error: float, depth: int, measured: Mapping[str, float] | None = None) -> str:
    """The class that an output error is typical of: one of CLASSES.

    `depth` is the number of layers that multiply, one after the other; `measured` are the model's `yardsticks`, if any.
    """
    if not error < _WRONG:
        return "wrong"
    limits = [limit * math.sqrt(max(depth, 1)) for limit in _LARGEST]
    if measured:
        limits = _sharpened(limits, measured)
    return next((name for name, limit in zip(CLASSES, limits) if error <= limit), "wrong")


def _sharpened(limits: list[float], measured: Mapping[str, float]) -> list[float]:
    """Limits between two classes that both were measured lie between them; one that was measured alone is inside its own."""
    sharper = list(limits)
    for i, (finer, coarser) in enumerate(pairwise(CLASSES)):
        a, b = measured.get(finer), measured.get(coarser)
        if a is not None and b is not None and 0 < a < b:
            sharper[i] = math.sqrt(a * b)
        elif a is not None:
            sharper[i] = max(sharper[i], 3 * a)
    return [max(sharper[: i + 1]) for i in range(len(sharper))]


def yardsticks(module: nn.Module, inputs: tuple[Tensor, ...], truth: Sequence[Tensor]) -> dict[str, float]:
    """Errors against `truth` (float64 outputs, flat) of the module run eagerly in float32, float16 and bfloat16, by class.

    A type that the module cannot be run in on this device is left out. tf32 is off meanwhile.
    """
    found = {}
    with exact_float32():
        for name, dtype in (("fp32", torch.float32), ("fp16/tf32", torch.float16), ("bf16", torch.bfloat16)):
            cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
            try:
                with torch.inference_mode():
                    answer = copy.deepcopy(module).to(dtype)(*cast)
            except RuntimeError:  # no kernel of that type, or a type written into the module
                continue
            error = relative_error([x.cpu() for x in tree_leaves(answer) if isinstance(x, Tensor)], truth)
            if math.isfinite(error):  # float16 overflows
                found[name] = error
    return found


def card(
    ours: Side, baseline: Side, *, depth: int, before: State, after: State, measured: Mapping[str, float] | None = None,
    despite: bool = False, clocks: Mapping[str, Any] | None = None,
) -> list[Point]:  # fmt: skip
    """Every point, in the order in which they are read.

    `before` and `after` are looks at the machine around the measurement, `depth` and `measured` as for `precision_of`;
    `despite`: the verdict would be the same if all ratios were off by what the sides drifted apart; `clocks`: what was seen of
    the GPU's clock while runs were made (`Watch.summary`). Facts that are read:
    "precision", "device", "inputs", "threads", "graph", "copies", "clock", "versions" (docs/compare.md).
    """
    on_cpu = str(ours.facts.get("device", "cpu")).startswith("cpu")
    return [
        _precision(ours, baseline, depth, measured),
        _outputs(ours, baseline),
        _device(ours, baseline),
        _inputs(ours, baseline),
        _threads(ours, baseline, on_cpu),
        _graph(ours, baseline, on_cpu),
        _copies(ours, baseline),
        _clock(ours, baseline),
        _versions(ours, baseline),
        _runs(ours, baseline),
        _order(ours, baseline),
        _drift(ours, baseline, despite),
        _clocks(before, after, on_cpu, clocks or {}),
        _load(before, after, on_cpu),
    ]


def _precision(ours: Side, baseline: Side, depth: int, measured: Mapping[str, float] | None) -> Point:
    shown, faults = [], []
    for side in (ours, baseline):
        if (instead := side.facts.get("computes in")) is not None:
            faults.append(f"{side.engine} was asked for {_text(side.facts.get('precision'))} and answered in {instead}")
        said = side.facts.get("precision")
        found = precision_of(side.output_error, depth, measured)
        shown.append(f"{_text(said)}; error {side.output_error:.1e}: {found}")
        if (fault := _fault(str(said) if said else "", found)) is not None:
            faults.append(f"{side.engine} {fault}")
    how = "this model's own errors in each type" if measured else f"what {depth} layers in each type can lose"
    why = (
        "; ".join(faults) or f"The distance of both outputs from the float64 result fits the stated precision, judged by {how}."
    )
    return Point(name="precision", ours=shown[0], baseline=shown[1], open=bool(faults), why=why)


def _fault(said: str, found: str) -> str | None:
    """What is wrong with an engine that says `said` and computes as `found`."""
    named = [_NAMES[word] for word in re.findall(r"[a-z]+\d*", said.lower()) if word in _NAMES]
    if not named:
        return None if found != "wrong" else "gives other numbers than the model"
    places = [CLASSES.index(name) for name in named]
    finest, coarsest, place = min(places), max(places), CLASSES.index(found)
    if coarsest > CLASSES.index("bf16"):
        # Engines keep layers in 16 bits that would lose too much in codes.
        finest = min(finest, CLASSES.index("fp16/tf32"))
    elif finest == CLASSES.index("bf16"):
        # Skips dilute errors by up to the factor 8 between the two 16-bit types; they run at one speed.
        finest = CLASSES.index("fp16/tf32")
    if place > coarsest:
        return f"says {said}, but computes in {found}"
    if place < finest and found != "fp64":
        return f"says {said}, but its output is as exact as {found}, so it does not compute in the stated precision"
    return None


def _outputs(ours: Side, baseline: Side) -> Point:
    wrong = [side.engine for side in (ours, baseline) if not side.output_error < _WRONG]
    why = (
        f"{' and '.join(wrong)}: the outputs differ too much from the model's."
        if wrong
        else "Both answer as the model does in float64."
    )
    shown = [f"{side.output_error:.1e} off" for side in (ours, baseline)]
    return Point(name="outputs", ours=shown[0], baseline=shown[1], open=bool(wrong), why=why)


def _device(ours: Side, baseline: Side) -> Point:
    a, b = (side.facts.get("device") for side in (ours, baseline))
    if a is None or b is None:
        return _point("device", a, b, _silent(ours, baseline, "device"))
    return _point("device", a, b, None if a == b else "The engines run on different devices.", "The same device.")


def _inputs(ours: Side, baseline: Side) -> Point:
    """Batch and shapes; types may differ, they are part of precision."""
    a, b = (side.facts.get("inputs") for side in (ours, baseline))
    if a is None or b is None:
        return _point("batch and shapes", a, b, _silent(ours, baseline, "inputs"))
    shapes = [[re.sub(r"^[^\[]*", "", str(text)) for text in side] for side in (a, b)]
    open_because = None if shapes[0] == shapes[1] else "The engines were given different shapes."
    return _point("batch and shapes", ", ".join(map(str, a)), ", ".join(map(str, b)), open_because, "The same shapes.")


def _threads(ours: Side, baseline: Side, on_cpu: bool) -> Point:
    a, b = (side.facts.get("threads") for side in (ours, baseline))
    if not on_cpu:
        return _point("threads", a, b, None, "The work is on the GPU.")
    if a is None or b is None:
        return _point("threads", a, b, _silent(ours, baseline, "threads"))
    return _point("threads", a, b, None if a == b else "The engines use different numbers of threads.", "The same number.")


def _graph(ours: Side, baseline: Side, on_cpu: bool) -> Point:
    a, b = (side.facts.get("graph") for side in (ours, baseline))
    if on_cpu:
        return _point("graph capture", a, b, None, "A CPU has no graph capture.")
    if a and b is None:
        return _point("graph capture", a, b, _silent(ours, baseline, "graph"))
    why = (
        "Alike."
        if bool(a) == bool(b)
        else "They differ, as they do for a user of both; the cost of a call without layers is the overhead."
    )
    return _point("graph capture", a, b, None, why)


def _copies(ours: Side, baseline: Side) -> Point:
    a, b = (side.facts.get("copies") for side in (ours, baseline))
    if b is None or a is None:
        return _point("copies in a call", a, b, _silent(ours, baseline, "copies"))
    more = _directions(str(b)) - _directions(str(a))
    open_because = (
        f"The baseline's time includes copies ({' and '.join(sorted(more))}) that ours does not include." if more else None
    )
    return _point("copies in a call", a, b, open_because, "The baseline's time includes no copy that ours does not include.")


def _directions(copies: str) -> set[str]:
    return set(re.findall(r"\b(in|out)\b", copies.partition(":")[0]))


def _clock(ours: Side, baseline: Side) -> Point:
    a, b = (side.facts.get("clock") for side in (ours, baseline))
    if a is None or b is None:
        return _point("stop-watch", a, b, _silent(ours, baseline, "clock"))
    ours_only_device = "event" in str(a).lower() and "event" not in str(b).lower()
    # The layers' programs may be timed otherwise than the whole model.
    layers = [str(side.facts.get("clock of layers", "call")) for side in (ours, baseline)]
    shown = [f"{told}; layers: {_STOPWATCHES.get(layer, layer)}" for told, layer in zip((a, b), layers, strict=True)]
    open_because = None
    if ours_only_device or (layers[0] == "device" and layers[1] != "device"):
        open_because = "Ours is timed on the device alone, but the baseline with the host's time of its calls."
    return _point("stop-watch", *shown, open_because, "The baseline's time includes nothing that ours does not include.")


_STOPWATCHES = {
    "call": "whole calls",
    "host": "the host's time of a call",
    "device": "the device's time of a call",
}
"""`Contender.clock` in words."""


def _versions(ours: Side, baseline: Side) -> Point:
    shown = [", ".join(f"{k} {v}" for k, v in (side.facts.get("versions") or {}).items()) for side in (ours, baseline)]
    why = "Both are known, so the measurement can be repeated."
    return _point("versions", shown[0] or None, shown[1] or None, _silent(ours, baseline, "versions"), why)


def _runs(ours: Side, baseline: Side) -> Point:
    least = [min(map(len, by_variant(side.runs).values()), default=0) for side in (ours, baseline)]
    shown = [f"{len(side.runs)} of {len(by_variant(side.runs))} variants" for side in (ours, baseline)]
    few = min(least) < _LEAST_RUNS
    why = f"At least {min(least)} of each variant."
    return _point(
        "runs", shown[0], shown[1], f"Only {min(least)} of a variant, wanted at least {_LEAST_RUNS}." if few else None, why
    )


def _order(ours: Side, baseline: Side) -> Point:
    """Both engines' runs must be spread over the same time, or whatever changes on the machine hits one of them."""
    if not ours.runs or not baseline.runs:
        return _point("order of runs", "none", "none", "Nothing was timed.")
    times = [sorted(run.at for run in side.runs) for side in (ours, baseline)]
    first, last = min(t[0] for t in times), max(t[-1] for t in times)
    apart = abs(statistics.fmean(times[0]) - statistics.fmean(times[1])) / max(last - first, 1e-9)
    shown = [f"{t[0]:.1f} to {t[-1]:.1f} s" for t in times]
    return _point(
        "order of runs", shown[0], shown[1], None if apart < 0.2 else "One engine was timed after the other.", "Interleaved."
    )


def _drift(ours: Side, baseline: Side, despite: bool) -> Point:
    shown = [f"{_drift_of(side.runs):+.1%}" for side in (ours, baseline)]
    apart = drifted_apart(ours.runs, baseline.runs)
    slower = f"One side became {apart:.0%} slower than the other during the measurement"
    if apart <= DRIFT:
        why = "The last third of the runs against the first third; what both sides share cancels in the ratio."
    elif despite:
        why = f"{slower}; the verdict is the same if every ratio is changed by that much."
    else:
        why = f"{slower}."
    return Point(name="drift", ours=shown[0], baseline=shown[1], open=apart > DRIFT and not despite, why=why)


def drifted_apart(ours: Sequence[Run], baseline: Sequence[Run]) -> float:
    """How much slower one side became than the other, relative, from the first third of the time to the last."""
    return abs(_drift_of(ours) - _drift_of(baseline))


def _drift_of(runs: Sequence[Run]) -> float:
    """Median of (run / median of its variant) in the last third of the time over that in the first third, less one."""
    usual = {name: statistics.median(seconds) or 1.0 for name, seconds in by_variant(runs).items()}
    relative = [run.seconds / usual[run.variant] for run in sorted(runs, key=lambda run: run.at)]
    third = len(relative) // 3
    return statistics.median(relative[-third:]) / statistics.median(relative[:third]) - 1 if third else 0.0


def _clocks(before: State, after: State, on_cpu: bool, seen: Mapping[str, Any]) -> Point:
    if on_cpu:
        shown = f"governor {before.governor}" if before.governor else "no governor to read"
        return _point("clocks", shown, shown, None, "One processor for both, runs interleaved.")
    if not after.gpu:
        return _point("clocks", None, None, "No driver reported the clocks, so they may differ between the runs.")
    sm = [state.gpu.get("sm") for state in (before, after)]
    shown = f"{sm[0]} to {sm[1]} of {after.gpu.get('sm_max')} MHz"
    slow = sorted({*before.gpu.get("slowdowns", []), *after.gpu.get("slowdowns", []), *seen.get("slowdowns", [])})
    why = "One card, interleaved."
    if seen:
        low, middle, high = seen["sm_mhz"]
        shown = f"{low} to {high}, median {middle}, of {after.gpu.get('sm_max')} MHz in {seen['samples']} samples"
        why = f"One GPU, interleaved; its power limit held the clock down in {seen['power_capped']:.0%} of the samples."
    return _point("clocks", shown, shown, f"The GPU throttles itself: {', '.join(slow)}." if slow else None, why)


def _load(before: State, after: State, on_cpu: bool) -> Point:
    share = others_share(before, after)
    load = "load not readable" if before.load is None else f"load {before.load:.1f} before"
    processes = 0 if on_cpu else after.gpu.get("processes", 0)
    shown = f"{load}, {processes} processes on the GPU" if processes else load
    if share is None:
        unread = "The load of other processes cannot be read here; its noise is part of the intervals."
        return _point("machine load", shown, shown, None, unread)
    why = f"Other processes used {share:.0%} of the processors during the measurement"
    if share > (_OTHERS_CPU if on_cpu else _OTHERS_GPU):
        return _point("machine load", shown, shown, f"{why}: measure on a quieter machine.")
    if processes > 2:  # ours, and a baseline's in a process of its own
        return _point("machine load", shown, shown, f"{processes} processes compute on the GPU.")
    return _point("machine load", shown, shown, None, f"{why}.")


def by_variant(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Seconds of the runs of each variant, in order."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.variant, []).append(run.seconds)
    return found


def _text(value: Any) -> str:
    return (
        "not told"
        if value is None
        else {True: "yes", False: "no"}.get(value, str(value))
        if isinstance(value, bool)
        else str(value)
    )


def _silent(ours: Side, baseline: Side, key: str) -> str | None:
    """Why a point is open for want of a fact."""
    silent = [side.engine for side in (ours, baseline) if not side.facts.get(key)]
    return f"{' and '.join(silent)} does not state its {key}; add it to the engine's facts." if silent else None


def _point(name: str, ours: Any, baseline: Any, open_because: str | None, why: str = "") -> Point:
    return Point(name=name, ours=_text(ours), baseline=_text(baseline), open=open_because is not None, why=open_because or why)
