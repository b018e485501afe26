"""DAPO (Yu et al., 2025): GRPO with an upper clip that is wider than the lower one, and with a mean over tokens.

Its other parts are `advantages.informative` (dynamic sampling) and `advantages.overlong_penalty`.
"""

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import clipped, token_mean

__all__ = ["dapo"]


def dapo(logprobs_T: Tensor, batch: Batch, *, low: float = 0.2, high: float = 0.28) -> Tensor:
    """Minus the clipped surrogate: the mean over the update's chosen tokens."""
    return token_mean(batch, clipped(batch.log_ratio(logprobs_T), batch.known("advantages"), low, high))
