"""Estimates the seconds of every layer from run times of whole programs: drift correction, weighted least squares, bootstrap.

    seconds of variant v = overhead + border_v c + sum_l n_vl t_l + sum_b a_vb d_b

border_v: bytes and tensors, in and out (`Border`); n_vl: how often layer l runs in v; a_vb: how often boundary b (layer i, then
i + 1) is crossed in v; d_b is 0 until segments.py finds that the engine fuses or overlaps the two. Layers of one group (same
operations, same shapes, same layer before them) share one unknown. The assumptions of each step are in docs/compare.md,
"How layers are timed without opening the engine". Uses numpy only.

Estimates are not constrained to be positive: a bound at zero would bias small layers upwards and their neighbours downwards,
and an interval around a clipped estimate would not have its coverage. Only displayed values are cut off at zero.

Not done here: building, running, merging, verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewright.bench.compare.results import Interval, Run

__all__ = [
    "FIRST",
    "TRIMS",
    "Border",
    "Design",
    "Fit",
    "Sample",
    "boundary_columns",
    "columns",
    "critical",
    "fit",
    "interval",
    "sample",
    "solve",
]

Floats = NDArray[np.float64]

# V variants, R rounds, P unknowns, S segments, D draws, B the border's four columns

TRIMS = {"the middle half of its runs": (0.25, 0.25), "the faster third of its runs": (0.05, 0.6)}
"""Shares of a variant's runs that its location leaves out, the fastest and the slowest: a midmean, which 10 % of disturbed runs
move by a tenth of one run's noise, and one for a machine that is disturbed more often than not."""

FIRST = 5
"""Column of the first group, behind the overhead and the four of the border."""
_PRIOR_RUNS = 16  # the weight of all variants' common noise in that of one, in runs
_RANK = 1e-7  # relative singular value that counts as zero; columns are scaled to 1 before


class Border(NamedTuple):
    """The inputs and outputs of a program, which an engine may copy, cast or convert to another layout."""

    bytes_in: float
    bytes_out: float
    tensors_in: float = 1.0
    tensors_out: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Design:
    """The layers that each variant runs, in order, as plain data."""

    layers: tuple[str, ...]
    """Names of the layers in order of execution."""
    groups: tuple[int, ...]
    """The group of each layer; layers of one group take the same time."""
    flops: tuple[float, ...]
    bytes: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]
    """Variant -> the layers that it runs, in order, with repetitions. "whole" is one of them."""
    border: dict[str, Border]
    dear: Border
    """Prior of the border's costs: standard deviations, around 0, of the seconds per byte and per tensor."""
    stepwise: tuple[bool, bool] = (False, False)
    """Whether ours, and the baseline, run operators one by one without fusion."""
    bare: tuple[bool, bool] = (False, False)
    """Whether inputs and outputs of a program cost nothing on ours, and on the baseline."""
    spared: bool = False
    """Whether the baseline's layers are timed without other waiting times of its user. Their times are then lower bounds, and
    none may fail."""
    silent: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Variants that show nothing about layers, on ours and on the baseline: their work is hidden in a call (ballast.py)."""


@dataclass(frozen=True)
class Sample:
    """Run times of one side, corrected for drift."""

    variants: tuple[str, ...]
    seconds_V: Floats
    """Robust location (trimmed mean of logarithms)."""
    influence_RV: Floats
    """The relative change of its variant's location by each run, times R; 0 if a round lacks the variant."""
    noise_V: Floats
    """Relative standard error of the location, shrunk towards the common one."""
    single: float
    """Relative noise of one run, all variants together, as it reaches the location."""

    def at(self, variant: str) -> int:
        """Its place."""
        return self.variants.index(variant)

    def fitted(self, silent: frozenset[str]) -> NDArray[np.intp]:
        """Indices of the variants that show something about layers; of all variants if there are none."""
        speak = [v for v, name in enumerate(self.variants) if name not in silent]
        return np.array(speak or range(len(self.variants)), dtype=np.intp)

    def of(self, kept: NDArray[np.intp]) -> "Sample":
        """The sample with only these variants."""
        names = tuple(self.variants[v] for v in kept)
        return Sample(names, self.seconds_V[kept], self.influence_RV[:, kept], self.noise_V[kept], self.single)

    def draws(self, count: int, seed: int) -> Floats:
        """[D, V] relative deviations of the locations: rounds drawn with replacement, each with all its variants."""
        rounds = len(self.influence_RV)
        rng = np.random.default_rng(seed)
        times_DR = rng.multinomial(rounds, np.full(rounds, 1 / rounds), size=count)
        found = (times_DR - 1.0) @ self.influence_RV / rounds
        # A resampled variance is short of the true one by (R - 1) / R, and the few runs of one variant know their own noise
        # badly: every column is scaled to the shrunk noise.
        spread = np.sqrt((self.influence_RV**2).sum(0)) / rounds
        scale = np.where(spread > 0, self.noise_V / np.where(spread > 0, spread, 1), 0)
        # ... whose own uncertainty, of a variance known from that many runs, makes the tails those of Student's t.
        freedom = _PRIOR_RUNS + (self.influence_RV != 0).sum(0) - 1
        return found * scale * np.sqrt(freedom / rng.chisquare(freedom, size=found.shape))


