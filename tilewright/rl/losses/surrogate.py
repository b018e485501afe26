"""Common parts of the losses: the clipped ratio, and two ways to average over tokens."""

import torch
from torch import Tensor

from tilewright.rl.batch import Batch

__all__ = ["clipped", "sequence_mean", "token_mean"]


def clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio) (Schulman et al., Proximal Policy Optimization, 2017)."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def token_mean(batch: Batch, loss_T: Tensor) -> Tensor:
    """The mean over all chosen tokens of the update. Each token has the same weight, so long answers have more weight."""
    return batch.total(loss_T) / batch.totals.of_tokens


def sequence_mean(batch: Batch, loss_T: Tensor) -> Tensor:
    """The mean over each answer's chosen tokens, then over the answers of the update. Each answer has the same weight."""
    return (batch.sums(loss_T) / batch.counts().clamp(min=1)).sum() / batch.totals.of_sequences
