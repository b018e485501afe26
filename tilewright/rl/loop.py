"""Reinforcement learning in one process: sample with the engine, score in workers, learn with the trainer's step.

Sampler and trainer share one set of parameters: nothing is copied or synchronised. What the trainer's pass over the packed
samples says of their probabilities is compared with what the engine said at every step (`ratio_off`).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tilewright.models import Model
from tilewright.rl.batch import Batch, Sample, pack
from tilewright.rl.config import RLConfig
from tilewright.rl.conversation import Conversation, converse
from tilewright.rl.environments.base import MultiTurn, Task
from tilewright.rl.environments.named import environment
from tilewright.rl.environments.workers import Workers
from tilewright.rl.learner import Learner
from tilewright.rl.policies import policy_of
from tilewright.rl.rollout import Sampler
from tilewright.rl.text import Text

__all__ = ["Shown", "Trainer"]

_EVALUATED = 1 << 40
"""Seeds of tasks from here on are measured on, and never trained on."""
_SHOWN = 4
Shown = tuple[str, str, float]
"""Prompt, answers, reward."""


class Trainer:
    """Updates a model by the config. Iterate over it: one dict of numbers a step. Use it as a context: workers end with it.

    Args:
        model: a policy of the caller's instead of the config's.
        text: its tokens; the config's, unless given.

    Raises:
        ModelError: the model cannot be had or trained.
        ValueError: the config does not fit the model, the device or the environment.
    """

    def __init__(self, config: RLConfig, model: Model | None = None, text: Text | None = None) -> None:
        self.config = config
        self.environment = environment(config.environment)
        own_text, own_model = policy_of(config, model)
        self.text, self.model = text or own_text, own_model
        self.device = next(self.model.parameters()).device
        if config.turns > 1 and not isinstance(self.environment, MultiTurn):
            raise ValueError(f"turns is {config.turns}, but {config.environment} has no reply(task, answers); set turns = 1")
        self.learner = Learner(config, self.model)  # before the sampler: the optimizer moves the parameters
        self.sampler = Sampler(
            self.model, max_len=self._longest(), seqs=256, end_ids=self.text.end_ids, invariant=config.invariant
        )
        self.workers = Workers(config.environment, count=config.reward_workers, timeout_s=config.reward_timeout_s)
        self.update = 0
        self.drawn = 0
        """Tasks drawn so far."""
        self.rounds = 0
        """Times that was sampled so far."""
        self.shown: list[Shown] = []
        """A few samples of the last step."""

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.workers.__exit__(None, None, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.update < self.config.updates:
            yield self.step()

    def state(self) -> dict[str, int]:
        """Where the trainer is; with the learner's tensors, all that later steps depend on."""
        return {"update": self.update, "drawn": self.drawn, "rounds": self.rounds}

    def load_state(self, state: dict[str, int]) -> None:
        """Go to where another one was."""
        self.update, self.drawn, self.rounds = state["update"], state["drawn"], state["rounds"]

    def step(self) -> dict[str, Any]:
        """Sample, score, learn once.

        Raises:
            ValueError: no answer of the step got a reward.
        """
        began, times = time.perf_counter(), [0.0, 0.0]
        samples, lost, dropped = self._samples(times)
        if not samples:
            raise ValueError(
                f"no answer of step {self.update} got a reward: {dict(self.workers.failures)}; {self.workers.last_error}"
            )
        stats = self.learner.learn(self._batch(samples), self.update)
        self.update += 1
        took = time.perf_counter() - began
        chosen = sum(sum(sample.chosen) for sample in samples)
        row = {
            "update": self.update,
            "exact": sum(sample.reward >= 1.0 for sample in samples) / len(samples),
            **stats,
            "lost": lost,
            "dropped_groups": dropped,
            "seconds": took,
            "sampling": times[0] / took,
            "scoring": times[1] / took,
            "sampled_tokens_per_s": chosen / times[0],
            "trained_tokens_per_s": sum(len(sample.tokens) for sample in samples) / max(took - sum(times), 1e-9),
        }
        if self.config.eval_every and (self.update % self.config.eval_every == 0 or self.update == self.config.updates):
            row["eval_exact"] = self.evaluate()
        return row

    def evaluate(self) -> float:
        """Share of held-out tasks whose one sampled answer gets the full reward; failures of the reward count as wrong."""
        tasks = [self.environment.task(_EVALUATED + i) for i in range(self.config.eval_tasks)]
        rewards = self._scores(self.sample(tasks, answers=1, seed=self.config.seed))
        return sum(reward is not None and reward >= 1.0 for reward in rewards) / len(rewards)

    def sample(self, tasks: Sequence[Task], *, answers: int, seed: int) -> list[Conversation]:
        """Conversations about each task by the current weights."""
        config = self.config
        replies = self.workers.reply if config.turns > 1 else None
        return converse(
            self.sampler, self.text, tasks, replies, answers=answers, max_tokens=config.max_tokens, turns=config.turns,
            max_reply_tokens=config.max_reply_tokens, seed=seed,
        )  # fmt: skip

    def _samples(self, times: list[float]) -> tuple[list[Sample], int, int]:
        """(samples of a step, samples whose reward failed, groups left out). Adds the seconds of sampling and of scoring.

        Without `resample` every group is in it. With it, groups that have something to learn from, the last round's others.
        """
        config, kept, lost, dropped = self.config, [], 0, 0
        self.shown = []
        for rounds_left in range(config.resample, -1, -1):
            wanted = config.prompts - len(kept)
            tasks = [self.environment.task(self.drawn + i) for i in range(wanted)]
            began = time.perf_counter()
            made = self.sample(tasks, answers=config.answers, seed=config.seed + self.rounds)
            sampled = time.perf_counter()
            rewards = self._scores(made)
            times[0] += sampled - began
            times[1] += time.perf_counter() - sampled
            self.drawn, self.rounds = self.drawn + wanted, self.rounds + 1
            lost += rewards.count(None)
            groups: list[list[Sample]] = [[] for _ in tasks]
            for one, reward in zip(made, rewards):
                if reward is not None:
                    groups[one.group].append(replace(one.sample(reward, self.update), group=len(kept) + one.group))
                    if len(self.shown) < _SHOWN:
                        self.shown.append((one.task.prompt, " | ".join(one.answers), reward))
            useful = [group for group in groups if len({sample.reward for sample in group}) > 1]
            if not rounds_left or len(useful) == wanted:
                kept += [group for group in groups if group]
                break
            dropped += wanted - len(useful)
            kept += useful
        return [replace(sample, group=i) for i, group in enumerate(kept) for sample in group], lost, dropped

    def _scores(self, made: Sequence[Conversation]) -> list[float | None]:
        return self.workers.score([one.task for one in made], [one.answers[-1] for one in made])

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return pack(samples).to(self.device)

    def _longest(self) -> int:
        """Tokens of the longest conversation: prompts as long as twice the longest of the first, and all its turns."""
        config = self.config
        prompt = max(len(self.text.prompt(self.environment.task(seed).prompt)) for seed in range(256))
        least = prompt + config.longest + (config.turns - 1) * config.max_reply_tokens
        most = self.model.config.max_position_embeddings
        if least > most:
            raise ValueError(
                f"a prompt of {prompt} tokens and its answers may have {least} tokens, and the model has {most} positions: "
                "lower max_tokens or turns"
            )
        return min(prompt + least, most)
