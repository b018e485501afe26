"""Operators of two checkouts in turns: which are measured again, and what is said of them. The measuring itself needs a GPU."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.test_engine_host import script_of


@pytest.fixture
def script() -> ModuleType:
    return script_of("ops_turns")


def _checkouts(script: ModuleType, monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> list[tuple[str, int]]:
    """Stand-ins that answer with the next of `times` of "there" and "here"; what they were asked."""
    asked: list[tuple[str, int]] = []
    left: dict[str, Iterator[float]] = {side: iter(of_side) for side, of_side in times.items()}

    class Fake:
        def __init__(self, folder: Path):
            self.side = "here" if folder == script.HERE else "there"

        def measure(self, op: str, words: list[str], rounds: int) -> dict[str, Any]:
            asked.append((self.side, rounds))
            us = next(left[self.side])
            return {"us": us} if us else {"error": "RuntimeError: out of memory"}

    monkeypatch.setattr(script, "Checkout", Fake)
    return asked


def test_a_problem_that_looks_slower_is_measured_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _checkouts(script, monkeypatch, {"there": [10.0, 10.0, 10.0, 10.0], "here": [10.1, 12.0, 9.9, 11.0]})
    rows = script.in_turns(Path("before"), [("rope", ["T=1"]), ("rope", ["T=256"])], 6, 0.02)
    assert [row["turns"] for row in rows] == [[1.01], [1.2, 0.99, 1.1]]
    assert asked[4:] == [("here", 12), ("there", 12)] * 2  # the other order, and longer
    assert script.summary(rows) == ["rope: 2 problems, 1.054, at most 1.100"]


def test_what_fails_on_one_side_has_no_ratio(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    _checkouts(script, monkeypatch, {"there": [10.0], "here": [0.0]})
    [row] = script.in_turns(Path("before"), [("rope", ["T=1"])], 6, 0.02)
    assert row["here"] == {"error": "RuntimeError: out of memory"}
    assert "ratio" not in row
    assert script.summary([row]) == []


def test_a_folder_without_the_package_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no tilewright/op\.py"):
        script.Checkout(tmp_path)
