"""GRPO (Shao et al., DeepSeekMath, 2024): PPO's clipping, with advantages relative to the group; a mean over each answer."""

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import clipped, sequence_mean

__all__ = ["grpo"]


def grpo(logprobs_T: Tensor, batch: Batch, *, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Minus the clipped surrogate: the mean over each answer's tokens, then over the update's answers. For a KL term, add
    `kl.penalty`."""
    return sequence_mean(batch, clipped(batch.log_ratio(logprobs_T), batch.known("advantages"), low, high))
