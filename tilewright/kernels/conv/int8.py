"""Convolution from int8 to int8 (quantised values), for chains of quantised layers without 16-bit tensors between them.

    y[n, p, o] = codes(factors[n] * activation(w_scales[o] * sum over taps and channels of x * weight + bias[o] + residual))

    x [N, *S, C], weight [O, *K, C / groups], residual and y [N, *P, O]: int8, channels-last and contiguous; w_scales, bias [O]
    and factors [N]: float32. codes() rounds to nearest even and saturates at +-127. NaN (from NaN in bias or scales) becomes 0.

The residual has a scale of its own. One scale after the activation is nevertheless enough, because max(s x, 0) = s max(x, 0)
for s > 0. `conv_codes` combines the scales of x, weight, residual and y into w_scales and factors, once. Compared with `conv`
with a 16-bit result followed by a quantiser, a quarter of the bytes moves between two layers, and the residual stream of a
bottleneck is half as wide.

    sm90       Hopper: the Gluon kernel of `conv`
    triton     any shape, from sm_80 on: the portable kernel of `conv`

Not supported: gradients, zero points, 16-bit results (`conv` has them), a residual with an activation other than none or relu.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.conv.checks import Int, Padding, window_of
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.implicit_gemm import TRITON
from tilewright.kernels.conv.inputs import conv_codes_arguments
from tilewright.kernels.conv.problem import ACTIVATIONS, Problem, problem_of
from tilewright.kernels.conv.reference import convolved
from tilewright.kernels.conv.sm90 import SM90
from tilewright.kernels.device.activations import activated
from tilewright.op import Example, Impl, Op
from tilewright.tune.space import Space

__all__ = ["conv_codes", "conv_codes_op", "folded_scales"]

# N images, C channels, O output channels


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], w_scales: Tensor, factors: Tensor,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return x.new_empty((0, *size, weight.shape[0]))
    # Sums of about 2000 products of int8 values are no longer exact in float32.
    y = convolved(x.double(), weight.double(), None, stride, padding, dilation, groups, size).float() * w_scales
    y = y if bias is None else y + bias
    y = activated(y if residual is None else y + residual, activation) * factors.view(-1, *(1,) * (x.dim() - 1))
    return y.clamp(-127.0, 127.0).nan_to_num(0.0).round().to(torch.int8).contiguous()


# ---- problem, cost, examples


def _problem(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], w_scales: Tensor, factors: Tensor,
) -> Problem:  # fmt: skip
    return problem_of(
        x, weight, bias, residual, activation, stride, padding, dilation, groups, size, factors, w_scales, torch.int8
    )  # fmt: skip


def _as_conv(*args: Any) -> tuple[Any, ...]:
    """The arguments of `conv` for a call with these arguments."""
    return *args[:-2], args[-1], args[-2], torch.int8


_example = Example.sized(conv_codes_arguments)
EXAMPLES = (
    _example("3x3", 2, 32, 5, 32, bias=True, activation="relu"),
    _example("residual", 1, 64, 4, 80, 1, bias=True, residual=True, activation="relu"),
    _example("strided", 2, 20, 7, 24, S=2, activation="silu", bias=True),
    _example("groups", 1, 32, 4, 32, groups=4),
    _example("no images", 0, 16, 4, 16),
)

# ---- implementations


SM90_SPACE = Space(
    default=lambda device, problem: {**SM90.space.default(device, problem), "SPLIT_K": 1},
    axes={**SM90.space.axes, "SPLIT_K": (1,)},
    refusal=SM90.space.refusal,
)


TRITON_SPACE = Space(
    default=TRITON.space.default,
    axes={**TRITON.space.axes, "BLOCK_N": (32, 64, 128), "BLOCK_K": (64, 128)},
    refusal=TRITON.space.refusal,
)


conv_codes_op = Op(
    name="conv_codes",
    reference=_reference,
    problem=_problem,
    cost=lambda *args: conv_op.cost(*_as_conv(*args)),
    examples=EXAMPLES,
    make=conv_codes_arguments,
    rows_in_problem=True,
    codes_may_move=True,
    impls=(
        Impl(
            name="sm90", launch=lambda config, *args: SM90.launch(config, *_as_conv(*args)), space=SM90_SPACE, written_for=90,
            refuse=SM90.refuse,
        ),
        Impl(
            name="triton", launch=lambda config, *args: TRITON.launch(config, *_as_conv(*args)), space=TRITON_SPACE,
            refuse=TRITON.refuse,
        ),
    ),
)  # fmt: skip

# ---- public function


def folded_scales(
    x_scale: Tensor, w_scales: Tensor, bias: Tensor | None, residual_scale: Tensor | None, y_scale: Tensor, images: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(w_scales [O], bias [O], factors [N]) of `conv_codes_op`, from the scale of each tensor: the value of one integer step.

    Args:
        x_scale, residual_scale, y_scale: one float32 each, positive; without a residual None.
        w_scales: [O], float32.
        bias: [O].
        images: N.
    """
    unit = torch.ones_like(y_scale) if residual_scale is None else residual_scale
    shift = None if bias is None else (bias.float() / unit).contiguous()
    return (w_scales * (x_scale / unit)).contiguous(), shift, (unit / y_scale).reshape(1).expand(images).contiguous()


