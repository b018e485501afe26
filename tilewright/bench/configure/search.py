"""Finds the best of many configurations with few measurements: predictions for all, corrected by measurements.

A prediction is made for each of many assumed machines around the expected one, because the machine's real speed shifts the
point at which objectives are missed. The measurements tell which of these are likely. The measured goodput is modelled as the
predicted one for the true machine times an unknown factor that changes smoothly along each axis. Its logarithm is a Gaussian
process over the axes (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapter 2): an RBF kernel over
the ranks of the values of ordered axes, and a constant for "another value" on unordered ones.

First the best prediction is measured, then in each step the point that improves the final choice most: by expected improvement
for a point that was not measured, and by the knowledge gradient for one that was (Frazier, Powell, Dayanik, SIAM J. Control
Optim. 47(5),
2008). A point may be measured again, because the model includes noise; the answer is the best measured point by the corrected
model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tilewright.bench.configure.predict import Point

__all__ = ["Found", "Measured", "search"]

FLOOR = 0.02
"""Of the best predicted goodput: less counts as this, since a logarithm of nothing is none."""
SIGNAL, COMMON, LENGTH, NOISE = 0.3, 0.5, 0.7, 0.02
"""Standard deviation of the unknown factor's logarithm from point to point and for all together; the distance over which it
changes, as a share of an axis; a measurement's own."""
OWN = 0.05
"""Standard deviation of what is a point's alone."""
OTHER = 0.3
"""Correlation between two values of an axis without order."""
LEAST = 1e-4
"""Improvement, as a share, that is worth a measurement."""


@dataclass(frozen=True)
class Measured:
    """A measurement and why it was made."""

    point: Point
    predicted: float
    goodput: float
    why: str


@dataclass(frozen=True)
class Found:
    """The answer: `expected` is the corrected model's goodput of `point`, `ranked` the next best that were not taken."""

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
    """The point with the highest goodput, by at most `budget` calls of `measure`.

    Args:
        predicted: machines x points, the believed machine first.

    Raises ValueError where nothing is predicted to work at all.
    """
    top = float(predicted.max())
    if top <= 0:
        raise ValueError("no configuration is predicted to keep the objectives; wanted bounds that this machine can reach")
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
        """What can be expected of a measured point; where nothing worked, the floor of the model says nothing."""
        seen = float(np.mean([one.goodput for one, at in zip(measured, chosen) if at == index]))
        return math.exp(mean[index]) if seen > FLOOR * top else seen

    best = max(set(chosen), key=served)
    others = sorted((i for i in range(len(points)) if i != best), key=lambda i: -mean[i])[:3]
    return Found(points[best], served(best), measured, [(points[i], math.exp(mean[i])) for i in others])


def _kernel(points: Sequence[Point]) -> np.ndarray:
    """Covariances of the factor's logarithm, points x points."""
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
    """Mean and standard deviation of log goodput, everywhere: of the machines' mixture, by how likely each is."""
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
    """Where a measurement is worth most to the choice at the end."""
    best = max(chosen, key=lambda index: mean[index])
    second = max((mean[index] for index in set(chosen) - {best}), default=mean[best] - 1)
    rival = np.full(len(mean), mean[best])
    rival[best] = second
    learned = np.maximum(deviation**2 / np.sqrt(deviation**2 + NOISE**2), 1e-9)
    z = (mean - rival) / learned
    z[chosen] = -np.abs(z[chosen])  # one of these is chosen already: what counts is that the choice may change
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in z]))
    worth = learned * (z * below + density)
    index = int(np.argmax(worth))
    if worth[index] < LEAST:
        return None, "nothing better is expected"
    why = "once more: it is close to another" if index in chosen else f"{worth[index]:.1%} of improvement expected"
    return index, why
