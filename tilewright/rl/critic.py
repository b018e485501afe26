"""A critic: what reward a state still promises, by a copy of the policy with one number for a head; and what PPO makes of it.

Values belong to choices: the value at token t is that of the state in which t was chosen, so it is read behind t - 1.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from tilewright.models import Model
from tilewright.rl.advantages import gae, whitened
from tilewright.rl.batch import Batch
from tilewright.rl.policy import hidden_of
from tilewright.rl.quantised import uncode

__all__ = ["Critic", "with_advantages"]


class Critic(nn.Module):
    """Value estimates by a model of the policy's shape, which begins with its weights. The head begins at 0.

    It shares no weights with the policy: its loss is many times larger, and would drown the policy's.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body = deepcopy(model).requires_grad_(True)
        uncode(self.body)
        if self.body.head.weight is not self.body.embed.weight:
            self.body.head.requires_grad_(False)  # words, which a critic has none of
        width, like = model.config.hidden_size, model.embed.weight
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=like.dtype, device=like.device))

    def forward(self, batch: Batch) -> Tensor:
        """[T] float32: the value of the state that each token was chosen in; 0 at each sequence's first token."""
        hidden_TE = hidden_of(self.body, batch)
        behind_T = nn.functional.linear(hidden_TE, self.weight)[:, 0].float()
        values = torch.cat([behind_T.new_zeros(1), behind_T[:-1]])
        return values.index_fill(0, batch.starts, 0.0)


def with_advantages(batch: Batch, values_T: Tensor, *, gamma: float, lam: float, whiten: bool) -> Batch:
    """The batch with values, returns and advantages by GAE over its chosen tokens.

    The reward comes with the last chosen token of a sequence, and nothing is promised behind it, also where an answer was cut.
    What stands between chosen tokens, such as a reply, is no step: the state before it and the one behind are neighbours.
    """
    counts, chosen = batch.counts().long(), batch.mask
    rewards = torch.zeros_like(values_T[chosen])
    some = counts > 0
    rewards[counts.cumsum(0)[some] - 1] = batch.rewards[some].to(rewards.dtype)
    found, returns = gae(rewards, values_T[chosen], counts, torch.zeros_like(batch.rewards), gamma=gamma, lam=lam)
    spread = [torch.zeros_like(values_T).masked_scatter(chosen, x) for x in (found, returns)]
    advantages = whitened(batch, spread[0]) if whiten else spread[0]
    return replace(batch, values=values_T, returns=spread[1], advantages=advantages)
