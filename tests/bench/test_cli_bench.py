"""What the options of `tilewright bench` reach."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewright.bench import attention_8bit, layers, op
from tilewright.bench.sets import PROJECTIONS
from tilewright.cli import bench
from tilewright.cli.root import app


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of what measures, in the place of which nothing is measured."""
    calls: list[tuple[Any, ...]] = []

    def rows(*args: Any) -> Iterator[dict[str, Any]]:
        calls.append(args)
        yield {"format": "fp8", "ratio": 2.0}

    monkeypatch.setattr(bench, "need_gpu", lambda what: None)
    for module in (attention_8bit, layers, op):
        monkeypatch.setattr(module, "rows", rows)
    return calls


@pytest.mark.parametrize("words", [["layers", "fp8"], ["attention-8bit", "fp8"], ["matmul", "M=8", "N=8", "K=8"]], ids=" ".join)
def test_settle(words: list[str], measured: list[tuple[Any, ...]], tmp_path: Path) -> None:
    for option, seconds in (((), 0.0), (("--settle", "0.5"), 0.5)):
        out = tmp_path / f"{seconds}.json"
        found = CliRunner().invoke(app, ["bench", *words, *option, "--out", str(out)])
        assert found.exit_code == 0, found.output
        assert measured.pop()[-1] == seconds
        assert json.loads(out.read_text())["settle_s"] == seconds
    assert CliRunner().invoke(app, ["bench", *words, "--settle", "11"]).exit_code == 2


def test_rows_of_the_projections(measured: list[tuple[Any, ...]]) -> None:
    assert CliRunner().invoke(app, ["bench", "layers", "fp8", "--rows", "64", "--rows", "7"]).exit_code == 0
    assert measured.pop()[1] == [(m, n, k) for m in (64, 7) for n, k in PROJECTIONS]
    found = CliRunner().invoke(app, ["bench", "layers", "fp8", "--rows", "64", "--shapes", "1x2x3"])
    assert (found.exit_code, "give only one of --shapes and --rows" in found.output) == (1, True)
