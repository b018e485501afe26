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
"""Most counters of an engine, and most characters in their names and kinds; more is not plausible for one model."""

MOST_RATIO = 1e6
"""Stands for an unbounded ratio: our time cannot be distinguished from 0."""


class Interval(NamedTuple):
    """An estimate and its confidence bounds, simultaneous over all segments of a comparison."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed call: its time (seconds from the start of measuring), its variant and its duration."""

    at: float
    variant: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Counter:
    """The time of one operation by the engine's own profiler. It is the engine's claim, and affects no interval or verdict."""

    name: str
    """The engine's name of the operation."""
    kind: str = ""
    """The operator or kernel, in the engine's words."""
    seconds: float
    """Seconds in one run of the whole model."""
    layers: list[str] = field(default_factory=list)
    """Our layers that it runs, as far as its name shows."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine: its facts, its times, and how well its layers add up to the whole model."""

    engine: str
    """The engine as it was named by the user: "eager", "optimize:int8", "cmd:./engine.sh"."""
    facts: dict[str, Any]
    """Facts that the engine reports: versions, requested precision, threads, graph capture, copies, build seconds."""
    whole: Interval
    """Seconds of the whole model."""
    layers: dict[str, Interval]
    """Name of each segment -> its seconds."""
    overhead: Interval
    """Seconds of a call without any layer."""
    residual: float
    """Root mean square of (measured - fitted) over the variants, relative to the whole model."""
    additive: bool
    """Whether the noise of single runs explains the residual."""
    output_error: float
    """|| output - float64 output || / || float64 output ||."""
    precision: str
    """The precision for which that error is typical: "fp32", "tf32", "fp16", "bf16", "int8" ..."""
    runs: list[Run]
    counters: list[Counter] = field(default_factory=list)
    """The engine's counters in its order; empty if they were not requested or are not available."""
    counters_exact: bool = False
    """Whether the counters are the device's own records of all kernels, each assigned to exactly one layer."""
    counters_note: str = ""
    """The reason why there are no counters, if they were requested."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A layer, or several layers that an engine evidently fuses, with its times on both sides."""

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
    """The speed of the whole model relative to one engine, and the conditions that are equal on both sides."""

    engine: str
    """The engine as it was named by the user: "graph:fp16"."""
    precision: str
    """The precision in which it says that it computes."""
    launch: str
    """The way in which it starts its work: "CUDA graph", "calls" or "not told"."""
    seconds: Interval
    """Seconds of the whole model on this engine."""
    ratio: Interval
    """Its time over ours. This interval is separate, not simultaneous with those of the segments."""
    equal: bool
    """Whether it computes in our precision and starts its work as ours does."""
    words: str
    """A text that says what is equal or different."""


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
    """All results for one model."""

    model: str
    claim: float
    confidence: float
    """Confidence of the simultaneous intervals: 0.95."""
    verdict: Verdict
    """Verdict on the claim: pass if every segment passes, fail if one fails, else undecided."""
    ratio: Interval
    """Ratio of the whole model."""
    segments: list[Segment]
    ours: Side
    baseline: Side
    card: list[Point]
    fusions: list[dict[str, Any]] = field(default_factory=list)
    """The decisions of `optimize`, if it is one of the engines: see tilewright.fuse."""
    tuning: list[dict[str, Any]] = field(default_factory=list)
    """For each of our launches, the op, the implementation, the config and the origin of the config."""
    claims: list[Claim] = field(default_factory=list)
    """Claims for the whole model against the baseline and further engines; equal precision and launch mode come first."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Measured ceilings: "bytes_per_s" and "flops_per_s.<dtype>"; empty if the machine has not been measured."""
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds that the comparison took."""

    @property
    def fair(self) -> bool:
        """Whether no point of the fairness card is open."""
        return not any(point.open for point in self.card)

    def to_json(self) -> dict[str, Any]:
        """Values for `json.dumps`. Intervals are [value, low, high]; infinities and NaN are "inf", "-inf" and "nan"."""
        return _finite({"format": FORMAT, "fair": self.fair, **asdict(self)})

    @classmethod
    def from_json(cls, data: Any) -> "Comparison":
        """The comparison from a result of `to_json`. Raises ValueError; the message names the first wrong places."""
        from pydantic import TypeAdapter, ValidationError

        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = repr(data.get("format")) if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"this is not a comparison of format {FORMAT}, got {got}; write it again with this version's --json"
            )
        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5]]
            raise ValueError(f"this is not a valid comparison: {'; '.join(faults)}") from error


def _finite(value: Any) -> Any:
    """`value` with every float that is not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
