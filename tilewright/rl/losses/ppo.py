"""PPO (Schulman et al., 2017): the clipped policy loss over tokens, and a critic's loss.

The usual implementation details (Huang et al., The 37 Implementation Details of PPO, 2022) are arguments or separate functions:
`advantages.whitened` normalises advantages, `entropy_bonus` is the entropy bonus, and `clip=` clips values.
"""

import torch
from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import clipped, token_mean

__all__ = ["entropy_bonus", "ppo", "value_loss"]


def ppo(logprobs_T: Tensor, batch: Batch, *, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Tensor:
    """Minus the clipped surrogate: the mean over the update's chosen tokens.

    dual: for negative advantages, the loss of a token is at most dual |A| (Ye et al., Mastering Complex Control, 2020: 3);
    None: no bound.
    """
    advantages = batch.known("advantages")
    loss = clipped(batch.log_ratio(logprobs_T), advantages, low, high)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return token_mean(batch, loss)


def value_loss(values_T: Tensor, batch: Batch, *, clip: float | None = 0.2) -> Tensor:
    """Half the squared error of the values: the mean over the update's chosen tokens.

    clip: if a value is further than this from its value at sampling time, moving it further does not reduce the loss; None: no
    bound.
    """
    returns = batch.known("returns")
    error = (values_T - returns) ** 2
    if clip is not None:
        before = batch.known("values")
        error = torch.maximum(error, (before + (values_T - before).clamp(-clip, clip) - returns) ** 2)
    return 0.5 * token_mean(batch, error)


def entropy_bonus(entropies_T: Tensor, batch: Batch, coefficient: float | Tensor) -> Tensor:
    """A term to add to a loss, so that the policy remains uncertain: -coefficient times the mean entropy."""
    return -coefficient * token_mean(batch, entropies_T)
