"""CISPO (MiniMax-M1, 2025): the clipped ratio is a weight without a gradient, so every token keeps its gradient."""

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import token_mean

__all__ = ["cispo"]


def cispo(logprobs_T: Tensor, batch: Batch, *, low: float = 1.0, high: float = 0.28) -> Tensor:
    """-clip(r, 1 - low, 1 + high) A log p, without a gradient through the clipped ratio: the mean over the update's chosen
    tokens."""
    weight = batch.log_ratio(logprobs_T).exp().clamp(1 - low, 1 + high).detach()
    return -token_mean(batch, weight * batch.known("advantages") * batch.chosen(logprobs_T))
