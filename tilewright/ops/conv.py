"""Convolutions with torch's names and shapes, with gradients, and with bias, activation and residual in the same launch.

Tensors have torch's shapes, [N, C, *S], in any memory format. The kernels need channels-last inputs: such tensors are read
without a copy, and others are converted first. Results are channels-last. The same holds for weights; the output channels of a
depthwise weight may also be its dense dimension.

Gradients are separate ops: the gradient of x is a transposed convolution, the gradient of the weight a sum over pixels in a
fixed order. If an input requires a gradient, the activation is a separate launch, and x and the weight are saved for the
backward pass. Second derivatives raise an error.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from tilewright.kernels.conv.checks import (
    PADDING_MODES,
    Int,
    Padding,
    Window,
    check_operands,
    check_scales,
    transposed_window,
    window_of,
)
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.replay import Plan, again
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.weight_gradient.conv_weight_gradient import conv_weight_gradient_op
from tilewright.kernels.launch.autograd import dense, no_view, wants_gradient
from tilewright.kernels.launch.replay import Held, call_key, in_place
from tilewright.ops.conv_training import ConvTraining
from tilewright.ops.pointwise import activation as activate

__all__ = [
    "PADDING_MODES",
    "Int",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "fold_batch_norm",
]


_TO_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_TO_FIRST = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""Permutations by number of dimensions, for `permute`, which takes half the host time of `movedim`."""


def _last(x: Tensor) -> Tensor:
    """[N, C, *S] -> [N, *S, C], contiguous."""
    return x.permute(_TO_LAST[x.dim()]).contiguous()


def _weight_last(weight: Tensor, depthwise: bool) -> Tensor:
    """[O, C, *K] -> [O, *K, C], contiguous; a depthwise weight may instead be dense along O."""
    moved = weight.permute(_TO_LAST[weight.dim()])
    return moved if depthwise and moved.stride(0) == 1 else moved.contiguous()


