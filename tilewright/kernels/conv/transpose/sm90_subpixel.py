"""`conv_transpose` for Hopper with a stride of 2, all phases in one launch: the implementation `phases`, in Gluon.

    y[n, i, j, c] = activation(sum of x[n, p, q, o] * weight[o, r, s, c] over o and all (p, r), (q, s) with
                               2 * p - padding + r = i and 2 * q - padding + s = j
                               + bias[c])

x [N, P, Q, O], weight [O, KH, KW, C], y [N, H, W, C], channels-last; fp16 or bf16.

Outputs of even rows meet every second row of the filter, those of odd rows the others; columns likewise. Such a phase is a
convolution of stride 1 by a part of the filter, which goes backwards through x (sm90.py). One launch for each
leaves the card idle at the end of each, and phases of a 3 x 3 filter have four positions, two, two, and one. Here a tile is a
box of 128 pixels of a phase by BLOCK_N channels; programs walk all of them, those with most positions first, so the last ones,
which no longer come out even, are the short ones. Each phase of y has a descriptor of its own, and is written in whole lines
of 128 bytes.

A step is 64 channels of x and a column of the phase's part of the filter: its one or two positions read one box of x, with a
row more. A producer warp, two consumer warpgroups that take turns at tiles.

Not here: other strides, dilation, filters below 2 x 2 and beyond 4 x 4, groups, channels of y that are no multiple of 64, one
or three spatial dims, Triton from 3.8 on (`VIEWS_REACH_ON`).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

# N images, O channels of x, C of y; boxes of pixels of a phase

from typing import Any

import torch
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
from tilewright.kernels.conv.problem import Problem, Three, sizes_of
from tilewright.kernels.conv.sm90_im2col import fetched_box, refuse_boxes
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.hopper.epilogue import activate, column_blocks
from tilewright.kernels.hopper.primitives import load_box, release, store_box, viewed
from tilewright.kernels.hopper.ring import barriers, new_ring
from tilewright.kernels.launch.plan import Plan, Planned
from tilewright.kernels.launch.replay import first_launch, pointer_kind
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["PHASES"]

_SIDE = 64
"""Channels of x of a step, and of y of a block of the epilogue: 128 bytes."""
_BLOCK_M = 128
"""Pixels of a tile."""


def _refuse(device: Device, problem: Problem) -> str | None:
    if (reason := refuse_boxes(device, problem)) is not None:
        return reason
    if problem.stride[1:] != (2, 2) or problem.dilation[1:] != (1, 1):
        return "supports two spatial dims with a stride of 2 in both, without dilation, only"
    if min(problem.padding) < 0:
        return "does not support negative padding"
    if not all(2 <= k <= 4 for k in problem.kernel[1:]):
        return "supports filters of 2 to 4 positions per dimension only"
    if min(problem.x[1:]) < 2:
        return "needs a y that is at least as large as the stride"
    if not problem.aligned or problem.o % 8 or problem.c % _SIDE:
        return "needs tensors that start at multiples of 16 bytes, a multiple of 8 channels in x, and of 64 in y"
    return None if VIEWS_REACH_ON else "needs a version of Triton whose views of shared memory may reach beyond their slice"


def _refuse_config(device: Device, problem: Problem, c: Config) -> str | None:
    return "BLOCK_N must divide the number of channels of y" if problem.c % c["BLOCK_N"] else None


def _box(images: int, rows: int, cols: int, taps: int, block_n: int) -> Three:
    """Of a phase's pixels, of which a product by 64 channels takes 2.8 cycles (conv/sm90_grouped.py)."""
    return fetched_box(_BLOCK_M, next_pow2(images), rows, cols, 1, taps - 1, 2.8 * taps * block_n / 64)


