"""Reinforcement learning in one process: sample with the engine, score in workers, learn with the trainer's step.

Sampler and trainer share one set of parameters: nothing is copied or synchronised. What the trainer's pass over the packed
samples says of their probabilities is compared with what the engine said at every step (`ratio_off`).
"""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.models import Model, random_model
from tilewright.models.config import ModelConfig
from tilewright.rl.batch import Batch, Sample, Totals, pack, select, split
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig
from tilewright.rl.environments.base import Task
from tilewright.rl.environments.named import environment
from tilewright.rl.environments.workers import Workers
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.losses.kl import penalty
from tilewright.rl.losses.ppo import entropy_bonus
from tilewright.rl.policy import logprobs_and_entropies_of, logprobs_of
from tilewright.rl.rollout import Answer, Sampler
from tilewright.rl.stats import measure
from tilewright.train.optim import AdamW
from tilewright.train.step import running_sum, trainable

__all__ = ["Trainer", "small_model"]

_HEAD_DIM = 16
_HEAD_SCALE = 0.1
"""The random head is made this much smaller, so that the first answers are nearly uniform over the characters."""


def small_model(config: RLConfig) -> Model:
    """A decoder of characters with random weights."""
    heads = config.hidden // _HEAD_DIM
    shape = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=Characters(config.alphabet).vocab,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2048,
        windows=(None,) * config.layers,
    )
    model = random_model(shape, device="cpu", dtype=torch.float32, seed=config.seed)
    assert isinstance(model.head.weight, Tensor)
    model.head.weight.data.mul_(_HEAD_SCALE)
    return model.requires_grad_(True)