def _undrifted(at: Floats, logs: Floats, of: NDArray[np.intp], count: int) -> Floats:
    """Logarithms without what all variants share at a time: clocks, temperature, other load.

    Residuals against the variant's median, in bins of consecutive runs as long as one round (15 at least): medians of bins,
    joined by lines. Multiplicative, so it needs variants in random order, not a clock model.
    """
    order = np.argsort(at, kind="stable")
    width = max(count, 15)
    bins = len(at) // width
    if bins < 3:
        return logs
    drift = np.zeros_like(logs)
    edges = np.linspace(0, len(at), bins + 1).astype(int)
    for _ in range(3):
        flat = logs - drift
        middle = np.array([np.median(flat[of == v]) for v in range(count)])
        residual = (logs - middle[of])[order]
        levels = np.array([np.median(residual[a:b]) for a, b in pairwise(edges)])
        centres = np.array([np.median(at[order][a:b]) for a, b in pairwise(edges)])
        drift = np.interp(at, centres, levels)
        drift -= drift.mean()
    return logs - drift


def sample(runs: Sequence[Run], design: Design, trim: tuple[float, float] = (0.25, 0.25)) -> Sample:
    """Locations and noise of the variants that were run; `trim` is one of `TRIMS`.

    ValueError: a variant that the design does not have, fewer than 3 runs of one, a run of no time.
    """
    names = sorted({run.variant for run in runs})
    unknown = [name for name in names if name not in design.parts]
    if unknown:
        raise ValueError(f"there are runs of variants {', '.join(unknown)}, which the design does not have")
    index = {name: v for v, name in enumerate(names)}
    of = np.array([index[run.variant] for run in runs], dtype=np.intp)
    seconds = np.array([run.seconds for run in runs])
    counts = np.bincount(of, minlength=len(names))
    if not len(runs) or counts.min() < 3 or not (seconds > 0).all():
        few = names[int(counts.argmin())] if len(runs) else "each variant"
        raise ValueError(
            f"{few} has {counts.min() if len(runs) else 0} runs; every variant needs at least 3, all with a time "
            "above 0 seconds"
        )
    logs = _undrifted(np.array([run.at for run in runs]), np.log(seconds), of, len(names))
    rounds = int(counts.max())
    influence = np.zeros((rounds, len(names)))
    place, variance = np.zeros(len(names)), np.zeros(len(names))
    for v in range(len(names)):
        x = logs[of == v]
        low, high = (int(share * len(x)) for share in trim)
        ordered = np.sort(x)
        place[v] = ordered[low : len(x) - high].mean()
        bent = np.clip(x, ordered[low], ordered[len(x) - high - 1])
        # Influence of a trimmed mean: winsorised deviations over the share that is kept (Tukey and McLaughlin 1963).
        moved = (bent - bent.mean()) / ((len(x) - low - high) / len(x))
        influence[: len(x), v] = moved * rounds / len(x)
        variance[v] = (moved**2).sum() / (len(x) - 1)
    pooled = float(np.average(variance, weights=counts - 1))
    shrunk = (_PRIOR_RUNS * pooled + (counts - 1) * variance) / (_PRIOR_RUNS + counts - 1)
    least = 1e-12  # a clock that always says the same
    return Sample(tuple(names), np.exp(place), influence, np.sqrt(shrunk / counts + least), float(np.sqrt(pooled)))


