"""`cross_entropy` with gradients: reduces the losses of kernels/softmax/cross_entropy.py.

The argument `gradient` determines when the gradient is computed, and thereby the memory of a step and the number of reads:

    "forward"     together with the losses: logits are read once; a tensor of their size is kept until the backward pass
    "in place"    the same, but the gradient overwrites the logits: no further tensor is kept
    "backward"    in the backward pass: the logits are kept and read a second time

The first two compute the gradient before they know the incoming gradient of the loss, by which it must be multiplied. This
factor is 1 if `backward` is called on the loss itself; any other factor costs another pass over the gradient. Both return the
stored tensor itself as the gradient, so they allow only one backward pass. With reduction "none" every row has its own factor,
so the gradient is always computed as with "backward".
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.elementwise.scale_in_place import scale_in_place_op
from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.kernels.softmax.cross_entropy import (
    cross_entropy_gradient_in_place_op,
    cross_entropy_gradient_op,
    cross_entropy_op,
)

__all__ = ["LossOptions", "check_targets", "cross_entropy", "loss_options", "rows_factor", "rows_weights"]

_REDUCTIONS = ("mean", "sum", "none")
_GRADIENTS = ("forward", "in place", "backward")


class LossOptions(NamedTuple):
    """The options of a loss, checked."""

    ignore_index: int
    smoothing: float
    z_loss: float
    reduction: str

    @property
    def kernel(self) -> tuple[int, float, float]:
        """(ignore_index, smoothing, z_loss), the last arguments of the ops."""
        return self.ignore_index, self.smoothing, self.z_loss


def loss_options(op: str, ignore_index: int, smoothing: float, z_loss: float, reduction: str) -> LossOptions:
    """The options, checked. Raises ValueError if one is out of its range."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {smoothing}")
    if not z_loss >= 0.0:
        raise ValueError(f"{op}: z_loss must be 0 or more, got {z_loss}")
    return LossOptions(int(ignore_index), float(smoothing), float(z_loss), reduction)


def check_targets(op: str, targets: Tensor, rows: torch.Size, classes: int, ignore_index: int, checked: bool) -> None:
    """Raise ValueError unless there is one int64 target per row, and each is `ignore_index` or in [0, classes).

    On a GPU, values are checked only if `checked` is set; the host then waits for the GPU. On a CPU they are always checked.
    """
    if targets.shape != rows or targets.dtype != torch.int64:
        raise ValueError(
            f"{op}: targets must be {list(rows)} torch.int64, one class per row; got {list(targets.shape)} {targets.dtype}"
        )
    if torch.compiler.is_compiling() or not (checked or targets.device.type == "cpu"):
        return
    flat = targets.flatten()
    wrong = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: the target of row {first} is {int(flat[first])}, wanted a class 0 to {classes - 1}, or "
            f"{ignore_index} to ignore the row ({int(wrong.sum())} of {flat.numel()} are wrong)"
        )


def rows_weights(op: str, class_weights: Tensor | None, targets: Tensor, classes: int, options: LossOptions) -> Tensor | None:
    """The weight of each row's loss: the weight of its class, or 0 for an ignored row. None: all rows have weight 1.

    Raises:
        ValueError: class_weights is not one weight per class on the targets' device; or it is combined with label smoothing,
            for which a row's loss would need the weights of all classes.
    """
    if class_weights is None:
        return None
    if class_weights.shape != (classes,) or not class_weights.is_floating_point() or class_weights.device != targets.device:
        raise ValueError(
            f"{op}: class_weights must be floats [{classes}] on {targets.device}; got {list(class_weights.shape)} "
            f"{class_weights.dtype} on {class_weights.device}"
        )
    if options.smoothing:
        raise ValueError(
            f"{op}: class_weights cannot be combined with label_smoothing; got label_smoothing {options.smoothing}"
        )
    # A target out of range has the loss NaN, whatever its weight. The clamp only prevents a read outside of the weights.
    weights = class_weights.detach().to(torch.promote_types(class_weights.dtype, torch.float32))[targets.clamp(0, classes - 1)]
    return weights.masked_fill(targets == options.ignore_index, 0.0)