class _Conv(torch.autograd.Function):
    """conv(x, weight) + bias + residual of channels-last tensors, differentiable in all four."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, window: Window, groups: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (window.stride, window.low, window.dilation, groups)
        stride, low, dilation, groups = ctx.options
        y = conv_op(x, weight, bias, residual, "none", stride, low, dilation, groups, window.size, None, None, x.dtype)
        return no_view(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = conv_transpose_op(dy, weight, None, "none", *ctx.options, list(x.shape[1:-1]))
        if ctx.needs_input_grad[1]:
            dw = conv_weight_gradient_op(dy, x, *ctx.options, list(weight.shape[1:-1]))
        if ctx.needs_input_grad[2]:
            db = dy.sum(tuple(range(dy.dim() - 1)))
        return dx, dw, db, dy if ctx.needs_input_grad[3] else None, None, None


class _Transposed(torch.autograd.Function):
    """conv_transpose(x, weight) + bias of channels-last tensors, differentiable in all three."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, groups: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = (window.stride, window.low, window.dilation, groups)
        return no_view(conv_transpose_op(x, weight, bias, "none", *ctx.options, window.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            size = list(x.shape[1:-1])
            dx = conv_op(dy, weight, None, None, "none", *ctx.options, size, None, None, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = conv_weight_gradient_op(x, dy, *ctx.options, list(weight.shape[1:-1]))
        if ctx.needs_input_grad[2]:
            db = dy.sum(tuple(range(dy.dim() - 1)))
        return dx, dw, db, None, None


def _padded(x: Tensor, window: Window, mode: str) -> tuple[Tensor, Window]:
    """(x, padded in a mode other than zeros; the window without this padding)."""
    if not any(window.low + window.high):
        return x, window
    sides = [side for pair in zip(reversed(window.low), reversed(window.high), strict=True) for side in pair]
    none = [0] * len(window.low)
    return F.pad(x, sides, mode=mode), window._replace(low=none, high=none)


_PLANS = Held()


def _kind(t: Tensor | None) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return None if t is None else (t.shape, t.dtype, t.device)


def _plan(
    op: str, dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Int, padding: Padding, dilation: Int,
    groups: int, padding_mode: str, activation: str, residual: Tensor | None, x_scales: Tensor | None, w_scales: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Window, torch.dtype]:  # fmt: skip
    """(the window on the unpadded x, the result's dtype). Raises ValueError if the arguments do not fit together."""
    check_operands(op, dims, x, weight, bias, groups, activation)
    out = check_scales(op, x, weight, x_scales, w_scales, dtype)
    window = window_of(op, x, weight, stride, padding, dilation)
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"{op}: padding_mode must be one of {', '.join(PADDING_MODES)}; got {padding_mode!r}")
    shape = (x.shape[0], weight.shape[0], *window.size)
    if residual is not None and (residual.shape != shape or residual.dtype != out or residual.device != x.device):
        raise ValueError(
            f"{op}: residual must be {list(shape)} {out} on {x.device}; "
            f"got {list(residual.shape)} {residual.dtype} on {residual.device}"
        )
    return window, out


def _planned(op: str, dims: int, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Window, torch.dtype]:
    """`_plan` with a cache, because the checks take longer than a small convolution."""
    if type(x) not in (Tensor, Parameter) or torch.compiler.is_compiling():
        return _plan(op, dims, x, weight, *rest)
    bias, stride, padding, dilation, groups, mode, activation, residual, x_scales, w_scales, dtype = rest
    if isinstance(padding, (list, tuple)):
        padding = tuple(tuple(v) if isinstance(v, list) else v for v in padding)
    key = (
        op, dims, x.shape, x.dtype, x.device, weight.shape, weight.dtype, weight.device, _kind(bias), _kind(residual),
        _kind(x_scales), _kind(w_scales), *(tuple(v) if isinstance(v, list) else v for v in (stride, dilation)), padding,
        groups, mode, activation, dtype,
    )  # fmt: skip
    found = _PLANS.get(key)
    if found is None:
        found = _plan(op, dims, x, weight, *rest)
        _PLANS.keep(key, found)
    return found


_AGAIN = Held()


def _arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, window: Window, groups: int,
    x_scales: Tensor | None, w_scales: Tensor | None, out: torch.dtype,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `conv_op`, for channels-last tensors."""
    stride, low, _, dilation, size = window
    return x, weight, bias, residual, activation, stride, low, dilation, groups, size, x_scales, w_scales, out


def _conv(
    op: str, dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Int, padding: Padding, dilation: Int,
    groups: int, padding_mode: str, activation: str, residual: Tensor | None, x_scales: Tensor | None, w_scales: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    key, trains = None, wants_gradient(x, weight, bias, residual)
    if x_scales is None and w_scales is None:
        options = (stride, padding, dilation, groups, padding_mode, activation, dtype, trains)
        key = call_key((op, conv_op.generation, options), x, weight, bias, residual)
        call: Plan | ConvTraining | None = None if key is None else _AGAIN.get(key)
        if call is not None:
            y = call(x, weight, bias, residual)
            return activate(y, activation) if trains and activation != "none" else y
    given, single = (x, weight, residual), x.dim() == dims + 1
    if single:
        key = None
        x, residual = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
    window, out = _planned(
        op, dims, x, weight, bias, stride, padding, dilation, groups, padding_mode, activation, residual, x_scales, w_scales,
        dtype,
    )  # fmt: skip
    if bias is not dense(bias):
        bias, key = dense(bias), None
    if padding_mode != "zeros":
        x, window = _padded(x, window, padding_mode)
    x, weight = _last(x), _weight_last(weight, groups == x.shape[1] > 1)
    residual = None if residual is None else _last(residual)
    if key is not None and not in_place(*zip((x, weight, residual), given, strict=True)):
        key = None
    if trains:
        if x.dtype == torch.int8:
            raise ValueError(f"{op}: int8 operands have no gradient; call it under torch.no_grad()")
        y: Any = _Conv.apply(x, weight, bias, residual, window, groups)
        found = None if key is None else again(*_arguments(x, weight, bias, residual, "none", window, groups, None, None, out))
        if found is not None:
            _AGAIN.keep(key, ConvTraining(found, window, groups))
        y = y if activation == "none" else activate(y, activation)
    else:
        if x_scales is not None:
            x_scales, w_scales = x_scales.expand(x.shape[0]).contiguous(), dense(w_scales)
        arguments = _arguments(x, weight, bias, residual, activation, window, groups, x_scales, w_scales, out)
        y = conv_op(*arguments)
        found = None if key is None else again(*arguments)
        if found is not None:
            _AGAIN.keep(key, found)
    y = y.permute(_TO_FIRST[dims + 2])
    return y.squeeze(0) if single else y


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Padding = 0, dilation: Int = 1,
    groups: int = 1, *, padding_mode: str = "zeros", activation: str = "none", residual: Tensor | None = None,
    x_scales: Tensor | None = None, w_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`conv2d` in one spatial dim: x [N, C, L], weight [O, C / groups, K] -> [N, O, P]. Fastest if x is stored as [N, L, C]."""
    return _conv(
        "conv1d", 1, x, weight, bias, stride, padding, dilation, groups, padding_mode, activation, residual,
        x_scales, w_scales, dtype,
    )  # fmt: skip


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Padding = 0, dilation: Int = 1,
    groups: int = 1, *, padding_mode: str = "zeros", activation: str = "none", residual: Tensor | None = None,
    x_scales: Tensor | None = None, w_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """activation(conv(x, weight) + bias + residual), differentiable in x, weight, bias and residual.

    Args:
        x: [N, C, H, W] or [C, H, W]; bf16, fp16, fp32, or int8 (with scales). channels_last is read without a copy.
        weight: [O, C / groups, KH, KW] of x's dtype; channels_last is read without a copy.
        bias: [O] of x's dtype (for int8: of the result's dtype, or float32).
        stride: one number or one for each spatial dim.
        padding: one number, one for each spatial dim, (low, high) for each, "valid", or "same" (only with stride 1).
        dilation: one number or one for each spatial dim.
        groups: a divisor of C and O.
        padding_mode: zeros; or reflect, replicate or circular, which first write a padded copy of x.
        activation: none, relu, gelu, gelu_tanh or silu.
        residual: in the shape and dtype of the result; added before the activation.
        x_scales: only for int8: float32, one number for each image or one for all.
        w_scales: only for int8: float32 [O].
        dtype: only for int8: the dtype of the result, bfloat16 (the default) or float16.

    Returns:
        [N, O, P, Q] in torch.channels_last.

    Raises:
        ValueError: shapes, dtypes, devices, scales or options do not fit, or the output would have no pixels.
    """
    return _conv(
        "conv2d", 2, x, weight, bias, stride, padding, dilation, groups, padding_mode, activation, residual,
        x_scales, w_scales, dtype,
    )  # fmt: skip


def conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Padding = 0, dilation: Int = 1,
    groups: int = 1, *, padding_mode: str = "zeros", activation: str = "none", residual: Tensor | None = None,
    x_scales: Tensor | None = None, w_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`conv2d` in three spatial dims: x [N, C, D, H, W], weight [O, C / groups, KD, KH, KW]; returns torch.channels_last_3d."""
    return _conv(
        "conv3d", 3, x, weight, bias, stride, padding, dilation, groups, padding_mode, activation, residual,
        x_scales, w_scales, dtype,
    )  # fmt: skip


# ---- transposed


def _transposed(
    op: str, dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Int, padding: Int, output_padding: Int,
    groups: int, dilation: Int, activation: str,
) -> Tensor:  # fmt: skip
    single = x.dim() == dims + 1
    x = x.unsqueeze(0) if single else x
    check_operands(op, dims, x, weight, bias, groups, activation, transposed=True)
    window = transposed_window(op, x, weight, stride, padding, output_padding, dilation)
    x, weight, bias = _last(x), _weight_last(weight, weight.shape[1] == 1 and groups == x.shape[1] > 1), dense(bias)
    if wants_gradient(x, weight, bias):
        y: Any = _Transposed.apply(x, weight, bias, window, groups)
        y = y if activation == "none" else activate(y, activation)
    else:
        y = conv_transpose_op(
            x, weight, bias, activation, window.stride, window.low, window.dilation, groups, window.size
        )  # fmt: skip
    y = y.permute(_TO_FIRST[dims + 2])
    return y.squeeze(0) if single else y


def conv_transpose1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Int = 0, output_padding: Int = 0,
    groups: int = 1, dilation: Int = 1, *, activation: str = "none",
) -> Tensor:  # fmt: skip
    """`conv_transpose2d` in one spatial dim: x [N, C, L], weight [C, O / groups, K]."""
    return _transposed(
        "conv_transpose1d", 1, x, weight, bias, stride, padding, output_padding, groups, dilation, activation
    )  # fmt: skip


def conv_transpose2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Int = 0, output_padding: Int = 0,
    groups: int = 1, dilation: Int = 1, *, activation: str = "none",
) -> Tensor:  # fmt: skip
    """activation(transposed conv(x, weight) + bias), differentiable in x, weight and bias.

    Args:
        x: [N, C, H, W] or [C, H, W], bf16, fp16 or fp32. channels_last is read without a copy.
        weight: [C, O / groups, KH, KW] of x's dtype; channels_last is read without a copy.
        bias: [O] of x's dtype.
        stride: one number or one for each spatial dim: the distance in the result between neighbouring pixels of x.
        padding: one number or one for each spatial dim: the number of pixels removed from each side of the result.
        output_padding: one number or one for each spatial dim: the number of pixels added at the end of each dim; less than
            stride or dilation.
        groups: a divisor of C and O.
        dilation: one number or one for each spatial dim.
        activation: none, relu, gelu, gelu_tanh or silu.

    Returns:
        [N, O, (H - 1) stride - 2 padding + dilation (KH - 1) + output_padding + 1, W likewise] in torch.channels_last.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit, or the output would have no pixels.
    """
    return _transposed(
        "conv_transpose2d", 2, x, weight, bias, stride, padding, output_padding, groups, dilation, activation
    )  # fmt: skip


def conv_transpose3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Int = 1, padding: Int = 0, output_padding: Int = 0,
    groups: int = 1, dilation: Int = 1, *, activation: str = "none",
) -> Tensor:  # fmt: skip
    """`conv_transpose2d` in three spatial dims: x [N, C, D, H, W], weight [C, O / groups, KD, KH, KW]."""
    return _transposed(
        "conv_transpose3d", 3, x, weight, bias, stride, padding, output_padding, groups, dilation, activation
    )  # fmt: skip


# ---- batch norm


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, mean: Tensor, variance: Tensor, scale: Tensor | None = None,
    shift: Tensor | None = None, eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weight, bias) of one convolution that replaces, in evaluation, a convolution and the batch norm after it.

    Args:
        weight: [O, C / groups, *K].
        bias: [O] of the convolution, or None.
        mean: [O], the norm's running mean.
        variance: [O], the norm's running variance.
        scale: [O], the norm's weight, or None.
        shift: [O], the norm's bias, or None.
        eps: added to the variance.

    Returns:
        Both in the dtype and memory format of `weight`, computed in float32.

    Raises:
        ValueError: one of the vectors is not [O].
    """
    given = {"bias": bias, "mean": mean, "variance": variance, "scale": scale, "shift": shift}
    for name, t in given.items():
        if t is not None and t.shape != weight.shape[:1]:
            raise ValueError(f"fold_batch_norm: {name} must be [{weight.shape[0]}]; got {list(t.shape)}")
    factor = torch.rsqrt(variance.float() + eps)
    factor = factor if scale is None else factor * scale.float()
    moved = (-mean.float() if bias is None else bias.float() - mean.float()) * factor
    moved = moved if shift is None else moved + shift.float()
    return (weight.float() * factor.view(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype), moved.to(weight.dtype)
