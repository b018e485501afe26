"""Decides whether an engine fuses two layers: which boundary explains the residuals of a fit, and whether that is chance.

Programs deviate from additivity by more than noise, each in its own way, and not because of a single boundary. So what a
boundary explains (t squared) is measured in units of the remaining variance, but at least of ADDITIVE: an F statistic, the
largest of many. Its distribution without any special boundary is simulated, with deviations of the observed size.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.bench.compare.attribution import Design, Fit, boundary_columns, solve

__all__ = ["ADDITIVE", "Joint", "Kind", "joint"]

Floats = NDArray[np.float64]
Kind = tuple[int, int]
"""A boundary: group of a layer, group of the one behind it."""

# V variants, K boundaries, N samples of residuals

ADDITIVE = 0.01
"""Model error, relative to a variant's time, below which layers count as additive however precise the runs are."""
_ALIKE = 0.99  # cosine of what is left of two boundaries' columns: the variants hardly tell them apart
_NULL_DRAWS = 1000


@dataclass(frozen=True)
class Joint:
    """Boundaries that explain what a fit leaves, and that no variant tells apart; usually one."""

    kinds: list[Kind]
    seconds: float
    """Of the two together beyond the two apart."""
    probability: float
    """Of so good an explanation where there is nothing to explain."""


def joint(design: Design, known: Collection[Kind], found: Fit) -> Joint | None:
    """The boundary that explains the residuals best, beyond those that are `known`; None where nothing can be told.

    A fit with one degree of freedom or none leaves nothing to compare with.
    """
    taken = found.sample
    scale = taken.seconds_V * np.sqrt(taken.noise_V**2 + ADDITIVE**2)
    crossed = {k: c for k, c in boundary_columns(design, taken.variants).items() if k not in known}
    if not crossed or found.freedom < 2:
        return None
    # Residuals against what the fit leaves of each candidate's column (Frisch, Waugh and Lovell).
    operator, _ = solve(found.x_VP, scale, found.dear_B)
    projector = (np.eye(len(scale)) - found.x_VP @ operator) * scale[None, :] / scale[:, None]
    a_VK = np.stack(list(crossed.values()), 1) / scale[:, None]
    before = np.sqrt((a_VK**2).sum(0))
    a_VK = projector @ a_VK
    norm = np.sqrt((a_VK**2).sum(0))
    seen = norm > 1e-6 * before.max()
    if not seen.any():
        return None
    kinds = [k for k, s in zip(crossed, seen, strict=True) if s]
    unit = a_VK[:, seen] / norm[seen]

    def explained(residual_NV: Floats) -> tuple[Floats, Floats]:
        """[N, K] t, and the [N] largest t squared over the variance that is left."""
        t = residual_NV @ unit
        most = (t**2).max(1)
        left = ((residual_NV**2).sum(1) - most) / (found.freedom - 1)
        return t, most / np.maximum(left, 1.0)

    residual = projector @ (taken.seconds_V / scale)
    size = max(float(np.sqrt((residual**2).sum() / found.freedom)), 1.0)
    null = np.random.default_rng(0).standard_normal((_NULL_DRAWS, len(scale))) * size
    t, strength = explained(residual[None, :])
    best = int(np.abs(t[0]).argmax())
    alike = np.abs(unit.T @ unit[:, best]) > _ALIKE
    chosen = [k for k, a in zip(kinds, alike, strict=True) if a]
    probability = float((explained(null @ projector.T)[1] >= strength[0]).mean())
    return Joint(chosen, float(t[0, best] / norm[seen][best]), probability)