# ---- the design as a matrix


def boundary_columns(design: Design, names: Sequence[str]) -> dict[tuple[int, int], Floats]:
    """(group, group of the next layer) -> [V] how often a variant runs the one right before the other.

    Of the model's own boundaries, and of a layer with its own copy, which only variants have.
    """
    kinds = {*pairwise(design.groups), *((g, g) for g in design.groups)}
    found = {kind: np.zeros(len(names)) for kind in sorted(kinds)}
    for v, name in enumerate(names):
        part = design.parts[name]
        for a, b in pairwise(part):
            kind = (design.groups[a], design.groups[b])
            if kind in found:
                found[kind][v] += 1
    return found


def columns(design: Design, names: Sequence[str], merged: Sequence[tuple[int, int]]) -> Floats:
    """[V, P]: overhead, the border's four (beyond the whole model's), groups from FIRST on, merged boundaries."""
    groups = max(design.groups) + 1
    x = np.zeros((len(names), FIRST + groups + len(merged)))
    x[:, 0] = 1
    for v, name in enumerate(names):
        x[v, 1:FIRST] = np.subtract(design.border[name], design.border["whole"])
        for i in design.parts[name]:
            x[v, FIRST + design.groups[i]] += 1
    crossed = boundary_columns(design, names)
    for k, kind in enumerate(merged):
        x[:, FIRST + groups + k] = crossed[kind]
    return x


@dataclass(frozen=True)
class Fit:
    """A weighted least-squares fit, linear in the locations: unknowns = operator @ seconds."""

    sample: Sample
    x_VP: Floats
    dear_B: Floats
    """`Design.dear`."""
    operator_PV: Floats
    prior_PB: Floats
    """What the unknowns would move by if the border's costs were known to be others than zero."""
    model_error: float
    """Relative standard deviation of a variant's time from additivity beyond the noise (Paule, Mandel 1982); 0: none seen."""

    @cached_property
    def unknowns_P(self) -> Floats:
        return self.operator_PV @ self.sample.seconds_V

    @cached_property
    def residual_V(self) -> Floats:
        """Seconds that are left over."""
        return self.sample.seconds_V - self.x_VP @ self.unknowns_P

    @cached_property
    def scale_V(self) -> Floats:
        """Standard error of each location in seconds, with the model error."""
        return self.sample.seconds_V * np.sqrt(self.sample.noise_V**2 + self.model_error**2)

    @cached_property
    def left_VV(self) -> Floats:
        """What the fit leaves of seconds."""
        return np.eye(len(self.sample.variants)) - self.x_VP @ self.operator_PV

    @cached_property
    def freedom(self) -> float:
        """Variants beyond the unknowns: with less than one, additivity cannot be tested."""
        return float(np.trace(self.left_VV))

    def estimable(self, contrasts_SP: Floats) -> NDArray[np.bool_]:
        """Whether the variants that were run determine each contrast, whatever the unknowns but the border's are."""
        x_VP = np.concatenate([self.x_VP, np.eye(FIRST, self.x_VP.shape[1])[1:]])
        size = np.abs(x_VP).max(0)
        x = x_VP / np.where(size > 0, size, 1)
        c = contrasts_SP / np.where(size > 0, size, 1)
        _, s, vt = np.linalg.svd(x, full_matrices=False)
        span = vt[s > _RANK * s[0]]
        seen = (size > 0) | (np.abs(contrasts_SP) == 0)
        return seen.all(1) & (np.linalg.norm(c - c @ span.T @ span, axis=1) < 1e-5 * np.linalg.norm(c, axis=1))

    def misfit(self, draws_DV: Floats) -> float:
        """Probability of residuals this large where layers add up (lack of fit against pure error, from the draws).

        1 where no variant is left to tell.
        """
        if self.freedom < 1:
            return 1.0
        scale = self.sample.seconds_V * self.sample.noise_V
        found = float(((self.residual_V / scale) ** 2).sum())
        borders_DB = np.random.default_rng(0).standard_normal((len(draws_DV), len(self.dear_B))) * self.dear_B
        moved_DV = draws_DV * self.sample.seconds_V + borders_DB @ self.x_VP[:, 1:FIRST].T
        left = moved_DV @ self.left_VV.T / scale
        return float(((left**2).sum(1) >= found).mean())

    def drawn(self, contrasts_SP: Floats, draws_DV: Floats, seed: int) -> Floats:
        """[D, S] deviations of the contrasts in seconds: resampled runs, the model error where there is one, the border's
        costs as far as runs do not tell them."""
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal(draws_DV.shape) * self.model_error
        borders_DB = rng.standard_normal((len(draws_DV), len(self.dear_B))) * self.dear_B
        of_runs = ((draws_DV + noise) * self.sample.seconds_V) @ (contrasts_SP @ self.operator_PV).T
        return of_runs + borders_DB @ (contrasts_SP @ self.prior_PB).T


