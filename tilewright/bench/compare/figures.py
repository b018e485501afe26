"""Numbers as people read them: three significant digits and a unit. And the one sentence that a comparison comes down to."""

import math

from tilewright.bench.compare.results import MOST_RATIO, Comparison, Interval, Segment, Side

__all__ = ["amount", "between", "headline", "precisions", "ratio", "seconds", "subline"]

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def _digits(x: float) -> str:
    """Three significant digits of a number from 1 to 1000, fewer below, none of them an exponent."""
    size = abs(x)
    return f"{x:.2f}" if size < 9.995 else f"{x:.1f}" if size < 99.95 else f"{x:.0f}"


def seconds(s: float) -> str:
    """A time: "12.3 µs"."""
    if not math.isfinite(s):
        return "not known"
    if s == 0:
        return "0 µs"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(s) >= 0.9995 * scale:
            return f"{_digits(s / scale)} {unit}"
    return f"{_digits(s / 1e-9)} ns"


def amount(x: float, unit: str) -> str:
    """A count or a rate with a decimal prefix: "1.23 GFLOP", "3.02 TB/s"."""
    if not math.isfinite(x):
        return "not known"
    for scale, prefix in _LARGE:
        if abs(x) >= 0.9995 * scale:
            return f"{_digits(x / scale)} {prefix}{unit}"
    return f"{_digits(x)} {unit}"


def ratio(x: float) -> str:
    """How many times as fast: "1.53×"; "∞" where the time of ours cannot be told from none."""
    if math.isnan(x):
        return "not known"
    return f"{_digits(x)}×" if x < MOST_RATIO else "∞"


def between(interval: Interval, shown=ratio) -> str:
    """An interval's bounds: "1.48× to 1.58×"."""
    return f"{shown(interval.low)} to {shown(interval.high)}"


def precisions(comparison: Comparison) -> str:
    """What computes in what: "fp16 against fp32 (tf32 convolutions)"."""
    return " against ".join(_precision(side) for side in (comparison.ours, comparison.baseline))


def _precision(side: Side) -> str:
    return str(side.facts.get("precision") or side.precision)


def headline(comparison: Comparison) -> str:
    """What was found out about the claim; or, while a point of the fairness card is open, that it is withheld, and why."""
    open_points = [point.name for point in comparison.card if point.open]
    if open_points or not comparison.card:
        points = "1 point" if len(open_points) == 1 else f"{len(open_points)} points"
        why = f"{points} of the fairness card open: {', '.join(open_points)}" if open_points else "there is no fairness card"
        return f"Headline withheld, {why}"
    claim = f"{comparison.claim:g}× as fast"
    ours, baseline = _precision(comparison.ours), _precision(comparison.baseline)
    types = "" if ours == baseline else f", {ours} against {baseline}"
    if len(comparison.segments) == 1:
        said = {"pass": "The whole model is at least", "fail": "The whole model is not"}
        return f"{said.get(comparison.verdict, 'Undecided whether the whole model is')} {claim}{types}"
    if comparison.verdict == "pass":
        return f"Every layer is at least {claim}{types}"
    if comparison.verdict == "fail":
        return f"Not every layer is {claim}{types}: {_named(comparison.segments, 'fail')} short"
    return f"Undecided whether every layer is {claim}{types}: {_named(comparison.segments, 'undecided')} open"


def _named(segments: list[Segment], verdict: str) -> str:
    names = [segment.name for segment in segments if segment.verdict == verdict]
    if len(names) == 1:
        return f"{names[0]} {'falls' if verdict == 'fail' else 'stays'}"
    return f"{len(names)} of {len(segments)} segments {'fall' if verdict == 'fail' else 'stay'}"


def subline(comparison: Comparison) -> str:
    """Who against whom, in which precision, and how the intervals are meant."""
    segments = "the one segment" if len(comparison.segments) == 1 else f"all {len(comparison.segments)} segments at once"
    return (
        f"{comparison.ours.engine} against {comparison.baseline.engine}, {precisions(comparison)}. "
        f"Intervals hold for {segments} with {comparison.confidence:.0%} confidence{_apart(comparison)}."
    )


def _apart(comparison: Comparison) -> str:
    """What a reader of single layers must know: where they are no parts of the whole. Of one segment it says nothing."""
    sides = [side.engine for side in (comparison.ours, comparison.baseline) if not side.additive]
    if len(comparison.segments) == 1 or not sides:
        return ""
    where = sides[0] if len(sides) == 1 else "either side"
    return f", wider because nothing shows that the layers add up on {where}"
