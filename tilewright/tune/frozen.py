"""A frozen table: the best rows for one card in a small JSON file, for the package or for all ranks of a job.

    {"format": 1, "card": "NVIDIA H100 80GB HBM3", "sms": 132,
     "environments": [{"driver": ..., "torch": ..., "triton": ..., "ptxas": ..., "clocks": ..., "policy": ...}],
     "problems": [
      {"op": "linear", "problem": {...}, "invariant": false, "rows": [
       {"impl": "skinny", "config": {...}, "us": 12.4, ..., "environment": 0},
       {"impl": "vendor", ...}]}]}

There is one row for each problem and implementation, the fastest first, with the versions that it was measured with. Equal rows
give byte-identical files. Reading one needs no torch. It does not contain failures, resources, or configs that were slower.
"""

import hashlib
import os
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tilewright.tune.ranking import Entry, Stack, ranked
from tilewright.tune.record import Environment, Row, canonical, parse_object

__all__ = ["TABLES", "FrozenTable", "freeze", "write_table"]

FORMAT = 1
TABLES = Path(__file__).parent / "tables"
"""The tables that ship with the package, `<card>.json`."""

MAX_TABLE_BYTES = 64 << 20
_ENVIRONMENT = ("driver", "torch", "triton", "ptxas", "clocks", "policy")
_ROW = ("impl", "config", "us", "us_spread", "verified", "source", "date", "dims")


class FrozenTable:
    """A table read from a file.

    Args:
        path: the file.
        check: check every row now, not when it is first used.

    Raises:
        ValueError: it is not a table, or has another format; the message states the path and the fault.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path | str, *, check: bool = False) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
        if len(data) > MAX_TABLE_BYTES:
            raise ValueError(f"{path} is not a tuning table: it is larger than {MAX_TABLE_BYTES >> 20} MiB")
        self.sha256 = hashlib.sha256(data).hexdigest()
        try:
            values = parse_object(data)
            if values.get("format") != FORMAT:
                raise ValueError(
                    f"format is {values.get('format')!r}, wanted {FORMAT}: write it again with `tilewright tune freeze`"
                )
            self.card, self.sms = str(values["card"]), int(values["sms"])
            self._environments: list[dict[str, Any]] = values["environments"]
            self._rows: dict[tuple[str, bool], dict[str, list[dict[str, Any]]]] = {}
            for p in values["problems"]:
                self._rows.setdefault((p["op"], p["invariant"]), {})[canonical(p["problem"])] = p["rows"]
            if check:
                for entry in self.entries():
                    entry.load()
        except KeyError as error:
            raise ValueError(
                f"{path} is not a tuning table: {error} is missing; write it again with `tilewright tune freeze`"
            ) from None
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a tuning table: {error}") from None

    def problems(self, op: str, invariant: bool) -> list[str]:
        """All problems of an op that have rows."""
        return list(self._rows.get((op, invariant), ()))

    def of(self, op: str, problem: str, invariant: bool) -> list[Entry]:
        """The rows of a problem."""
        rows = self._rows.get((op, invariant), {}).get(problem, ())
        return [self._entry(op, problem, invariant, row) for row in rows]

    def entries(self) -> list[Entry]:
        """Every row."""
        keys = [(op, problem, invariant) for (op, invariant), problems in self._rows.items() for problem in problems]
        return [entry for key in keys for entry in self.of(*key)]

    def _entry(self, op: str, problem: str, invariant: bool, row: dict[str, Any]) -> Entry:
        environment = self._environments[row["environment"]]
        return Entry(
            op, self.card, problem, invariant, row["impl"], canonical(row["config"]), row["us"], row["us_spread"],
            row["verified"], row["source"], Stack(*(environment[name] for name in Stack._fields)), row["date"],
            "frozen table", partial(self._row, op, problem, invariant, row),
        )  # fmt: skip

    def _row(self, op: str, problem: str, invariant: bool, row: dict[str, Any]) -> Row:
        environment = Environment(card=self.card, sms=self.sms, **self._environments[row["environment"]])
        values = {name: row[name] for name in _ROW}
        return Row(op=op, problem=problem, invariant=invariant, status="ok", environment=environment, **values)


def freeze(entries: Iterable[Entry]) -> str:
    """The text of the table for one card. Raises ValueError if the rows are of several cards, or if there are none."""
    found = sorted(entries, key=lambda e: (e.op, e.problem, e.invariant))
    if len(cards := sorted({e.card for e in found})) != 1:
        raise ValueError(f"a table is for one card, but the rows are from {', '.join(cards) or 'none'}; select one with --card")
    environments: list[str] = []
    problems: list[str] = []
    sms = 0
    for (op, problem, invariant), group in groupby(found, key=lambda e: (e.op, e.problem, e.invariant)):
        best: dict[str, Row] = {}
        for entry in ranked(group):
            best.setdefault(entry.impl, entry.load())
        lines = []
        for row in best.values():
            sms = row.environment.sms
            environment = canonical({name: getattr(row.environment, name) for name in _ENVIRONMENT})
            if environment not in environments:
                environments.append(environment)
            values = {name: getattr(row, name) for name in _ROW}
            # Rounded to nanoseconds: further digits are noise, and would enlarge the file.
            values |= {"us": round(row.us or 0, 3) or row.us, "us_spread": round(row.us_spread or 0, 3)}
            lines.append(canonical({**values, "environment": environments.index(environment)}))
        head = f'{{"op":{canonical(op)},"problem":{problem},"invariant":{canonical(invariant)},"rows":['
        problems.append("  " + head + "\n   " + ",\n   ".join(lines) + "]}")
    top = f'"format":{FORMAT},"card":{canonical(cards[0])},"sms":{sms}'
    return (
        f'{{{top},\n "environments":[\n  ' + ",\n  ".join(environments) + "],\n"
        ' "problems":[\n' + ",\n".join(problems) + "]}\n"
    )  # fmt: skip


def write_table(path: Path, text: str) -> None:
    """Write the table atomically: a reader sees the old or the new content, complete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