def solve(x_VP: Floats, scale_V: Floats, dear_B: Floats) -> tuple[Floats, Floats]:
    """The operator of least squares with weights 1 / scale, [P, V], and that of the border's costs as known beforehand, [P, B].

    What is known of them are as many more observations (a ridge): where runs tell nothing of a cost, it is zero.
    """
    # In units of what is known of them the border's costs are 0 with a deviation of 1, and no column is far from the others.
    unit = np.ones(x_VP.shape[1])
    unit[1:FIRST] = dear_B
    x = np.concatenate([x_VP * unit / scale_V[:, None], np.eye(FIRST, x_VP.shape[1])[1:]])
    size = np.sqrt((x**2).sum(0))
    size = np.where(size > 0, size, 1)
    u, s, vt = np.linalg.svd(x / size, full_matrices=False)
    kept = s > _RANK * s[0]
    operator = ((vt[kept].T / s[kept]) @ u[:, kept].T) * (unit / size)[:, None]
    operator /= np.concatenate([scale_V, dear_B])
    return operator[:, : len(scale_V)], operator[:, len(scale_V) :]


def fit(taken: Sample, x_VP: Floats, dear: Border) -> Fit:
    """Weighted least squares with weights of each variant's own noise and a common relative model error.

    The model error is the smallest for which the residuals are as large as their degrees of freedom say. Where layers add up it
    is about 0; where they do not it keeps precise variants from ruling, and widens the intervals.
    """

    def at(error: float) -> tuple[Fit, float]:
        operator, prior = solve(x_VP, taken.seconds_V * np.sqrt(taken.noise_V**2 + error**2), dear_B)
        found = Fit(taken, x_VP, dear_B, operator, prior, error)
        return found, float(((found.residual_V / found.scale_V) ** 2).sum())

    dear_B = np.array(dear)
    best, misfit = at(0.0)
    if best.freedom < 1 or misfit <= best.freedom:
        return best
    low, high = 0.0, 1.0
    for _ in range(18):
        middle = (low + high) / 2 if low else high / 4
        best, misfit = at(middle)
        low, high = (middle, high) if misfit > best.freedom else (low, middle)
        if high - low < 0.02 * high:
            break
    return best


def critical(deviations_DS: Floats, confidence: float) -> tuple[Floats, float]:
    """Standard errors [S], and the factor that makes all intervals hold together: the quantile of the largest |t| (max-t)."""
    error = np.sqrt((deviations_DS**2).mean(0))
    safe = np.where(error > 0, error, 1)
    return error, float(np.quantile(np.abs(deviations_DS / safe).max(1), confidence))


def interval(value: float, error: float, factor: float) -> Interval:
    """Estimate and bounds of a time, cut at zero."""
    return Interval(max(value, 0.0), max(value - factor * error, 0.0), max(value + factor * error, 0.0))
