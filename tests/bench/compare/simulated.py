"""Run times of an engine that does not exist, whose layers' times are therefore known."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tilewright.bench.compare.attribution import Border, Design
from tilewright.bench.compare.results import Run
from tilewright.bench.compare.segments import Attribution

DEAR = Border(1e-5, 1e-5, 1e-5, 1e-5)
"""Three times what borders cost here."""


def chain_design(layers: int, *, groups: tuple[int, ...] | None = None, prefixes: bool = True, repeats: int = 7) -> Design:
    """A chain in which every second layer keeps its shape: those are left out and repeated, all are cut behind."""
    everything = tuple(range(layers))
    parts: dict[str, tuple[int, ...]] = {"whole": everything}
    border = {"whole": Border(1.0, 1.0)}
    for i in everything:
        cut = f"prefix {i + 1}"
        if prefixes and i + 1 < layers:
            parts[cut], border[cut] = everything[: i + 1], Border(1.0, 1.0 + (i * 7) % 5)
        only = f"only {i}"
        parts[only], border[only] = (i,), Border(1.0 + (i * 3) % 5, 1.0 + (i * 7) % 5)
        if i % 2:
            parts[f"without {i}"], border[f"without {i}"] = everything[:i] + everything[i + 1 :], Border(1.0, 1.0)
            many = everything[:i] + (i,) * (repeats + 1) + everything[i + 1 :]
            parts[f"repeat {i}"], border[f"repeat {i}"] = many, Border(1.0, 1.0)
    names = tuple(f"block{i // 4}.layer{i}" for i in everything)
    ones = (1.0,) * layers
    return Design(layers=names, groups=groups or everything, flops=ones, bytes=ones, parts=parts, border=border, dear=DEAR)


@dataclass
class Truth:
    """Seconds of each layer; what neighbours save when one follows the other; what a call and its borders cost."""

    layers: np.ndarray
    overhead: float
    border: Border = Border(0.0, 0.0, 0.0, 0.0)  # noqa: RUF009
    saved: dict[int, float] = field(default_factory=dict)
    """Layer i -> seconds saved when layer i + 1 follows it."""
    own: dict[str, float] = field(default_factory=dict)
    """Variant -> factor of its own, which no run reduces: its layers do not add up, each program in another way."""

    def of(self, design: Design, variant: str) -> float:
        """Seconds of a variant without any noise."""
        part = design.parts[variant]
        inside = sum(self.layers[i] for i in part)
        fused = sum(self.saved.get(a, 0.0) for a, b in pairwise(part) if b == a + 1)
        borders = sum(cost * many for cost, many in zip(self.border, design.border[variant], strict=True))
        seconds = self.overhead + borders + inside - fused
        return float(seconds * self.own.get(variant, 1.0))


def truth_of(
    design: Design, rng: np.random.Generator, *, fused: int | None = None, speed: float = 1.0, uneven: float = 1.0
) -> Truth:
    """Layers a factor of some five apart, a call that costs 4 % of the model, borders 0.15 %, outputs `uneven` times that."""
    times = 1e-4 * np.exp(rng.normal(0, 0.5, len(set(design.groups))))[list(design.groups)] / speed
    whole = float(times.sum())
    saved = {} if fused is None else {fused: 0.4 * float(times[fused] + times[fused + 1])}
    return Truth(times, 0.04 * whole, Border(0.0015 * whole, 0.0015 * uneven * whole, 0.0, 0.0), saved)


def own_ways(design: Design, rng: np.random.Generator, size: float) -> dict[str, float]:
    """A factor for each variant, lognormal."""
    return {name: float(np.exp(rng.normal(0, size))) for name in design.parts}


def runs_of(
    design: Design,
    truth: Truth,
    rng: np.random.Generator,
    *,
    rounds: int,
    noise: float = 0.03,
    drift: float = 0.05,
    spikes: float = 0.05,
) -> list[Run]:
    """Rounds of all variants in random order.

    Lognormal noise, a clock that wanders around its average, a run in twenty disturbed by 10 to 100 %.
    """
    names = list(design.parts)
    exact = {name: truth.of(design, name) for name in names}
    runs, at, length = [], 0.0, sum(exact.values()) * rounds
    phase = rng.uniform(0, 6.28)
    # A layer's true time is the one at the clock's (geometric) average.
    wander = np.linspace(0, 1, 200) - 0.5 + 0.5 * np.sin(phase + 9 * np.linspace(0, 1, 200))
    wander = drift * (wander - wander.mean())
    for _ in range(rounds):
        for k in rng.permutation(len(names)):
            slow = float(np.exp(np.interp(at / length, np.linspace(0, 1, 200), wander)))
            spike = 1 + rng.uniform(0.1, 1.0) if rng.uniform() < spikes else 1.0
            seconds = exact[names[k]] * slow * spike * float(np.exp(rng.normal(0, noise)))
            runs.append(Run(at=at, variant=names[k], seconds=float(seconds)))
            at += seconds
    return runs


def judge(answer: Attribution, design: Design, ours: Truth, baseline: Truth) -> dict[str, np.ndarray]:
    """Relative errors, half widths, and whether each interval holds the truth: of both sides' segments, and of the ratios."""
    errors, inside, wide, ratio_inside = [], [], [], []
    for segment in answer.segments:
        at = [design.layers.index(name) for name in segment.layers]
        true = [float(t.layers[at].sum() - sum(t.saved.get(i, 0.0) for i in at[:-1])) for t in (ours, baseline)]
        for got, seconds in zip((segment.ours, segment.baseline), true, strict=True):
            errors.append(abs(got.value / seconds - 1))
            inside.append(got.low <= seconds <= got.high)
            wide.append((got.high - got.low) / 2 / seconds)
        ratio_inside.append(segment.ratio.low <= true[1] / true[0] <= segment.ratio.high)
    lists = {"errors": errors, "inside": inside, "half_widths": wide, "ratio_inside": ratio_inside}
    return {name: np.array(values) for name, values in lists.items()}
