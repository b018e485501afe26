"""Samplers that lose answers cost their samples alone, and the loss is counted; on Ray they are replaced (`long`)."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.rl.test_loop import TINY
from tests.rl.test_run import HERE
from tests.rl.test_split import APART, bare
from tilewright.rl.config import RLConfig
from tilewright.rl.loop import Trainer
from tilewright.rl.rollout import Answer


class Losing:
    """A sampler that loses every third prompt's answers."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.lost = sampler, 0

    def __call__(self, prompts: Sequence[Sequence[int]], *, answers: int, **call: Any) -> list[list[Answer]]:
        found = self._sampler(prompts, answers=answers, **call)
        self.lost += answers * len(found[::3])
        return [group if index % 3 else [] for index, group in enumerate(found)]


@pytest.mark.parametrize("turns", [1, 3])
def test_lost_answers_cost_their_samples_and_are_counted(turns: int) -> None:
    guessing = {"environment": f"{HERE / 'rewards_for_tests.py'}:Guessing", "alphabet": "0123456789<>=", "max_tokens": 4}
    config = replace(TINY, turns=turns, eval_every=1, eval_tasks=6, **(guessing if turns > 1 else {}))
    with Trainer(config) as trainer:
        losing = Losing(trainer.gatherer.sampler)
        trainer.gatherer.sampler = losing
        taken, seen = trainer._gathered, []

        def noted() -> Any:
            losing.lost = 0
            found = taken()
            seen.append((losing.lost, found))
            return found

        trainer._gathered = noted
        for row in trainer:
            lost, found = seen[-1]
            assert row["lost"] == lost > 0
            assert len(found.samples) == config.prompts * config.answers - lost
            assert row["applied"] == 1.0
            assert row["ratio_off"] < 1e-4
            assert 0.0 <= row["eval_exact"] <= 1.0


def test_bad_configs_are_one_sentence() -> None:
    for name in ("ray:0", "ray:", "ray:2,cpu", "ray"):
        with pytest.raises(ValueError, match="several of these separated by commas, or ray:N"):
            RLConfig(environment="reversal", sampler=name)
    with pytest.raises(ValueError, match="receive weights through Ray's object store; leave handover out"):
        RLConfig(environment="reversal", sampler="ray:2", handover="broadcast")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_actors_on_ray_give_the_numbers_of_one_process_and_one_that_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'tilewright[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = replace(APART, updates=5)
    with Trainer(replace(config, sampler="")) as together:
        wanted = [bare(row) for row in together]
    with Trainer(replace(config, sampler="ray:2")) as trainer:
        steps = iter(trainer)
        for alone in wanted[:2]:
            row = next(steps)
            assert (row["reward"], row["length"], row["oldest"]) == (alone["reward"], alone["length"], 0)
            assert row["ratio_off"] < 1e-4
            assert row["lost"] == row["lost_samplers"] == 0
        os.kill(ray.get(process_of(trainer.remote.actors[1])), signal.SIGKILL)
        row = next(steps)
        assert row["lost"] == config.prompts // 2 * config.answers
        assert row["lost_samplers"] == 1
        row = next(steps)  # the new one has the newest weights
        assert (row["lost"], row["oldest"], row["lost_samplers"]) == (0, 0, 1)
        assert row["ratio_off"] < 1e-4
        for actor in trainer.remote.actors:  # all of them: the step is sampled again
            os.kill(ray.get(process_of(actor)), signal.SIGKILL)
        row = next(steps)
        assert (row["lost"], row["oldest"], row["lost_samplers"]) == (0, 0, 3)
        trainer.config = replace(trainer.config, updates=9)
        trainer.remote._ends = [2, 2]
        os.kill(ray.get(process_of(trainer.remote.actors[0])), signal.SIGKILL)
        with pytest.raises(ConnectionError, match="sampler 0 on Ray ended before it answered: "):
            trainer.step()


def process_of(actor: Any) -> Any:
    """Its process number, as Ray knows it."""
    return actor.__ray_call__.remote(lambda self: os.getpid())
