"""scripts/test_gpu.py without a GPU: every test is dealt once, none begins after the time, and what was skipped is told."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.source import ROOT

PROBE = """
import pytest

@pytest.mark.parametrize("i", range(7))
def test_one(i):
    if i == 3:
        pytest.skip("not on a Tuesday")
    assert i != 5
"""


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_gpu_script_under_test", ROOT / "scripts/test_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, shard: str, *words: str) -> tuple[Path, int]:
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_probe.py").write_text(PROBE)
    report = folder / f"{shard.partition('/')[0]}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "test_probe.py",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "--shard",
        shard,
    ]
    done = subprocess.run(
        [*command, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
    )
    report.with_suffix(".txt").write_text(done.stdout + done.stderr)
    return report, done.returncode


def test_the_report_of_all_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run(tmp_path, f"{i}/2") for i in range(2)]
    assert script().report_shards([report for report, _ in runs], [status for _, status in runs]) == 1
    said = capsys.readouterr().out
    assert "5 passed, 1 failed, 1 skipped, of which 0 for lack of time" in said
    assert "FAILED test_probe::test_one[5]" in said
    assert "1  not on a Tuesday" in said


def test_no_test_begins_after_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, status = run(tmp_path, "0/1", "--until", "1")
    assert script().report_shards([report], [status]) == 1
    assert "0 passed, 0 failed, 7 skipped, of which 7 for lack of time" in capsys.readouterr().out


def test_a_process_that_breaks_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, status = run(tmp_path, "0/1", "--no-such-option")
    assert script().report_shards([report], [status]) == 1
    assert "ended with status 4" in capsys.readouterr().out
