"""Tables of runs that a known law made, and the points of the Chinchilla paper's figure where they are at hand."""

from pathlib import Path

import numpy as np
import pytest

from tests.paths import SHARED
from tilewright.scaling import Law, Runs
from tilewright.scaling.runs import Array

CHINCHILLA = SHARED / "data" / "scaling" / "chinchilla.csv"
needs_chinchilla = pytest.mark.skipif(not CHINCHILLA.is_file(), reason=f"no points of the paper's figure at {CHINCHILLA}")

TRUTH = Law(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)


def synthetic(noise: float, rng: np.random.Generator, *, law: Law = TRUTH, budgets: int = 5, sizes: int = 8) -> Runs:
    """Runs of `budgets` budgets from 1e18 to 1e20 FLOPs, of `sizes` sizes each around the best; log L scatters by `noise`."""
    flops = np.repeat(np.geomspace(1e18, 1e20, budgets), sizes)
    best = np.array([law.optimum(float(c)).params for c in flops])
    params: Array = best * np.tile(np.geomspace(1 / 4, 4, sizes), budgets)
    tokens: Array = flops / 6 / params
    loss = law.E + law.A * params**-law.alpha + law.B * tokens**-law.beta
    return Runs(params=params, tokens=tokens, flops=flops, loss=loss * np.exp(rng.normal(0, noise, len(loss))))


def write(path: Path, text: str) -> Path:
    """A file with that text; its path."""
    path.write_text(text, encoding="utf-8")
    return path
