"""Reinforcement learning: sample with the engine, compute rewards in worker processes, learn with the trainer's optimizer step.

Without `sampler`, engine and trainer share one set of parameters in one process, so nothing is copied or synchronised. In every
step, the probabilities from the trainer's pass over the packed samples are compared with those from the engine (`ratio_off`).
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.extras import needed
from tilewright.models import Model
from tilewright.rl.batch import Batch, Sample, pack
from tilewright.rl.config import RLConfig
from tilewright.rl.environments.base import MultiTurn
from tilewright.rl.environments.named import environment
from tilewright.rl.environments.workers import Workers
from tilewright.rl.gather import Ahead, Gathered, Gatherer, Shown
from tilewright.rl.learner import Learner
from tilewright.rl.policies import policy_of
from tilewright.rl.sampler_process import sampler_of
from tilewright.rl.samplers import RemoteSamplers
from tilewright.rl.text import Text

__all__ = ["Trainer"]

_RAY = "tilewright.rl.on_ray"
_EVALUATED = 1 << 40
"""Tasks with seeds from here on are used only for measurements, and never for training."""


class Trainer:
    """Trains a model as described by the config. Iterating over it runs the steps, and yields a dict of statistics for each.
    Use as a context manager: leaving it ends the worker and sampler processes.

    Args:
        model: a policy to use instead of the config's model.
        text: the tokenizer of the policy; by default the config's.

    Raises:
        ModelError: the model cannot be loaded or trained.
        ValueError: the config does not fit the model, the device or the environment.
    """

    def __init__(self, config: RLConfig, model: Model | None = None, text: Text | None = None) -> None:
        self.config = config
        self.environment = environment(config.environment)
        own_text, own_model = policy_of(config, model)
        self.text, self.model = text or own_text, own_model
        self.device = next(self.model.parameters()).device
        if config.turns > 1 and not isinstance(self.environment, MultiTurn):
            raise ValueError(
                f"turns is {config.turns}, but the environment {config.environment} has no reply(task, answers); set turns to 1"
            )
        self.learner = Learner(config, self.model)  # before the sampler: the optimizer moves the parameters to other memory
        longest = self._longest()
        self.workers = Workers(config.environment, count=config.reward_workers, timeout_s=config.reward_timeout_s)
        self.remote = _remote(config, self.model, longest) if config.sampler else None
        self._local = None if self.remote else sampler_of(config, self.model, longest, self.text.end_ids)
        sampler = self.remote or self._local
        assert sampler is not None
        self.gatherer = Gatherer(config, self.environment, self.text, sampler, self.workers)
        self._ahead: Ahead | None = None
        self.update = 0
        self._reached = (0, 0)
        """Number of tasks drawn and number of sampling rounds, up to the last step that was learnt from."""
        self.shown: list[Shown] = []
        """A few samples from the last step."""

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        if self.remote is not None:
            self.remote.close()  # also ends the wait of the gathering thread
        if self._ahead is not None:
            self._ahead.close()
        self.workers.__exit__(None, None, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.update < self.config.updates:
            yield self.step()

    def state(self) -> dict[str, int]:
        """The progress of the trainer. Together with the learner's tensors, this is everything that later steps depend on."""
        return {"update": self.update, "drawn": self._reached[0], "rounds": self._reached[1]}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue from the saved state of another trainer. Call this before the first step."""
        self.update, self._reached = state["update"], (state["drawn"], state["rounds"])
        self.gatherer.drawn, self.gatherer.rounds = self._reached
        if self.remote is not None:
            self.remote.push(self.update)

    def step(self) -> dict[str, Any]:
        """Run one step: sample, score and learn.

        Raises:
            ConnectionError: a sampler process has ended, or its weights are older than `staleness` allows.
            ValueError: no answer of the step received a reward.
        """
        began = time.perf_counter()
        found = self._gathered()
        samples, waited = found.samples, time.perf_counter() - began
        self._check_age(samples)
        if not samples:
            raise ValueError(
                f"step {self.update}: no answer got a reward; failures by kind: {dict(self.workers.failures)}; last "
                f"error: {self.workers.last_error}"
            )
        versions = [sample.version for sample in samples]
        freed = self._freed()
        stats = self.learner.learn(self._batch(samples), self.update)
        self.update += 1
        self._reached, self.shown = (found.drawn, found.rounds), found.shown
        pushed = {} if self.remote is None else self._pushed(self.remote)
        took = time.perf_counter() - began
        chosen = sum(sum(sample.chosen) for sample in samples)
        row = {
            "update": self.update,
            "exact": sum(sample.reward >= 1.0 for sample in samples) / len(samples),
            **stats,
            "entropy_whole": found.whole,
            "oldest": self.update - 1 - min(versions),
            "lost": found.lost,
            "empty": found.empty,
            "dropped_groups": found.dropped,
            "seconds": took,
            "waiting": waited / took,
            "sampling": found.sampling_s / took,
            "scoring": found.scoring_s / took,
            "sampled_tokens_per_s": chosen / found.sampling_s,
            "trained_tokens_per_s": sum(len(sample.tokens) for sample in samples) / max(took - waited, 1e-9),
            **pushed,
            **freed,
        }
        if self.config.eval_every and (self.update % self.config.eval_every == 0 or self.update == self.config.updates):
            row["eval_exact"] = self.evaluate()
        return row

    def evaluate(self) -> float:
        """The share of held-out tasks whose single sampled answer receives the full reward. An answer whose reward could not be
        computed counts as wrong."""
        tasks = [self.environment.task(_EVALUATED + i) for i in range(self.config.eval_tasks)]
        with self.gatherer.lock:
            rewards = self.gatherer.scores(self.gatherer.sample(tasks, answers=1, seed=self.config.seed))
        return sum(reward is not None and reward >= 1.0 for reward in rewards) / len(tasks)

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return pack(samples, temperature=self.config.drawing.temperature).to(self.device)

    def _gathered(self) -> Gathered:
        if self._local is not None:
            self._local.version = self.update
        if not self.config.staleness:
            with self.gatherer.lock:
                return self.gatherer.gather()
        if self._ahead is None:
            self._ahead = Ahead(self.gatherer, first=self.update, staleness=self.config.staleness)
        return self._ahead.take()

    def _freed(self) -> dict[str, float]:
        """Give the memory of the sampler's cache to the trainer, if `free_cache` is set and both are in this process."""
        if self._local is None or not self.config.free_cache:
            return {}
        freed, took = self._local.give_back()
        return {"cache_freed_bytes": freed, "cache_free_s": took, "cache_take_s": self._local.taking_s}

    def _check_age(self, samples: Sequence[Sample]) -> None:
        """Raise ConnectionError if samples come from weights that are too old, or newer than the trainer's."""
        oldest, newest = (how((sample.version for sample in samples), default=self.update) for how in (min, max))
        if not self.update - self.config.staleness <= oldest <= newest <= self.update:
            raise ConnectionError(
                f"step {self.update} got samples from weights of versions {oldest} to {newest}, wanted version "
                f"{self.update} or at most {self.config.staleness} (staleness) versions older; the sampler is out of "
                "step with the trainer"
            )

    def _pushed(self, remote: Any) -> dict[str, float]:
        numbers = remote.push(self.update)
        if self._ahead is not None:
            self._ahead.updated(self.update)
        return numbers

    def _longest(self) -> int:
        """An upper bound of the tokens in a conversation: a prompt twice as long as the longest of the first 256, and all
        turns."""
        config = self.config
        prompt = max(len(self.text.prompt(self.environment.task(seed).prompt)) for seed in range(256))
        least = prompt + config.longest + (config.turns - 1) * config.max_reply_tokens
        most = self.model.config.max_position_embeddings
        if least > most:
            raise ValueError(
                f"a prompt of {prompt} tokens and its answers can have {least} tokens, but the model has only {most} "
                "positions; lower max_tokens or turns"
            )
        return min(prompt + least, most)


def _remote(config: RLConfig, model: Model, longest: int) -> Any:
    """`RemoteSamplers`; or on a Ray cluster `RaySamplers`, which has the same methods."""
    if config.on_ray:
        return needed(_RAY, "ray").RaySamplers(config, model, longest)
    return RemoteSamplers(config, model, longest)
