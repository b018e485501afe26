"""One training step (update), in mathematical terms.

    loss  = (sum of the losses of all targets of all micro-batches) / (number of targets)
    grads = d loss / d weights,  summed over micro-batches by `sum_of`
    weights, moments = optimizer(grads, lr)

The optimizer clips gradients by their global norm, and skips the update if they are not finite. It does both on the device, so
nothing waits for the device. The number of micro-batches and their distribution over ranks affect only the order of sums. With
`tree_sum`, this order depends only on the number of micro-batches.
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
    """A loss to minimise. `keys_values`: the value that the objective passes to the model's attention layers."""

    keys_values: PackedKeysValues

    def __call__(self, model: Model, batch: TrainBatch) -> Tensor:
        """The sum of the losses over the batch's targets: a scalar with a gradient."""
        ...

    def measures(self) -> dict[str, float]:
        """Further results for the log, about all batches since the last call. May wait for the device."""
        ...


SumOf = Callable[[Iterable[list[Tensor]]], list[Tensor]]
"""(loss, gradient, gradient ...) of each micro-batch, in order -> their sums over the micro-batches."""


class StepResult(NamedTuple):
    """The result of a step, on the device."""

    loss: Tensor
    """Mean loss over the step's targets, before the update, in nats (float32, 0-dim). It includes terms that the objective
    adds."""
    norm: Tensor
    """Norm of all gradients together, before clipping. float64, 0-dim."""
    applied: Tensor
    """1 if the update was applied; 0 if the norm was not finite, so that no weight was changed. float64, 0-dim."""


class NextToken:
    """Cross-entropy of the next token. Only a part of a batch's logits is stored at any time.

    Args:
        z_loss: adds z_loss * (log of the sum of the exponentials of the logits)^2 to the loss of each target (Chowdhery et al.,
            "PaLM", 2022).
        label_smoothing: the share of the target probability that is spread evenly over all tokens.
        deterministic: the same batch always gives the same gradients.
    """

    def __init__(self, *, z_loss: float = 0.0, label_smoothing: float = 0.0, deterministic: bool = False):
        self.z_loss, self.label_smoothing = z_loss, label_smoothing
        self.keys_values = PackedKeysValues(deterministic=deterministic)

    def __call__(self, model: Model, batch: TrainBatch) -> Tensor:
        """The sum of the losses over the batch's targets."""
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
        """Empty: there are no results other than the loss."""
        return {}


def plain_head(model: Model) -> Tensor:
    """The head's weight, for a loss that computes the logits itself. Raises TypeError if the logits are not a plain product
    with this weight."""
    head = model.head.weight
    if not isinstance(head, Tensor):
        raise TypeError("this loss needs gradients through the head, but the head is quantised; leave lm_head unquantised")
    if model.config.logit_softcap is not None:
        raise TypeError(
            "this loss needs plain logits, but the model caps them; set final_logit_softcapping to null in the model's config"
        )
    return head


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied parameter occurs once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def loss_and_grads(
    model: Model, objective: Objective, batches: Sequence[TrainBatch], n_targets: int
) -> Iterator[list[Tensor]]:  # fmt: skip
    """For each micro-batch: (loss, gradient of each of `trainable(model)`), as its share of the mean over `n_targets`."""
    weights = list(trainable(model).values())
    for batch in batches:
        loss = objective(model, batch) / n_targets
        yield [loss.detach(), *torch.autograd.grad(loss, weights)]


Passes = Callable[[Model, Objective, Sequence[TrainBatch], int], Iterable[list[Tensor]]]
"""`loss_and_grads`, or a replacement for it such as `train.captured.Captured`."""


def train_step(
    model: Model, optimizer: Optimizer | Muon, batches: Sequence[TrainBatch], lr: float, objective: Objective, sum_of: SumOf,
    passes: Passes = loss_and_grads,
) -> StepResult:  # fmt: skip
    """Update the weights once, from the sum over all of `batches`. Raises ValueError if there are no targets."""
    n_targets = sum(batch.n_targets for batch in batches)
    if not n_targets:
        raise ValueError("train_step: no position in this step's batches has a target; check which positions the data mask")
    loss, *grads = sum_of(passes(model, objective, batches, n_targets))
    norm, applied = optimizer.step(dict(zip(trainable(model), grads, strict=True)), lr)
    return StepResult(loss, norm, applied)


def spread_step(
    spread: Spread, optimizer: Optimizer | Muon, batches: Sequence[TrainBatch], n_targets: int, lr: float, objective: Objective
) -> StepResult:
    """`train_step` on one of several ranks. `batches`: those of this rank. `n_targets`: number over all ranks. Raises
    ValueError if it is 0."""
    if not n_targets:
        raise ValueError("spread_step: no position in this step's batches has a target; check which positions the data mask")

    def loss_of(model: Model, batch: TrainBatch) -> Tensor:
        return objective(model, batch) / n_targets

    loss, grads = spread.gradients(batches, loss_of, objective.keys_values)
    norm, applied = optimizer.step(grads, lr, squares=spread.squares(grads))
    spread.share()
    return StepResult(loss, norm, applied)
