"""The project's own Python files, read as text and syntax, for the tests that hold the house rules."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Source", "planted", "sources"]

ROOT = Path(__file__).resolve().parents[1]


class Source(NamedTuple):
    """One file: its path from the repository root, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name that it is imported under."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def part(self) -> str:
        """The part of the house: "kernels" for tilewright/kernels/*.py, "op" for tilewright/op.py, "" for the root."""
        return part_of(self.module)


def part_of(module: str) -> str:
    """The second name of a dotted module name; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def planted(path: str, text: str) -> Source:
    """A file that is not there, to see whether a rule finds what is wrong with it."""
    return Source(path, text, ast.parse(text))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file under these folders of the repository, in order of path."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(planted(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
