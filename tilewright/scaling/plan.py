"""Plans of training runs: for each budget several model sizes, on both sides of the expected minimum.

The expected minimum comes from a law of earlier work (`PRIOR`) or an earlier fit; it may be wrong by a factor of up to the span
of the sizes. The number of tokens follows from the budget and the counted FLOPs of the shape (`shapes.py`), so all runs of a
budget cost the same. A run may have its own options, such as a learning rate for its width, or a seed.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_named
from tilewright.scaling.budget_law import BudgetLaw
from tilewright.scaling.law import Law
from tilewright.scaling.shapes import LARGEST_HIDDEN, Shape, nearest_shape, shape_of

__all__ = ["PRIOR", "Plan", "PlannedRun", "hours", "plan", "plan_widths", "rates", "read_plan", "repeated"]

PRIOR = Law(E=1.8172, A=477.8, B=2143.4, alpha=0.3473, beta=0.3672)
"""Fitted to the runs of the Chinchilla paper (docs/scaling.md)."""
_FORMAT = "tilewright-scaling-plan"
_LARGEST_FILE = 16 << 20
_MOST_RUNS = 1000
_DISTINCT = 1.08
"""Two sizes of one budget differ at least by this factor; closer ones would give the same measurement."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run: a model of `shape`, trained on `tokens` tokens. `flops` counts linear layers, head and causal attention.

    options: fields of the training config for this run only, such as lr and seed; values are numbers or strings.
    """

    name: str
    budget: float
    flops: float
    params: int
    tokens: int
    shape: Shape
    options: dict[str, int | float | str] = field(default_factory=dict[str, int | float | str])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs that train on sequences of `sequence` tokens, cheapest budget first."""

    sequence: int
    runs: tuple[PlannedRun, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `read_plan` can read from a JSON file."""
        return {"format": _FORMAT, "version": 1, "sequence": self.sequence, "runs": [asdict(run) for run in self.runs]}


def plan(
    budget: float,
    *,
    budgets: int = 5,
    ratio: float = math.sqrt(10),
    sizes: int = 5,
    span: float = 3.0,
    vocab: int = 32_000,
    sequence: int = 1024,
    tied: bool = False,
    head_dim: int = 64,
    layers: int | None = None,
    prior: Law = PRIOR,
) -> Plan:
    """A grid of runs: `budgets` budgets up to `budget` FLOPs, each with `sizes` sizes from N* / span to N* span.

    Successive budgets differ by the factor `ratio`. N* is the best size for a budget according to `prior`. layers: the number
    of layers of every model; None: it is chosen in proportion to the width.

    Raises:
        ValueError: an argument is out of range, or a budget is so small that there are not `sizes` distinct shapes around its
            optimum.
    """
    _check(budget, budgets, ratio, sizes, span, vocab, sequence, head_dim, 1 if layers is None else layers)
    of_size = partial(nearest_shape, vocab=vocab, tied=tied, head_dim=head_dim, layers=layers)
    runs = []
    for power in range(budgets - 1, -1, -1):
        flops = budget / ratio**power
        # The law assumes C = 6 N D, but the FLOPs per parameter and token depend on the shape. So the optimum is computed again
        # with the FLOPs of the shape that was found, twice.
        best = prior.optimum(flops).params
        for _ in range(2):
            shape = of_size(best)
            best = prior.optimum(flops, shape.train_flops(sequence) / shape.params).params
        wanted = [best * span ** (2 * i / (sizes - 1) - 1) for i in range(sizes)]
        shapes = {of_size(size): None for size in wanted}
        if not _bracketing(list(shapes), sizes, best):
            smallest = of_size(1).params
            raise ValueError(
                f"the best size for {flops:.3g} FLOPs is {best:.3g} parameters, and there are no {sizes} distinct "
                f"sizes around it (the smallest model has {smallest:,}); use a larger budget, fewer budgets or "
                "sizes, a smaller vocabulary or head dim, or a larger span"
            )
        runs += [_run(flops, shape, sequence) for shape in shapes]
    return Plan(sequence=sequence, runs=tuple(runs))


def plan_widths(
    budget: float,
    widths: Sequence[int],
    *,
    budgets: int = 5,
    ratio: float = math.sqrt(10),
    span: float = 3.0,
    max_tokens: float = math.inf,
    vocab: int = 32_000,
    sequence: int = 1024,
    tied: bool = False,
    head_dim: int = 64,
    layers: int,
    prior: Law | BudgetLaw | None = None,
) -> Plan:
    """Runs of models with given hidden sizes, for `budgets` budgets up to `budget` FLOPs that differ by the factor `ratio`.

    prior: sizes that differ by more than the factor `span` from the best size by this law are left out; None: all are kept.
    max_tokens: runs with more tokens, for example more than an epoch, are left out.

    Raises:
        ValueError: an argument is out of range, or a budget has no runs left.
    """
    _check(budget, budgets, ratio, 3, span, vocab, sequence, head_dim, layers)
    if not widths or any(width < head_dim or width % head_dim or width > LARGEST_HIDDEN for width in widths):
        raise ValueError(
            f"the hidden sizes are {list(widths)}; wanted at least one, all multiples of the head dim {head_dim} and at "
            f"most {LARGEST_HIDDEN}"
        )
    shapes = [shape_of(layers, width, vocab, tied, head_dim) for width in sorted(set(widths))]
    runs: list[PlannedRun] = []
    for power in range(budgets - 1, -1, -1):
        flops = budget / ratio**power
        made = [_run(flops, shape, sequence) for shape in shapes]
        if prior is not None:
            made = [run for run in made if 1 / span <= run.params / _best(prior, flops, run) <= span]
        made = [run for run in made if run.tokens <= max_tokens]
        if not made:
            raise ValueError(
                f"no hidden size is left for the budget of {flops:.3g} FLOPs; give other sizes, a larger span or more tokens"
            )
        runs += made
    return Plan(sequence=sequence, runs=tuple(runs))


def _best(prior: Law | BudgetLaw, flops: float, run: PlannedRun) -> float:
    if isinstance(prior, BudgetLaw):
        return prior.best_size(flops)
    return prior.optimum(flops, run.flops / run.params / run.tokens).params


def repeated(made: Plan, by_width: Callable[[int], Sequence[float]] | None, seeds: int) -> Plan:
    """The plan with every run repeated: once for each learning rate that `by_width` returns for its hidden size, and each seed.

    Seeds are 0 to seeds - 1. Names of runs contain the rate, and the seed if there are several.

    Raises:
        ValueError: seeds is not 1 to 1000.
    """
    if not 1 <= seeds <= 1000:
        raise ValueError(f"seeds is {seeds}, wanted 1 to 1000")
    runs: list[PlannedRun] = []
    for run in made.runs:
        for rate in [None] if by_width is None else by_width(run.shape.hidden):
            for seed in range(seeds):
                options = run.options | ({} if rate is None else {"lr": rate}) | ({"seed": seed} if seeds > 1 else {})
                name = run.name + ("" if rate is None else f"-lr{rate:.1e}") + (f"-seed{seed}" if seeds > 1 else "")
                runs.append(replace(run, name=name, options=options))
    return Plan(sequence=made.sequence, runs=tuple(runs))


def rates(text: str) -> Callable[[int], list[float]]:
    """A function from hidden size to learning rates, from text.

    "2e-3,4e-3": these rates for every size. "128:4e-3,512:1e-3": one rate per size. Sizes between those that are given get a
    rate by interpolation in logarithms, sizes outside of them the rate of the nearest one.

    Raises:
        ValueError: the text has neither form.
    """
    try:
        pairs = [[float(part) for part in one.split(":")] for one in text.split(",")]
        kinds = {len(pair) for pair in pairs}
        if len(kinds) != 1 or not kinds <= {1, 2} or not all(0 < x < math.inf for pair in pairs for x in pair):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--lr is {text!r}, wanted learning rates, as in 2e-3,4e-3, or hidden sizes with their rates, as in "
            "128:4e-3,512:1e-3"
        ) from None
    if kinds == {1}:
        return lambda hidden: [pair[0] for pair in pairs]
    x, y = zip(*((math.log(width), math.log(rate)) for width, rate in sorted(pairs)))
    return lambda hidden: [float(f"{math.exp(_between(math.log(hidden), x, y)):.4g}")]


def _between(at: float, x: Sequence[float], y: Sequence[float]) -> float:
    for (x0, y0), (x1, y1) in pairwise(zip(x, y)):
        if at <= x1:
            return y0 + (y1 - y0) * max(0.0, at - x0) / (x1 - x0)
    return y[-1]


def _check(
    budget: float, budgets: int, ratio: float, sizes: int, span: float, vocab: int, sequence: int, head_dim: int, layers: int
) -> None:
    for name, value, low, high in (
        ("budget", budget, 1e9, 1e28),
        ("budgets", budgets, 1, 50),
        ("ratio", ratio, 1.3, 1000.0),
        ("sizes", sizes, 3, 50),
        ("span", span, 1.2, 100.0),
        ("vocab", vocab, 2, 1 << 22),
        ("sequence", sequence, 1, 1 << 24),
        ("head dim", head_dim, 16, 512),
        ("layers", layers, 1, 1000),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} is {value:g}, wanted {low:g} to {high:g}")


def _bracketing(shapes: Sequence[Shape], sizes: int, best: float) -> bool:
    params = [shape.params for shape in shapes]
    distinct = all(b / a >= _DISTINCT for a, b in pairwise(params))
    return len(params) == sizes and distinct and params[0] < best < params[-1]


def _run(budget: float, shape: Shape, sequence: int) -> PlannedRun:
    a_token = shape.train_flops(sequence)
    tokens = max(1, round(budget / a_token / sequence)) * sequence
    name = f"c{budget:.1e}-n{shape.params:.2e}".replace("+", "")
    return PlannedRun(name=name, budget=budget, flops=a_token * tokens, params=shape.params, tokens=tokens, shape=shape)


def hours(flops: float, card: str, utilisation: float) -> float:
    """Hours for `flops` operations in bf16 on a card. utilisation: the share of the measured rate of its tensor cores.

    Raises:
        ValueError: the card is unknown, or utilisation is not above 0 and at most 1.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation is {utilisation:g}, wanted above 0 and at most 1")
    return flops / (ceilings(device_named(card)).flops["bf16"] * utilisation) / 3600


def read_plan(path: Path) -> Plan:
    """A plan from its file, checked.

    Raises:
        ValueError: the file is not a plan; the message states what is wrong.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(
            f"{path} is larger than {_LARGEST_FILE >> 20} MiB; wanted a file written by `tilewright scaling plan --out`"
        )
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["format"] != _FORMAT or saved["version"] != 1:
            raise ValueError(f"it has format {saved['format']!r} and version {saved['version']!r}, wanted {_FORMAT!r} and 1")
        runs = tuple(PlannedRun(**{**row, "shape": Shape(**row["shape"])}) for row in saved["runs"])
        names = [run.name for run in runs]
        if not 0 < len(runs) <= _MOST_RUNS or len(set(names)) < len(names):
            raise ValueError(
                f"it has {len(runs)} runs with {len(set(names))} different names; wanted 1 to {_MOST_RUNS} runs, each "
                "with its own name"
            )
        for run in runs:
            _check_run(run)
        return Plan(sequence=int(saved["sequence"]), runs=runs)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a file that `tilewright scaling plan --out` wrote: {error}") from None


def _check_run(run: PlannedRun) -> None:
    if not (isinstance(run.name, str) and run.name.isascii() and 0 < len(run.name) <= 100):
        raise ValueError(f"a run's name is {run.name!r}, wanted ASCII text of 1 to 100 characters")
    if not all(c.isalnum() or c in "._-" for c in run.name) or run.name.startswith("."):
        raise ValueError(
            f"the run's name {run.name!r} cannot be the name of its folder; use only letters, digits, '.', '_' and '-', "
            "and no '.' at the start"
        )
    numbers = [run.budget, run.flops, run.params, run.tokens]
    numbers += [value for key, value in asdict(run.shape).items() if key != "tied"]
    if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers):
        raise ValueError(f"run {run.name} has a number that is not finite or not above 0")
    if not all(isinstance(value, int | float | str) and not isinstance(value, bool) for value in run.options.values()):
        raise ValueError(f"run {run.name} has an option that is neither a number nor text")
