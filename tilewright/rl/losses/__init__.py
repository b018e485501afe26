"""The algorithms by name. An algorithm defines how rewards become advantages, and a loss. To add one, add a file and a line
here.

Every loss is a function of the batch and of the log-probabilities [T] of its tokens under the current weights. It returns a
scalar. The scalars of micro-batches and ranks add up to the loss of the whole update.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tilewright.rl.advantages import group_centered, group_normalised, leave_one_out
from tilewright.rl.batch import Batch
from tilewright.rl.losses.cispo import cispo
from tilewright.rl.losses.dapo import dapo
from tilewright.rl.losses.dr_grpo import dr_grpo
from tilewright.rl.losses.grpo import grpo
from tilewright.rl.losses.gspo import gspo
from tilewright.rl.losses.ppo import ppo
from tilewright.rl.losses.reinforce import reinforce
from tilewright.rl.losses.reinforce_plus_plus import discounted_whitened

__all__ = ["ALGORITHMS", "Algorithm"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """`advantages`: batch -> [T]; None: a critic computes them (`gae`). `loss`: (log-probabilities [T], batch, options) ->
    scalar."""

    advantages: Callable[[Batch], Tensor] | None
    loss: Callable[..., Tensor]


ALGORITHMS = {
    "ppo": Algorithm(advantages=None, loss=ppo),
    "reinforce++": Algorithm(advantages=discounted_whitened, loss=ppo),
    "rloo": Algorithm(advantages=leave_one_out, loss=reinforce),
    "grpo": Algorithm(advantages=group_normalised, loss=grpo),
    "dr-grpo": Algorithm(advantages=group_centered, loss=dr_grpo),
    "dapo": Algorithm(advantages=group_normalised, loss=dapo),
    "gspo": Algorithm(advantages=group_normalised, loss=gspo),
    "cispo": Algorithm(advantages=group_normalised, loss=cispo),
}
