"""The project's own Python files, read as text and syntax, for the tests that hold the house rules."""

import ast
import gc
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Source", "planted", "sources"]

ROOT = Path(__file__).resolve().parents[1]
KINDS = (
    ast.Import, ast.ImportFrom, ast.Call, ast.keyword, ast.Attribute, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef
)  # fmt: skip
"""Nodes that some rule looks at, a fifth of all."""


@dataclass(frozen=True, eq=False)
class Source:
    """One file: its path from the repository root and its text."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> tuple[Any, ...]:
        """Every node of `KINDS` in its syntax tree, from the top down: each rule looks at all of them."""
        # The collector would walk millions of nodes, which stay, again and again: while they are made, in each later
        # collection, and in the five that pytest makes at its end.
        was = gc.isenabled()
        gc.disable()
        try:
            return tuple(node for node in ast.walk(ast.parse(self.text)) if isinstance(node, KINDS))
        finally:
            gc.freeze()
            if was:
                gc.enable()

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
    return Source(path, text)


def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file under these folders of the repository, in order of path."""
    return tuple(sorted((source for folder in folders for source in _under(folder)), key=lambda source: source.path))


@cache
def _under(folder: str) -> tuple[Source, ...]:
    paths = (ROOT / folder).rglob("*.py")
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
