"""REINFORCE (Williams, 1992), as RLOO uses it (Ahmadian et al., Back to Basics, 2024): no ratio, no clip, whole answers."""

from torch import Tensor

from tilewright.rl.batch import Batch

__all__ = ["reinforce"]


def reinforce(logprobs_T: Tensor, batch: Batch) -> Tensor:
    """-A log p(answer), a mean over the step's answers; the log-probability of an answer is the sum over its tokens.

    For samples of the current weights; if `old` differs from them, the gradient is biased.
    """
    return -batch.sums(batch.known("advantages") * batch.chosen(logprobs_T)).sum() / batch.totals.of_sequences
