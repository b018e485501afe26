"""Computes the summary of samples: percentiles, throughput, goodput, and whether the load was steady.

Only requests whose scheduled time is in the measured window count, whatever their result; throughput counts all tokens that
arrived in the window, also those of other requests.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilewright.bench.load.sample import FAILED, OK, REJECTED, Sample
from tilewright.bench.load.slo import METRICS, Slo

__all__ = ["PERCENTILES", "Summary", "spread", "summarise"]

PERCENTILES = (50, 90, 99)
WINDOWS = 3
"""Number of parts of the measured window that have to agree."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of one stage. Times are in seconds, rates per second."""

    label: str
    concurrency: int | None
    offered_rate: float
    """Scheduled requests per second."""
    window_s: float
    requests: int
    completed: int
    rejected: int
    failed: int
    request_rate: float
    """Answers per second that ended in the window."""
    row_rate: float | None
    """Rows per second of the answers that ended in the window; None: requests have no rows."""
    token_rate: float
    """Output tokens per second that arrived in the window."""
    prompt_token_rate: float
    cached_share: float
    """Share of the prompts' tokens that the service reports as cached."""
    user_token_rate: float | None
    """Output tokens per second of the median user after the first token: 1 / (median TPOT)."""
    good: int
    """Completed requests that met the objectives."""
    goodput: float
    good_share: float
    """Good requests as a share of all requests, including rejected and failed ones."""
    latencies: dict[str, dict[str, float]]
    """Metric -> p50, p90, p99, mean, max, count."""
    lag_p99_s: float
    """This client's own lateness, from the scheduled to the real sending time; it is part of the latencies."""
    spread: float | None
    """Largest relative difference in throughput or latency between parts of the window; None: too few requests."""
    problems: dict[str, int]
    """Error message -> number of rejected and failed requests with this message."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def summarise(
    label: str,
    samples: Sequence[Sample],
    slo: Slo,
    *,
    begin_s: float,
    end_s: float,
    concurrency: int | None = None,
    rows: int | None = None,
) -> Summary:
    """The summary of a stage over the window from `begin_s` to `end_s` seconds. `rows`: rows of each request."""
    window_s = max(end_s - begin_s, 1e-9)
    ours = [sample for sample in samples if begin_s <= sample.planned_s < end_s]
    states = Counter(sample.status for sample in ours)
    done = [sample for sample in ours if sample.status == OK]
    good = sum(slo.kept_by(sample.latencies) for sample in done)
    prompt = sum(sample.prompt_tokens for sample in done)
    latencies = {name: found for name in METRICS if (found := _percentiles(name, done))}
    median = latencies.get("tpot", {}).get("p50")
    lags = [sample.sent_s - sample.planned_s for sample in ours]
    problems = Counter(sample.detail or sample.status for sample in ours if sample.status != OK)
    rate = sum(s.status == OK and begin_s <= s.end_s < end_s for s in samples) / window_s
    return Summary(
        label=label,
        concurrency=concurrency,
        offered_rate=len(ours) / window_s,
        window_s=window_s,
        requests=len(ours),
        completed=len(done),
        rejected=states[REJECTED],
        failed=states[FAILED],
        request_rate=rate,
        row_rate=None if rows is None else rows * rate,
        token_rate=_tokens_between(samples, begin_s, end_s) / window_s,
        prompt_token_rate=prompt / window_s,
        cached_share=sum(sample.cached_tokens for sample in done) / prompt if prompt else 0.0,
        user_token_rate=1 / median if median else None,
        good=good,
        goodput=good / window_s,
        good_share=good / len(ours) if ours else 0.0,
        latencies=latencies,
        lag_p99_s=float(np.percentile(lags, 99)) if lags else 0.0,
        spread=spread(samples, begin_s, end_s),
        problems=dict(problems.most_common(8)),
    )


def _percentiles(name: str, done: Sequence[Sample]) -> dict[str, float]:
    if name == "itl":
        values = [gap for sample in done for gap in sample.gaps]
    else:
        values = [value for sample in done if (value := getattr(sample, name)) is not None]
    if not values:
        return {}
    found = {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES))}
    return {**found, "mean": float(np.mean(values)), "max": max(values), "count": float(len(values))}


def _tokens_between(samples: Sequence[Sample], begin_s: float, end_s: float) -> float:
    """Output tokens that arrived between two times; the tokens of an answer are spread evenly over its pieces."""
    tokens = 0.0
    for sample in samples:
        if sample.pieces_s:
            inside = sum(begin_s <= at_s < end_s for at_s in sample.pieces_s)
            tokens += inside * max(sample.output_tokens, len(sample.pieces_s)) / len(sample.pieces_s)
    return tokens


def spread(samples: Sequence[Sample], begin_s: float, end_s: float, windows: int = WINDOWS) -> float | None:
    """How much `windows` equal parts of a time differ: the larger (max - min) / mean of answers and of median latency.

    None if a part has fewer than five answers, which is not enough to judge.
    """
    edges = np.linspace(begin_s, end_s, windows + 1)
    parts: list[list[float]] = [[] for _ in range(windows)]
    for sample in samples:
        if sample.status == OK and begin_s <= sample.end_s < end_s:
            parts[min(windows - 1, int(np.searchsorted(edges, sample.end_s, side="right")) - 1)].append(sample.e2e or 0.0)
    if min(map(len, parts)) < 5:
        return None
    series = ([float(len(part)) for part in parts], [float(np.median(part)) for part in parts])
    return max((max(values) - min(values)) / (math.fsum(values) / windows) for values in series)
