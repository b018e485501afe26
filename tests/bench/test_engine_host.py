"""What a decode step costs the host: each part is there, and the harness decodes and does nothing else."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tilewright.bench.engine_host import HostSteps, host_times

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"guesses", "schedule", "pack", "complete", "hand out", "all", "read"}


@pytest.mark.parametrize("speculate", [False, True])
def test_parts(speculate: bool) -> None:
    found = host_times(running=5, context=40, steps=12, speculate=speculate)
    assert set(found) == PARTS | {"all p99"}
    assert found["all"] >= max(found[part] for part in ("schedule", "pack", "complete"))


def test_every_request_decodes_from_the_first_measured_step_on() -> None:
    steps = HostSteps(running=40, context=600, steps=30)  # more prompt tokens than go through in one step
    scheduler = steps._engine.scheduler
    before = scheduler.generated_tokens
    steps.measure(10)
    assert scheduler.generated_tokens - before == 10 * 40


def test_two_checkouts_in_turns() -> None:
    """Each has an engine of its own modules, and the process has its own back."""
    spec = importlib.util.spec_from_file_location("engine_host_turns_under_test", ROOT / "scripts/engine_host_turns.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = sys.modules["tilewright.engine.core"]
    first, second = script.harness(ROOT), script.harness(ROOT)
    assert sys.modules["tilewright.engine.core"] is before
    assert len({first.Engine, second.Engine, before.Engine}) == 3
    rows = script.measured([ROOT, ROOT], running=4, context=40, turns=2, steps=5)
    assert [set(row) for row in rows] == [PARTS | {"checkout"}] * 2
    assert all(row["all"]["least"] <= row["all"]["median"] <= row["all"]["p99"] for row in rows)
    with pytest.raises(SystemExit, match="has no tilewright/engine"):
        script.harness(ROOT / "docs")