def _default(device: Device, problem: Problem) -> Config:
    """The tile with the least work for the program that has most of it. Positions cost by their products or their loads."""
    if problem.c % 128:
        return {"BLOCK_N": 64}
    (_, kh, kw), (_, h, w), taps = problem.kernel, problem.x, (problem.kernel[1] + 1) // 2
    # Rows of the filter that outputs of either parity meet, and columns.
    work = [((kh + 1 - a) // 2) * ((kw + 1 - b) // 2) for a in (0, 1) for b in (0, 1)]
    most: dict[int, float] = {}
    for block_n in (64, 128):
        rows, cols = ceil_div(h, 2), ceil_div(w, 2)
        box = _box(problem.n_bucket, rows, cols, taps, block_n)
        boxes = ceil_div(rows, box[0]) * ceil_div(problem.n_bucket, box[1]) * ceil_div(cols, box[2])
        tiles, programs = boxes * (problem.c // block_n), device.sms
        loads = [0] * programs
        for k, positions in enumerate(work):
            for program in range(programs):
                # Of tiles k * tiles to (k + 1) * tiles, every so manyeth is this program's.
                begun = [ceil_div(max(end - program, 0), programs) for end in (k * tiles, (k + 1) * tiles)]
                loads[program] += positions * (begun[1] - begun[0])
        most[block_n] = max(loads) * max(2.8 * block_n / 64, 4.6 * (1 + (taps - 1) / box[0]) / taps)
    return {"BLOCK_N": 64 if most[64] < most[128] else 128}


SPACE = Space(default=_default, axes={"BLOCK_N": (64, 128)}, refusal=_refuse_config)

# ---- kernel


@gluon.jit
def _tile_at(tile, boxes, boxes_h, boxes_w, tiles_n, shape: gl.constexpr, MOST_H: gl.constexpr, MOST_W: gl.constexpr):
    """(phase, parity of its rows, of columns, first row of the box, image, column, column of tiles)."""
    k = tile // (boxes * tiles_n)
    rest = tile - k * (boxes * tiles_n)
    box = rest // tiles_n
    row = box // boxes_w
    p, n, q = row % boxes_h * shape[0], row // boxes_h * shape[1], box % boxes_w * shape[2]
    return k, k // 2 ^ MOST_H, k % 2 ^ MOST_W, p, n, q, rest - box * tiles_n


@gluon.jit
def _positions(parity, PAD: gl.constexpr, K: gl.constexpr):
    """(first position of the filter that outputs of a parity meet, how many, pixel of x of output 0 there)."""
    first = (parity + PAD) % 2
    return first, (K + 1 - first) // 2, (parity + PAD) // 2


@gluon.jit
def _load_step(
    x_desc, below_desc, w_desc, units, w_boxes, at, row, n, col, o, r, s, c,
    COUNT: gl.constexpr, UNITS: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """Load a box of x for COUNT positions of a column of the filter, and the weight's boxes."""
    X: gl.constexpr = x_desc.block_type.shape
    W: gl.constexpr = w_desc.block_type.shape
    ROWS: gl.constexpr = X[0] + COUNT - 1
    bar = at.fill((ROWS * X[1] * X[2] + COUNT * W[3]) * 64 * 2)
    layout: gl.constexpr = x_desc.layout
    load_box(x_desc, [row, n, col, o], bar, viewed(units.index(at.stage * UNITS), x_desc.dtype, X, layout))
    if COUNT > 1:
        BELOW: gl.constexpr = below_desc.block_type.shape
        below_layout: gl.constexpr = below_desc.layout
        below = viewed(units.index(at.stage * UNITS + X[0]), x_desc.dtype, BELOW, below_layout)
        load_box(below_desc, [row + X[0], n, col, o], bar, below)
    for t in gl.static_range(COUNT):
        load_box(w_desc, [o, r + 2 * t, s, c], bar, w_boxes.index(at.stage * TAPS + t))


@gluon.jit
def _load_tiles(
    x_desc, below_desc, w_desc, units, w_boxes, ring, boxes, boxes_h, boxes_w, tiles_n, chunks,
    KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, MOST_H: gl.constexpr, MOST_W: gl.constexpr,
    UNITS: gl.constexpr, TAPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = x_desc.block_type.shape
    at = ring.to_fill()
    for tile in range(gl.program_id(0), 4 * boxes * tiles_n, gl.num_programs(0)):
        _, a, b, p, n, q, tile_col = _tile_at(tile, boxes, boxes_h, boxes_w, tiles_n, shape, MOST_H, MOST_W)
        r, down, row = _positions(a, PAD_H, KH)
        s, across, col = _positions(b, PAD_W, KW)
        for chunk in range(chunks):
            for t in range(across):
                if TAPS > 1:
                    if down > 1:
                        _load_step(
                            x_desc, below_desc, w_desc, units, w_boxes, at, p + row - 1, n, q + col - t, chunk * 64, r,
                            s + 2 * t, tile_col * BLOCK_N, 2, UNITS, TAPS,
                        )  # fmt: skip
                if TAPS == 1 or KH == 3:
                    if TAPS == 1 or down == 1:
                        _load_step(
                            x_desc, below_desc, w_desc, units, w_boxes, at, p + row, n, q + col - t, chunk * 64, r,
                            s + 2 * t, tile_col * BLOCK_N, 1, UNITS, TAPS,
                        )  # fmt: skip
                at = at.next()


@gluon.jit
def _sum_steps(
    units, w_bufs, at, turn, steps, count, ROWS: gl.constexpr, UNITS: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """A tile's product, `count` positions a step; gives the stages back as it goes, then the other consumer its turn."""
    COLS: gl.constexpr = w_bufs.shape[2]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 16])
    layout: gl.constexpr = units.layout
    shape: gl.constexpr = [ROWS, 64]
    acc = gl.zeros([ROWS, COLS], gl.float32, acc_layout)
    for step in range(steps):
        at.wait()
        # A loop, where a filter of three rows has one position or two: two branches with products would be serialized.
        for t in range(count):
            x = viewed(units.index(at.stage * UNITS + count - 1 - t), units.dtype, shape, layout)
            started = warpgroup_mma(x, w_bufs.index(at.stage * TAPS + t), acc, use_acc=(step > 0) | (t > 0), is_async=True)
            # One product stays in flight. After the first of a step that before is over: what it read may be overwritten.
            acc = warpgroup_mma_wait(1, deps=(started,))
            at.give_back_last((step > 0) & (t == 0))
        at = at.next()
    release(turn)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    at.give_back_last()
    return acc


@gluon.jit
def _multiply_tiles(
    wg: gl.constexpr, units, w_boxes, tile_boxes, ring, turns, y_desc, y1_desc, y2_desc, y3_desc, bias_ptr,
    boxes, boxes_h, boxes_w, tiles_n, chunks,
    KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, MOST_H: gl.constexpr,
    MOST_W: gl.constexpr, UNITS: gl.constexpr, TAPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = y_desc.block_type.shape
    ROWS: gl.constexpr = shape[0] * shape[1] * shape[2]
    BLOCKS: gl.constexpr = BLOCK_N // 64
    dtype: gl.constexpr = y_desc.dtype
    w_shape: gl.constexpr = [w_boxes.shape[0], 64, BLOCK_N]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tile_shape: gl.constexpr = [2 * BLOCKS, ROWS, 64]
    w_bufs = viewed(w_boxes, dtype, w_shape, layout)
    tile_bufs = viewed(tile_boxes, dtype, tile_shape, layout)
    programs = gl.num_programs(0)
    passed = 0  # steps that the producer loaded before this tile, for either consumer
    if wg == 1:
        passed += _positions(gl.program_id(0) // (boxes * tiles_n) % 2 ^ MOST_W, PAD_W, KW)[1] * chunks
    for tile in range(gl.program_id(0) + wg * programs, 4 * boxes * tiles_n, 2 * programs):
        k, a, b, p, n, q, tile_col = _tile_at(tile, boxes, boxes_h, boxes_w, tiles_n, shape, MOST_H, MOST_W)
        _r, down, _row = _positions(a, PAD_H, KH)
        _s, across, _col = _positions(b, PAD_W, KW)
        # A stage's parity tells its last two rounds apart, no more: begin when the other has seen its whole tile arrive.
        mbarrier.wait(turns.index(wg), (tile // programs // 2 + 1 - wg) & 1)
        turn = turns.index(1 - wg)
        acc = _sum_steps(units, w_bufs, ring.after(passed), turn, across * chunks, down, ROWS, UNITS, TAPS)
        after = (tile + programs) // (boxes * tiles_n)
        passed += (across + _positions(after % 2 ^ MOST_W, PAD_W, KW)[1]) * chunks
        blocks = column_blocks(acc, BLOCKS)
        first_col = tile_col * BLOCK_N
        for j in gl.static_range(BLOCKS):
            y = blocks[j]
            if bias_ptr is not None:
                cols = first_col + j * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, y.type.layout))
                y += gl.expand_dims(gl.load(bias_ptr + cols).to(gl.float32), 0)
            y = activate(y, ACTIVATION)
            tma.store_wait(pendings=BLOCKS - 1)
            tile_bufs.index(wg * BLOCKS + j).store(y.to(dtype))
            fence_async_shared()
            at = [p, n, q, first_col + j * 64]
            box = tile_boxes.index(wg * BLOCKS + j)
            if k == 0:
                store_box(y_desc, at, box)
            if k == 1:
                store_box(y1_desc, at, box)
            if k == 2:
                store_box(y2_desc, at, box)
            if k == 3:
                store_box(y3_desc, at, box)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["boxes", "boxes_h", "boxes_w", "tiles_n", "chunks"])
def _phases_kernel(
    x_desc, below_desc, w_desc, y_desc, y1_desc, y2_desc, y3_desc, bias_ptr, boxes, boxes_h, boxes_w, tiles_n, chunks,
    KH: gl.constexpr, KW: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, MOST_H: gl.constexpr, MOST_W: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Launch on at most as many programs as there are SMs, with num_warps=4.

    A box of x is [rows, images, columns, 64], below_desc's of one row, those of y_desc and the others like x's: of the phases
    of y, those with most filter positions first. w_desc's are [64, 1, 1, BLOCK_N] of [O, KH, KW, C]. MOST_H, MOST_W: the parity
    of outputs that meets more of the filter's rows, of its columns. boxes, boxes_h, boxes_w: of the largest phase, in all, down
    and across; chunks: steps of channels.
    """
    shape: gl.constexpr = x_desc.block_type.shape
    TAPS: gl.constexpr = (KH + 1) // 2
    UNITS: gl.constexpr = shape[0] + TAPS - 1
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    units = gl.allocate_shared_memory(x_desc.dtype, [STAGES * UNITS, shape[1] * shape[2], 64], layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TAPS] + w_desc.block_type.shape, w_desc.layout)
    tile_boxes = gl.allocate_shared_memory(y_desc.dtype, [BLOCK_N // 32] + y_desc.block_type.shape, y_desc.layout)
    ring = new_ring(STAGES, 1)
    turns = barriers(2)
    gl.warp_specialize([
        (_multiply_tiles, (
            0, units, w_boxes, tile_boxes, ring, turns, y_desc, y1_desc, y2_desc, y3_desc, bias_ptr,
            boxes, boxes_h, boxes_w, tiles_n, chunks,
            KH, KW, PAD_H, PAD_W, MOST_H, MOST_W, UNITS, TAPS, BLOCK_N, STAGES, ACTIVATION,
        )),
        (_multiply_tiles, (
            1, units, w_boxes, tile_boxes, ring, turns, y_desc, y1_desc, y2_desc, y3_desc, bias_ptr,
            boxes, boxes_h, boxes_w, tiles_n, chunks,
            KH, KW, PAD_H, PAD_W, MOST_H, MOST_W, UNITS, TAPS, BLOCK_N, STAGES, ACTIVATION,
        )),
        (_load_tiles, (
            x_desc, below_desc, w_desc, units, w_boxes, ring, boxes, boxes_h, boxes_w, tiles_n, chunks,
            KH, KW, PAD_H, PAD_W, MOST_H, MOST_W, UNITS, TAPS, BLOCK_N, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- launcher


def _key(
    config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, size: list[int],
) -> tuple[Any, ...]:  # fmt: skip
    return (
        x.get_device(), x.dtype, x.shape, weight.shape, pointer_kind(bias), activation, *padding, *size, *config.values(),
    )  # fmt: skip


def _parities(padding: int) -> tuple[int, int]:
    """Of outputs; those first that meet the filter's position 0, and so no fewer of them than the others."""
    return padding % 2, 1 - padding % 2


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    y = torch.empty((x.shape[0], *rest[-1], weight.shape[-1]), dtype=x.dtype, device=x.device)
    if y.numel():
        weight = weight.contiguous()
        _PLANS.fill(config, y, (x, weight, bias, *rest), (x, weight, y, bias, None, None, None))
    return y


def _first_launch(
    config: Config, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: list[int],
    padding: list[int], dilation: list[int], groups: int, size: list[int],
) -> Plan:  # fmt: skip
    """Fill y."""
    device = card_of(x)
    s = sizes_of(y, weight, stride, padding, dilation, groups, x.shape[1:-1])
    (_, kh, kw), (_, pad_h, pad_w), block_n = s.kernel, s.padding, config["BLOCK_N"]
    taps, h, w = (kh + 1) // 2, ceil_div(s.x[1], 2), ceil_div(s.x[2], 2)
    box = _box(s.n, h, w, taps, block_n)
    pixels = x.transpose(0, 1)  # a row of all images, then the next one
    phases = [y[:, a::2, b::2].transpose(0, 1) for a in _parities(pad_h) for b in _parities(pad_w)]
    descs = [descriptor(pixels, [rows, *box[1:], _SIDE]) if rows else None for rows in (box[0], taps - 1)]
    descs += [descriptor(weight, [_SIDE, 1, 1, block_n])] + [descriptor(phase, [*box, _SIDE]) for phase in phases]
    down, deep, across = ceil_div(h, box[0]), ceil_div(s.n, box[1]), ceil_div(w, box[2])
    boxes, tiles_n = down * deep * across, s.c // block_n
    # A step of x with the row below it, and of the weight; the two consumers' tiles leave through memory of their own.
    step_bytes = 2 * _SIDE * ((box[0] + taps - 1) * box[1] * box[2] + taps * block_n)
    stages = min(8, (device.smem_bytes - 2 * 2 * _BLOCK_M * block_n - 1024) // step_bytes)
    programs = min(4 * boxes * tiles_n, device.sms)
    arguments = (*descs, bias, boxes, down, across, tiles_n, ceil_div(s.o, _SIDE))
    constants = {
        "KH": kh, "KW": kw, "PAD_H": pad_h, "PAD_W": pad_w, "MOST_H": pad_h % 2, "MOST_W": pad_w % 2, "STAGES": stages,
        "ACTIVATION": activation, **config, "num_warps": 4,
    }  # fmt: skip
    owners = (0, 0, 1, 2, 2, 2, 2, 3)
    return Plan(first_launch(_phases_kernel, (programs,), arguments, constants, owners, (x, weight, y, bias)))


_PLANS = Planned(_key, _first_launch)

PHASES = Impl(name="phases", launch=_launch, plan=_PLANS.plan, space=SPACE, written_for=90, refuse=_refuse)
