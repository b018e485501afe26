"""Formats numbers for people (three significant digits and a unit), and the one-sentence result of a comparison."""

import math

from tilewright.bench.compare.results import MOST_RATIO, Claim, Comparison, Interval, Segment, Side

__all__ = ["amount", "between", "claim_line", "headline", "precisions", "ratio", "seconds", "shown_alone", "subline", "sums"]

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


def claim_line(claim: Claim) -> str:
    """ "1.42× (1.40× to 1.45×) as fast as graph:fp16; equal precision and launch mode"."""
    return f"{ratio(claim.ratio.value)} ({between(claim.ratio)}) as fast as {claim.engine}; {claim.words}"


def sums(comparison: Comparison) -> list[tuple[str, float, float]]:
    """(name, ours, baseline) in seconds: the layers together, what a call costs without any, and what neither explains."""
    sides = comparison.ours, comparison.baseline
    layers = [sum(getattr(segment, which).value for segment in comparison.segments) for which in ("ours", "baseline")]
    rest = [side.whole.value - side.overhead.value - total for side, total in zip(sides, layers, strict=True)]
    return [
        ("sum of the layers", layers[0], layers[1]),
        ("overhead of a call", sides[0].overhead.value, sides[1].overhead.value),
        ("not explained", rest[0], rest[1]),
    ]


def shown_alone(comparison: Comparison) -> tuple[int, int, int]:
    """(layers that pass by themselves, layers in segments of several, all layers)."""
    alone = [s for s in comparison.segments if len(s.layers) <= 1]
    joined = sum(len(s.layers) for s in comparison.segments if len(s.layers) > 1)
    return sum(s.verdict == "pass" for s in alone), joined, len(alone) + joined


def headline(comparison: Comparison) -> str:
    """What was found out; while a point of the fairness card is open, that it is withheld, and why.

    The whole model at equal precision and launch mode comes first, where the baseline is not of both itself.
    """
    open_points = [point.name for point in comparison.card if point.open]
    if open_points or not comparison.card:
        points = "1 point" if len(open_points) == 1 else f"{len(open_points)} points"
        why = f"{points} of the fairness card open: {', '.join(open_points)}" if open_points else "there is no fairness card"
        return f"Headline withheld, {why}"
    return _equal(comparison) + _about_layers(comparison)


def _equal(comparison: Comparison) -> str:
    """The claim at equal precision and launch mode, where it is about another engine than the baseline."""
    equal = next((claim for claim in comparison.claims if claim.equal), None)
    if equal is None or equal.engine == comparison.baseline.engine:
        return ""
    return f"{ratio(equal.ratio.value)} as fast as {equal.engine} at equal precision and launch mode. "


def _about_layers(comparison: Comparison) -> str:
    claim = f"{comparison.claim:g}× as fast"
    ours, baseline = _precision(comparison.ours), _precision(comparison.baseline)
    types = "" if ours == baseline else f", {ours} against {baseline}"
    if len(comparison.segments) == 1:
        said = {"pass": "The whole model is at least", "fail": "The whole model is not"}
        return f"{said.get(comparison.verdict, 'Undecided whether the whole model is')} {claim}{types}"
    than = f"{claim} as {comparison.baseline.engine}" if comparison.claims else claim
    joined = shown_alone(comparison)[1]
    if comparison.verdict == "pass":
        what = f"Every segment, with {joined} layers not shown by themselves," if joined else "Every layer"
        return f"{what} is at least {than}{types}"
    if comparison.verdict == "fail":
        return f"Not every layer is {than}{types}: {_named(comparison.segments, 'fail')} short"
    return f"Undecided whether every layer is {than}{types}: {_named(comparison.segments, 'undecided')} open"


def _named(segments: list[Segment], verdict: str) -> str:
    names = [segment.name for segment in segments if segment.verdict == verdict]
    many = f"{len(names)} of {len(segments)} segments"
    if len(names) == 1:  # a layer may be called "6": its name alone would be read as a count
        return f"{many} (layer “{names[0]}”) {'falls' if verdict == 'fail' else 'stays'}"
    return f"{many} {'fall' if verdict == 'fail' else 'stay'}"


def subline(comparison: Comparison) -> str:
    """Who against whom, in which precision, and how the intervals are meant."""
    none_equal = bool(comparison.claims) and not any(claim.equal for claim in comparison.claims)
    unequal = " No engine of our precision and launch mode was measured." if none_equal else ""
    segments = "the one segment" if len(comparison.segments) == 1 else f"all {len(comparison.segments)} segments at once"
    return (
        f"{comparison.ours.engine} against {comparison.baseline.engine}, {precisions(comparison)}. "
        f"Intervals hold for {segments} with {comparison.confidence:.0%} confidence{_apart(comparison)}.{unequal}"
    )


def _apart(comparison: Comparison) -> str:
    """What a reader of single layers must know: where they are no parts of the whole. Of one segment it says nothing."""
    sides = [side.engine for side in (comparison.ours, comparison.baseline) if not side.additive]
    if len(comparison.segments) == 1 or not sides:
        return ""
    where = sides[0] if len(sides) == 1 else "either side"
    return f", wider because nothing shows that the layers add up on {where}"
