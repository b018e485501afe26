"""Result files: written after every row, each by one process, and combined to sets if they have the same code and card.

A set is a folder. An interrupted run leaves NAME.json, marked "incomplete"; the run that continues it writes NAME.2.json, and
so on: no file is ever continued by another process. `joined` combines the parts.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilewright.bench.provenance import SAME, environment, shared_by

__all__ = ["Results", "joined", "parts", "rows_in", "strangers"]

_IDENTITY = ("op", "format", "dims", "shape", "M", "N", "K", "activation", "weights", "kv_cache", "workload", "run")

_PART = re.compile(r".+\.\d+")


class Results:
    """A result file that is on the disk after every row: a run that is cut short leaves what it measured, marked "incomplete".

    Each writing replaces the file, so that a reader finds the one before it or the new one, whole; an older file stands until
    the first row is there. `finish` takes the mark away.

    Attributes:
        rows: what this process measured.
        before: rows of earlier processes that this one goes on with; [] unless `resume`.
        whole: there is nothing left to measure.
    """

    def __init__(self, path: Path | None, what: str, *, resume: bool = False) -> None:
        """`path`: the file, whose folder is made; None keeps the rows in memory alone.

        Args:
            resume: go on with what `path` and its parts hold. Their rows are in `before`, and the rows of this process go to
                a part of their own.

        Raises:
            OSError: the folder cannot be made.
            ValueError: `resume` without a path, or its folder holds results of other code, another card or other versions.
        """
        self.rows: list[dict[str, Any]] = []
        self.before: list[dict[str, Any]] = []
        self.whole = False
        self._what, self._path, self._older = what, path, []
        if path is None:
            if resume:
                raise ValueError("--resume goes on with the file of --out: give one")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._environment = environment()
        found = parts(path)
        if not resume:
            self._older = found[1:]
        else:
            _check_same(path, self._environment)
            self.before, self.whole = rows_in(path)
            self._path = part(path, len(found) + 1)

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        """Those of earlier processes and those of this one."""
        return [*self.before, *self.rows]

    def keep(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the rows as they come, the file written after each; returns all there are. Raises OSError."""
        for row in rows:
            self.rows.append(row)
            self.write()
        return self.rows

    def finish(self, **more: Any) -> None:
        """Write what goes beside the rows, and no mark; nothing where the set was whole before. Raises OSError."""
        if not self.whole:
            self.write(incomplete=False, **more)

    def write(self, *, incomplete: bool = True, **more: Any) -> None:
        """Write the rows as they are now. Raises OSError."""
        if self._path is None:
            return
        mark = {"incomplete": True} if incomplete else {}
        content = {"what": self._what, **mark, "environment": self._environment, **more, "rows": self.rows}
        path, text = self._path.resolve(), json.dumps(content, indent=1) + "\n"
        if path.exists() and not path.is_file():  # a pipe, a terminal: what is written there stays, so it gets the whole alone
            if not incomplete:
                path.write_text(text)
            return
        beside = path.with_name(path.name + ".part")
        beside.write_text(text)
        beside.replace(path)
        while self._older:  # parts of the file that this one replaces
            self._older.pop().unlink(missing_ok=True)


def _check_same(path: Path, here: Mapping[str, Any]) -> None:
    """Raise ValueError unless this process may go on with a result."""
    strange = strangers(path.parent, here)
    if strange:
        raise ValueError(f"{strange[0]}; one folder is of one code on one card: give another one")
    if not path.is_file():
        return
    was, now = (_command(facts) for facts in (read(path)["environment"], here))
    if was != now:
        raise ValueError(f"{path} is of `{was}`, and `{now}` cannot go on with it: give another file")


def _command(facts: Mapping[str, Any]) -> str:
    """Without the word that tells the first process from the others."""
    return shlex.join(word for word in shlex.split(facts["command"]) if word != "--resume")


def part(path: Path, number: int) -> Path:
    """The file of the process that came as `number`-th, from 1."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def parts(path: Path) -> list[Path]:
    """The files of a result, in the order in which they were measured."""
    found = []
    while (next_one := part(path, len(found) + 1)).is_file():
        found.append(next_one)
    return found


def rows_in(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a result, of all its parts, and whether they are all that were wanted.

    Of a row that is there twice the later one counts: a run may end between the rows of one measurement.

    Raises:
        ValueError: a part is no result file.
        OSError: one cannot be read.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    whole = False
    for file in parts(path):
        content = read(file)
        whole = not content.get("incomplete")
        rows |= {tuple(row.get(name) for name in _IDENTITY): row for row in content["rows"]}
    return list(rows.values()), whole


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for one that is none, OSError."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no result file: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or "environment" not in content:
        raise ValueError(f'{path} is no result file: wanted an object with "environment" and "rows"')
    return content


def strangers(folder: Path, here: Mapping[str, Any]) -> list[str]:
    """A sentence for each result file of a folder that is of other code, another card or other versions than `here`.

    What `here` does not know (the card, in a process that does not touch it) is not compared.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        was = json.loads(path.read_text()).get("environment", {})
        other = next((name for name in shared_by(path.name) if name in here and was.get(name) != here[name]), None)
        if other is not None:
            found.append(f"{path} is of {other} {was.get(other)}, this is {other} {here[other]}")
    return found


def joined(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a set: name -> content, with the rows of all parts, and "parts", how many processes measured them.

    Raises:
        ValueError: a result is incomplete, or its parts are of two codes, cards or versions.
        OSError: a file cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        if _PART.fullmatch(path.stem):
            if path not in parts(path.with_name(f"{path.stem.rpartition('.')[0]}.json")):
                raise ValueError(f"{path.name} goes on with a file that is not there")
            continue
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            continue  # studies of another form: of the analytical model, of whole models
        files = parts(path)
        if len(files) > 1:
            content["rows"] = _of_one_set(path, files)
        if read(files[-1]).get("incomplete"):
            raise ValueError(
                f"{path.name} is incomplete: its run was cut short; go on with it (--resume), or move it to studies/"
            )
        content.pop("incomplete", None)
        found[path.stem] = content | {"parts": len(files)}
    return found


def _of_one_set(path: Path, files: list[Path]) -> list[dict[str, Any]]:
    first, *others = (read(file)["environment"] for file in files)
    for file, other in zip(files[1:], others, strict=True):
        if first.get("commit") is None and first.get("source") is None:
            raise ValueError(f"{path.name} has parts and does not name its code: measure it again in one run")
        name = next((name for name in SAME if first.get(name) != other.get(name)), None)
        if name is not None:
            raise ValueError(
                f"{file.name} has {name} {other.get(name)}, {path.name} {first.get(name)}: they are not one result"
            )
    return rows_in(path)[0]
