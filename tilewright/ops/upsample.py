"""Resizing with gradients, in torch's shapes: [N, C, H, W], [N, C, L] or [N, C, D, H, W].

The kernels are channels-last (kernels/spatial/upsample.py). A tensor in torch's channels-last memory format is read without a
copy; any other tensor is copied first. The result is channels-last in memory. A volume is resized in two passes, first each
plane, then along the depth; 16-bit numbers are rounded between the passes.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.kernels.spatial.upsample import upsample_op
from tilewright.kernels.spatial.upsample_backward import upsample_backward_op

__all__ = ["upsample"]

_MODES = {"nearest": (3, 4, 5), "linear": (3,), "bilinear": (4,), "trilinear": (5,), "bicubic": (4,)}
_LARGEST = 1 << 31


class _Upsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], *options: Any) -> Tensor:
        ctx.options = (list(x.shape[1:3]), *options)
        return upsample_op(x, out, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return upsample_backward_op(grads[0].contiguous(), *ctx.options), None, None, None, None, None


def upsample(
    x: Tensor, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest", align_corners: bool | None = None,
) -> Tensor:  # fmt: skip
    """x resized, differentiable in x; torch's `interpolate`.

    Args:
        x: [N, C, H, W], [N, C, L] or [N, C, D, H, W], bf16, fp16 or fp32; channels-last memory is read without a copy.
        size: the result's (depth,) height and width, or one number for all of them. Give either this or scale_factor.
        scale_factor: ratio of the result's size to x's, one number or one for each dimension; sizes are rounded down. It is
            replaced by the nearest fraction with a denominator up to 1000, so that positions are computed exactly.
        mode: "nearest"; "linear" for [N, C, L], "bilinear" and "bicubic" for [N, C, H, W], "trilinear" for [N, C, D, H, W].
        align_corners: for modes other than "nearest": align the corner pixels of both images instead of their borders.

    Returns:
        [N, C, *out] of x's dtype, channels-last in memory.

    Raises:
        ValueError: the mode or the shapes do not fit.
    """
    if mode not in _MODES or x.dim() not in _MODES[mode]:
        wanted = ", ".join(f"{name} for {' or '.join(str(d - 2) for d in dims)}" for name, dims in _MODES.items())
        raise ValueError(
            f"upsample: mode is {mode!r} and x is {list(x.shape)}, wanted a mode with its numbers of spatial "
            f"dimensions: {wanted}"
        )
    if mode == "nearest" and align_corners is not None:
        raise ValueError("upsample: align_corners is only for the linear modes and bicubic")
    if (size is None) == (scale_factor is None):
        raise ValueError(f"upsample: exactly one of size and scale_factor must be given; got {size} and {scale_factor}")
    spatial, corners = x.dim() - 2, bool(align_corners)
    steps = [_axis(n, o, f, corners) for n, o, f in zip(x.shape[2:], *_spread(size, scale_factor, spatial), strict=True)]
    of = "nearest" if mode == "nearest" else "cubic" if mode == "bicubic" else "linear"
    y = x.movedim(1, -1).contiguous()
    if spatial == 3:
        images, depth, *_, channels = y.shape
        y = _resized(y.flatten(0, 1), steps[1:], of, corners)
        sides = y.shape[1:3]
        # The pixels of a plane are flattened to one axis, the second, which is not resized.
        y = _resized(y.reshape(images, depth, -1, channels), [steps[0], (sides.numel(), 1, 1)], of, corners)
        return y.unflatten(2, sides).movedim(-1, 1)
    y = _resized(y.view(y.shape[0], *[1] * (2 - spatial), *y.shape[1:]), [(1, 1, 1)] * (2 - spatial) + steps, of, corners)
    return y.reshape(y.shape[0], *y.shape[3 - spatial :]).movedim(-1, 1)


def _resized(x: Tensor, steps: list[tuple[int, int, int]], mode: str, corners: bool) -> Tensor:
    """Resize images [N, H, W, C]. steps: for each axis (size of the result, num, den), as `_axis` returns them."""
    out, num, den = (list(numbers) for numbers in zip(*steps, strict=True))
    options = (out, mode, num, den, corners)
    if wants_gradient(x):
        return _Upsample.apply(x, *options)  # pyright: ignore[reportReturnType]
    return upsample_op(x, *options)


def _spread(size: Any, factor: Any, spatial: int) -> tuple[list[Any], list[Any]]:
    """(sizes, factors), one for each dimension; the numbers of one of the two lists are all None."""
    both = []
    for name, value in (("size", size), ("scale_factor", factor)):
        given = list(value) if isinstance(value, Sequence) else [value] * spatial
        if len(given) != spatial:
            raise ValueError(f"upsample: {name} must be one number or {spatial} numbers, got {value}")
        both.append(given)
    return both[0], both[1]


def _axis(n: int, size: int | None, factor: float | None, corners: bool) -> tuple[int, int, int]:
    """(size of the result, num, den) along an axis."""
    step = None if factor is None or factor <= 0 else 1 / Fraction(factor).limit_denominator(1000)
    out = size if step is None else int(n / step)
    if out is None or out < 1 or n < 1:
        raise ValueError(
            f"upsample: all sizes must be at least 1, got an input of {n} and an output of "
            f"{size if factor is None else f'{factor} times that'}"
        )
    if corners:
        step = Fraction(n - 1, out - 1) if out > 1 else Fraction(0)
    elif step is None:
        step = Fraction(n, out)
    if (2 * out + 1) * step.numerator + 2 * step.denominator * (n + 1) >= _LARGEST:
        raise ValueError(
            f"upsample: resizing from {n} to {out} in steps of {step} needs products of more than 31 bits; give size "
            "instead of scale_factor"
        )
    return out, step.numerator, step.denominator
