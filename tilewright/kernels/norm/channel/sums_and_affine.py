"""Sums over the places of each channel, and an affine map of each channel: what group, instance and batch norms are made of.

    # N images, S places of an image (height x width, or time), C channels
    channel_sums(x, shift)        first[n, c] = sum_s (x[n, s, c] - shift[n, c]),   second[n, c] = sum_s (x - shift)^2
    channel_sums(x, shift, dy)    first[n, c] = sum_s dy[n, s, c],                  second[n, c] = sum_s dy (x - shift)
    channel_affine(x, a, b)       y[n, s, c] = a[n, c] x[n, s, c] + b[n, c]
    channel_affine(..., dy, d)    y[n, s, c] = a[n, c] x[n, s, c] + b[n, c] + d[n, c] dy[n, s, c]

    x, dy, y: [N, S, C] of bf16, fp16 or fp32, dense in memory as [N, S, C] (channels last) or as [N, C, S]; dy and y as x is.
    shift, a, b, d: [N, C] float32, or [1, C] for all images alike; sums [N, C] float32.

A norm of this kind forward is the sums, a few numbers for each channel, and the map; its gradient is the same with dy. What
it averages over, groups of channels or all images, is decided on those few numbers, in ops/group_norm.py and batch_norm.py.
The shift keeps a variance from being the difference of two large sums: one of the channel's own elements will do.

Limited by bytes: the sums read x once, the map reads and writes it. The map goes through x backwards: the end of what the sums
read is still in L2. Sums of long images are made in parts, added in the order of their numbers: the same bits every time.
Not supported: other layouts (the public functions copy).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device, device_of
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.launch.replay import Prepared, launch
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.kernels.norm.channel.inputs import channel_affine_arguments, channel_sums_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = [
    "CHANNEL_SPACE",
    "affine_into",
    "channel_affine_op",
    "channel_problem",
    "channel_sums_op",
    "channels_last",
    "parts_kernel",
    "place_offsets",
    "places_at_once",
]


def _sums_reference(x: Tensor, shift: Tensor, dy: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    gap = x.to(wide) - shift.to(wide)[:, None]
    given = gap if dy is None else dy.to(wide)
    return given.sum(1), (given * gap).sum(1)


def _affine_reference(x: Tensor, a: Tensor, b: Tensor, dy: Tensor | None, d: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = a.to(wide)[:, None] * x.to(wide) + b.to(wide)[:, None]
    if dy is not None and d is not None:
        y = y + d.to(wide)[:, None] * dy.to(wide)
    return torch.empty_like(x).copy_(y)


def _sums_cost(x: Tensor, shift: Tensor, dy: Tensor | None) -> Cost:
    sums = 3 * x.shape[0] * x.shape[2] * 4
    return Cost(flops=(3 if dy is None else 4) * x.numel(), bytes=(1 + (dy is not None)) * x.nbytes + sums)


def _affine_cost(x: Tensor, a: Tensor, b: Tensor, dy: Tensor | None, d: Tensor | None) -> Cost:
    return Cost(flops=2 * x.numel(), bytes=(2 + (dy is not None)) * x.nbytes + a.shape[1] * 8)


# ---- space and examples


class Problem(NamedTuple):
    """All that a config may depend on: not the number of images."""

    dtype: torch.dtype
    last: bool
    """Whether the channels are dense in memory, not the places."""
    channels: int
    places: int
    """As a power of two, at most 1024."""


def channel_problem(x: Tensor, *rest: object) -> Problem:
    """Of an op whose first argument is x [N, S, C]."""
    return Problem(x.dtype, channels_last(x), x.shape[2], min(1024, next_pow2(x.shape[1])))


def channels_last(x: Tensor) -> bool:
    """Whether the channels of x [N, S, C] are dense in memory."""
    return x.is_contiguous() and (x.shape[2] > 1 or x.shape[1] == 1)


def _default(device: Device, problem: Problem) -> Config:
    if problem.last:
        # A divisor of C where it is wide enough to read: with 256 of 320 channels a third of the lanes would have none.
        divisor = problem.channels & -problem.channels
        block_c = min(256, divisor if divisor >= 32 else max(16, next_pow2(problem.channels)))
        return {"BLOCK_C": block_c, "BLOCK_S": 4096 // block_c, "num_warps": 4}
    block_s = max(16, problem.places)
    return {"BLOCK_C": 4096 // block_s, "BLOCK_S": block_s, "num_warps": 4}


CHANNEL_SPACE = row_space(_default, BLOCK_C=(4, 16, 32, 64, 128, 256), BLOCK_S=(16, 32, 64, 128, 256, 1024), num_warps=(4, 8))


def _tensors(
    inputs: Inputs, shape: tuple[int, int, int], dtype: torch.dtype, last: bool, both: bool, mean: float
) -> tuple[Tensor, Tensor | None]:
    n, s, c = shape

    def one() -> Tensor:
        x = inputs.randn(n, s, c, dtype=dtype) if last else inputs.randn(n, c, s, dtype=dtype).mT
        return x + mean if mean else x

    return one(), one() if both else None


def _examples(affine: bool) -> tuple[Example, ...]:
    @Example.of
    def example(
        inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, last: bool = True, both: bool = False,
        mean: float = 0.0, shared: bool = False,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        n, s, c = shape
        x, dy = _tensors(inputs, (n, s, c), dtype, last, both, mean)
        vectors = [inputs.randn(1 if shared else n, c) + mean for _ in range(3)]
        shift, b, d = vectors
        return (x, shift, b, dy, d if both else None) if affine else (x, shift, dy)

    return (
        example("channels last", 2, 100, 48),
        example("channels first", 2, 70, 5, last=False, dtype=torch.float16),
        example("with dy", 1, 300, 20, both=True, dtype=torch.float32),
        example("with dy, first", 3, 64, 6, both=True, last=False, shared=True),
        example("far from zero", 2, 65, 3, mean=20.0, dtype=torch.float32, shared=True),
        example("one place", 3, 1, 40, last=False, dtype=torch.float32),
        example("many channels", 1, 9, 300),
        example("no images", 0, 4, 8),
    )


# ---- kernels


@triton.jit
def place_offsets(s, c, C: tl.constexpr, S, LAST: tl.constexpr):
    """[BLOCK_S, BLOCK_C] places of an image."""
    return s.to(tl.int64)[:, None] * C + c[None, :] if LAST else c.to(tl.int64)[None, :] * S + s[:, None]


@triton.jit(do_not_specialize=["s_units", "n_images", "shift_stride", "share"])
def parts_kernel(
    x_ptr, shift_ptr, dy_ptr, y_ptr, g_ptr, first_ptr, second_ptr, s_units, n_images, shift_stride, share,
    C: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr, SHIFT: tl.constexpr, HAS_DY: tl.constexpr,
    RELU: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sums of a program's places: of x - shift and its square; HAS_DY: of g and g (x - shift), where g is dy, or with RELU what
    is left of it where y is not cut off, which is written. SHIFT: "first" takes a channel's x[0, 0], "one" is for all images,
    "each" for one.

    An image of axis 0, channels of axis 1, and of the image's places blocks number `share` times axis 2 and on.
    """
    S = s_units * VECTOR
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if SHIFT == "first":
        shift = tl.load(x_ptr + (c if LAST else c.to(tl.int64) * S), mask=c < C, other=0.0).to(tl.float32)
    else:
        shift = tl.load(shift_ptr + (image * shift_stride if SHIFT == "each" else 0) + c, mask=c < C, other=0.0)
    x_ptr += image * S * C
    dy_ptr += image * S * C
    y_ptr += image * S * C
    g_ptr += image * S * C
    first = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    second = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    begin = tl.program_id(2) * share * BLOCK_S
    for start in tl.range(begin, tl.minimum(begin + share * BLOCK_S, S), BLOCK_S, num_stages=2):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s < S)[:, None] & (c < C)[None, :]
        at = place_offsets(s, c, C, S, LAST)
        gap = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - shift[None, :]
        if HAS_DY:
            given = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if RELU:
                given = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) <= 0, 0.0, given)
                tl.store(g_ptr + at, given.to(g_ptr.dtype.element_ty), mask=mask)
        else:
            gap = tl.where(mask, gap, 0.0)
            given = gap
        first += given
        second += given * gap
    at = (tl.program_id(2).to(tl.int64) * n_images + image) * C + c
    tl.store(first_ptr + at, tl.sum(first, axis=0), mask=c < C)
    tl.store(second_ptr + at, tl.sum(second, axis=0), mask=c < C)


