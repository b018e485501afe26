"""REINFORCE++ (Hu et al., 2025): PPO's loss without a critic. The advantage is the reward minus the KL summed up to the end of
the answer, normalised over the batch."""

from torch import Tensor

from tilewright.rl.advantages import gae, whitened
from tilewright.rl.batch import Batch

__all__ = ["discounted_whitened"]


def discounted_whitened(batch: Batch, *, kl_coefficient: float = 0.0) -> Tensor:
    """Advantages [T]: the reward of the answer, minus `kl_coefficient` times the KL (k1) of this and all later tokens;
    whitened.

    The loss for them is `ppo`. The KL needs the batch's `reference`.
    """
    rewards = batch.spread(batch.rewards)
    if kl_coefficient:
        kl = (batch.old - batch.known("reference")).masked_fill(~batch.mask, 0.0)
        # With values of 0, lambda 1 and gamma 1, GAE is the sum of future rewards.
        rewards = (
            rewards
            + gae(
                -kl_coefficient * kl,
                kl.new_zeros(kl.shape),
                batch.lengths,
                batch.rewards.new_zeros(len(batch.lengths)),
                lam=1.0,
            )[0]
        )
    return whitened(batch, rewards)
