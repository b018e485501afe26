"""Budgets of the house. The numbers stand here and are changed on purpose only: a file that needs more has two subjects.

A function's length is its physical lines, from `def` to its last one, with its docstring and the functions inside it.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.source import Source, planted, sources

FILE_LINES = 400
KERNEL_FILE_LINES = 450  # reference, cost, space, kernels, launchers and the public function belong in one file
FUNCTION_LINES = 60


def over_budget(source: Source) -> Iterator[str]:
    """What is too long in a file, in words."""
    limit = KERNEL_FILE_LINES if source.path.startswith("tilewright/kernels/") else FILE_LINES
    lines = len(source.text.splitlines())
    if lines > limit:
        yield f"{source.path}: {lines} lines, at most {limit}"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def test_everything_is_within_budget() -> None:
    found = [finding for source in sources("tilewright", "tests", "scripts") for finding in over_budget(source)]
    assert not found, "\n".join(found)


def function(lines: int, head: str = "def f():") -> str:
    return f"{head}\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("path", "text", "findings"),
    [
        ("tilewright/a.py", "x = 1\n" * 400, []),
        ("tilewright/a.py", "x = 1\n" * 401, ["401 lines, at most 400"]),
        ("tests/a.py", "x = 1\n" * 401, ["401 lines, at most 400"]),
        ("tilewright/kernels/a.py", "x = 1\n" * 450, []),
        ("tilewright/kernels/a.py", "x = 1\n" * 451, ["451 lines, at most 450"]),
        ("a.py", function(60), []),
        ("a.py", function(61), ["a.py:1: f has 61 lines, at most 60"]),
        ("a.py", "\n\n" + function(61, "async def g():"), ["a.py:3: g has 61 lines, at most 60"]),
        ("a.py", "@decorated\n" + function(60), []),
        ("a.py", "def outer():\n    def inner():\n" + "        x = 1\n" * 59, ["a.py:1: outer has 61 lines"]),
    ],
)
def test_the_measure_finds_what_is_planted(path: str, text: str, findings: list[str]) -> None:
    found = list(over_budget(planted(path, text)))
    assert len(found) == len(findings), found
    assert all(want in got for want, got in zip(findings, found))
