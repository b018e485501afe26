"""What goes wrong in a run is one sentence of the command, and counted in the log."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.rl.test_run import HERE
from tilewright.cli import app
from tilewright.rl.characters import Characters
from tilewright.rl.rollout import Answer


def run_of(tmp_path: Path, name: str, more: str = "", updates: int = 1) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Exit code, lines to stderr and rows of the log of a run in an environment of rewards_for_tests.py."""
    path, log = tmp_path / "a.toml", tmp_path / "a.jsonl"
    path.write_text(
        f'environment = "{HERE / "rewards_for_tests.py"}:{name}"\nmax_tokens = 2\nprompts = 8\nanswers = 2\nhidden = 32\n'
        f"layers = 1\n{more}"
    )
    result = CliRunner().invoke(app, ["rl", str(path), "--updates", str(updates), "--log", str(log)], prog_name="tilewright")
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return result.exit_code, result.stderr.splitlines(), rows


def only(lines: list[str], words: str) -> str:
    found = [line for line in lines if words in line]
    assert len(found) == 1, lines
    return found[0]


def test_groups_of_one_reward_are_counted_and_said(tmp_path: Path) -> None:
    code, lines, rows = run_of(tmp_path, "Same", updates=1)
    assert code == 0
    only(lines, "warning: step 1: all answers to each prompt have the same reward, so there is nothing to learn from")
    assert rows[0]["equal_groups"] == 1.0
    assert rows[0]["norm"] >= 0.0


def test_rewards_of_the_wrong_shape_cost_their_samples_and_are_said(tmp_path: Path) -> None:
    code, lines, rows = run_of(tmp_path, "Lists", "seed = 1\n")
    assert code == 0
    assert 0 < rows[0]["lost"] < 16
    line = only(lines, f"samples without a reward: {{'raised': {rows[0]['lost']}}}")
    assert "TypeError" in line
    assert "not 'list'" in line


def test_prompts_over_the_context_are_one_sentence(tmp_path: Path) -> None:
    code, lines, rows = run_of(tmp_path, "Long")
    assert code != 0
    assert not rows
    only(
        lines,
        "a prompt of 3000 tokens and its answers can have 3002 tokens, but the model has only 2048 positions; lower max_tokens",
    )


def test_a_longer_prompt_later_on_is_one_sentence(tmp_path: Path) -> None:
    code, lines, rows = run_of(tmp_path, "Later", "minibatches = 1\n", updates=60)
    assert code != 0
    assert len(rows) == 300 // 8
    only(lines, "the prompt has 100 tokens and max_tokens is 2, together 102")


class Empty:
    """A sampler that ends answers at once."""

    version = 0

    def __call__(self, prompts: Sequence[Sequence[int]], *, answers: int, **call: Any) -> list[list[Answer]]:
        end = Characters().end
        answer = Answer(tokens=[end], logprobs=[-3.0], kept=[0], whole=[-3.0], truncated=False, version=self.version)
        return [[answer] * answers for _ in prompts]


def test_empty_answers_are_counted_learnt_from_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.rl.loop.sampler_of", lambda *given: Empty())
    code, lines, rows = run_of(tmp_path, "Same")
    assert code == 0
    only(lines, "warning: step 1: 16 answers are empty, because the policy ends them at once")
    assert (rows[0]["empty"], rows[0]["length"], rows[0]["lost"]) == (16, 1.0, 0)
    assert rows[0]["applied"] == 1.0
