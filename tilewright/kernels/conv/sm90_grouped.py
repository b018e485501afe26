"""`conv` for Hopper with groups of up to 64 channels: the implementation `narrow`, in Gluon.

    y[n, p, q, o] = activation(sum over r, s, c of x[n, p * stride + r - padding, ..., first(o) + c] * weight[o, r, s, c] + ...)

x [N, H, W, C], weight [O, KH, KW, C / groups], channels-last, fp16 or bf16. These are grouped convolutions as in ResNeXt (Xie
et al., "Aggregated Residual Transformations for Deep Neural Networks", 2017). A group has 4, 8, 16, 32 or 64 channels of x and
as many of y.

The weight of 64 output channels is small: at most 9 filter positions of 64 x 64 numbers. A program loads it once and keeps it
in shared memory for all pixels that it processes. Groups narrower than 64 channels lie on the diagonal of a 64 x 64 matrix,
whose other entries are zeros. The additional products cost little, because the tensor cores are not the limit here.

The limit is loading x: the copy engine needs 4.6 cycles per pixel (sm90_kernel.py). So one box serves as many filter positions
as possible. With a stride of 1, these are the positions of a column of the filter; with a stride of 2, those of a column whose
rows are in the same phase. The copy engine sees x as [H / stride, stride, N, W / stride, stride * C], where the phase of the
rows is a dimension of its own. So two descriptors are enough: one for a box, and one for the rows below it.

A producer warp loads. Two consumer warpgroups take turns at tiles, so that the epilogue of one overlaps the products of the
other. The residual is loaded into the buffer from which the tile is stored; the load starts before the products of the tile.

Not here: dilation, filters of more than 3 x 3, channels that are no multiple of 64, odd sizes with a stride of 2, int8,
three spatial dims, Triton from 3.8 on (`VIEWS_REACH_ON`).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

# N images, C channels, O output channels; S stride; boxes of pixels

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.hw.device import Device
from tilewright.kernels.conv.plan import launcher, plan_of
from tilewright.kernels.conv.problem import Problem, Three, sizes_of
from tilewright.kernels.conv.sm90_im2col import fetched_box, refuse_boxes
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON, corner
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.hopper.epilogue import activate
from tilewright.kernels.hopper.primitives import load_box, release, store_box, viewed
from tilewright.kernels.hopper.ring import barriers, new_ring
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["NARROW"]

_SIDE = 64
"""Channels of x, and channels of y, in a tile: 128 bytes, which is one row of the swizzle pattern."""


def _refuse(device: Device, problem: Problem) -> str | None:
    if (reason := refuse_boxes(device, problem, groups=True)) is not None:
        return reason
    own = problem.c // problem.groups
    if own not in (4, 8, 16, 32, 64) or problem.o != problem.c:
        return "supports groups of 4, 8, 16, 32 or 64 channels of x only, with as many of y"
    if problem.c % _SIDE:
        return "needs a number of channels that is a multiple of 64"
    if max(problem.kernel) > 3 or max(problem.dilation) > 1:
        return "supports filters of up to 3 x 3 without dilation only: their weights fit in shared memory"
    stride = problem.stride[2]
    if problem.stride[1] != stride or stride not in (1, 2) or problem.x[1] % stride or problem.x[2] % stride:
        return "supports a stride of 1 only, or of 2 if height and width are even"
    if not problem.aligned:
        return "needs tensors that start at multiples of 16 bytes"
    return None if VIEWS_REACH_ON else "needs a version of Triton whose views of shared memory may reach beyond their slice"


_PRODUCT_CYCLES = 2.3
"""Cycles per pixel and filter position, for 64 channels of x by 64 of y. At the peak rate of the tensor cores it would be 2."""


def _box(block_m: int, images: int, y: Three, kernel: Three, stride: int) -> tuple[Three, int, int]:
    """(box of pixels, number of rows below it, total number of boxes)."""
    (_, rows, cols), (_, kh, kw), images = y, kernel, next_pow2(images)
    below = next_pow2(ceil_div(kh, stride) - 1) if kh > stride else 0
    box = fetched_box(block_m, images, rows, cols, kw * min(kh, stride), kw * below, _PRODUCT_CYCLES * kh * kw)
    return box, below, ceil_div(rows, box[0]) * ceil_div(images, box[1]) * ceil_div(cols, box[2])


def _default(device: Device, problem: Problem) -> Config:
    """The tile that wastes less in the last round. For smaller boxes, the rows below them are a larger share of the loads."""
    walkers = max(1, device.sms // (problem.o // _SIDE))
    boxes = {m: _box(m, problem.n_bucket, problem.y, problem.kernel, problem.stride[2])[2] for m in (64, 128)}
    rounds = {m: ceil_div(count, walkers) * m for m, count in boxes.items()}
    return {"BLOCK_M": 64 if 1.1 * rounds[64] < rounds[128] else 128}


SPACE = Space(default=_default, axes={"BLOCK_M": (64, 128)}, refusal=lambda device, problem, config: None)
"""BLOCK_M: pixels of a tile. Each tile is computed by one consumer."""

# ---- kernel


@gluon.jit
def _load_column(
    x_desc, below_desc, units, at, unit, p, n, q, c, C,
    s: gl.constexpr, rows: gl.constexpr, KH: gl.constexpr, STRIDE: gl.constexpr, PAD_H: gl.constexpr,
    PAD_W: gl.constexpr,
):  # fmt: skip
    """Load the pixels for column `s` of the filter: for those of its positions that read rows of x in phase `rows`."""
    FIRST: gl.constexpr = (rows + PAD_H) % STRIDE
    BOX: gl.constexpr = x_desc.block_type.shape
    BELOW: gl.constexpr = below_desc.block_type.shape if FIRST + STRIDE < KH else [0, 1, 1, 1, 1]
    PIXELS: gl.constexpr = BOX[0] * BOX[2] * BOX[3] + BELOW[0] * BELOW[2] * BELOW[3]
    bar = at.fill(PIXELS * BOX[4] * x_desc.dtype.primitive_bitwidth // 8)
    SHIFT_H: gl.constexpr = (FIRST - PAD_H - rows) // STRIDE
    PHASE_W: gl.constexpr = (s + PAD_W * (STRIDE - 1)) % STRIDE
    SHIFT_W: gl.constexpr = (s - PAD_W - PHASE_W) // STRIDE
    layout: gl.constexpr = x_desc.layout
    box = viewed(units.index(unit), x_desc.dtype, BOX, layout)
    load_box(x_desc, [p + SHIFT_H, rows, n, q + SHIFT_W, PHASE_W * C + c], bar, box)
    if FIRST + STRIDE < KH:
        below_layout: gl.constexpr = below_desc.layout
        below = viewed(units.index(unit + BOX[0]), x_desc.dtype, BELOW, below_layout)
        load_box(below_desc, [p + SHIFT_H + BOX[0], rows, n, q + SHIFT_W, PHASE_W * C + c], bar, below)


@gluon.jit
def _load_boxes(
    x_desc, below_desc, y_desc, units, ring, boxes, boxes_h, boxes_w, tiles_n, C,
    KH: gl.constexpr, KW: gl.constexpr, STRIDE: gl.constexpr, PAD_H: gl.constexpr,
    PAD_W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    UNITS: gl.constexpr = units.shape[0] // STAGES
    shape: gl.constexpr = y_desc.block_type.shape
    c = gl.program_id(0) % tiles_n * 64
    at = ring.to_fill()
    for box in range(gl.program_id(0) // tiles_n, boxes, gl.num_programs(0) // tiles_n):
        p, n, q = corner(box, boxes_h, boxes_w, shape)
        for s in gl.static_range(KW):
            for rows in gl.static_range(STRIDE):
                if (rows + PAD_H) % STRIDE < KH:
                    _load_column(
                        x_desc, below_desc, units, at, at.stage * UNITS, p, n, q, c, C, s, rows, KH, STRIDE, PAD_H, PAD_W
                    )
                    at = at.next()


@gluon.jit
def _place_weights(w_ptr, w_bufs, placed, first_col, wg: gl.constexpr, OWN: gl.constexpr, TAPS: gl.constexpr):
    """Store this consumer's half of the filter positions in shared memory, each as [64 channels of y, 64 channels of x].

    The groups are blocks on the diagonal.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, layout)), 0)
    for t in gl.static_range(wg, TAPS, 2):
        ptrs = w_ptr + (first_col + o) * (TAPS * OWN) + (t * OWN + c % OWN)
        w_bufs.index(t).store(gl.load(ptrs, mask=o // OWN == c // OWN, other=0.0))
    fence_async_shared()
    release(placed.index(0))


@gluon.jit
def _sum_column(
    units, w_bufs, at, acc, s, rows: gl.constexpr, begun, KH: gl.constexpr, KW: gl.constexpr, STRIDE: gl.constexpr,
    PAD_H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc + the products of the filter positions of one call of `_load_column`. Releases the previous stage."""
    FIRST: gl.constexpr = (rows + PAD_H) % STRIDE
    COUNT: gl.constexpr = (KH - FIRST + STRIDE - 1) // STRIDE
    UNITS: gl.constexpr = units.shape[0] // STAGES
    layout: gl.constexpr = units.layout
    shape: gl.constexpr = [acc.shape[0], 64]
    at.wait()
    for i in gl.static_range(COUNT):
        x = viewed(units.index(at.stage * UNITS + i), units.dtype, shape, layout)
        w = w_bufs.index((FIRST + i * STRIDE) * KW + s).permute((1, 0))
        started = warpgroup_mma(x, w, acc, use_acc=begun | (i > 0), is_async=True)
        # One product stays in flight. So after the first product of a step, the last one of the previous step has ended, and
        # its stage may be overwritten.
        acc = warpgroup_mma_wait(1, deps=(started,))
        if i == 0:
            at.give_back_last(begun)
    return acc


@gluon.jit
def _finish(
    acc, tile_box, arrived, parity, residual_desc, y_desc, bias_ptr, p, n, q, first_col, ACTIVATION: gl.constexpr
):  # fmt: skip
    """Add bias and residual, apply the activation, round once, store through `tile_box`. The residual is loaded there too."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    shape: gl.constexpr = acc.shape
    buf = viewed(tile_box, y_desc.dtype, shape, layout)
    if bias_ptr is not None:
        cols = first_col + gl.arange(0, 64, layout=gl.SliceLayout(0, acc.type.layout))
        acc += gl.expand_dims(gl.load(bias_ptr + cols).to(gl.float32), 0)
    if residual_desc is not None:
        mbarrier.wait(arrived, parity)
        acc += buf.load(acc.type.layout).to(gl.float32)
    else:
        tma.store_wait(pendings=0)
    buf.store(activate(acc, ACTIVATION).to(y_desc.dtype))
    fence_async_shared()
    store_box(y_desc, [p, n, q, first_col], tile_box)


@gluon.jit
def _multiply_boxes(
    wg: gl.constexpr, units, w_bufs, tile_boxes, ring, turns, placed, arrived, residual_desc, y_desc, w_ptr, bias_ptr,
    boxes, boxes_h, boxes_w, tiles_n, filter_w,
    OWN: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, STRIDE: gl.constexpr,
    PAD_H: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = y_desc.block_type.shape
    ROWS: gl.constexpr = shape[0] * shape[1] * shape[2]
    STEPS: gl.constexpr = KW * (STRIDE if KH >= STRIDE else KH)
    # The first phase of rows that the filter reads. For a filter with one row it is not always 0.
    FIRST_ROWS: gl.constexpr = 0 if PAD_H % STRIDE < KH else 1
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    walkers = gl.num_programs(0) // tiles_n
    first_col = gl.program_id(0) % tiles_n * 64
    tile_box = tile_boxes.index(wg)
    _place_weights(w_ptr, w_bufs, placed, first_col, wg, OWN, KH * KW)
    mbarrier.wait(placed.index(0), 0)
    at = ring.after(gl.to_tensor(STEPS * wg))
    for box in range(gl.program_id(0) // tiles_n + wg * walkers, boxes, 2 * walkers):
        mine = box // walkers // 2  # tiles of this consumer so far
        p, n, q = corner(box, boxes_h, boxes_w, shape)
        if residual_desc is not None:
            tma.store_wait(pendings=0)
            mbarrier.expect(arrived.index(wg), ROWS * 128)
            load_box(residual_desc, [p, n, q, first_col], arrived.index(wg), tile_box)
        # The parity of a barrier distinguishes only its last two rounds. So begin only when the other consumer has seen its
        # whole tile arrive.
        mbarrier.wait(turns.index(wg), (mine + 1 - wg) & 1)
        acc = gl.zeros([ROWS, 64], gl.float32, acc_layout)
        for s in range(filter_w):  # not unrolled: otherwise the addresses of all weights would stay in registers
            for rows in gl.static_range(STRIDE):
                if (rows + PAD_H) % STRIDE < KH:
                    acc = _sum_column(
                        units, w_bufs, at, acc, s, rows, (s > 0) | (rows > FIRST_ROWS), KH, KW, STRIDE, PAD_H, STAGES
                    )
                    at = at.next()
        release(turns.index(1 - wg))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        at.give_back_last()
        at = at.skip(STEPS)  # the stages of the other consumer's tile
        _finish(acc, tile_box, arrived.index(wg), mine & 1, residual_desc, y_desc, bias_ptr, p, n, q, first_col, ACTIVATION)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["boxes", "boxes_h", "boxes_w", "tiles_n", "filter_w", "C"])
def _narrow_kernel(
    x_desc, below_desc, residual_desc, y_desc, w_ptr, bias_ptr, boxes, boxes_h, boxes_w, tiles_n, filter_w, C,
    OWN: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, STRIDE: gl.constexpr,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Launch on a multiple of tiles_n programs, at most as many as there are SMs, with num_warps=4.

    A tile is a box of pixels [rows, images, columns] by 64 output channels. The programs form tiles_n sets, one per 64 output
    channels; the programs of a set process the boxes in turn. x_desc: boxes [rows, 1, images, columns, 64] of x in the form
    that is described at the top of this file. below_desc: boxes of the rows below that the filter reads with the same phase;
    None if there are none.
    """
    shape: gl.constexpr = x_desc.block_type.shape
    EXTRA: gl.constexpr = 0 if below_desc is None else below_desc.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    units = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (shape[0] + EXTRA), shape[2] * shape[3], 64], layout)
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [KH * KW, 64, 64], layout)
    tile_boxes = gl.allocate_shared_memory(y_desc.dtype, [2] + y_desc.block_type.shape, y_desc.layout)
    ring = new_ring(STAGES, 1)
    turns = barriers(2)
    arrived = barriers(2)
    placed = barriers(1, 2)
    gl.warp_specialize([
        (_multiply_boxes, (
            0, units, w_bufs, tile_boxes, ring, turns, placed, arrived, residual_desc, y_desc, w_ptr, bias_ptr,
            boxes, boxes_h, boxes_w, tiles_n, filter_w, OWN, KH, KW, STRIDE, PAD_H, STAGES, ACTIVATION,
        )),
        (_multiply_boxes, (
            1, units, w_bufs, tile_boxes, ring, turns, placed, arrived, residual_desc, y_desc, w_ptr, bias_ptr,
            boxes, boxes_h, boxes_w, tiles_n, filter_w, OWN, KH, KW, STRIDE, PAD_H, STAGES, ACTIVATION,
        )),
        (_load_boxes, (
            x_desc, below_desc, y_desc, units, ring, boxes, boxes_h, boxes_w, tiles_n, C,
            KH, KW, STRIDE, PAD_H, PAD_W, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- launcher


def _key(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    activation, stride, padding, _, groups, size, *_ = rest
    return (
        x.get_device(), x.dtype, x.shape, weight.shape, *size, *stride, *padding, groups, activation, residual is None,
        pointer_kind(weight), pointer_kind(bias), *config.values(),
    )  # fmt: skip


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int], *rest: Any,
) -> Plan:  # fmt: skip
    """Fill y. Returns the plan of the launch."""
    device = card_of(x)
    s = sizes_of(x, weight, stride, padding, dilation, groups, size)
    (_, h, w), (_, rows, cols), (_, kh, kw), step = s.x, s.y, s.kernel, s.stride[2]
    box, extra, _ = _box(config["BLOCK_M"], s.n, s.y, s.kernel, step)
    # [H / S, S, N, W / S, S * C]: the rows of a phase are neighbours, and so are its columns.
    seen = x.view(s.n, h // step, step, w // step, step * s.c).permute(1, 2, 0, 3, 4)
    descs = [descriptor(seen, [height, 1, box[1], box[2], _SIDE]) if height else None for height in (box[0], extra)]
    # [rows, images, columns, channels], as for x: a row of all images comes before the next row.
    planes = [None if t is None else t.view(s.n, rows, cols, s.o).transpose(0, 1) for t in (residual, y)]
    descs += [None if t is None else descriptor(t, [*box, _SIDE]) for t in planes]
    down, deep, across = ceil_div(rows, box[0]), ceil_div(s.n, box[1]), ceil_div(cols, box[2])
    boxes, tiles_n = down * deep * across, s.o // _SIDE
    programs = tiles_n * max(1, min(boxes, device.sms // tiles_n))
    pixel_bytes = 2 * _SIDE
    left = device.smem_bytes - pixel_bytes * (kh * kw * _SIDE + 2 * config["BLOCK_M"]) - 1024
    stages = min(12, left // ((box[0] + extra) * box[1] * box[2] * pixel_bytes))
    arguments = (*descs, weight, bias, boxes, down, across, tiles_n, kw, s.c)
    constants = {
        "OWN": s.c // groups, "KH": kh, "KW": kw, "STRIDE": step, "PAD_H": s.padding[1],
        "PAD_W": s.padding[2], "STAGES": stages, "ACTIVATION": activation, "num_warps": 4,
    }  # fmt: skip
    owners = (0, 0, 4, 2, 1, 3)
    return Plan(first_launch(_narrow_kernel, (programs,), arguments, constants, owners, (x, weight, y, bias, residual)))


_PLANS = Planned(_key, _first_launch)
_launch = launcher(_PLANS)

NARROW = Impl(name="narrow", launch=_launch, space=SPACE, plan=plan_of(_PLANS.plan), written_for=90, refuse=_refuse)