class Trainer:
    """Updates a model by the config. Iterate over it: one dict of numbers a step. Use it as a context: workers end with it."""

    def __init__(self, config: RLConfig, model: Model | None = None) -> None:
        self.config = config
        self.environment = environment(config.environment)
        self.text = Characters(config.alphabet)
        self.model = model or small_model(config)
        # Before the sampler: the optimizer moves the parameters into memory of its own.
        self.optimizer = AdamW(trainable(self.model), weight_decay=0.0, max_norm=config.max_norm)
        self.reference = deepcopy(self.model).requires_grad_(False) if config.kl else None
        longest = max(len(self.text.encode(self.environment.task(seed).prompt)) for seed in range(256)) + config.max_tokens
        self.sampler = Sampler(self.model, max_len=2 * longest, seqs=256, end_ids=(self.text.end,))
        self.workers = Workers(config.environment, count=config.reward_workers, timeout_s=config.reward_timeout_s)
        self.update = 0

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.workers.__exit__(None, None, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.update < self.config.updates:
            yield self.step()

    def step(self) -> dict[str, Any]:
        """Sample, score, learn once."""
        began = time.perf_counter()
        seeds = range(self.update * self.config.prompts, (self.update + 1) * self.config.prompts)
        tasks = [self.environment.task(seed) for seed in seeds]
        answers = self.sample(tasks, self.config.answers, self.config.seed + self.update)
        sampled = time.perf_counter()
        samples = self._scored(tasks, answers)
        scored = time.perf_counter()
        if not samples:
            raise ValueError(
                f"no answer of step {self.update} got a reward: {dict(self.workers.failures)}; {self.workers.last_error}"
            )
        batch = self._prepared(pack(samples))
        stats = self._learn(batch)
        self.update += 1
        done = time.perf_counter()
        exact = sum(sample.reward >= 1.0 for sample in samples) / len(samples)
        return {
            "update": self.update,
            "exact": exact,
            **stats,
            "lost": len(tasks) * self.config.answers - len(samples),
            "seconds": done - began,
            "sampling": (sampled - began) / (done - began),
            "scoring": (scored - sampled) / (done - began),
        }

    def sample(self, tasks: Sequence[Task], answers: int, seed: int) -> list[list[Answer]]:
        """Answers of the current weights."""
        prompts = [self.text.encode(task.prompt) for task in tasks]
        return self.sampler(prompts, answers=answers, max_tokens=self.config.max_tokens, seed=seed)

    def _scored(self, tasks: Sequence[Task], answers: Sequence[Sequence[Answer]]) -> list[Sample]:
        flat = [(group, task, answer) for group, (task, given) in enumerate(zip(tasks, answers)) for answer in given]
        rewards = self.workers.score([task for _, task, _ in flat], [self.text.decode(answer.tokens) for _, _, answer in flat])
        samples = []
        for (group, task, answer), reward in zip(flat, rewards):
            if reward is not None:
                prompt = self.text.encode(task.prompt)
                samples.append(
                    Sample(
                        tokens=prompt + answer.tokens,
                        chosen=[False] * len(prompt) + [True] * len(answer.tokens),
                        logprobs=[0.0] * len(prompt) + answer.logprobs,
                        reward=reward,
                        group=group,
                        version=self.update,
                        truncated=answer.truncated,
                    )
                )
        return samples

    def _prepared(self, batch: Batch) -> Batch:
        """With the trainer's own log-probabilities before the first update, the reference's, and advantages."""
        parts = split(batch, self.config.tokens_per_pass)
        with torch.no_grad():
            batch = replace(batch, old=torch.cat([logprobs_of(self.model, part) for part in parts]))
            if self.reference is not None:
                batch = replace(batch, reference=torch.cat([logprobs_of(self.reference, part) for part in parts]))
        advantages = ALGORITHMS[self.config.algorithm].advantages
        assert advantages is not None
        return replace(batch, advantages=advantages(batch))

    def _learn(self, batch: Batch) -> dict[str, Any]:
        config = self.config
        options = {"longest": config.max_tokens} if config.algorithm == "dr-grpo" else {}
        loss_of = partial(ALGORITHMS[config.algorithm].loss, **options)
        rate = config.learning_rate * min(1.0, (self.update + 1) / max(1, config.warmup))
        generator = torch.Generator().manual_seed(config.seed + self.update)
        # On policy the trainer's probabilities are the sampler's, and every ratio is 1; this is what they really are.
        stats: dict[str, Any] = measure(batch.old, replace(batch, old=batch.sampled))
        stats["entropy"] = -float(batch.sampled[batch.mask].mean())
        for _ in range(config.epochs):
            for kept in torch.randperm(len(batch.lengths), generator=generator).chunk(config.minibatches):
                chosen = select(batch, kept)
                counts = chosen.counts()
                chosen = replace(chosen, totals=Totals(tokens=int(counts.sum()), sequences=int((counts > 0).sum())))
                result = running_sum(self._parts(chosen, loss_of))
                norm, applied = self.optimizer.step(dict(zip(trainable(self.model), result[1:])), rate)
                stats |= {"loss": float(result[0]), "norm": float(norm), "applied": float(applied)}
        # How far the updates of this step have moved the policy.
        with torch.no_grad():
            parts = split(batch, config.tokens_per_pass)
            moved = measure(torch.cat([logprobs_of(self.model, part) for part in parts]), batch)
        return stats | {f"{name}_after": moved[name] for name in ("ratio", "clip_share", "kl")}

    def _parts(self, batch: Batch, loss_of: Any) -> Iterator[list[Tensor]]:
        for part in split(batch, self.config.tokens_per_pass):
            if self.config.entropy_bonus:
                logprobs, entropies = logprobs_and_entropies_of(self.model, part)
                loss = loss_of(logprobs, part) + entropy_bonus(entropies, part, self.config.entropy_bonus)
            else:
                logprobs = logprobs_of(self.model, part)
                loss = loss_of(logprobs, part)
            if self.config.kl:
                loss = loss + penalty(logprobs, part, self.config.kl, self.config.kl_estimator)
            yield [loss.detach(), *torch.autograd.grad(loss, list(trainable(self.model).values()))]
