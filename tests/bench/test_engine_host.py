"""What a decode step costs the host: each part is there, and the harness decodes and does nothing else."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
    scheduler = steps.engine.scheduler
    before = scheduler.generated_tokens
    steps.measure(30)
    assert scheduler.generated_tokens - before == 30 * 40
    assert len(scheduler.running) == 40


def test_a_request_ends_and_another_comes_in_every_step() -> None:
    steps = HostSteps(running=6, context=40, steps=30, joining=True)
    scheduler = steps.engine.scheduler
    before, arrived = set(scheduler.running), scheduler.prompt_tokens
    steps.measure(6)
    assert len(scheduler.running) == 6
    assert not before & set(scheduler.running)
    assert scheduler.prompt_tokens > arrived


def script_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_columns_and_values_are_of_the_same_samples() -> None:
    script = script_of("sampled_columns")
    columns, values = script.by_columns(16, 20), script.by_values(16, 20)
    for _ in range(2):
        found = columns()
        assert found == values()
        assert [len(ids) for ids, *_ in found] == [20] * 16
        assert len({tuple(drawn) for _, _, drawn, _ in found}) == 16


def test_two_checkouts_in_turns() -> None:
    """Each has an engine of its own modules, and the process has its own back."""
    script = script_of("engine_host_turns")
    before = sys.modules["tilewright.engine.core"]
    first, second = script.harness(ROOT), script.harness(ROOT)
    assert sys.modules["tilewright.engine.core"] is before
    assert len({first.Engine, second.Engine, before.Engine}) == 3
    rows = script.measured([ROOT, ROOT], running=4, context=40, turns=2, steps=5)
    assert [set(row) for row in rows] == [PARTS | {"checkout"}] * 2
    assert all(row["all"]["least"] <= row["all"]["median"] <= row["all"]["p99"] for row in rows)
    with pytest.raises(SystemExit, match="has no tilewright/engine"):
        script.harness(ROOT / "docs")
