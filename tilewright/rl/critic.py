"""A critic, which estimates the future reward of a state, and the advantages of PPO. The critic is a copy of the policy, but
its head returns one number.

The value at token t belongs to the state in which t was chosen, so it is computed from the hidden state at position t - 1.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from tilewright.models import Model
from tilewright.rl.advantages import gae, whitened
from tilewright.rl.batch import Batch
from tilewright.rl.policy import hidden_of
from tilewright.rl.quantised import remove_quantised_weights

__all__ = ["Critic", "with_advantages"]


class Critic(nn.Module):
    """Estimates values with a model of the same shape as the policy, which begins with the policy's weights. The weights of its
    head begin at 0.

    The critic shares no weights with the policy, because its loss is many times larger than the policy's and would dominate.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body = deepcopy(model).requires_grad_(True)
        remove_quantised_weights(self.body)
        if self.body.head.weight is not self.body.embed.weight:
            self.body.head.requires_grad_(False)  # the head for tokens; the critic does not use it
        width, like = model.config.hidden_size, model.embed.weight
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=like.dtype, device=like.device))

    def forward(self, batch: Batch) -> Tensor:
        """[T] float32: the value of the state in which each token was chosen; 0 at each sequence's first token."""
        hidden_TE = hidden_of(self.body, batch)
        behind_T = nn.functional.linear(hidden_TE, self.weight)[:, 0].float()
        values = torch.cat([behind_T.new_zeros(1), behind_T[:-1]])
        return values.index_fill(0, batch.starts, 0.0)


def with_advantages(batch: Batch, values_T: Tensor, *, gamma: float, lam: float, whiten: bool) -> Batch:
    """The batch with the values, and with returns and advantages by GAE over the chosen tokens.

    The reward is given at the last chosen token of a sequence. The value after that token is 0, even if the answer was cut off.
    Tokens between chosen tokens, such as a reply, are not steps: the states before and after them count as neighbours.
    """
    counts, chosen = batch.counts().long(), batch.mask
    rewards = torch.zeros_like(values_T[chosen])
    some = counts > 0
    rewards[counts.cumsum(0)[some] - 1] = batch.rewards[some].to(rewards.dtype)
    found, returns = gae(rewards, values_T[chosen], counts, torch.zeros_like(batch.rewards), gamma=gamma, lam=lam)
    spread = [torch.zeros_like(values_T).masked_scatter(chosen, x) for x in (found, returns)]
    advantages = whitened(batch, spread[0]) if whiten else spread[0]
    return replace(batch, values=values_T, returns=spread[1], advantages=advantages)
