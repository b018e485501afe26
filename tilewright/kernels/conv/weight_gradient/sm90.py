"""`conv_weight_gradient` for Hopper: the implementation `sm90`, in Gluon.

    dw[o, r, s, c] = sum over n, p, q of dy[n, p, q, o] * x[n, p + r - padding, q + s - padding, c]

dy [N, P, Q, O], x [N, H, W, C], dw [O, KH, KW, C], channels-last; fp16 or bf16.

The summed dimension is pixels, and both operands have their other dimension dense, which wgmma reads from shared memory as it
stands. So the copy engine fetches boxes of 64 pixels of dy and of x, shifted for a column of the filter, with rows below it:
all positions of the column read the same box of x, each a row lower (conv/sm90_kernel.py), and each has an accumulator of its
own. A tile is 64 channels of dy for each of two consumer warpgroups, 64 of x, a column; where dy's channels are an odd number
of 64, they take different pixels instead. 128 channels of dy a consumer wrote twice the parts and took 1.1 to 1.8 times as
long.

Where tiles are few SPLIT programs share one, each a run of boxes. Each part goes to memory in float32, and a second kernel adds
them in order: the same bits every time. The parts of 132 programs are 13 MB, whatever the weight.

Where sizes are ragged a box reaches beyond y, where dy is zero: a pixel of x that is inf or NaN there spoils the sum of filter
positions that do not meet it.

Not here: strides, dilation, groups, filters of more than three rows, channels that are no multiple of 64, three spatial dims,
Triton from 3.8 on (`VIEWS_REACH_ON`).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

# N images, C channels of x, O of dy; boxes of pixels

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewright.hw.device import Device
from tilewright.kernels.conv.problem import sizes_of
from tilewright.kernels.conv.sm90_im2col import fetched_box
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON, corner
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.hopper.primitives import load_box, viewed
from tilewright.kernels.hopper.ring import new_ring
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["WEIGHT_GRADIENT_SM90"]

_SIDE = 64
"""Channels of x of a tile, and pixels of a box."""


def _refuse(device: Device, problem: Any) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"does not support {problem.dtype}"
    if problem.groups != 1:
        return "does not support groups"
    if not problem.pixels or problem.deep:
        return "supports up to two spatial dims only, and no empty tensors"
    if max(problem.stride) > 1 or max(problem.dilation) > 1 or problem.kernel[1] > 3:
        return "supports filters of up to three rows with a stride of 1 and without dilation only"
    if not problem.aligned or problem.o % _SIDE or problem.c % _SIDE:
        return "needs tensors that start at multiples of 16 bytes, and numbers of channels that are multiples of 64"
    return None if VIEWS_REACH_ON else "needs a version of Triton whose views of shared memory may reach beyond their slice"


# ---- kernels


@gluon.jit
def _tile(tiles_c, KW: gl.constexpr):
    """(block of dy's channels, of x's channels, column of the filter) of this program."""
    tile = gl.program_id(0)
    return tile // KW // tiles_c, tile // KW % tiles_c, tile % KW


@gluon.jit
def _load_units(desc, units, unit, bar, at):
    shape: gl.constexpr = desc.block_type.shape
    layout: gl.constexpr = desc.layout
    load_box(desc, at, bar, viewed(units.index(unit), desc.dtype, shape, layout))


@gluon.jit
def _load_boxes(
    dy_desc, x_desc, below_desc, dy_boxes, units, ring, boxes_h, boxes_w, tiles_c, steps, share,
    KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, APART: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    X: gl.constexpr = x_desc.block_type.shape
    BELOW: gl.constexpr = below_desc.block_type.shape if KH > 1 else [0, 1, 1, 1]
    WIDTH: gl.constexpr = dy_desc.block_type.shape[3]
    BOXES: gl.constexpr = 2 if APART else 1
    UNITS: gl.constexpr = units.shape[0] // (STAGES * BOXES)
    ROWS: gl.constexpr = X[0] + BELOW[0]
    tile_o, tile_c, s = _tile(tiles_c, KW)
    at = ring.to_fill()
    for step in range(gl.program_id(1) * share, gl.minimum(gl.program_id(1) * share + share, steps)):
        bar = at.fill((2 * 64 * WIDTH + BOXES * ROWS * X[1] * X[2] * 64) * 2)
        for b in gl.static_range(BOXES):
            p, n, q = corner(step * BOXES + b, boxes_h, boxes_w, X)
            unit = (at.stage * BOXES + b) * UNITS
            _load_units(x_desc, units, unit, bar, [p - PAD_H, n, q + s - PAD_W, tile_c * 64])
            if KH > 1:
                _load_units(below_desc, units, unit + X[0], bar, [p - PAD_H + X[0], n, q + s - PAD_W, tile_c * 64])
            if APART:
                load_box(dy_desc, [p, n, q, tile_o * WIDTH], bar, dy_boxes.index(at.stage * 2 + b))
            else:
                for j in gl.static_range(2):
                    load_box(dy_desc, [p, n, q, (tile_o * 2 + j) * WIDTH], bar, dy_boxes.index(at.stage * 2 + j))
        at = at.next()


@gluon.jit
def _multiply_boxes(
    wg: gl.constexpr, dy_boxes, units, ring, parts_ptr, O, C, tiles_c, steps, share,
    KH: gl.constexpr, KW: gl.constexpr, APART: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BOXES: gl.constexpr = 2 if APART else 1
    UNITS: gl.constexpr = units.shape[0] // (STAGES * BOXES)
    WIDTH: gl.constexpr = dy_boxes.shape[4]
    dtype: gl.constexpr = units.dtype
    layout: gl.constexpr = units.layout
    dy_shape: gl.constexpr = [2 * STAGES, 64, WIDTH]
    x_shape: gl.constexpr = [64, 64]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dy_bufs = viewed(dy_boxes, dtype, dy_shape, layout)
    first = gl.program_id(1) * share
    accs = ()
    for _ in gl.static_range(KH):
        accs += (gl.zeros([WIDTH, 64], gl.float32, acc_layout),)
    at = ring.after(gl.to_tensor(0))
    for step in range(first, gl.minimum(first + share, steps)):
        at.wait()
        dy = dy_bufs.index(at.stage * 2 + wg).permute((1, 0))
        started = ()
        for t in gl.static_range(KH):
            unit = (at.stage * BOXES + (wg if APART else 0)) * UNITS + t
            x = viewed(units.index(unit), dtype, x_shape, layout)
            started += (warpgroup_mma(dy, x, accs[t], is_async=True),)
        # The products of this step stay in flight; those of the one before are over: what they read may be overwritten.
        waited = warpgroup_mma_wait(KH, deps=started)
        if KH == 1:
            accs = (waited,)
        else:
            accs = waited
        at.give_back_last(step > first)
        at = at.next()
    ended = warpgroup_mma_wait(0, deps=accs)
    if KH == 1:
        accs = (ended,)
    else:
        accs = ended
    tile_o, tile_c, s = _tile(tiles_c, KW)
    part = gl.program_id(1) * 2 + wg if APART else gl.program_id(1)
    block = tile_o if APART else tile_o * 2 + wg
    o = block * WIDTH + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(1, acc_layout)), 1)
    c = tile_c * 64 + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, acc_layout)), 0)
    for t in gl.static_range(KH):
        ptrs = parts_ptr + part.to(gl.int64) * (O * KH * KW * C) + (o * (KH * KW) + t * KW + s) * C + c
        gl.store(ptrs, accs[t].to(parts_ptr.dtype.element_ty))


@gluon.jit(do_not_specialize=["boxes_h", "boxes_w", "tiles_c", "steps", "share"])
def _gradient_kernel(
    dy_desc, x_desc, below_desc, parts_ptr, O, C, boxes_h, boxes_w, tiles_c, steps, share,
    KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, APART: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Launch on (blocks of dy's channels * tiles_c * KW, SPLIT) programs with num_warps=4.

    A box is [rows, images, columns] of 64 pixels: x_desc's and below_desc's of 64 channels, and dy_desc's too. A step is a
    box, whose channels of dy the consumers share out, or with APART a box each. share: steps of a program. parts_ptr: [SPLIT,
    O, KH, KW, C] in float32, with APART [2 * SPLIT, ...]; or, where it is one part, the result.
    """
    X: gl.constexpr = x_desc.block_type.shape
    BOXES: gl.constexpr = 2 if APART else 1
    UNITS: gl.constexpr = X[0] + (below_desc.block_type.shape[0] if KH > 1 else 0)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    units = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BOXES * UNITS, X[1] * X[2], 64], layout)
    dy_boxes = gl.allocate_shared_memory(dy_desc.dtype, [STAGES * 2] + dy_desc.block_type.shape, dy_desc.layout)
    ring = new_ring(STAGES, 2)
    gl.warp_specialize([
        (_multiply_boxes, (
            0, dy_boxes, units, ring, parts_ptr, O, C, tiles_c, steps, share, KH, KW, APART, STAGES,
        )),
        (_multiply_boxes, (
            1, dy_boxes, units, ring, parts_ptr, O, C, tiles_c, steps, share, KH, KW, APART, STAGES,
        )),
        (_load_boxes, (
            dy_desc, x_desc, below_desc, dy_boxes, units, ring, boxes_h, boxes_w, tiles_c, steps, share,
            KH, KW, PAD_H, PAD_W, APART, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit(do_not_specialize=["PARTS"])
def _add_kernel(parts_ptr, out_ptr, PARTS, COUNT: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of PARTS arrays of COUNT numbers: AT_ONCE are asked for together, sums are added first to last."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, AT_ONCE)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, PARTS, AT_ONCE):
        part = (first + rows)[:, None]
        ptrs = parts_ptr + part.to(tl.int64) * COUNT + at[None, :]
        total += tl.sum(tl.load(ptrs, mask=(part < PARTS) & (at < COUNT)[None, :], other=0.0), axis=0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < COUNT)


# ---- launcher


def _key(config: Config, dy: Tensor, x: Tensor, stride: list[int], padding: list[int], *rest: Any) -> tuple[Any, ...]:
    return x.get_device(), x.dtype, dy.shape, x.shape, *padding, *rest[-1]


def _launch(config: Config, dy: Tensor, x: Tensor, *window: Any) -> Tensor:
    dw = torch.empty((dy.shape[-1], *window[-1], x.shape[-1]), dtype=x.dtype, device=x.device)
    _PLANS.fill(config, dw, (dy, x, *window), (dy, x, dw))
    return dw


def _first_launch(
    config: Config, dw: Tensor, dy: Tensor, x: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    kernel: list[int],
) -> Plan:  # fmt: skip
    """Fill dw."""
    s = sizes_of(x, dw, stride, padding, dilation, groups, dy.shape[1:-1])
    device = card_of(x)
    n, c, o, (_, rows, cols), (_, kh, kw) = s.n, s.c, s.o, s.y, s.kernel
    extra = next_pow2(kh - 1) if kh > 1 else 0
    apart = o // _SIDE % 2 == 1
    each = 2 if apart else 1
    # Boxes of x and of dy; a product of a pixel takes 2 cycles at best.
    box = fetched_box(_SIDE, next_pow2(n), rows, cols, 4 - each, extra, 2.8 * kh * (3 - each))
    # A row of all images, then the next one.
    seen, pixels = dy.view(n, rows, cols, o).transpose(0, 1), x.view(n, *s.x[1:], c).transpose(0, 1)
    x_descs = [descriptor(pixels, [r, *box[1:], _SIDE]) if r else None for r in (box[0], extra)]
    down, deep, across = ceil_div(rows, box[0]), ceil_div(n, box[1]), ceil_div(cols, box[2])
    steps, tiles_c = ceil_div(down * deep * across, each), c // _SIDE
    tiles = o // (_SIDE * (3 - each)) * tiles_c * kw
    share = ceil_div(steps, max(1, min(steps, device.sms // tiles)))
    split = ceil_div(steps, share)
    stage_bytes = 2 * (2 * _SIDE * _SIDE + each * (box[0] + extra) * box[1] * box[2] * _SIDE)
    count = split * each
    parts = dw if count == 1 else torch.empty(count * dw.numel(), dtype=torch.float32, device=x.device)
    arguments = (descriptor(seen, [*box, _SIDE]), *x_descs, parts, o, c, down, across, tiles_c, steps, share)
    constants = {
        "KH": kh, "KW": kw, "PAD_H": s.padding[1], "PAD_W": s.padding[2], "APART": apart,
        "STAGES": min(6, (device.smem_bytes - 1024) // stage_bytes), "num_warps": 4,
    }  # fmt: skip
    operands, owners = (dy, x, dw, parts), (0, 1, 1, 2 if count == 1 else 3)  # which operand each argument points into
    products = first_launch(_gradient_kernel, (tiles, split), arguments, constants, owners, operands)
    if count == 1:
        return Plan(products)
    grid, sizes = (ceil_div(dw.numel(), 256),), {"COUNT": dw.numel(), "AT_ONCE": 16, "BLOCK": 256}
    sums, scratch = first_launch(_add_kernel, grid, (parts, dw, count), sizes, (3, 2), operands), parts.numel()
    return Plan(products, sums, memory=lambda device: (torch.empty(scratch, dtype=torch.float32, device=device),))


_PLANS = Planned(_key, _first_launch)

WEIGHT_GRADIENT_SM90 = Impl(name="sm90", launch=_launch, plan=_PLANS.plan, written_for=90, refuse=_refuse)
