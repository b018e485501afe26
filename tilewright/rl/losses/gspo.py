"""GSPO (Zheng et al., Group Sequence Policy Optimization, 2025): one ratio for each answer, clipped as a whole."""

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import clipped

__all__ = ["gspo"]


def gspo(logprobs_T: Tensor, batch: Batch, *, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """Minus the clipped surrogate of s = exp(mean over the answer's tokens of log(p / p_old)): the mean over the update's
    answers."""
    count = batch.counts()
    weight = count.clamp(min=1)
    advantages = batch.sums(batch.known("advantages")) / weight
    loss = clipped(batch.sums(batch.log_ratio(logprobs_T)) / weight, advantages, low, high)
    return (loss * (count > 0)).sum() / batch.totals.of_sequences
