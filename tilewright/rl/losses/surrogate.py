"""Common parts of the losses: the clipped ratio, and the ways to average over tokens."""

import torch
from torch import Tensor

from tilewright.rl.batch import Batch

__all__ = ["clipped", "sequence_mean", "token_mean"]


def clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio) (Schulman et al., Proximal Policy Optimization, 2017)."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def token_mean(batch: Batch, loss_T: Tensor) -> Tensor:
    """Every chosen token of the step has the same weight, so long answers have more."""
    return batch.total(loss_T) / batch.totals.of_tokens


def sequence_mean(batch: Batch, loss_T: Tensor) -> Tensor:
    """Every answer of the step has the same weight: the mean over its chosen tokens, then over answers."""
    return (batch.sums(loss_T) / batch.counts().clamp(min=1)).sum() / batch.totals.of_sequences
