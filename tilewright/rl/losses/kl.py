"""Estimates of the KL divergence from a reference policy, computed from samples (Schulman, Approximating KL Divergence, 2020).

With x = log p_ref - log p for tokens sampled from p:

    k1 = -x             unbiased, high variance
    k2 = x^2 / 2        biased, low variance
    k3 = e^x - 1 - x    unbiased, never negative

If they are used as a loss, only k2 has, on average, the gradient of the KL divergence. The gradient of k1 is 0 on average.
"""

from collections.abc import Callable

from torch import Tensor

from tilewright.rl.batch import Batch
from tilewright.rl.losses.surrogate import token_mean

__all__ = ["ESTIMATORS", "penalty"]

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: x.expm1() - x,
}


def penalty(
    logprobs_T: Tensor,
    batch: Batch,
    coefficient: float,
    estimator: str = "k3",
    mean: Callable[[Batch, Tensor], Tensor] = token_mean,
) -> Tensor:
    """A term to add to a loss: the coefficient times the mean KL divergence from the batch's `reference`.

    Raises:
        ValueError: there is no such estimator, or the batch has no reference.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"the KL estimator is {estimator!r}, wanted one of {', '.join(ESTIMATORS)}")
    return coefficient * mean(batch, ESTIMATORS[estimator](batch.chosen(batch.known("reference")) - batch.chosen(logprobs_T)))
