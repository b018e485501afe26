"""Result files: each is written by one process after every row; files with the same code and card form a set.

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
    """A result file that is written after every row: an interrupted run leaves its rows, marked "incomplete".

    Each write replaces the whole file, so that a reader finds either the previous version or the new one. A file of an earlier
    run is kept until the first row is measured. `finish` removes the mark.

    Attributes:
        rows: the rows measured by this process.
        before: rows of earlier processes that this one continues; [] unless `resume`.
        whole: whether nothing is left to measure.
    """

    def __init__(self, path: Path | None, what: str, *, resume: bool = False) -> None:
        """Prepare the file.

        Args:
            path: the file, whose folder is made; None keeps the rows in memory only.
            what: a description of the measurement, written into the file.
            resume: continue `path` and its parts. Their rows are in `before`, and the rows of this process go to a new part.

        Raises:
            OSError: the folder cannot be made.
            ValueError: `resume` without a path, or its folder has results of other code, another card or other versions.
        """
        self.rows: list[dict[str, Any]] = []
        self.before: list[dict[str, Any]] = []
        self.whole = False
        self._what, self._path, self._older = what, path, []
        if path is None:
            if resume:
                raise ValueError("--resume continues the file given by --out; give --out")
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
        """The rows of earlier processes and of this one."""
        return [*self.before, *self.rows]

    def keep(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows and write the file after each; return all rows. Raises OSError."""
        for row in rows:
            self.rows.append(row)
            self.write()
        return self.rows

    def finish(self, **more: Any) -> None:
        """Write further facts next to the rows, and remove the mark. Does nothing if the file was complete. Raises OSError."""
        if not self.whole:
            self.write(incomplete=False, **more)

    def write(self, *, incomplete: bool = True, **more: Any) -> None:
        """Write the present rows. Raises OSError."""
        if self._path is None:
            return
        mark = {"incomplete": True} if incomplete else {}
        content = {"what": self._what, **mark, "environment": self._environment, **more, "rows": self.rows}
        path, text = self._path.resolve(), json.dumps(content, indent=1) + "\n"
        if path.exists() and not path.is_file():  # a pipe or a terminal cannot be rewritten: it gets only the complete result
            if not incomplete:
                path.write_text(text)
            return
        beside = path.with_name(path.name + ".part")
        beside.write_text(text)
        beside.replace(path)
        while self._older:  # parts of the file that this one replaces
            self._older.pop().unlink(missing_ok=True)


def _check_same(path: Path, here: Mapping[str, Any]) -> None:
    """Raise ValueError unless this process may continue a result."""
    strange = strangers(path.parent, here)
    if strange:
        raise ValueError(
            f"{strange[0]}; a folder contains results of a single version of the code on one GPU, so use another folder"
        )
    if not path.is_file():
        return
    was, now = (_command(facts) for facts in (read(path)["environment"], here))
    if was != now:
        raise ValueError(f"{path} was written by `{was}`, so `{now}` cannot continue it; use another file")


def _command(facts: Mapping[str, Any]) -> str:
    """The command of a result, without --resume, which only later processes have."""
    return shlex.join(word for word in shlex.split(facts["command"]) if word != "--resume")


def part(path: Path, number: int) -> Path:
    """The file of the `number`-th process, counted from 1."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def parts(path: Path) -> list[Path]:
    """The files of a result, in the order in which they were measured."""
    found = []
    while (next_one := part(path, len(found) + 1)).is_file():
        found.append(next_one)
    return found


def rows_in(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of all parts of a result, and whether the result is complete.

    If a row occurs twice, the later one counts, because a run may end between the rows of one measurement.

    Raises:
        ValueError: a part is not a result file.
        OSError: a part cannot be read.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    whole = False
    for file in parts(path):
        content = read(file)
        whole = not content.get("incomplete")
        rows |= {tuple(row.get(name) for name in _IDENTITY): row for row in content["rows"]}
    return list(rows.values()), whole


def read(path: Path) -> dict[str, Any]:
    """Read a result file. Raises OSError, or ValueError if it is not a result file."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a result file: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or "environment" not in content:
        raise ValueError(f'{path} is not a result file: wanted an object with "environment" and "rows"')
    return content


def strangers(folder: Path, here: Mapping[str, Any]) -> list[str]:
    """A sentence for each result file of a folder that has other code, another card or other versions than `here`.

    Facts that `here` does not have are not compared, such as the card in a process that does not use it.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        was = json.loads(path.read_text()).get("environment", {})
        other = next((name for name in shared_by(path.name) if name in here and was.get(name) != here[name]), None)
        if other is not None:
            found.append(f"{path} has {other} {was.get(other)}, but this run has {other} {here[other]}")
    return found


def joined(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a set: name -> content, with the rows of all parts, and "parts", how many processes measured them.

    Raises:
        ValueError: a result is incomplete, or its parts differ in code, card or versions.
        OSError: a file cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        if _PART.fullmatch(path.stem):
            if path not in parts(path.with_name(f"{path.stem.rpartition('.')[0]}.json")):
                raise ValueError(f"{path.name} continues a file that does not exist")
            continue
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
            continue  # studies with another format: of the analytical model, of whole models
        files = parts(path)
        if len(files) > 1:
            content["rows"] = _of_one_set(path, files)
        if read(files[-1]).get("incomplete"):
            raise ValueError(
                f"{path.name} is incomplete because its run was interrupted; continue it (--resume), or move it to studies/"
            )
        content.pop("incomplete", None)
        found[path.stem] = content | {"parts": len(files)}
    return found


def _of_one_set(path: Path, files: list[Path]) -> list[dict[str, Any]]:
    first, *others = (read(file)["environment"] for file in files)
    for file, other in zip(files[1:], others, strict=True):
        if first.get("commit") is None and first.get("source") is None:
            raise ValueError(f"{path.name} has parts but does not name the version of its code; measure it again in one run")
        name = next((name for name in SAME if first.get(name) != other.get(name)), None)
        if name is not None:
            raise ValueError(
                f"{file.name} has {name} {other.get(name)}, but {path.name} has {first.get(name)}, so they are not one result"
            )
    return rows_in(path)[0]
