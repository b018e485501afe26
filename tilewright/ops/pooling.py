"""Max and average pooling with gradients, in torch's shapes: [N, C, *spatial] or [C, *spatial], 1 to 3 spatial dimensions.

The kernels are channels-last (kernels/spatial/pooling.py). A tensor in torch's channels-last memory format is read without a
copy; any other tensor is copied first. The result is always channels-last in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.spatial.pooling import avg_pool_op, max_pool_op
from tilewright.kernels.spatial.pooling_backward import avg_pool_backward_op, max_pool_backward_op
from tilewright.ops.reduction import mean

__all__ = ["adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool", "spread"]

Sizes = int | Sequence[int]


# ---- shapes


def spread(op: str, name: str, value: Sizes, spatial: int) -> list[int]:
    """The argument as one number for each spatial dimension. Raises ValueError if it has another length."""
    given = [value] * spatial if isinstance(value, int) else list(value)
    if len(given) == 1:
        given *= spatial
    if len(given) != spatial:
        raise ValueError(f"{op}: {name} must be one number or {spatial} numbers, got {value}")
    return given


def _volume(op: str, x: Tensor, spatial: int) -> tuple[Tensor, bool]:
    """(x as a contiguous [N, D, H, W, C], whether x has a batch dimension)."""
    if spatial not in (1, 2, 3) or x.dim() not in (spatial + 1, spatial + 2) or not x.is_floating_point():
        raise ValueError(
            f"{op}: wanted floating point [N, C, ...] or [C, ...] with {spatial} spatial dimensions (1, 2 or 3); "
            f"got {x.dtype} {list(x.shape)}"
        )
    batched = x.dim() == spatial + 2
    last = (x if batched else x[None]).movedim(1, -1)
    return last.contiguous().view(last.shape[0], *[1] * (3 - spatial), *last.shape[1:]), batched


def _unvolume(y: Tensor, spatial: int, batched: bool) -> Tensor:
    y = y.reshape(y.shape[0], *y.shape[4 - spatial :]).movedim(-1, 1)
    return y if batched else y[0]


def _window(
    op: str, size: Sequence[int], kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil_mode: bool,
    spatial: int,
) -> tuple[list[int], ...]:  # fmt: skip
    """(out, kernel, stride, padding, dilation), three numbers each. Raises ValueError if they do not fit."""
    kernels = spread(op, "kernel_size", kernel, spatial)
    strides = kernels if stride is None or stride == [] else spread(op, "stride", stride, spatial)
    paddings, dilations = spread(op, "padding", padding, spatial), spread(op, "dilation", dilation, spatial)
    outs = []
    for n, k, s, p, d in zip(size[3 - spatial :], kernels, strides, paddings, dilations, strict=True):
        if k < 1 or s < 1 or d < 1 or not 0 <= p <= k // 2:
            raise ValueError(
                f"{op}: kernel_size, stride and dilation must be at least 1, and padding at most half of "
                f"kernel_size; got {k}, {s}, {d} and {p}"
            )
        o = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
        # No window may begin in the padding at the end.
        o -= ceil_mode and (o - 1) * s >= n + p
        if o < 1:
            raise ValueError(
                f"{op}: a size of {n} is too small for a window of {d * (k - 1) + 1} with this padding: the output would "
                f"have size {o}"
            )
        outs.append(o)
    fill = 3 - spatial
    return (
        [1] * fill + outs, [1] * fill + kernels, [1] * fill + strides, [0] * fill + paddings, [1] * fill + dilations
    )  # fmt: skip


def _adaptive_out(op: str, size: Sequence[int], output_size: int | Sequence[int | None] | None, spatial: int) -> list[int]:
    given = [output_size] * spatial if output_size is None or isinstance(output_size, int) else list(output_size)
    if len(given) != spatial:
        raise ValueError(f"{op}: output_size must be one number or {spatial} numbers, got {output_size}")
    outs = [n if o is None else o for n, o in zip(size[3 - spatial :], given, strict=True)]
    if min(outs) < 1 or min(size) < 1:
        raise ValueError(
            f"{op}: all sizes must be at least 1, got an input of {list(size[3 - spatial :])} and an output of {outs}"
        )
    return [1] * (3 - spatial) + outs


# ---- gradients


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], *window: list[int]) -> tuple[Tensor, Tensor]:
        y, indices = max_pool_op(x, out, *window, True)
        ctx.save_for_backward(indices)
        ctx.options = (list(x.shape[1:4]), *window)
        ctx.mark_non_differentiable(indices)
        return y, indices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return max_pool_backward_op(grads[0].contiguous(), indices, *ctx.options), None, None, None, None, None


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], *options: Any) -> Tensor:
        ctx.options = (list(x.shape[1:4]), *options)
        return avg_pool_op(x, out, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return avg_pool_backward_op(grads[0].contiguous(), *ctx.options), None, None, None, None, None, None


def _max(
    x: Tensor, spatial: int, batched: bool, out: list[int], window: tuple[list[int], ...], return_indices: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if wants_gradient(x):
        y, indices = _MaxPool.apply(x, out, *window)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        y, indices = max_pool_op(x, out, *window, return_indices)
    y = _unvolume(y, spatial, batched)
    return (y, _unvolume(indices, spatial, batched).long()) if return_indices else y


def _avg(x: Tensor, spatial: int, batched: bool, out: list[int], *options: Any) -> Tensor:
    y: Any = _AvgPool.apply(x, out, *options) if wants_gradient(x) else avg_pool_op(x, out, *options)
    return _unvolume(y, spatial, batched)


# ---- public functions


def max_pool(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, dilation: Sizes = 1,
    ceil_mode: bool = False, return_indices: bool = False, *, spatial: int = 2,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The maximum of each window, differentiable in x; torch's `max_pool1d`, `2d` and `3d`.

    Args:
        x: [N, C, *spatial] or [C, *spatial], bf16, fp16 or fp32; channels-last memory is read without a copy.
        kernel_size, stride, padding, dilation: one number, or one for each spatial dimension. stride None: the kernel's size.
        ceil_mode: also include windows that reach beyond the end of the image, as long as they begin before its end.
        return_indices: also return the index of each maximum in the flattened image, int64. NaN counts as the largest value.
            Among equal values the first one is taken.
        spatial: the number of pooled dimensions, 1 to 3.

    Returns:
        [N, C, *out] or [C, *out] of x's dtype, channels-last in memory; with `return_indices` also the indices.

    Raises:
        ValueError: shapes or windows do not fit, or the output would be empty.
    """
    volume, batched = _volume("max_pool", x, spatial)
    sizes = volume.shape[1:4]
    out, *window = _window("max_pool", sizes, kernel_size, stride, padding, dilation, ceil_mode, spatial)
    return _max(volume, spatial, batched, out, tuple(window), return_indices)


