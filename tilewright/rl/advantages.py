"""Advantages [T] from rewards: by a critic (GAE), relative to the other answers to a prompt, or relative to the whole batch.

A sequence without chosen tokens counts as a member of its group like any other: an empty answer also has a reward.
"""

import torch
from torch import Tensor

from tilewright.rl.batch import Batch

__all__ = ["gae", "group_centered", "group_normalised", "informative", "leave_one_out", "overlong_penalty", "whitened"]


def gae(
    rewards_T: Tensor, values_T: Tensor, lengths_S: Tensor, after_S: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016). Returns advantages [T] and returns [T].

    rewards_T: the reward of each step, for all sequences one after the other. values_T: the critic's value of the state before
    each step. lengths_S: the number of steps in each sequence. after_S: the value of the state after a sequence's last step: 0
    if the sequence ended there, the critic's estimate if it was cut off. For a language model with one reward per answer, a
    step is a chosen token.
    """
    size, longest = len(lengths_S), int(lengths_S.max()) if len(lengths_S) else 0
    inside = torch.arange(longest, device=lengths_S.device) < lengths_S[:, None]
    rewards, values = (x.new_zeros(size, longest).masked_scatter(inside, x) for x in (rewards_T, values_T))
    advantages, running = torch.zeros_like(rewards), rewards.new_zeros(size)
    following = after_S.to(rewards.dtype)
    for t in range(longest - 1, -1, -1):
        step = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        here = inside[:, t]
        running = torch.where(here, step, running)
        following = torch.where(here, values[:, t], following)
        advantages[:, t] = running
    found = advantages[inside]
    return found, found + values_T


def group_normalised(batch: Batch, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (standard deviation + eps) over the answers to a prompt (GRPO: Shao et al., 2024). 0 for a single answer."""
    mean, spread, count = _groups(batch)
    return batch.spread(torch.where(count > 1, (batch.rewards - mean) / (spread + eps), 0.0))


def group_centered(batch: Batch) -> Tensor:
    """r - mean over the answers to a prompt (Dr. GRPO: Liu et al., 2025)."""
    return batch.spread(batch.rewards - _groups(batch)[0])


def leave_one_out(batch: Batch) -> Tensor:
    """r - mean of the other answers to the prompt (RLOO: Kool et al., 2019; Ahmadian et al., 2024). 0 for a single answer."""
    mean, _, count = _groups(batch)
    return batch.spread((batch.rewards - mean) * count / (count - 1).clamp(min=1))


def whitened(batch: Batch, x_T: Tensor, *, center: bool = True, eps: float = 1e-8) -> Tensor:
    """x divided by its standard deviation over all chosen tokens of the batch. With `center`, the mean over these tokens is
    subtracted first. Pass the batch of the whole step, because micro-batches have other means and deviations."""
    chosen = x_T[batch.mask]
    mean = chosen.mean() if center else 0.0
    return (x_T - mean) / (chosen.std(correction=0) + eps)


def informative(batch: Batch) -> Tensor:
    """[S] bool: whether the rewards in the sequence's group differ. Groups with equal rewards have no gradient; DAPO (Yu et
    al., 2025) replaces them."""
    highest, lowest = (
        batch.rewards.new_zeros(_count(batch)).scatter_reduce(0, _index(batch), batch.rewards, how, include_self=False)
        for how in ("amax", "amin")
    )
    return (highest > lowest)[_index(batch)]


def overlong_penalty(lengths_S: Tensor, limit: int, buffer: int) -> Tensor:
    """[S]: a term to add to the rewards, which punishes long answers (DAPO, equation 13). It is 0 up to limit - buffer tokens,
    -1 from `limit` tokens on, and linear in between."""
    return ((limit - buffer - lengths_S) / buffer).clamp(-1.0, 0.0)


def _index(batch: Batch) -> Tensor:
    return torch.unique(batch.groups, return_inverse=True)[1]


def _count(batch: Batch) -> int:
    return len(torch.unique(batch.groups))


def _groups(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """For each sequence [S]: the mean, the standard deviation (over n - 1) and the size of its group."""
    index = _index(batch)
    zeros = batch.rewards.new_zeros(_count(batch))
    count = zeros.index_add(0, index, torch.ones_like(batch.rewards))
    mean = zeros.index_add(0, index, batch.rewards) / count
    squares = zeros.index_add(0, index, (batch.rewards - mean[index]) ** 2)
    spread = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean[index], spread[index], count[index]
