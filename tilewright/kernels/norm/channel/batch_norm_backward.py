"""The gradient of batch norm by a batch's own statistics, with a relu behind it: of x, of what was added, of weight and bias.

    # N images, S places of an image (height x width, or time), C channels; n = N S values a channel
    h = (x - mean) scale,   scale = 1 / sqrt(variance + eps)
    g = dy, or where y is given dy where y > 0, else 0                  the gradient of what was added before the relu
    dbias = sum g,   dweight = sum g h                                  over images and places
    dx = scale weight (g - dbias / n - h dweight / n)

    dy, x, y, g, dx: [N, S, C] of bf16, fp16 or fp32, dense in memory as [N, S, C] (channels last) or as [N, C, S], all alike.
    mean, variance: [C] float32, of `batch_statistics`; weight: [C] of bf16, fp16 or fp32, or None; dweight, dbias: [C] of its
    dtype, float32 without one. Without y nothing is masked, and g is returned without elements.

Three launches (Ioffe and Szegedy, "Batch Normalization", 2015): sums of a program's places, which write g as well, since
dx reads it again; the sums of these and a few numbers a channel; the map. The same bits every time.

Limited by bytes: dy, x and y are read, g written; g and x read, dx written. Not supported: other activations, other layouts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.replay import Held, Prepared, launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.kernels.norm.channel.batch_statistics import JOIN, join_rows, part_grid
from tilewright.kernels.norm.channel.inputs import batch_norm_backward_arguments
from tilewright.kernels.norm.channel.sums_and_affine import (
    CHANNEL_SPACE,
    affine_into,
    channel_problem,
    channels_last,
    parts_kernel,
    places_at_once,
)
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["Again", "batch_norm_backward_op", "launched"]


def _reference(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, g, dweight, dbias)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    kept = dy if y is None else torch.where(y <= 0, 0.0, dy)
    g, scale, count = kept.to(wide), (variance.to(wide) + eps).rsqrt(), x.shape[0] * x.shape[1]
    h = (x.to(wide) - mean.to(wide)) * scale
    dweight, dbias = (g * h).sum((0, 1)), g.sum((0, 1))
    d = scale if weight is None else scale * weight.to(wide)
    dx = torch.empty_like(x).copy_(d * (g - (dbias + h * dweight) / count))
    of = wide if weight is None else weight.dtype
    return dx, x.new_empty(0) if y is None else torch.empty_like(x).copy_(g), dweight.to(of), dbias.to(of)


# ---- cost, examples


def _cost(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None, eps: float) -> Cost:
    moved = (3 if y is None else 5) * x.nbytes + 16 * x.shape[2] + (0 if weight is None else weight.nbytes)
    return Cost(flops=9 * x.numel(), bytes=moved)


@Example.of
def _example(
    inputs: Inputs, n: int, s: int, c: int, dtype: torch.dtype, vectors: torch.dtype | None = torch.float32, *,
    last: bool = True, relu: bool = True,
) -> tuple[object, ...]:  # fmt: skip
    *given, weight, eps = batch_norm_backward_arguments(inputs, B=n, M=s, N=c, dtype=dtype, first=not last, relu=relu)
    return *given, None if vectors is None else weight.to(vectors), eps


EXAMPLES = (
    _example("channels last", 1, 300, 48, torch.bfloat16, torch.bfloat16),
    _example("channels first", 3, 70, 5, torch.float16, last=False),
    _example("no relu", 2, 65, 40, torch.float32, relu=False),
    _example("no weight", 1, 9, 300, torch.float16, None),
    _example("two values", 2, 1, 16, torch.float32, last=False, relu=False),
)


@triton.jit(do_not_specialize=["rows", "C", "count"])
def _numbers_kernel(
    given_ptr, crossed_ptr, mean_ptr, variance_ptr, weight_ptr, dweight_ptr, dbias_ptr, a_ptr, b_ptr, d_ptr,
    rows, C, count, eps, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """From parts of sum g and sum g (x - mean) to the gradients, and to a, b and d of dx = a x + b + d g."""
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = c < C
    given, crossed = join_rows(given_ptr, crossed_ptr, rows, C, c, ROWS, COLS)
    scale = tl.rsqrt(tl.load(variance_ptr + c, mask=mask, other=1.0) + eps)
    crossed *= scale
    d = scale
    if weight_ptr is not None:
        d *= tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    a = -scale * d * crossed / count
    b = -d * given / count - tl.load(mean_ptr + c, mask=mask, other=0.0) * a
    tl.store(a_ptr + c, a, mask=mask)
    tl.store(b_ptr + c, b, mask=mask)
    tl.store(d_ptr + c, d, mask=mask)
    tl.store(dweight_ptr + c, crossed.to(dweight_ptr.dtype.element_ty), mask=mask)
    tl.store(dbias_ptr + c, given.to(dbias_ptr.dtype.element_ty), mask=mask)


# ---- launcher and op


class Again(NamedTuple):
    """The launches of one call, to be made again on other memory."""

    parts: Prepared
    numbers: Prepared
    map: Prepared
    rows: int
    """Of parts."""
    channels: int

    def launch(
        self, dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(dx, g or None, dweight, dbias); dx and g as x lies. Only addresses are read, and the dtype of weight."""
        c = self.channels
        of = {"dtype": torch.float32 if weight is None else weight.dtype, "device": x.device}
        scratch = _scratch(self.rows, c, x.device)
        dx, g = torch.empty_like(x), None if y is None else torch.empty_like(x)
        dweight, dbias = torch.empty(c, **of), torch.empty(c, **of)
        given, at, rest, here, pitch = dy.data_ptr(), x.data_ptr(), scratch.data_ptr(), mean.data_ptr(), 4 * c
        masked, first = given if g is None else g.data_ptr(), rest + 3 * pitch
        second = first + self.rows * pitch
        self.parts((at, here, given, at if y is None else y.data_ptr(), masked, first, second))
        self.numbers((
            first, second, here, variance.data_ptr(), 0 if weight is None else weight.data_ptr(), dweight.data_ptr(),
            dbias.data_ptr(), rest, rest + pitch, rest + 2 * pitch,
        ))  # fmt: skip
        self.map((at, masked, rest, rest + pitch, rest + 2 * pitch, dx.data_ptr()))
        return dx, g, dweight, dbias


