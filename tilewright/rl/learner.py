"""The learning half of a step: the policy, an optional critic, an optional frozen reference, the optimizers, and statistics."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.models import Model
from tilewright.op import invariant
from tilewright.rl.advantages import overlong_penalty
from tilewright.rl.batch import Batch, Totals, select, split
from tilewright.rl.captured import CapturedPasses, check_graphs
from tilewright.rl.config import RLConfig
from tilewright.rl.critic import Critic, with_advantages
from tilewright.rl.losses import ALGORITHMS
from tilewright.rl.losses.correction import masked, truncated
from tilewright.rl.losses.kl import penalty
from tilewright.rl.losses.ppo import entropy_bonus, value_loss
from tilewright.rl.policy import logprobs_and_entropies_of, logprobs_of, support_of
from tilewright.rl.quantised import requantise
from tilewright.rl.stats import measure
from tilewright.train.optim import AdamW
from tilewright.train.step import running_sum, trainable

__all__ = ["Learner"]

_CORRECTIONS: dict[str, Callable[[Batch], Batch]] = {"none": lambda batch: batch, "truncated": truncated, "masked": masked}


class Learner:
    """Learns from batches. Create it before anything else reads the model's parameters, because the optimizer moves them to
    other memory.

    Raises:
        ValueError: the parameters have several dtypes, or `graphs` is set and the passes cannot be captured.
    """

    def __init__(self, config: RLConfig, model: Model) -> None:
        self.config, self.model = config, model
        if config.graphs:
            check_graphs(model)
        self._optimizer = AdamW(trainable(model), weight_decay=0.0, max_norm=config.max_norm)
        self._reference = deepcopy(model).requires_grad_(False) if config.kl else None
        self.critic: Critic | None = None
        if ALGORITHMS[config.algorithm].advantages is None:
            self.critic = Critic(model)
            self._critic_optimizer = AdamW(trainable(self.critic), weight_decay=0.0, max_norm=config.max_norm)
        self._loss_of = partial(ALGORITHMS[config.algorithm].loss, **self._options())
        self.captured = CapturedPasses(model, self._policy_pass, config.tokens_per_pass) if config.graphs else None
        """The policy's passes, if they are captured. Created after the optimizer, which moves the parameters."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that later updates depend on, by name. The reference is not included, because it is the initial model."""
        found = self._optimizer.state_dict()
        if self.critic is not None:
            found |= {f"critic.{name}": tensor for name, tensor in self._critic_optimizer.state_dict().items()}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved state. Raises ValueError if it is for another model or algorithm."""
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("critic.")}
        self._optimizer.load_state_dict(own)
        requantise(self.model)
        if self.critic is not None:
            critic = {name.removeprefix("critic."): x for name, x in tensors.items() if name.startswith("critic.")}
            self._critic_optimizer.load_state_dict(critic)

    def learn(self, batch: Batch, update: int) -> dict[str, float]:
        """Update the weights from the samples of a step. `update`: the number of earlier steps. Returns the statistics of the
        step."""
        with self._kernels():
            return self._learn(self._prepared(batch, update), update)

    def _kernels(self) -> AbstractContextManager[Any]:
        return invariant() if self.config.invariant else nullcontext()

    def _once(self, update: int) -> bool:
        """Whether the step makes a single update. Then the pass of this update also gives the old log-probabilities, and no
        separate pass is needed."""
        config = self.config
        policy_learns = self.critic is None or update >= config.critic_warmup
        return policy_learns and config.epochs * config.minibatches == 1 and config.correction == "none"

    def _trusts(self, update: int) -> bool:
        """Whether the sampler's log-probabilities are used as the old ones although the step makes several updates. The config
        then promises that they have the same bits as the trainer's. The pass of the first update shows whether they do."""
        config = self.config
        policy_learns = self.critic is None or update >= config.critic_warmup
        exact = config.invariant and not config.sampler and config.correction == "none"
        return exact and policy_learns and not self._once(update)

    @torch.no_grad()
    def _over(self, batch: Batch, values_of: Callable[[Batch], Tensor]) -> Tensor:
        return torch.cat([values_of(part) for part in split(batch, self.config.tokens_per_pass)])

    def _logprobs(self, batch: Batch) -> Tensor:
        """[T]: the policy's log-probabilities, without gradients."""
        return self._over(batch, partial(logprobs_of, self.model)) if self.captured is None else self.captured.logprobs(batch)

    def _prepared(self, batch: Batch, update: int) -> Batch:
        """The batch with advantages; where needed, also with the trainer's log-probabilities before the first update, and with
        those of the reference."""
        config = self.config
        if config.drawing.filters:
            width = max(1, int(batch.known("kept").max()))
            batch = replace(batch, support=self._over(batch, partial(support_of, self.model, width=width)))
        if not (self._once(update) or self._trusts(update)):
            batch = replace(batch, old=self._logprobs(batch))
        if self._reference is not None:
            batch = replace(batch, reference=self._over(batch, partial(logprobs_of, self._reference)))
        rewarded = batch
        if config.overlong:
            rewarded = replace(batch, rewards=batch.rewards + overlong_penalty(batch.counts(), config.longest, config.overlong))
        advantages = ALGORITHMS[config.algorithm].advantages
        if advantages is not None:
            return _CORRECTIONS[config.correction](replace(batch, advantages=advantages(rewarded)))
        assert self.critic is not None
        values = self._over(batch, self.critic)
        found = with_advantages(rewarded, values, gamma=config.gamma, lam=config.lam, whiten=config.whiten)
        return _CORRECTIONS[config.correction](replace(found, rewards=batch.rewards))

    def _learn(self, batch: Batch, update: int) -> dict[str, float]:
        config = self.config
        left = max(0.0, min(1.0, (config.updates - update) / max(1.0, config.decay * config.updates)))
        rate = left * min(1.0, (update + 1) / max(1, config.warmup))
        generator = torch.Generator().manual_seed(config.seed + update)
        results: dict[str, Tensor] = {}  # stays on the device until all updates are launched, so that the host does not wait
        sampled, counts = batch, [int(count) for count in batch.counts().tolist()]
        first: tuple[Tensor, Batch] | None = None
        """(log-probabilities before the first update, the samples of this update)."""
        bonus = left * config.entropy_bonus
        for _ in range(config.epochs):
            for kept in torch.randperm(len(counts), generator=generator).chunk(config.minibatches):
                own = [counts[i] for i in kept.tolist()]
                totals = Totals(tokens=sum(own), sequences=sum(count > 0 for count in own))
                chosen = replace(select(batch, kept), totals=totals)
                if self.critic is not None:
                    result = running_sum(self._critic_parts(self.critic, chosen))
                    grads = dict(zip(trainable(self.critic), result[1:]))
                    norm, _ = self._critic_optimizer.step(grads, config.critic_learning_rate * rate)
                    results |= {"value_loss": result[0], "value_norm": norm}
                if self.critic is None or update >= config.critic_warmup:
                    seen: list[Tensor] = []
                    if self.captured is not None:
                        result = self.captured.gradients(chosen, bonus, seen, self._once(update))
                    else:
                        result = running_sum(self._policy_parts(chosen, bonus, seen, self._once(update)))
                    grads = dict(zip(trainable(self.model), result[1:]))
                    norm, applied = self._optimizer.step(grads, config.learning_rate * rate)
                    requantise(self.model)
                    results |= {"loss": result[0], "norm": norm, "applied": applied}
                    first = (torch.cat(seen), chosen) if first is None else first
        if self._once(update) and first is not None:
            batch = replace(first[1], old=first[0])
        stats = {"entropy": -float(sampled.sampled[sampled.mask].mean()), **{name: float(x) for name, x in results.items()}}
        # Ratios of the trainer's probabilities before the first update to the sampler's. If the sampler's are trusted, `old` is
        # equal to them here, and the real ratios are measured below.
        stats |= measure(batch.old, replace(batch, old=batch.sampled))
        if self._trusts(update) and first is not None:
            real = measure(first[0], first[1])
            stats |= {name: real[name] for name in ("ratio", "ratio_off", "clip_share", "kl")}
        if self.critic is not None:
            stats["explained"] = _explained(batch)
        if not config.moved_every or (update + 1) % config.moved_every:
            return stats
        # Measure how far the updates of this step have moved the policy.
        moved = measure(self._logprobs(batch), batch)
        return stats | {f"{name}_after": moved[name] for name in ("ratio", "clip_share", "kl")}

    def _options(self) -> dict[str, Any]:
        config = self.config
        if config.algorithm == "dr-grpo":
            return {"longest": config.longest}
        return {"dual": config.dual_clip or None} if config.algorithm == "ppo" else {}

    def _policy_parts(self, batch: Batch, bonus: float, seen: list[Tensor], on_policy: bool) -> Iterator[list[Tensor]]:
        """Loss and gradients of each pass. seen: a list to which the log-probabilities of the passes are appended. on_policy:
        whether the old log-probabilities are those of this pass."""
        for part in split(batch, self.config.tokens_per_pass):
            loss, logprobs = self._policy_pass(part, bonus or None, on_policy)
            seen.append(logprobs.detach())
            yield [loss.detach(), *torch.autograd.grad(loss, list(trainable(self.model).values()))]

    def _policy_pass(self, part: Batch, bonus: float | Tensor | None, on_policy: bool) -> tuple[Tensor, Tensor]:
        """(loss, log-probabilities [T]) of a part, with gradients. bonus: coefficient of the entropy bonus; None: no bonus.
        on_policy: whether the old log-probabilities are those of this pass."""
        if bonus is None:
            logprobs, entropies = logprobs_of(self.model, part), None
        else:
            logprobs, entropies = logprobs_and_entropies_of(self.model, part)
        if on_policy:
            part = replace(part, old=logprobs.detach())
        loss = self._loss_of(logprobs, part)
        if bonus is not None and entropies is not None:
            loss = loss + entropy_bonus(entropies, part, bonus)
        if self.config.kl:
            loss = loss + penalty(logprobs, part, self.config.kl, self.config.kl_estimator)
        return loss, logprobs

    def _critic_parts(self, critic: Critic, batch: Batch) -> Iterator[list[Tensor]]:
        for part in split(batch, self.config.tokens_per_pass):
            loss = value_loss(critic(part), part, clip=self.config.value_clip or None)
            yield [loss.detach(), *torch.autograd.grad(loss, list(trainable(critic).values()))]


def _explained(batch: Batch) -> float:
    """The share of the variance of the returns that the values at sampling time explain. 1: all of it; 0: no more than a
    constant."""
    returns, values = batch.known("returns")[batch.mask], batch.known("values")[batch.mask]
    spread = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
