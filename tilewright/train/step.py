"""One step of training, as defined mathematically.

    loss  = (sum of the losses of all targets of all micro-batches) / (number of targets)
    grads = d loss / d weights,  summed over micro-batches by `sum_of`
    weights, moments = optimizer(grads, lr)          clips by the global norm and skips gradients that are not finite, on the
    device

Nothing waits for the device. The number of micro-batches and their distribution over ranks affect only the order of sums;
`tree_sum` makes that order depend only on the number of micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models import Model
from tilewright.nn import PackedKeysValues
from tilewright.parallel.reduce import running_sum, tree_sum
from tilewright.parallel.spread import Spread
from tilewright.parallel.vocabulary import SlicedHead
from tilewright.train.batch import IGNORED, TrainBatch
from tilewright.train.optim import Muon, Optimizer

__all__ = [
    "NextToken",
    "Objective",
    "Passes",
    "StepResult",
    "SumOf",
    "loss_and_grads",
    "plain_head",
    "running_sum",
    "spread_step",
    "train_step",
    "trainable",
    "tree_sum",
]


class Objective(Protocol):
    """A loss to minimise. `keys_values`: the value that it passes to the model's attention layers."""

    keys_values: PackedKeysValues

    def __call__(self, model: Model, batch: TrainBatch) -> Tensor:
        """The sum of the losses of the batch's targets, a scalar with a gradient."""
        ...

    def measures(self) -> dict[str, float]:
        """Further results for the log, about the batches since the last call; may wait for the device."""
        ...


SumOf = Callable[[Iterable[list[Tensor]]], list[Tensor]]
"""(loss, gradient, gradient ...) of each micro-batch, in order -> their sums."""


class StepResult(NamedTuple):
    """The result of a step, on the device."""

    loss: Tensor
    """Mean over the step's targets before the update, nats (float32, 0-dim), including what the objective adds."""
    norm: Tensor
    """Norm of all gradients together, before clipping."""
    applied: Tensor
    """1, or 0 if the norm was not finite and no weight was changed."""


class NextToken:
    """Cross-entropy of the next token; the logits of a batch are never stored completely.

    Args:
        z_loss: adds z_loss * (log of the softmax's sum)^2 to each loss (Chowdhery et al., "PaLM", 2022).
        label_smoothing: the share of the target that is spread evenly over all tokens.
        deterministic: the same batch always gives the same gradients.
    """

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0, deterministic: bool = False):
        self.z_loss, self.label_smoothing = z_loss, label_smoothing
        self.keys_values = PackedKeysValues(deterministic=deterministic)

    def __call__(self, model: Model, batch: TrainBatch) -> Tensor:
        """The sum over the batch's targets."""
        hidden_TE, last = model(batch.token_ids, batch.packed, self.keys_values), model.head
        if isinstance(last, SlicedHead):
            return last.loss(
                hidden_TE, batch.targets, ignore_index=IGNORED, label_smoothing=self.label_smoothing, z_loss=self.z_loss
            )
        head = plain_head(model)
        return ops.linear_cross_entropy(
            hidden_TE, head, batch.targets, model.head.bias, ignore_index=IGNORED, reduction="sum",
            label_smoothing=self.label_smoothing, z_loss=self.z_loss,
        )  # fmt: skip

    def measures(self) -> dict[str, float]:
        """Nothing besides the loss."""
        return {}


def plain_head(model: Model) -> Tensor:
    """The head's weight, for a loss that computes the logits itself. Raises TypeError if they are more than a product."""
    head = model.head.weight
    if not isinstance(head, Tensor):
        raise TypeError("the head is quantised, and a loss has no gradient through it: do not quantise lm_head")
    if model.config.logit_softcap is not None:
        raise TypeError("the model caps its logits (final_logit_softcapping), and this loss needs plain ones: set it to null")
    return head


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied parameter occurs once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def loss_and_grads(
    model: Model, objective: Objective, batches: Sequence[TrainBatch], n_targets: int
) -> Iterator[list[Tensor]]:  # fmt: skip
    """(loss, gradient of each of `trainable(model)`) for each micro-batch, as parts of the mean over `n_targets`."""
    weights = list(trainable(model).values())
    for batch in batches:
        loss = objective(model, batch) / n_targets
        yield [loss.detach(), *torch.autograd.grad(loss, weights)]


Passes = Callable[[Model, Objective, Sequence[TrainBatch], int], Iterable[list[Tensor]]]
"""`loss_and_grads`, or an equivalent: `train.captured`."""


def train_step(
    model: Model, optimizer: Optimizer | Muon, batches: Sequence[TrainBatch], lr: float, objective: Objective, sum_of: SumOf,
    passes: Passes = loss_and_grads,
) -> StepResult:  # fmt: skip
    """Update the weights once, from all of `batches` together. Raises ValueError if there are no targets."""
    n_targets = sum(batch.n_targets for batch in batches)
    if not n_targets:
        raise ValueError("train_step: no position of this step's batches has a target; check what the data masks")
    loss, *grads = sum_of(passes(model, objective, batches, n_targets))
    norm, applied = optimizer.step(dict(zip(trainable(model), grads, strict=True)), lr)
    return StepResult(loss, norm, applied)


def spread_step(
    spread: Spread, optimizer: Optimizer | Muon, batches: Sequence[TrainBatch], n_targets: int, lr: float, objective: Objective
) -> StepResult:
    """`train_step` on one of many ranks: `batches` are its own, `n_targets` counts all ranks. Raises ValueError if it is 0."""
    if not n_targets:
        raise ValueError("spread_step: no position of this step's batches has a target; check what the data masks")

    def loss_of(model: Model, batch: TrainBatch) -> Tensor:
        return objective(model, batch) / n_targets

    loss, grads = spread.gradients(batches, loss_of, objective.keys_values)
    norm, applied = optimizer.step(grads, lr, squares=spread.squares(grads))
    spread.share()
    return StepResult(loss, norm, applied)
