"""The results of a comparison as plain data, from which its report, its JSON and its exit code are made.

All times are seconds of one forward pass; all ratios are the baseline's time over ours, so above 1 we are faster. Nothing is
measured or drawn here.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "MOST_COUNTERS", "MOST_KIND", "MOST_NAME", "MOST_RATIO", "Claim", "Comparison", "Counter", "Interval", "Point", "Run",
    "Segment", "Side", "Verdict",
]  # fmt: skip

Verdict = Literal["pass", "fail", "undecided"]
"""pass: the lower bound of the ratio reaches the claim; fail: its upper bound stays below; undecided: neither."""

FORMAT = 1
"""Version of the JSON."""

MOST_COUNTERS, MOST_NAME, MOST_KIND = 4096, 1000, 100
"""Counters of an engine, and characters of what it calls them: what more would be is no operation of one model."""

MOST_RATIO = 1e6
"""Stands for a ratio without a bound: the time of ours cannot be told from none."""


class Interval(NamedTuple):
    """An estimate and its confidence bounds, simultaneous over all segments of a comparison."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed call: when (seconds from the start of measuring), of which variant, how long."""

    at: float
    variant: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Counter:
    """What an engine's own profiler says of one of its operations: the engine's claim. No interval or verdict knows of it."""

    name: str
    """As the engine calls it."""
    kind: str = ""
    """The operator or kernel, in the engine's words."""
    seconds: float
    """Of one run of the whole model."""
    layers: list[str] = field(default_factory=list)
    """Ours that it runs, as far as its name tells."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine: what it is, what it took, and how well its layers add up to it."""

    engine: str
    """As it was asked for: "eager", "optimize:int8", "cmd:./engine.sh"."""
    facts: dict[str, Any]
    """What the engine says of itself: versions, precision asked for, threads, graph capture, copies, build seconds."""
    whole: Interval
    """The whole model."""
    layers: dict[str, Interval]
    """Seconds of each segment by its name."""
    overhead: Interval
    """What a call costs with no layer in it."""
    residual: float
    """Root mean square of (measured - fitted) over the variants, relative to the whole model."""
    additive: bool
    """Whether the residual is what the noise of single runs explains."""
    output_error: float
    """|| output - float64 output || / || float64 output ||."""
    precision: str
    """What that error is typical of: "fp32", "tf32", "fp16", "bf16", "int8" ..."""
    runs: list[Run]
    counters: list[Counter] = field(default_factory=list)
    """In the engine's order; empty where it was not asked or does not tell."""
    counters_exact: bool = False
    """Whether they are the device's own records of every kernel, each known to be of one layer."""
    counters_note: str = ""
    """Why there are none, where it was asked."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A layer, or several that an engine evidently fuses, on both sides."""

    name: str
    layers: list[str]
    """Names of the modules or nodes in it, in order."""
    ours: Interval
    baseline: Interval
    ratio: Interval
    verdict: Verdict
    flops: float
    bytes: float
    """Smallest traffic: inputs, weights and outputs once, in the precision of ours."""
    why: str = ""
    """Why its layers are one segment; empty for a layer alone."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How many times as fast as one engine the whole model is, and what is equal on both sides."""

    engine: str
    """As it was asked for: "graph:fp16"."""
    precision: str
    """What it says it computes in."""
    launch: str
    """How it starts its work: "CUDA graph", "calls" or "not told"."""
    seconds: Interval
    """Of its whole model."""
    ratio: Interval
    """Its time over ours. An interval of its own, not simultaneous with those of the segments."""
    equal: bool
    """Whether it computes in our precision and starts its work as ours does."""
    words: str
    """What is equal, or what differs."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A line of the fairness card: something that would make the comparison unfair if it differed."""

    name: str
    ours: str
    baseline: str
    open: bool
    """An open point withholds the headline."""
    why: str
    """One sentence: what was checked, or what is missing."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that was found out about one model."""

    model: str
    claim: float
    confidence: float
    """Of the simultaneous intervals: 0.95."""
    verdict: Verdict
    """Of the claim: pass when every segment passes, fail when one fails, else undecided."""
    ratio: Interval
    """Of the whole model."""
    segments: list[Segment]
    ours: Side
    baseline: Side
    card: list[Point]
    fusions: list[dict[str, Any]] = field(default_factory=list)
    """What `optimize` decided, when it is one side: see tilewright.fuse."""
    tuning: list[dict[str, Any]] = field(default_factory=list)
    """Op, implementation, config and where it came from, for each launch of ours."""
    claims: list[Claim] = field(default_factory=list)
    """Of the whole model against the baseline and the engines beside it, the one at equal precision and launch mode first."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Measured: "bytes_per_s", and "flops_per_s.<dtype>"; empty where the machine has not been measured."""
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """How long the comparison took."""

    @property
    def fair(self) -> bool:
        """Whether no point of the fairness card is open."""
        return not any(point.open for point in self.card)

    def to_json(self) -> dict[str, Any]:
        """As `json.dumps` takes it; intervals are [value, low, high], numbers that JSON lacks "inf", "-inf" and "nan"."""
        return _finite({"format": FORMAT, "fair": self.fair, **asdict(self)})

    @classmethod
    def from_json(cls, data: Any) -> "Comparison":
        """What `to_json` gave. Raises ValueError naming the first places that are not as they should be."""
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = repr(data.get("format")) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a comparison of format {FORMAT}: got {got}; write it again with this version's --json")
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5]]
            raise ValueError(f"not a comparison: {'; '.join(faults)}") from error


def _finite(value: Any) -> Any:
    """`value` with every float that is not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
