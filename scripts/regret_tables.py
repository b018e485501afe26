"""The tables of `regret.py --from`: what every way to choose without a search loses against the best candidate, as Markdown.

Defaults are those of today's spaces; where one is a config that the study did not measure, its place is empty.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fit_model
import numpy as np
import regret_cases as cases
from regret_model import Study, op_named
from regret_store import read

from tilewright.tune.constants import CONSTANTS

__all__ = ["by_op", "percentile", "show"]

Json = dict[str, Any]

_TOP = 8


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of them does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else math.nan


def _intro(environment: Mapping[str, Any], counts: Mapping[str, int], study: Study, folds: int) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in environment.items())
    failed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"""# What a choice without a search costs

The study measured every valid config of {len(study.keys)} problems, as far as the time allowed: {len(study.us)} candidates
({facts}). Not measured, by reason: {failed}. The *regret* of a choice is its time divided by the least time of all measured
candidates of that problem, minus 1. Measurements of implementations that have been removed since (`split_kv`, which decoded
before `stream`) are left out.

- *default*: the config that an untuned program runs with today's config spaces.
- *model, top 1*: the first config in the order of the analytical model (`tilewright/tune/model.py`); nothing is measured.
- *model, top {_TOP}*: the best of the model's first {_TOP}, which are those that `tilewright tune` measures. The vendor's
  library counts as one candidate and is always among them.
- *held out*: the same, with constants that were fitted without the problem at hand, in {folds} parts. The other rows have
  constants fitted to all problems, so their regret flatters the model. The formula itself was chosen with all problems in
  view.
- *linear, ours*: `linear` without the vendor's library, which is the best candidate for half of the problems.

The page is written by `python scripts/regret.py --from benchmarks/results/h100/regret.json --folds {folds}`, and the
constants by `scripts/fit_model.py`. The resources of a config (registers, shared memory) are those of its own compilation for
the problem.
"""


def show(path: Path, folds: int) -> None:
    """Print the tables of a data file; with `folds` parts for the held-out rows, 0 for none."""
    environment, rows, counts = read(path)
    study = Study(rows)
    predicted = {"model": study.predicted_us(CONSTANTS[90])}
    if folds:
        predicted["held out"] = fit_model.held_out(study, folds, fit_model.TRIES)
    defaults = _defaults(study)
    print(_intro(environment, counts, study, folds))
    print("## By op\n")
    by_op(study, predicted, defaults)
    print("\n## Should an untuned program ask the model?\n")
    print(_STEP)
    print("\n## By problem\n")
    torch_us = {(row["op"], row["label"]): row["us"] for row in rows if row["impl"] == "torch"}
    _by_case(study, predicted["model"], defaults, torch_us)


# ---- choices


def _defaults(study: Study) -> list[int | None]:
    """The candidate of each case that an untuned program of today runs; None where it was not measured."""
    found: list[int | None] = []
    for number, (name, _) in enumerate(study.keys):
        members = np.flatnonzero(study.case == number)
        op = op_named(name)
        problem = op.problem(*cases.arguments({"op": name, **study.rows[members[0]]["dims"]}, "meta"))
        impl = next(impl for impl in op.impls if impl.refusal(study.device, problem) is None)
        config = dict(impl.space.default(study.device, problem))
        # `varlen` and `invariant` of attention are one kernel: with one config, one measurement.
        same = {other.name for other in op.impls if other.launch is impl.launch}
        rows = ((int(i), study.rows[i]) for i in members)
        found.append(next((i for i, row in rows if row["impl"] in same and row["config"] == config), None))
    return found


def _regrets(study: Study, chosen: Iterable[int | None]) -> dict[int, float]:
    """Case -> regret of a chosen candidate, where there is one."""
    best = study.best
    return {case: float(study.us[i] / best[case] - 1) for case, i in enumerate(chosen) if i is not None}


# ---- tables


def _cells(values: Iterable[float]) -> str:
    held = list(values)
    return f"{len(held)} | {percentile(held, 0.5):.1%} | {percentile(held, 0.95):.1%} | {max(held):.1%}"


def by_op(study: Study, predicted: Mapping[str, np.ndarray], defaults: list[int | None]) -> None:
    """Print the table of regret by op, of times predicted in several ways."""
    print("| op | choice | problems | median | 95th percentile | most |\n|---|---|---|---|---|---|")
    ours = Study([row for row in study.rows if row["impl"] != "vendor"])
    without = {how: us[~study.library] for how, us in predicted.items()}
    untuned = _regrets(study, defaults)
    for group in (*dict.fromkeys(op for op, _ in study.keys), "linear, ours", "all"):
        held = ours if group == "linear, ours" else study
        members = [i for i, (op, _) in enumerate(held.keys) if group in (op, "all", f"{op}, ours")]
        if held is study and any(i in untuned for i in members):
            print(f"| {group} | default | {_cells(untuned[i] for i in members if i in untuned)} |")
        for top in (1, _TOP):
            for how, us in (without if held is ours else predicted).items():
                regret = held.regret(us, top)
                words = f"model, top {top}" + (", held out" if how == "held out" else "")
                print(f"| {group} | {words} | {_cells(regret[members])} |")


_STEP = """Until this study, an untuned program took the model's first config instead of its default if no similar problem had
been measured and the predicted time was less by a factor of 1.6 and by 3 us. Among the 32 products of this study to which
that applied, the model's config was taken 0 times, and 1 time with held-out constants, where the mean regret rose from 1.39%
to 1.98%. With smaller factors it was taken more often and lost more: with a factor of 1 it was taken 15 times (held out),
with a mean regret of 4.42%. So the model is no longer asked: a program runs its default, and `tilewright tune` uses the order
of the model."""
"""From the study as it was when programs asked the model."""


def _by_case(study: Study, us: np.ndarray, defaults: list[int | None], torch_us: Mapping[tuple[str, str], float]) -> None:
    names = "op | problem | candidates | best | us | spread | library us | default us | regret | model's first | predicted us"
    print(f"| {names} | us | regret | top {_TOP}: regret |\n" + "|---" * 14 + "|")
    untuned, first, some = _regrets(study, defaults), study.regret(us, 1), study.regret(us, _TOP)
    for number, key in enumerate(study.keys):
        members = np.flatnonzero(study.case == number)
        best = int(members[np.argmin(study.us[members])])
        chosen = int(members[np.argsort(us[members], kind="stable")[0]])
        library = torch_us.get(key, next((study.us[i] for i in members if study.library[i]), None))
        default = defaults[number]
        cells = [
            key[0], key[1], str(len(members)), _config(study.rows[best]), _us(study.us[best]),
            f"{study.rows[best]['us_spread']:.2f}", _us(library), _us(None if default is None else study.us[default]),
            f"{untuned[number]:.1%}" if number in untuned else "", _config(study.rows[chosen]), _us(us[chosen]),
            _us(study.us[chosen]), f"{first[number]:.1%}", f"{some[number]:.1%}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def _config(row: Json) -> str:
    return " ".join([row["impl"], *(f"{name}={value}" for name, value in row["config"].items())])


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
