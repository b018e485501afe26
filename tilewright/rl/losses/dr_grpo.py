"""Dr. GRPO (Liu et al., Understanding R1-Zero-Like Training, 2025): GRPO with a loss that is not normalised by answer
length."""

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import clipped

__all__ = ["dr_grpo"]


def dr_grpo(logprobs_T: Tensor, batch: Batch, *, longest: int, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Minus the clipped surrogate: the sum over tokens, divided by `longest` (the limit of an answer) and by the number of
    answers of the update."""
    loss = clipped(batch.log_ratio(logprobs_T), batch.known("advantages"), low, high)
    return batch.total(loss) / (longest * batch.totals.of_sequences)
