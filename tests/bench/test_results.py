"""What a measurement leaves behind when it is cut short: every row that it had, marked as a part of the set."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilewright.bench.engine
import tilewright.bench.layers
import tilewright.bench.ops
from tilewright.bench import op
from tilewright.bench.results import Results
from tilewright.cli import bench
from tilewright.cli.root import app
from tilewright.kernels.gemm.linear import linear_op

ROWS = [{"format": "int8", "ratio": 2.0}, {"format": "int8", "ratio": 0.5}]

COMMANDS: dict[str, tuple[list[str], Any, str]] = {
    "op": (["softmax", "M=4", "N=8"], op, "rows"),
    "layers": (["layers", "int8", "--shapes", "1x8x16"], tilewright.bench.layers, "rows"),
    "ops": (["ops", "softmax"], tilewright.bench.ops, "measure"),
    "engine": (["engine", "qwen3-0.6b"], tilewright.bench.engine, "run_engine"),
}


@pytest.mark.parametrize("which", COMMANDS)
@pytest.mark.parametrize("cut", [KeyboardInterrupt, RuntimeError, None])
def test_rows_are_kept_as_they_come(which: str, cut: type[BaseException] | None, tmp_path: Path, monkeypatch: Any) -> None:
    words, where, name = COMMANDS[which]
    path = tmp_path / "made" / "it.json"
    seen = []

    def rows(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        seen.append(json.loads(path.read_text()))
        if cut is not None:
            raise cut("the time ran out")
        yield ROWS[1]

    monkeypatch.setattr(bench, "need_gpu", lambda _: None)
    monkeypatch.setattr(where, name, rows)
    monkeypatch.setattr(tilewright.bench.ops, "dispatch_overhead_us", lambda _: {})
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(path)])
    left = json.loads(path.read_text())
    assert seen[0]["rows"] == ROWS[:1]
    assert seen[0]["incomplete"] is True
    assert (done.exit_code == 0) is (cut is None)
    assert left["rows"] == (ROWS if cut is None else ROWS[:1])
    assert ("incomplete" in left) is (cut is not None)
    assert left["environment"]["torch"] == torch.__version__
    assert [file.name for file in path.parent.iterdir()] == ["it.json"]


KILLED = """
import os, sys
from pathlib import Path
from tilewright.bench.results import Results

def rows():
    yield {"us": 1.0}
    os.kill(os.getpid(), int(sys.argv[2]))

Results(Path(sys.argv[1]), "a set").keep(rows())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_its_rows(number: int, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    done = subprocess.run([sys.executable, "-c", KILLED, path, str(number)], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    left = json.loads(path.read_text())
    assert done.returncode == -number
    assert (left["rows"], left["incomplete"]) == ([{"us": 1.0}], True)


def test_an_older_file_stands_until_there_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_text("{}")
    results = Results(path, "a set")
    assert path.read_text() == "{}"
    results.keep(ROWS)
    results.finish(mean=1.0)
    left = json.loads(path.read_text())
    assert list(left) == ["what", "environment", "mean", "rows"]
    assert left["rows"] == ROWS


@pytest.mark.parametrize("peer", [True, False])
def test_progress_says_the_figures(peer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"impl": "sm90", "us": 12.5, "tflop_per_s": 600.1, "tb_per_s": 0.25, "against": "torch"}
    theirs = {"their_us": 13.0, "ratio": 1.04} if peer else {}
    monkeypatch.setattr(op, "measure", lambda *_: row | theirs)
    said: list[str] = []
    list(op.rows(linear_op, [["M=1"]], "torch", None, said.append))
    figures = "  sm90 12.5 us, 600.1 TFLOP/s, 0.25 TB/s" + ("; torch 13.0 us, ratio 1.04" if peer else "")
    assert said == ["linear M=1", figures]


def test_what_cannot_be_replaced_is_written_at_the_end(tmp_path: Path) -> None:
    """A pipe gets the whole once; a link stays one, and the file behind it is replaced."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "file.json"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        results = Results(pipe, "it")
        results.keep(ROWS)
        results.finish()
        told, _ = reader.communicate(timeout=60)
    assert json.loads(told)["rows"] == ROWS
    link.symlink_to(file)
    results = Results(link, "it")
    results.keep(ROWS[:1])
    results.finish()
    assert link.is_symlink()
    assert json.loads(file.read_text())["rows"] == ROWS[:1]
