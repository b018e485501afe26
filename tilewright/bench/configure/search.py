"""Finds the best of many configurations with few measurements: predictions for all, corrected by measurements.

A prediction is made for each of many assumed machines around the expected one, because the machine's real speed shifts the
point at which objectives are missed. The measurements tell which of these are likely. The measured goodput is modelled as the
predicted one for the true machine times an unknown factor that changes smoothly along each axis. Its logarithm is a Gaussian
process over the axes (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2): an RBF kernel over
the ranks of the values of ordered axes, and a constant for "another value" on unordered ones.

First the best prediction is measured, then in each step the point that improves the final choice most: by expected improvement
for a point that was not measured, and by the knowledge gradient for one that was (Frazier, Powell, Dayanik, SIAM J. Control
Optim. 47(5), 2008). A point may be measured again, because the model includes noise; the answer is the best measured point by
the corrected model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tilewright.bench.configure.predict import Point

__all__ = ["Found", "Measured", "search"]

FLOOR = 0.02
"""Smallest goodput, as a share of the best predicted one: less counts as this, because the logarithm of 0 does not exist."""
SIGNAL, COMMON, LENGTH, NOISE = 0.3, 0.5, 0.7, 0.02
"""Of the unknown factor's logarithm: its standard deviation from point to point, that of its common part, and the distance over
which it changes, as a share of an axis. NOISE: standard deviation of a measurement."""
OWN = 0.05
"""Standard deviation of the part that is independent for each point."""
OTHER = 0.3
"""Correlation between two different values of an unordered axis."""
LEAST = 1e-4
"""Smallest expected improvement, as a share, that is worth a measurement."""


@dataclass(frozen=True)
class Measured:
    """A measurement and why it was made."""

    point: Point
    predicted: float
    goodput: float
    why: str


@dataclass(frozen=True)
class Found:
    """The result: `expected` is the corrected model's goodput of `point`, `ranked` are the next best points."""

    point: Point
    expected: float
    measured: list[Measured]
    ranked: list[tuple[Point, float]]


def search(
    points: Sequence[Point],
    predicted: np.ndarray,
    measure: Callable[[Point], float],
    *,
    budget: int = 15,
    say: Callable[[Measured], None] = lambda one: None,
) -> Found:
    """Find the point with the highest goodput with at most `budget` calls of `measure`.

    Args:
        predicted: goodput, [machines, points], with the expected machine first.

    Raises ValueError if no point is predicted to work at all.
    """
    top = float(predicted.max())
    if top <= 0:
        raise ValueError("no configuration is predicted to meet the objectives; give objectives that this machine can reach")
    prior = np.log(np.maximum(predicted, FLOOR * top))
    kernel = _kernel(points)
    chosen: list[int] = []
    values: list[float] = []
    measured: list[Measured] = []
    for _ in range(budget):
        mean, deviation = _posterior(prior, kernel, chosen, values)
        index, why = _improve(mean, deviation, chosen) if chosen else (int(np.argmax(mean)), "the best prediction")
        if index is None:
            break
        goodput = measure(points[index])
        chosen.append(index)
        values.append(math.log(max(goodput, FLOOR * top)))
        measured.append(Measured(points[index], float(predicted[0, index]), goodput, why))
        say(measured[-1])
    mean, _ = _posterior(prior, kernel, chosen, values)

    def served(index: int) -> float:
        """The expected goodput of a measured point; the measured mean if that is near 0, where the model has a lower bound."""
        seen = float(np.mean([one.goodput for one, at in zip(measured, chosen) if at == index]))
        return math.exp(mean[index]) if seen > FLOOR * top else seen

    best = max(set(chosen), key=served)
    others = sorted((i for i in range(len(points)) if i != best), key=lambda i: -mean[i])[:3]
    return Found(points[best], served(best), measured, [(points[i], math.exp(mean[i])) for i in others])


def _kernel(points: Sequence[Point]) -> np.ndarray:
    """Covariances of the factor's logarithm, [points, points]."""
    correlation = np.ones((len(points), len(points)))
    rows = [asdict(point) for point in points]
    for name in rows[0]:
        column = [row[name] for row in rows]
        if all(isinstance(value, int) for value in column):
            ranks = {value: rank for rank, value in enumerate(sorted(set(column)))}
            at = np.array([ranks[value] for value in column]) / max(1, len(ranks) - 1)
            correlation *= np.exp(-0.5 * ((at[:, None] - at[None, :]) / LENGTH) ** 2)
        else:
            same = np.array([[a == b for b in column] for a in column])
            correlation *= np.where(same, 1.0, OTHER)
    return COMMON**2 + SIGNAL**2 * correlation + OWN**2 * np.eye(len(points))


def _posterior(prior: np.ndarray, kernel: np.ndarray, chosen: list[int], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of log goodput at all points, over the machines, weighted by how likely each is."""
    if not chosen:
        return prior[0], np.sqrt(np.diag(kernel))
    across = kernel[:, chosen]
    inside = kernel[np.ix_(chosen, chosen)] + NOISE**2 * np.eye(len(chosen))
    solved = np.linalg.solve(inside, across.T)
    left = np.array(values) - prior[:, chosen]
    likelihood = -0.5 * np.einsum("mi,mi->m", left, np.linalg.solve(inside, left.T).T)
    weights = np.exp(likelihood - likelihood.max())
    weights /= weights.sum()
    means = prior + left @ solved
    mean = weights @ means
    variance = np.diag(kernel) - np.einsum("ij,ji->i", across, solved)
    variance = np.maximum(variance, 0) + weights @ (means - mean) ** 2
    return mean, np.sqrt(np.maximum(variance, 1e-12))


def _improve(mean: np.ndarray, deviation: np.ndarray, chosen: list[int]) -> tuple[int | None, str]:
    """The point at which a measurement improves the final choice most, and the reason; None if none is worth it."""
    best = max(chosen, key=lambda index: mean[index])
    second = max((mean[index] for index in set(chosen) - {best}), default=mean[best] - 1)
    rival = np.full(len(mean), mean[best])
    rival[best] = second
    learned = np.maximum(deviation**2 / np.sqrt(deviation**2 + NOISE**2), 1e-9)
    z = (mean - rival) / learned
    z[chosen] = -np.abs(z[chosen])  # these points were measured already: their value is that the choice may change
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in z]))
    worth = learned * (z * below + density)
    index = int(np.argmax(worth))
    if worth[index] < LEAST:
        return None, "nothing better is expected"
    why = "once more: it is close to another" if index in chosen else f"{worth[index]:.1%} of improvement expected"
    return index, why