@triton.jit(do_not_specialize=["s_units", "a_stride", "b_stride", "d_stride"])
def _affine_kernel(
    x_ptr, dy_ptr, a_ptr, b_ptr, d_ptr, y_ptr, s_units, a_stride, b_stride, d_stride,
    C: tl.constexpr, VECTOR: tl.constexpr, LAST: tl.constexpr, HAS_DY: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    S = s_units * VECTOR
    # Backwards: what was read last is still in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    TILES_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tiles_s = tl.cdiv(S, BLOCK_S)
    c = program % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    s = program // TILES_C % tiles_s * BLOCK_S + tl.arange(0, BLOCK_S)
    image = (program // TILES_C // tiles_s).to(tl.int64)
    mask = (s < S)[:, None] & (c < C)[None, :]
    at = image * S * C + place_offsets(s, c, C, S, LAST)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + image * a_stride + c, mask=c < C, other=0.0)
    b = tl.load(b_ptr + image * b_stride + c, mask=c < C, other=0.0)
    y = x * a[None, :] + b[None, :]
    if HAS_DY:
        d = tl.load(d_ptr + image * d_stride + c, mask=c < C, other=0.0)
        y += tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32) * d[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


# ---- launchers and ops


def places_at_once(x: Tensor) -> int:
    """Places that are read at once where they are dense, up to 16 bytes."""
    vector = 1 if channels_last(x) else 16 // x.element_size()
    while x.shape[1] % vector:
        vector //= 2
    return vector


def _step(vectors: Tensor) -> int:
    """Elements from an image's channels to the next one's; 0 where all have the same."""
    return vectors.stride(0) if vectors.shape[0] > 1 else 0


def _sums_launch(config: Config, x: Tensor, shift: Tensor, dy: Tensor | None) -> tuple[Tensor, Tensor]:
    n, s, c = x.shape
    if not x.numel():
        first, second = (torch.zeros(n, c, dtype=torch.float32, device=x.device) for _ in range(2))
        return first, second
    groups, blocks = ceil_div(c, config["BLOCK_C"]), ceil_div(s, config["BLOCK_S"])
    wanted = ceil_div(8 * device_of(x.get_device()).sms, n * groups)
    share = ceil_div(blocks, min(blocks, wanted))
    splits, vector = ceil_div(blocks, share), places_at_once(x)
    first, second = (torch.empty(splits, n * c, dtype=torch.float32, device=x.device) for _ in range(2))
    layout = {"C": c, "VECTOR": vector, "LAST": channels_last(x)}
    constants = {**layout, "SHIFT": "each", "HAS_DY": dy is not None, "RELU": False, **config}
    operands, numbers = (x, shift, x if dy is None else dy, x, x, first, second), (s // vector, n, _step(shift), share)
    launch(parts_kernel, (n, groups, splits), operands, numbers, constants)
    if splits > 1:
        first, second = column_sums(torch.float32, first, second)
    return first.view(n, c), second.view(n, c)


def affine_into(
    config: Config, x: Tensor, a: Tensor, b: Tensor, dy: Tensor | None, d: Tensor | None, y: Tensor
) -> Prepared | None:
    """The map, written to y; x has elements. Gives what makes the launch again, of x, dy or x, a, b, d or a, y."""
    n, s, c = x.shape
    vector = places_at_once(x)
    operands = (x, x if dy is None else dy, a, b, a if d is None else d, y)
    numbers = (s // vector, _step(a), _step(b), 0 if d is None else _step(d))
    constants = {"C": c, "VECTOR": vector, "LAST": channels_last(x), "HAS_DY": dy is not None, **config}
    programs = n * ceil_div(s, config["BLOCK_S"]) * ceil_div(c, config["BLOCK_C"])
    return launch(_affine_kernel, (programs,), operands, numbers, constants)


def _affine_launch(config: Config, x: Tensor, a: Tensor, b: Tensor, dy: Tensor | None, d: Tensor | None) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        affine_into(config, x, a, b, dy, d, y)
    return y


channel_sums_op = Op(
    name="channel_sums",
    reference=_sums_reference,
    problem=channel_problem,
    cost=_sums_cost,
    examples=_examples(False),
    make=channel_sums_arguments,
    impls=(Impl(name="triton", launch=_sums_launch, space=CHANNEL_SPACE),),
)

channel_affine_op = Op(
    name="channel_affine",
    reference=_affine_reference,
    problem=channel_problem,
    cost=_affine_cost,
    examples=_examples(True),
    make=channel_affine_arguments,
    impls=(Impl(name="triton", launch=_affine_launch, space=CHANNEL_SPACE, batch_invariant=True),),
)
