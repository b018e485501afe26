"""The last layer and its loss, chunk by chunk: cross_entropy(x @ weight^T + bias, targets) without storing all logits.

    # T rows, D features, V classes
    losses(logits_t, target_t),  logits = x @ weight^T + bias

The logits of 16k tokens and 131072 classes take 4 GB, and so does their gradient. Here rows are processed in chunks (Hsu et
al., "Liger Kernel", 2024). The logits of one chunk are computed and then overwritten by their own gradient
(`cross_entropy_gradient_in_place`), from which the chunk's contributions to the gradients of x, weight and bias are computed
immediately. The next chunk uses the same memory. The gradients are thus computed in the forward pass, before the incoming
gradient of the loss is known, and allow only one backward pass. The gradient of the weight is summed over chunks in float32.

The tensor cores determine the time. With gradients there are three products, as without chunks, and a chunk has enough rows for
products that fill a card. With reduction "none" each row's loss has its own incoming gradient, which only the backward pass
knows. The logits are recomputed there, so there are four products.

Not supported: everything that cross_entropy does not support; quantised weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.kernels.elementwise.scale_in_place import scale_in_place_op
from tilewright.kernels.gemm.linear import add_product, matmul
from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.softmax.cross_entropy import cross_entropy_gradient_in_place_op, cross_entropy_op
from tilewright.ops.cross_entropy import LossOptions, check_targets, loss_options, rows_factor, rows_weights

__all__ = ["linear_cross_entropy"]

_FEWEST_ROWS = 2048  # H100, weight 131072 x 4096: float32 sums cost 1.2 times the products alone, 1.7 times with 1024 rows


def _rows_a_chunk(rows: int, features: int) -> int:
    """Rows per chunk: equal parts of about max(2048, D) rows at most. With D rows, logits are as large as the weight."""
    chunks = -(-rows // max(_FEWEST_ROWS, features))
    return -(-rows // max(1, chunks) // 128) * 128 if chunks > 1 else max(1, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    """The reduced loss, differentiable once in x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, counts: Tensor | None, options: LossOptions,
        chunk: int,
    ) -> Tensor:  # fmt: skip
        """Computes the loss and already the needed gradients. torch disables autograd here."""
        factor = rows_factor(targets, options, x.dtype, counts)
        scale = factor.expand(targets.shape) if counts is None else factor * counts
        wide = factor.dtype
        of_x, of_weight, of_bias = (bool(needed) for needed in ctx.needs_input_grad[:3])
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None
        dweight = None
        dbias = torch.zeros(weight.shape[0], dtype=wide, device=x.device) if of_bias else None
        loss = torch.zeros((), dtype=wide, device=x.device)
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = matmul(x[rows], weight.mT, bias)
            ids = targets[rows]
            losses = cross_entropy_gradient_in_place_op(logits, ids, scale[rows], *options.kernel)
            loss += (losses if counts is None else losses * counts[rows]).sum()
            if dx is not None:
                dx[rows] = matmul(logits, weight)
            if of_weight:
                # A single chunk needs no float32 sum.
                dweight = matmul(logits.mT, x[rows]) if chunk >= x.shape[0] else add_product(dweight, logits.mT, x[rows])
            if dbias is not None:
                dbias += logits.sum(0, dtype=wide)
        if of_weight and dweight is None:  # no rows
            dweight = torch.zeros(weight.shape, dtype=wide, device=x.device)
        ctx.grads = (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(weight.dtype),
        )
        return loss * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias), and None for the rest."""
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy: a first backward pass has used up the gradients; to run a second one, call it again, or "
                'use cross_entropy(linear(...), gradient="backward")'
            )
        made, ctx.grads = ctx.grads, None
        for grad in made:
            if grad is not None:
                scale_in_place_op(grad, grads[0])
        return *made, None, None, None, None


class _RowLosses(torch.autograd.Function):
    """The loss of each row, differentiable once in x, weight and bias. The backward pass recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions, chunk: int
    ) -> Tensor:  # fmt: skip
        """torch disables autograd during this function."""
        ctx.save_for_backward(x, weight, bias, targets)
        ctx.options, ctx.chunk = options, chunk
        return _row_losses(x, weight, bias, targets, options, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradients of x, weight, bias), and None for the rest."""
        (x, weight, bias, targets), chunk = ctx.saved_tensors, ctx.chunk
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None
        dweight = torch.zeros(weight.shape, dtype=grads[0].dtype, device=x.device) if of_weight else None
        dbias = torch.zeros(weight.shape[0], dtype=grads[0].dtype, device=x.device) if of_bias else None
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = matmul(x[rows], weight.mT, bias)
            cross_entropy_gradient_in_place_op(logits, targets[rows], grads[0][rows].contiguous(), *ctx.options.kernel)
            if dx is not None:
                dx[rows] = matmul(logits, weight)
            if of_weight:
                dweight = add_product(dweight, logits.mT, x[rows])
            if dbias is not None:
                dbias += logits.sum(0, dtype=dbias.dtype)
        found = (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if bias is None or dbias is None else dbias.to(bias.dtype),
        )
        return *found, None, None, None


def _row_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions, chunk: int
) -> Tensor:  # fmt: skip
    starts = range(0, x.shape[0], chunk)
    losses = [
        cross_entropy_op(matmul(x[i : i + chunk], weight.mT, bias), targets[i : i + chunk], *options.kernel) for i in starts
    ]
    return torch.cat(losses) if losses else x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0, chunk: int | None = None, checked: bool = False,
    class_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """cross_entropy(linear(x, weight, bias), targets), without storing all logits at once.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight: [V, D] of x's dtype.
        targets: [...] int64, each in [0, V) or `ignore_index`; as in `cross_entropy`.
        bias: [V].
        ignore_index: rows with this target have no loss and no gradient, and do not count in the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the target that is spread evenly over all classes, 0 to 1.
        z_loss: z_loss * logsumexp(logits)^2 is added to each row's loss.
        chunk: the number of rows whose logits are in memory at once. None: equal parts of about max(2048, D) rows at most. With
            D rows, the logits are as large as the weight.
        checked: also check the values of targets on a GPU; the host then waits for the GPU.
        class_weights: [V]: the factor on the loss of rows with this class, as in `cross_entropy`. It has no gradient.

    Returns:
        The loss in float32: a scalar, or [...] with reduction "none".

    Raises:
        ValueError: shapes, dtypes or options do not fit; or a target is out of range (on a CPU, or if `checked`).
    """
    options = loss_options("linear_cross_entropy", ignore_index, label_smoothing, z_loss, reduction)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.shape[0] or weight.dtype != x.dtype:
        raise ValueError(
            "linear_cross_entropy: x must be [..., D] and weight [V, D] of the same dtype, with V at least 1; got "
            f"{list(x.shape)} {x.dtype} and {list(weight.shape)} {weight.dtype}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk must be at least 1 row, got {chunk}")
    check_targets("linear_cross_entropy", targets, x.shape[:-1], weight.shape[0], ignore_index, checked)
    rows, ids = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    counts = rows_weights("linear_cross_entropy", class_weights, ids, weight.shape[0], options)
    step = chunk or _rows_a_chunk(rows.shape[0], weight.shape[1])
    if wants_gradient(x, weight, bias):
        if reduction == "none":
            losses: Any = _RowLosses.apply(rows, weight, bias, ids, options, step)
            return (losses if counts is None else losses * counts).view(targets.shape)
        return _LinearCrossEntropy.apply(rows, weight, bias, ids, counts, options, step)  # pyright: ignore[reportReturnType]
    factor = rows_factor(ids, options, x.dtype, counts)
    joined = _row_losses(rows, weight, bias, ids, options, step)
    joined = joined if counts is None else joined * counts
    return joined.view(targets.shape) if reduction == "none" else joined.sum() * factor