def rows_factor(targets: Tensor, options: LossOptions, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """The factor by which the reduction multiplies the sum of the rows' losses: a scalar on the targets' device."""
    wide = torch.promote_types(dtype, torch.float32)
    if options.reduction == "mean":
        counted = (targets != options.ignore_index).sum() if weights is None else weights.sum()
        return counted.to(wide).reciprocal()
    return torch.ones((), dtype=wide, device=targets.device)


def _reduced(losses: Tensor, factor: Tensor | None, weights: Tensor | None) -> Tensor:
    losses = losses if weights is None else losses * weights
    return losses if factor is None else losses.sum() * factor


class _CrossEntropy(torch.autograd.Function):
    """The reduced loss, differentiable in the logits once."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor | None, options: LossOptions, gradient: str
    ) -> Tensor:  # fmt: skip
        """torch disables autograd during this function."""
        factor = None if options.reduction == "none" else rows_factor(targets, options, logits.dtype, weights)
        ctx.options, ctx.grad = options, None
        if factor is None or gradient == "backward":
            ctx.save_for_backward(logits, targets, factor, weights)
            return _reduced(cross_entropy_op(logits, targets, *options.kernel), factor, weights)
        scale = factor.expand(targets.shape) if weights is None else factor * weights
        if gradient == "in place":
            losses = cross_entropy_gradient_in_place_op(logits, targets, scale, *options.kernel)
            torch.autograd.graph.increment_version(logits)
            ctx.grad = logits.detach()
        else:
            losses, ctx.grad = cross_entropy_gradient_op(logits, targets, scale, *options.kernel)
        return _reduced(losses, factor, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradient of the logits), and None for the rest."""
        if ctx.saved_tensors:
            logits, targets, factor, weights = ctx.saved_tensors
            scale = grads[0].to(torch.promote_types(logits.dtype, torch.float32))
            scale = scale if factor is None else (scale * factor).expand(targets.shape)
            scale = scale if weights is None else scale * weights
            return cross_entropy_gradient_op(logits, targets, scale, *ctx.options.kernel)[1], None, None, None, None
        if ctx.grad is None:
            raise RuntimeError(
                "cross_entropy: a first backward pass has used up the gradient that the forward pass computed; to run several "
                'backward passes, use gradient="backward"'
            )
        grad, ctx.grad = ctx.grad, None
        scale_in_place_op(grad, grads[0])
        return grad, None, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, gradient: str = "forward", checked: bool = False, class_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits and one target class per row, without a float32 copy of the logits.

    Args:
        logits: [..., V], bf16, fp16 or fp32. Classes are the last dimension; for torch's layout use `nn.CrossEntropyLoss`.
        targets: [...] int64, each in [0, V) or `ignore_index`. On a GPU any other target gives NaN in loss and gradients.
        ignore_index: rows with this target have no loss and no gradient, and do not count in the mean.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        label_smoothing: the share of the target that is spread evenly over all classes, 0 to 1.
        z_loss: z_loss * logsumexp(logits)^2 is added to each row's loss.
        gradient: when the gradient is computed: "forward", "in place" or "backward" (see the module's docstring).
        checked: also check the values of targets on a GPU; the host then waits for the GPU.
        class_weights: [V]: the factor on the loss of rows with this class. A mean divides by the sum of the weights, as with
            torch's `weight`. It has no gradient.

    Returns:
        The loss in float32 (float64 for float64 logits on a CPU): a scalar, or [...] with reduction "none". The mean of no rows
        is NaN, as in torch.

    Raises:
        ValueError: shapes, dtypes or options do not fit; class_weights and label_smoothing are both given; a target is out of
            range (on a CPU, or if `checked`); or gradient is "in place" and logits are a leaf or not contiguous, or the
            reduction is "none".
    """
    options = loss_options("cross_entropy", ignore_index, label_smoothing, z_loss, reduction)
    if gradient not in _GRADIENTS:
        raise ValueError(f"cross_entropy: gradient must be one of {', '.join(map(repr, _GRADIENTS))}; got {gradient!r}")
    if logits.dim() == 0 or not logits.is_floating_point() or not logits.shape[-1]:
        raise ValueError(
            f"cross_entropy: logits must be floats [..., V], V at least 1; got {list(logits.shape)} {logits.dtype}"
        )
    if targets.device != logits.device:
        raise ValueError(f"cross_entropy: targets are on {targets.device}, but the logits on {logits.device}; move one of them")
    check_targets("cross_entropy", targets, logits.shape[:-1], logits.shape[-1], ignore_index, checked)
    wanted = wants_gradient(logits)
    if wanted and gradient == "in place" and (logits.is_leaf or not logits.is_contiguous() or reduction == "none"):
        raise ValueError(
            'cross_entropy: gradient="in place" needs a reduction, and contiguous logits that are not a leaf; got '
            f"{'a leaf' if logits.is_leaf else f'strides {logits.stride()}'} and reduction {reduction!r}"
        )
    rows, ids = rows_ready(logits).reshape(-1, logits.shape[-1]), targets.contiguous().flatten()
    weights = rows_weights("cross_entropy", class_weights, ids, logits.shape[-1], options)
    if wanted:
        loss: Tensor = _CrossEntropy.apply(rows, ids, weights, options, gradient)  # pyright: ignore[reportAssignmentType]
    else:
        losses = cross_entropy_op(rows, ids, *options.kernel)
        loss = _reduced(losses, None if reduction == "none" else rows_factor(ids, options, logits.dtype, weights), weights)
    return loss.view(targets.shape) if reduction == "none" else loss
