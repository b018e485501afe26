"""Fit the constants of the analytical time model to the regret study: `python scripts/fit_model.py`. A few minutes, no GPU.

    --write          write the constants fitted to all cases to tilewright/tune/constants.py
    --folds 4        also measure held-out regret: the cases of each operator are divided into 4 parts, each is left out once

The fit is a random walk from `START`: one or two constants at a time change by a random factor, and a change is kept if it
lowers the loss. The loss is the mean over the cases of

    the regret of the candidates, weighted by how fast the model predicts them to be (a soft minimum, 4 % wide)
    + 0.5 times the RMS error of the logarithm of the time, over candidates within 2.5 times the best, all implementations equal
    + 0.2 times the regret of the candidate that the model ranks first

so the order of the fastest configs counts, not that of the slow ones. Constants stay within `BOUNDS`, their plausible ranges.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from regret_model import Study
from regret_store import read

from tilewright.tune import constants as constants_file
from tilewright.tune.constants import CONSTANTS, Constants

START = Constants(
    source="a guess",
    warpgroup_rows=64,
    launch_s=1.5e-6,
    start_s=5e-7,
    round_s=3e-7,
    latency_s=3e-7,
    step_s=1e-7,
    chain_s=1e-7,
    fetch=9e10,
    operations=1.5e11,
    load=6.0,
    warp_fetch=1e10,
    warp_operations=1e10,
    warpgroup=1.1,
    warp=0.4,
    warp_tile=250.0,
    memory=1.0,
    serial=0.3,
    spill=1.0,
    hidden=0.3,
    library=0.9,
    library_narrow=0.15,
    library_narrow_memory=0.45,
    library_s=3e-6,
)

BOUNDS = {
    "launch_s": (1e-7, 2.5e-6),
    "start_s": (1e-7, 2e-6),
    "round_s": (5e-8, 1e-6),
    "latency_s": (1e-7, 1.2e-6),
    "step_s": (1e-8, 5e-7),
    "chain_s": (1e-8, 5e-7),
    "fetch": (4e10, 1.6e11),
    "operations": (3e10, 4e11),
    "load": (1.0, 32.0),
    "warp_fetch": (2e9, 1e11),
    "warp_operations": (2e9, 1e11),
    "warpgroup": (0.5, 1.35),
    "warp": (0.2, 0.8),
    "warp_tile": (1.0, 2000.0),
    "memory": (0.85, 1.03),
    "serial": (0.01, 4.0),
    "spill": (0.1, 5.0),
    "hidden": (0.01, 0.99),
    "library": (0.5, 1.3),
    "library_narrow": (0.05, 0.5),
    "library_narrow_memory": (0.1, 1.0),
    "library_s": (1e-6, 6e-6),
}

TRIES = 6000
_NEAR = 2.5
_SOFT = 25.0


class _Loss:
    """The loss over some cases of a study, from constants."""

    def __init__(self, study: Study, cases: np.ndarray):
        self.study = study
        self.places = study.places[cases]
        padding = np.zeros(self.places.shape, bool)
        padding[:, 1:] = self.places[:, 1:] == self.places[:, :1]
        self.us = study.us[self.places]
        self.worse = np.minimum(self.us / study.best[cases][:, None] - 1, 2)
        self.padding = np.where(padding, -np.inf, 0.0)
        self.weight = np.zeros(self.places.shape)
        near = (self.worse < _NEAR - 1) & ~padding
        impls = np.array([row["impl"] for row in study.rows])[self.places]
        for row, (names, live) in enumerate(zip(impls, near, strict=True)):
            for name in set(names):
                members = live & (names == name)
                self.weight[row, members] = 1 / max(1, members.sum())
        self.weight /= self.weight.sum()
        # Where a library takes part, the order of the rest counts as a case of its own.
        mixed = np.flatnonzero((library := study.library[self.places]).any(1))
        own = np.where(library[mixed] | padding[mixed], np.inf, self.us[mixed]).min(1)
        self.rows = np.concatenate([np.arange(len(cases)), mixed])
        self.worse = np.concatenate([self.worse, np.minimum(self.us[mixed] / own[:, None] - 1, 2)])
        self.padding = np.concatenate([self.padding, np.where(library[mixed], -np.inf, self.padding[mixed])])

    def __call__(self, constants: Constants) -> float:
        predicted = np.log(self.study.predicted_us(constants)[self.places])
        lead = -_SOFT * predicted[self.rows] + self.padding
        share = np.exp(lead - lead.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        first = np.minimum(self.worse[np.arange(len(lead)), lead.argmax(1)], 1)
        error = np.sqrt((self.weight * (predicted - np.log(self.us)) ** 2).sum())
        return float((share * np.maximum(self.worse, 0)).sum(1).mean() + 0.5 * error + 0.2 * first.mean())


def fit(study: Study, cases: np.ndarray, tries: int, seed: int = 0) -> Constants:
    """The best constants that a walk of so many tries meets."""
    draw, loss, found = np.random.default_rng(seed), _Loss(study, cases), START
    least, names = loss(found), list(BOUNDS)
    step = dict.fromkeys(names, 0.3)
    for _ in range(tries):
        moved = [names[i] for i in draw.choice(len(names), size=draw.integers(1, 3), replace=False)]
        values = {n: float(np.clip(getattr(found, n) * np.exp(draw.normal() * step[n]), *BOUNDS[n])) for n in moved}
        value = loss(tried := found._replace(**values))
        for name in moved:
            step[name] = float(np.clip(step[name] * (1.3 if value < least else 0.97), 0.02, 0.6))
        if value < least:
            found, least = tried, value
    return found


def held_out(study: Study, folds: int, tries: int) -> np.ndarray:
    """Each candidate's time as constants predict it that were fitted without its case."""
    place: dict[str, int] = {}
    fold = []
    for op, _ in study.keys:
        place[op] = place.get(op, -1) + 1
        fold.append(place[op] % folds)
    predicted = np.zeros(len(study.us))
    for number in range(folds):
        constants = fit(study, np.flatnonzero(np.array(fold) != number), tries)
        mine = np.array(fold)[study.case] == number
        predicted[mine] = study.predicted_us(constants)[mine]
    return predicted


