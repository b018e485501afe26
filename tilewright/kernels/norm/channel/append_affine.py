"""Appends new channels to rows, and computes an affine map and an activation of all channels so far, in one launch.

    # R rows (all places of all images), W columns of a buffer, J new channels, C = start + J channels so far
    rows[r, start + j] = new[r, j]
    y[r, c] = activation(rows[r, c] * scale[c] + shift[c]),   c < C

    rows: [R, W] of bf16, fp16 or fp32, contiguous, W >= C; new: [R, J] of its dtype, contiguous.
    scale, shift: [C] float32. y: [R, C], contiguous. float32 inside, one rounding.

A batch norm in evaluation is such a map (Ioffe and Szegedy, "Batch Normalization", 2015). A layer of a DenseNet (Huang et al.,
"Densely Connected Convolutional Networks", 2017) concatenates the results of all layers before it, and normalises them:
copying them anew in each layer moves a number of bytes that is quadratic in the layers. Here they stay in one buffer.

Limited by bytes. rows is written in place, but only behind the channels that it has: what was read from it before stays valid.
Not supported: gradients.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import activate, activated
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.kernels.norm.channel.sums_and_affine import CHANNEL_SPACE
from tilewright.op import Args, Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["append_affine_op"]


def _reference(rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Tensor:
    wide, count = torch.promote_types(rows.dtype, torch.float32), scale.shape[0]
    rows[:, count - new.shape[1] : count] = new
    y = rows[:, :count].to(wide) * scale.to(wide) + shift.to(wide)
    return activated(y, activation).to(rows.dtype)


def _cost(rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Cost:
    moved = 2 * rows.shape[0] * scale.shape[0] * rows.element_size() + 8 * scale.shape[0]
    return Cost(flops=2 * rows.shape[0] * scale.shape[0], bytes=moved + new.nbytes)


# ---- problem, arguments and examples


class _Problem(NamedTuple):
    """All that a config may depend on."""

    dtype: torch.dtype
    channels: int
    last: bool = True
    """The channels are dense in memory."""


def _problem(rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> _Problem:
    return _Problem(rows.dtype, scale.shape[0])


_BLOCKS = (16, 32, 64, 128, 256)
SPACE = row_space(CHANNEL_SPACE.default, BLOCK_C=_BLOCKS, BLOCK_S=_BLOCKS, num_warps=(4, 8))


def _arguments(
    inputs: Inputs, *, M: int, N: int, width: int | None = None, new: int = 16, dtype: torch.dtype = torch.float16,
    activation: str = "none",
) -> Args:  # fmt: skip
    """M rows of a buffer with `width` (N) columns, of which N are channels, the last `new` of them appended by the call;
    float32 vectors."""
    rows, scale, shift = inputs.randn(M, N if width is None else width, dtype=dtype), inputs.randn(N), inputs.randn(N)
    return rows, inputs.randn(M, new, dtype=dtype), scale, shift, activation


@Example.of
def _example(
    inputs: Inputs, rows: int, width: int, channels: int, new: int, dtype: torch.dtype, activation: str = "none"
) -> tuple[object, ...]:
    return _arguments(inputs, M=rows, N=channels, width=width, new=new, dtype=dtype, activation=activation)


EXAMPLES = (
    _example("the last channels", 100, 48, 48, 16, torch.bfloat16),
    _example("then relu", 130, 256, 96, 32, torch.float16, "relu"),
    _example("the first channels", 70, 40, 24, 24, torch.float32, "silu"),
    _example("odd sizes", 33, 19, 12, 5, torch.float16, "gelu"),
    _example("many channels", 9, 1024, 640, 32, torch.bfloat16, "relu"),
    _example("one row", 1, 64, 64, 16, torch.float32),
    _example("no rows", 0, 64, 64, 16, torch.float16),
)

# ---- kernel


@triton.jit(do_not_specialize=["count", "start_units", "c_units", "w_units"])
def _append_affine_kernel(
    rows_ptr, new_ptr, scale_ptr, shift_ptr, y_ptr, count, start_units, c_units, w_units,
    VECTOR: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # The sizes are multiples of VECTOR, and a load of so many channels is one.
    start, C, W = start_units * VECTOR, c_units * VECTOR, w_units * VECTOR
    tiles_c = tl.cdiv(C, BLOCK_C)
    c = tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    r = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = (r < count)[:, None] & (c < C)[None, :]
    at = r[:, None] * W + c[None, :]
    fresh = mask & (c >= start)[None, :]
    before = tl.load(rows_ptr + at, mask=mask & (c < start)[None, :], other=0.0)
    added = tl.load(new_ptr + r[:, None] * (C - start) + (c - start)[None, :], mask=fresh, other=0.0)
    tl.store(rows_ptr + at, added, mask=fresh)
    x = tl.where((c >= start)[None, :], added, before).to(tl.float32)
    scale = tl.load(scale_ptr + c, mask=c < C, other=0.0)
    shift = tl.load(shift_ptr + c, mask=c < C, other=0.0)
    y = activate(x * scale[None, :] + shift[None, :], ACTIVATION)
    tl.store(y_ptr + r[:, None] * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


def _vector(*sizes: int) -> int:
    """The largest power of two that divides all of them, at most 8."""
    vector = 8
    while any(size % vector for size in sizes):
        vector //= 2
    return vector


def _launch(config: Config, rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Tensor:
    (count, width), channels = rows.shape, scale.shape[0]
    start = channels - new.shape[1]
    y = rows.new_empty(count, channels)
    if y.numel():
        vector = _vector(start, channels, width)
        numbers = (count, start // vector, channels // vector, width // vector)
        constants = {"VECTOR": vector, "ACTIVATION": activation, **config}
        grid = (ceil_div(count, config["BLOCK_S"]) * ceil_div(channels, config["BLOCK_C"]),)
        launch(_append_affine_kernel, grid, (rows, new, scale, shift, y), numbers, constants)
    return y


append_affine_op = Op(
    name="append_affine",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    mutates=("rows",),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)
