"""The commands that measure, in small on a CPU: handing weights over, and a step beside the loop built of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32")


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / name), *SMALL, *words], capture_output=True, text=True, timeout=240)


def last_row(result: subprocess.CompletedProcess[str]) -> dict[str, float]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("handover", ["broadcast", pytest.param("memory", marks=pytest.mark.long)])
def test_all_bits_arrive_and_both_rates_are_told(handover: str) -> None:
    row = last_row(run("rl_push.py", "--to", "cpu", "--times", "2", "--handover", handover))
    assert row["bits_equal"] is True
    assert row["bytes"] > 10_000_000
    for name in ("push",) if handover == "broadcast" else ("push", "pull"):
        assert row[f"{name}_gb_per_s"] == pytest.approx(row["bytes"] / row[f"{name}_s"] / 1e9)
        assert row[f"{name}_share_of_link"] == pytest.approx(row[f"link_{name}_s"] / row[f"{name}_s"])


@pytest.mark.long
def test_devices_that_do_not_go_together_are_one_sentence() -> None:
    result = run("rl_push.py", "--to", "cpu", "--handover", "card")
    assert result.returncode != 0
    assert 'handover is "card", which needs the trainer and all samplers on the same GPU' in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("of", ["ours", "continuous-batching", "generate"])
def test_a_step_is_measured_here_and_built_of_transformers(of: str) -> None:
    pytest.importorskip("transformers", reason="transformers, of which the other loop is built, is not installed")
    sizes = ("--prompts", "4", "--answers", "2", "--tokens", "8", "--prompt-tokens", "8", "--workers", "1", "--cache-gib", "1")
    row = last_row(run("rl_speed.py", "--of", of, *sizes))
    assert row["of"] == of
    assert row["tokens_per_s"] == pytest.approx(4 * 2 * 8 / row["seconds"])