def show(title: str, study: Study, predicted_us: np.ndarray) -> None:
    """Regret by op, and the error of the times."""
    print(title)
    near = study.us < _NEAR * study.best[study.case]
    error = np.log(predicted_us / study.us)
    for op in (*dict.fromkeys(op for op, _ in study.keys), "all"):
        cases = [i for i, (name, _) in enumerate(study.keys) if op in (name, "all")]
        line = f"  {op:16}"
        for top in (1, 8):
            values = study.regret(predicted_us, top)[cases]
            high = np.quantile(values, 0.95, method="inverted_cdf")
            line += f"  top {top}: median {np.median(values):.1%} 95th {high:.1%} most {values.max():.1%}"
        of_op = near & np.isin(study.case, cases)
        print(f"{line}  times off by {np.sqrt((error[of_op] ** 2).mean()):.0%}")


def _literal(value: str | float) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:.4g}".replace("e+", "e")


def write(constants: Constants, path: Path) -> None:
    """Put constants into the table's file. Raises ValueError when it has no place for them."""
    lines = "".join(f"    {name}={_literal(value)},\n" for name, value in constants._asdict().items())
    text, count = re.subn(
        r"_SM90 = Constants\(\n.*?\n\)\n", lambda _: f"_SM90 = Constants(\n{lines})\n", path.read_text(), flags=re.S
    )
    if count != 1:
        raise ValueError(f"{path}: wanted one `_SM90 = Constants(...)` to replace, got {count}")
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parents[1] / "benchmarks/results/h100/regret.json"
    parser.add_argument("--data", type=Path, default=default, help="data file written by regret.py, with --out or --small")
    parser.add_argument("--tries", type=int, default=TRIES, help="number of steps of the random walk")
    parser.add_argument("--folds", type=int, default=0, help="also measure held-out regret, with this many parts; 0: off")
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    options = parser.parse_args()
    environment, rows, _ = read(options.data)
    study = Study(rows)
    show("constants in force", study, study.predicted_us(CONSTANTS[90]))
    if options.folds:
        show(f"held out, {options.folds} folds", study, held_out(study, options.folds, options.tries))
    found = fit(study, np.arange(len(study.keys)), options.tries)
    source = f"fitted by scripts/fit_model.py to {len(study.us)} measurements on {environment['card']}"
    rounded = found._replace(source=source, **{n: float(f"{getattr(found, n):.4g}") for n in BOUNDS})
    show("fitted", study, study.predicted_us(rounded))
    print(rounded)
    if options.write:
        write(rounded, Path(constants_file.__file__))


if __name__ == "__main__":
    main()