def conv_codes(
    x: Tensor, weight: Tensor, x_scale: Tensor, w_scales: Tensor, y_scale: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, residual_scale: Tensor | None = None, stride: Int = 1, padding: Padding = 0,
    dilation: Int = 1, groups: int = 1, *, activation: str = "none",
) -> Tensor:  # fmt: skip
    """activation(conv(x, weight) + bias + residual) in int8. x, residual and the result have one known scale each.

    Args:
        x: [N, C, *S], int8, one to three spatial dims; channels-last memory is read as it is.
        weight: [O, C / groups, *K], int8.
        x_scale, y_scale: one float32 each: the value of one integer step of x, and of the result.
        w_scales: [O], float32.
        bias: [O], float32 or of 16 bits.
        residual: int8, of the result's shape. It needs a residual_scale. It is added before the activation, which must be none
            or relu.
        stride, padding, dilation, groups: as for `conv2d`.
        activation: none, relu, gelu, gelu_tanh or silu.

    Returns:
        [N, O, *P], int8, in channels-last memory.

    Raises:
        ValueError: shapes, dtypes, devices, scales or options do not fit.
    """
    if x.dtype != torch.int8 or weight.dtype != torch.int8 or x.dim() != weight.dim() or x.dim() not in (3, 4, 5):
        raise ValueError(
            f"conv_codes: x [N, C, *S] and weight [O, C / groups, *K] must be int8 with one to three spatial dims; got "
            f"{list(x.shape)} {x.dtype} and {list(weight.shape)} {weight.dtype}"
        )
    if groups < 1 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"conv_codes: x has {x.shape[1]} channels, which do not fit weight {list(weight.shape)}, groups={groups}"
        )
    if activation not in ACTIVATIONS or (residual is not None and activation not in ("none", "relu")):
        known = "none or relu, as there is a residual" if residual is not None else ", ".join(ACTIVATIONS)
        raise ValueError(f"conv_codes: activation must be {known}; got {activation!r}")
    window = window_of("conv_codes", x, weight, stride, padding, dilation)
    shape = (x.shape[0], weight.shape[0], *window.size)
    if (residual is None) != (residual_scale is None):
        raise ValueError("conv_codes: give both residual and residual_scale, or neither")
    if residual is not None and (residual.shape != shape or residual.dtype != torch.int8 or residual.device != x.device):
        raise ValueError(f"conv_codes: residual must be {list(shape)} int8; got {list(residual.shape)} {residual.dtype}")
    outputs = weight.shape[:1]
    for name, t, size in (("x_scale", x_scale, 1), ("y_scale", y_scale, 1), ("w_scales", w_scales, outputs.numel())):
        if t.numel() != size or t.dtype != torch.float32 or t.device != x.device:
            raise ValueError(f"conv_codes: {name} must be {size} float32 on {x.device}; got {list(t.shape)} {t.dtype}")
    if bias is not None and bias.shape != outputs:
        raise ValueError(f"conv_codes: bias must be {list(outputs)}; got {list(bias.shape)}")
    w_scales, bias, factors = folded_scales(x_scale, w_scales, bias, residual_scale, y_scale, x.shape[0])
    last = [None if t is None else t.movedim(1, -1).contiguous() for t in (x, weight, residual)]
    y = conv_codes_op(
        last[0], last[1], bias, last[2], activation, window.stride, window.low, window.dilation, groups, window.size, w_scales,
        factors,
    )  # fmt: skip
    return y.movedim(-1, 1)