def _scratch(rows: int, channels: int, device: torch.device) -> Tensor:
    """a, b and d, then the parts of two sums: always in the same places, which the kernels' alignment was found of."""
    return torch.empty((2 * rows + 3) * channels, dtype=torch.float32, device=device)


_HELD = Held()


def _key(
    config: Config, dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None, eps: float
) -> Any:
    kinds = (pointer_kind(t) for t in (dy, x, y, mean, variance, weight))
    return (x.get_device(), x.shape, x.stride(), *kinds, eps, *config.values())


def launched(*args: Any) -> Again | None:
    """What makes the launches of a call of `batch_norm_backward_op` again; None where it launched nothing."""
    return _HELD.get(_key(batch_norm_backward_op.chosen(*args).config, *args))


def _launch(
    config: Config, dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, variance: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = dense(weight)
    key = _key(config, dy, x, y, mean, variance, weight, eps)
    held: Again | None = _HELD.get(key)
    if held is not None:
        dx, g, dweight, dbias = held.launch(dy, x, y, mean, variance, weight)
        return dx, x.new_empty(0) if g is None else g, dweight, dbias
    n, s, c = x.shape
    dx, g = torch.empty_like(x), x.new_empty(0) if y is None else torch.empty_like(x)
    of = torch.float32 if weight is None else weight.dtype
    dweight, dbias = (torch.zeros(c, dtype=of, device=x.device) for _ in range(2))
    if not x.numel():
        return dx, g, dweight, dbias
    grid, share = part_grid(config, x)
    rows, vector = grid[2] * n, places_at_once(x)
    scratch = _scratch(rows, c, x.device)
    a, b, d = scratch[: 3 * c].view(3, 1, c).unbind(0)
    sums = scratch[3 * c :].view(2, rows, c).unbind(0)
    masked = dy if y is None else g
    constants = {
        "C": c, "VECTOR": vector, "LAST": channels_last(x), "SHIFT": "one", "HAS_DY": True, "RELU": y is not None, **config,
    }  # fmt: skip
    operands = (x, mean, dy, x if y is None else y, masked, *sums)
    parts = launch(parts_kernel, grid, operands, (s // vector, n, 0, share), constants)
    operands = (*sums, mean, variance, weight, dweight, dbias, a, b, d)
    numbers = launch(_numbers_kernel, (ceil_div(c, JOIN["COLS"]),), operands, (rows, c, n * s, eps), JOIN)
    mapped = affine_into(config, x, a, b, masked, d, dx)
    if parts is not None and numbers is not None and mapped is not None:
        _HELD.keep(key, Again(parts, numbers, mapped, rows, c))
    return dx, g, dweight, dbias


batch_norm_backward_op = Op(
    name="batch_norm_backward",
    reference=_reference,
    problem=lambda dy, x, *rest: channel_problem(x),
    cost=_cost,
    examples=EXAMPLES,
    make=batch_norm_backward_arguments,
    impls=(Impl(name="triton", launch=_launch, space=CHANNEL_SPACE),),
)
