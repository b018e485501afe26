"""REINFORCE (Williams, 1992), as in RLOO (Ahmadian et al., Back to Basics, 2024): no ratio, no clipping, whole answers."""

from torch import Tensor

from tilewright.rl.batch import Batch

__all__ = ["reinforce"]


def reinforce(logprobs_T: Tensor, batch: Batch) -> Tensor:
    """-A log p(answer): the mean over the update's answers. The log-probability of an answer is the sum over its tokens.

    This is for samples from the current weights. If `old` differs from their log-probabilities, the gradient is biased.
    """
    return -batch.sums(batch.known("advantages") * batch.chosen(logprobs_T)).sum() / batch.totals.of_sequences
