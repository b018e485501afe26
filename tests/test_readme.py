"""README.md and the docs show the figures that stand in benchmarks/results, and no others."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_those_of_the_results() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/results_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
