"""Finished runs: parameters, tokens, FLOPs and loss of each, read from a CSV file and checked."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Columns", "Runs", "budgets", "read_runs"]

Array = NDArray[np.float64]

_LARGEST_FILE = 64 << 20
_MOST_RUNS = 100_000
FEWEST_RUNS = 8
"""A law has five parameters, which fewer runs than this do not determine."""
FEWEST_BUDGETS = 3
_WINDOW = 0.25
"""Natural logarithm of the largest allowed ratio between the FLOPs of two runs of one budget."""

# Usual names of columns; case, blanks and punctuation are ignored.
_KNOWN = {
    "params": ("params", "parameters", "nparams", "modelsize", "n"),
    "tokens": ("tokens", "trainingtokens", "ntokens", "d"),
    "flops": ("flops", "flop", "trainingflop", "trainingflops", "compute", "c"),
    "loss": ("loss", "finalloss", "valloss", "evalloss"),
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns of a file. None: the first column with a usual name for this quantity."""

    params: str | None = None
    tokens: str | None = None
    flops: str | None = None
    loss: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Runs:
    """Arrays of equal length; each index is a run."""

    params: Array
    tokens: Array
    flops: Array
    loss: Array

    def __len__(self) -> int:
        return len(self.loss)

    def where(self, kept: NDArray[np.bool_]) -> "Runs":
        """The runs for which `kept` is true, in the same order."""
        return Runs(params=self.params[kept], tokens=self.tokens[kept], flops=self.flops[kept], loss=self.loss[kept])

    def without_highest(self, count: int) -> "Runs":
        """All runs except the `count` runs with the highest losses.

        Raises:
            ValueError: `count` is negative or not less than the number of runs.
        """
        if not 0 <= count < len(self):
            raise ValueError(f"{count} of {len(self)} runs are to be dropped; wanted 0 to {len(self) - 1}")
        kept = np.ones(len(self), bool)
        kept[np.argsort(self.loss, kind="stable")[len(self) - count :]] = False
        return self.where(kept)

    @property
    def flops_per_param_token(self) -> float:
        """k in C = k N D, as the geometric mean over the runs; 6 if their FLOPs follow the usual rule."""
        return float(np.exp(np.mean(np.log(self.flops / self.params / self.tokens))))

    def repeats(self) -> tuple[int, float] | None:
        """(number of runs that share parameters and tokens with another run, the standard deviation of log L among them).

        Runs with different seeds are such repeats; no law can predict their scatter. None if there are no repeats.
        """
        _, group = np.unique(np.stack([self.params, self.tokens], axis=1), axis=0, return_inverse=True)
        count = np.bincount(group.ravel())
        logs = np.log(self.loss)
        means = np.bincount(group.ravel(), logs) / count
        freedom = int((count - 1).sum())
        if not freedom:
            return None
        return int(count[count > 1].sum()), float(np.sqrt(((logs - means[group.ravel()]) ** 2).sum() / freedom))

    def check_enough(self) -> None:
        """Check that a law can be fitted.

        Raises:
            ValueError: there are fewer than 8 runs or fewer than 3 budgets, or all runs have nearly the same parameters or the
                same tokens.
        """
        if len(self) < FEWEST_RUNS:
            raise ValueError(f"a law with five parameters needs at least {FEWEST_RUNS} runs, but there are only {len(self)}")
        if (count := len(budgets(self))) < FEWEST_BUDGETS:
            raise ValueError(
                f"a trend over budgets needs at least {FEWEST_BUDGETS} budgets, but the runs have {count}; add runs "
                "with another number of FLOPs"
            )
        if np.ptp(np.log(self.params)) < 0.05 or np.ptp(np.log(self.tokens)) < 0.05:
            raise ValueError(
                "all runs have nearly the same parameters or the same tokens; alpha and beta can be fitted only if both vary"
            )


def budgets(runs: Runs) -> list[NDArray[np.intp]]:
    """Indices of the runs of each budget, smallest budget first; every run is in exactly one.

    The FLOPs of runs of one budget differ by at most 28 %. The interval of this width with the most runs becomes the first
    group, and so on with the remaining runs. A budget with scattered FLOPs is thus one group, and outliers are separate groups.
    """
    logs = np.log(runs.flops)
    left = np.argsort(logs, kind="stable")
    groups = []
    while len(left):
        ends = np.searchsorted(logs[left], logs[left] + _WINDOW, side="right")
        first = int(np.argmax(ends - np.arange(len(left))))
        groups.append(left[first : ends[first]])
        left = np.concatenate([left[:first], left[ends[first] :]])
    return sorted(groups, key=lambda group: float(logs[group].mean()))


def read_runs(path: Path, columns: Columns | None = None) -> Runs:
    """Read a CSV file with a header. Two of parameters, tokens and FLOPs are enough: the third follows from C = 6 N D.

    Raises:
        ValueError: a column is missing, a cell is not a positive finite number, or the file is too large; the message states
            what was found.
        OSError: the file cannot be read.
    """
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise ValueError(f"{path} has {size >> 20} MiB, but a table of runs may have at most {_LARGEST_FILE >> 20}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            header = [name for name in reader.fieldnames or [] if name]
            names = _resolve(path, header, columns or Columns())
            cells = [[row.get(name) for name in names.values()] for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not 0 < len(cells) <= _MOST_RUNS:
        raise ValueError(f"{path} has {len(cells):,} runs; wanted 1 to {_MOST_RUNS:,}, one run per line below a header")
    table = np.array([[_number(path, line, *pair) for pair in zip(names.values(), row)] for line, row in enumerate(cells, 2)])
    found = dict(zip(names, table.T))
    if "flops" not in found:
        found["flops"] = 6 * found["params"] * found["tokens"]
    elif "tokens" not in found:
        found["tokens"] = found["flops"] / 6 / found["params"]
    elif "params" not in found:
        found["params"] = found["flops"] / 6 / found["tokens"]
    return Runs(**found)


def _resolve(path: Path, header: list[str], columns: Columns) -> dict[str, str]:
    """Quantity -> the name of the column that contains it."""
    plain = {"".join(c for c in name.casefold() if c.isalnum()): name for name in reversed(header)}
    names: dict[str, str] = {}
    for key, usual in _KNOWN.items():
        wanted: str | None = getattr(columns, key)
        if wanted is not None and wanted not in header:
            raise ValueError(f"{path} has no column {wanted!r} for {key}; its columns are {_listed(header)}")
        if name := wanted or next((plain[word] for word in usual if word in plain), None):
            names[key] = name
    if "loss" not in names or len(names) < 3:
        missing = [key for key in _KNOWN if key not in names]
        raise ValueError(
            f"{path} has the columns {_listed(header)}; it needs loss and two of params, tokens and flops, and none "
            f"was recognised for {', '.join(missing)}; name their columns, as in --loss-column NAME"
        )
    return names


def _listed(header: list[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in header[:20])
    return shown + (f" and {len(header) - 20} more" if len(header) > 20 else "") if header else "none"


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ValueError(f"{path}, row {line}, column {name!r}: {(text or '')[:40]!r} is not a finite number above 0")
    return value