def avg_pool(
    x: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, *, spatial: int = 2,
) -> Tensor:  # fmt: skip
    """The mean of each window, differentiable in x; torch's `avg_pool1d`, `2d` and `3d`.

    Args:
        x: [N, C, *spatial] or [C, *spatial], bf16, fp16 or fp32; channels-last memory is read without a copy.
        kernel_size, stride, padding: one number, or one for each spatial dimension. stride None: the kernel's size.
        ceil_mode: also include windows that reach beyond the end of the image, as long as they begin before its end.
        count_include_pad: whether the divisor includes the zeros of the padding.
        divisor_override: a divisor to use instead of the number of elements; not 0.
        spatial: the number of pooled dimensions, 1 to 3.

    Returns:
        [N, C, *out] or [C, *out] of x's dtype, channels-last in memory.

    Raises:
        ValueError: shapes or windows do not fit, or the output would be empty.
    """
    if divisor_override == 0:
        raise ValueError("avg_pool: divisor_override is 0, wanted a number other than 0, or None")
    volume, batched = _volume("avg_pool", x, spatial)
    out, kernel, strides, paddings, _ = _window(
        "avg_pool", volume.shape[1:4], kernel_size, stride, padding, 1, ceil_mode, spatial
    )
    return _avg(volume, spatial, batched, out, kernel, strides, paddings, count_include_pad, divisor_override)


def adaptive_max_pool(
    x: Tensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False, *, spatial: int = 2
) -> Tensor | tuple[Tensor, Tensor]:
    """The maximum of windows that divide each dimension into `output_size` parts; torch's `adaptive_max_pool1d`, `2d`, `3d`.

    An output_size of None keeps the size of a dimension. Otherwise as `max_pool`.
    """
    volume, batched = _volume("adaptive_max_pool", x, spatial)
    out = _adaptive_out("adaptive_max_pool", volume.shape[1:4], output_size, spatial)
    return _max(volume, spatial, batched, out, ([], [], [], []), return_indices)


def adaptive_avg_pool(x: Tensor, output_size: int | Sequence[int | None] | None, *, spatial: int = 2) -> Tensor:
    """The mean of windows that divide each dimension into `output_size` parts; torch's `adaptive_avg_pool1d`, `2d`, `3d`.

    An output_size of None keeps the size of a dimension. Otherwise as `avg_pool`.
    """
    volume, batched = _volume("adaptive_avg_pool", x, spatial)
    out = _adaptive_out("adaptive_avg_pool", volume.shape[1:4], output_size, spatial)
    if out == [1, 1, 1]:
        # With one window per image the pooling kernel leaves most of a card idle. 32 x 7 x 7 x 2048 on an H100: 24.6 us by
        # pooling, 15.4 us by a reduction, 9.4 us by torch.
        return _unvolume(mean(volume, (1, 2, 3), keepdim=True), spatial, batched)
    return _avg(volume, spatial, batched, out, [], [], [], False, None)
