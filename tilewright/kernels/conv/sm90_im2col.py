"""Shared by the launchers of sm90_kernel.py: the choice of the box of pixels and of the tile, the descriptors, the launch."""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.conv.problem import Problem
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON, conv_sm90_kernel
from tilewright.kernels.gemm.sm90_configs import shares
from tilewright.kernels.hopper.descriptors import card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.kernels.launch.plan import Plan
from tilewright.kernels.launch.replay import first_launch
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.tune.space import Config

__all__ = [
    "AXES",
    "Launch",
    "Shape",
    "best_tile",
    "box_of",
    "fetched_box",
    "launch_boxes",
    "phases_of",
    "refuse_boxes",
    "tile_refusal",
]


# N images, C channels, O output channels; H, W spatial dims of x, P, Q of y; KH, KW of the filter

Two = tuple[int, int]
Three = tuple[int, int, int]

# ---- boxes of pixels


def refuse_boxes(
    device: Device, problem: Problem, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16), *, groups: bool = False
) -> str | None:
    """Why a problem is refused by every kernel that loads boxes of pixels on sm_90, or None."""
    if problem.dtype not in dtypes:
        return f"does not support {problem.dtype}"
    if problem.empty:
        return "does not support empty tensors"
    if problem.x[0] != 1 or problem.y[0] != 1 or problem.kernel[0] != 1:
        return "does not support three spatial dims"
    return "does not support groups" if problem.groups != 1 and not groups else None


_FETCH_CYCLES = 4.6
"""Cycles that the copy engine of an SM needs per pixel of x, whatever the pixel holds (docs/log.md)."""


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _cheapest(rows: int, images: int, height: int, width: int, column: bool, cost: Callable[[int, int], float]) -> Three:
    """The (height, images, width) of boxes of `rows` pixels that cost least in total. One box costs `cost(height, width)`.

    column: a box is loaded with some additional rows, so a row (of all its images) must have at least eight pixels.
    """
    best, least = (1, rows, 1), float("inf")
    for h in (1 << i for i in range((rows // 8 if column else rows).bit_length())):
        for w in (1 << i for i in range((rows // h).bit_length())):
            n = rows // (w * h)
            total = _blocks(images, n) * _blocks(height, h) * _blocks(width, w) * cost(h, w)
            if total < least:
                best, least = (h, n, w), total
    return best


@lru_cache(maxsize=1024)
def box_of(rows: int, images: int, height: int, width: int, column: bool) -> Three:
    """(height, images, width) of a box of `rows` pixels, each a power of two, with little waste at the edges.

    column: a box is loaded with some additional rows, so a high box is better. Among boxes that are equal in this, the one with
    the smallest border per pixel is preferred: filters of 3 x 3 then load less from beyond L2.
    """

    def cost(h: int, w: int) -> float:
        return 1 + (0.1 / h if column else 0) + 0.02 * (h + 2) * (w + 2) / (h * w)

    return _cheapest(rows, images, height, width, column, cost)


@lru_cache(maxsize=1024)
def fetched_box(rows: int, images: int, height: int, width: int, once: float, below: float, product: float) -> Three:
    """Like `box_of`, with a cost in cycles per pixel: `product` for its products, or the cost of its loads if that is higher.

    A pixel is loaded `once` times; the rows below a box of height h add `below` / h loads per pixel.
    """

    def cost(h: int, w: int) -> float:
        return max(product, _FETCH_CYCLES * (once + below / h)) * (1 + 0.002 * (h + 2) * (w + 2) / (h * w))

    return _cheapest(rows, images, height, width, below > 0, cost)


def _box_count(box: Three, images: int, height: int, width: int) -> Three:
    """The number of boxes down an image, along the images, and across an image."""
    return _blocks(height, box[0]), _blocks(images, box[1]), _blocks(width, box[2])


def phases_of(kernel: Two, stride: Two, padding: Two, dilation: Two) -> list[Two]:
    """The phases of x that the filter positions read: (row modulo stride, column modulo stride)."""
    rows, cols = (sorted({(k * dilation[d] - padding[d]) % stride[d] for k in range(kernel[d])}) for d in (0, 1))
    return [(row, col) for row in rows for col in cols]


# ---- tiles

_WIDTH = 64
"""Columns of a block in the epilogue of a consumer."""

# BLOCK_M, BLOCK_N, whether the consumers take turns at tiles
_TILES = (
    (128, 256, False),
    (256, 128, False),
    (128, 128, False),
    (256, 64, False),
    (128, 64, False),
    (128, 128, True),
    (128, 64, True),
)

AXES = {
    "BLOCK_M": (128, 256), "BLOCK_N": (64, 128, 256), "TURNS": (False, True), "COLUMN": (False, True), "SPLIT_K": (1, 0, 2),
}  # fmt: skip
"""TURNS: the consumers take turns at tiles; otherwise each computes half of the pixels of every tile. COLUMN: a step is a whole
column of the filter, whose positions read one box of x with a few additional rows; otherwise a step is one position. SPLIT_K:
programs that share a tile along K. With 0, programs share only the tiles of the last wave, which does not fill the card."""


class Shape(NamedTuple):
    """The sizes that the choice of a tile depends on."""

    images: int
    rows: int
    cols: int
    """Of y."""
    o: int
    kernel: Two
    stride: Two
    dilation: Two
    c: int
    itemsize: int
    """Bytes of an element of x."""
    residual: bool
    slow_activation: bool
    """Whether the activation needs an exponential."""


def _block_k(c: int, itemsize: int) -> int:
    """Channels per step: 128 bytes, or 64 or 32 bytes if there are no more channels."""
    return max(32, min(128, next_pow2(c * itemsize))) // itemsize


def _box(config: Config, images: int, rows: int, cols: int) -> Three:
    pixels = config["BLOCK_M"] // (1 if config["TURNS"] else 2)
    return box_of(pixels, next_pow2(images), rows, cols, config["COLUMN"])


def best_tile(device: Device, shape: Shape) -> Config:
    """The tile with the shortest estimated time.

    The estimate is that of `linear` (gemm/sm90_configs.py), which counts K in elements of 16 bits.
    """
    best, best_cycles = _config(_TILES[-1], False, 1), float("inf")
    block_k, (kh, kw) = _block_k(shape.c, shape.itemsize), shape.kernel
    chunks = _blocks(shape.c, block_k)
    k = kh * kw * chunks * block_k * shape.itemsize // 2
    for tile, column in product(_TILES, (False, True)):
        config = _config(tile, column, 1)
        if tile_refusal(device, shape, config):
            continue
        if tile[2] and column and kw * chunks == 1:
            continue  # tiles of one step: 67 us for a stem, but 59 us if each consumer has half of a tile (docs/log.md)
        block_m, block_n, turns = tile
        box = _box(config, *shape[:3])
        down, deep, across = _box_count(box, *shape[:3])
        waves, left = divmod(_blocks(down * deep * across, 1 if turns else 2) * _blocks(shape.o, block_n), device.sms)
        pixels = block_m * (box[0] + kh - 1) / box[0] / kh if column else block_m
        cycles = max(
            k * block_m * block_n * (1.02 if turns and waves else 1.15) / 2048,  # with one tile per program nothing alternates
            k * (pixels + block_n) * 2 / 50,
            kh * kw * chunks * pixels * _FETCH_CYCLES,
        )
        end = 1800 + block_m * block_n * (0.28 * shape.slow_activation + 0.03 * shape.residual)
        ways = {1: (waves + (left > 0)) * (cycles + (360 if turns else end)) + (end if turns else 0)}
        if not turns and not column and 2 * left <= device.sms and k >= 2048:
            parts = min(4, device.sms // max(left, 1))
            ways[0 if waves else 2] = waves * (cycles + end) + cycles / (parts if waves else 2) + (7700 if waves else 14800)
        for split, total in ways.items():
            if total < best_cycles:
                best, best_cycles = _config(tile, column, split), total
    return best


def _config(tile: tuple[int, int, bool], column: bool, split_k: int) -> Config:
    return {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "TURNS": tile[2], "COLUMN": column, "SPLIT_K": split_k}


def tile_refusal(device: Device, shape: Shape, c: Config) -> str | None:
    """Why a config cannot work for a shape, or None."""
    block_m, block_n, turns, kh = c["BLOCK_M"], c["BLOCK_N"], c["TURNS"], shape.kernel[0]
    if (block_m, block_n, turns) not in _TILES:
        return "not a supported tile: BLOCK_M, BLOCK_N and TURNS must fit the two consumer warpgroups"
    if turns and (shape.residual or c["SPLIT_K"] != 1):
        return "TURNS supports neither a residual nor SPLIT_K: the consumers alternate between whole tiles"
    if block_n > 64 and block_n >= 2 * shape.o:
        return "BLOCK_N is at least twice the number of channels of y"
    if not c["COLUMN"]:
        return None
    if kh not in (2, 3, 4, 5) or shape.stride != (1, 1) or abs(shape.dilation[0]) != 1:
        return "COLUMN needs a filter of 2 to 5 rows without dilation, and a stride of 1"
    if not VIEWS_REACH_ON:
        return "needs a version of Triton whose views of shared memory may reach beyond their slice"
    if c["SPLIT_K"] != 1:
        return "COLUMN does not support SPLIT_K: steps of a whole filter column are too few to share"
    step_bytes = _block_k(shape.c, shape.itemsize) * shape.itemsize
    if _ring(device, c, _box(c, *shape[:3]), kh, next_pow2(kh - 1), step_bytes, _WIDTH)[0] < 2:
        return "more shared memory than the device has"
    return None


def _ring(device: Device, c: Config, box: Three, taps: int, extra: int, step_bytes: int, width: int) -> Two:
    """(number of stages, buffers of a consumer's epilogue). As many stages as fit, up to eight."""
    pixels, buffers = box[0] * box[1] * box[2], min(2, c["BLOCK_N"] // width) if c["TURNS"] else 1
    loaded = c["BLOCK_M"] // box[0] * (box[0] + extra) + taps * c["BLOCK_N"]
    return min(8, (device.smem_bytes - 2 * buffers * pixels * width * 2 - 1024) // (loaded * step_bytes)), buffers


# ---- launch


class Launch(NamedTuple):
    """A convolution for the kernel.

    Tensors are views that the copy engine can address: channels are dense, other strides are multiples of 16 bytes.
    """

    x: Tensor
    """[N, H, W, C]"""
    weight: Tensor
    """[O, KH, KW, C], or with w_major "n" [C, KH, KW, O]"""
    y: Tensor
    """[N, P, Q, O]"""
    stride: Two
    padding: Two
    """Of the low sides; may be negative."""
    dilation: Two
    """May be negative: the filter's positions then go backwards through x."""
    activation: str
    bias: Tensor | None
    """[O], or of a length that divides O; it is then repeated."""
    residual: Tensor | None = None
    """Like y."""
    x_scales: Tensor | None = None
    w_scales: Tensor | None = None
    w_major: str = "k"


def _shared(scratch: int | None, counters: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Scratch memory and counters for tiles that several programs share."""
    if scratch is None:
        return None, None
    return torch.empty(scratch, dtype=torch.float32, device=device), tickets(device, counters)


_OWNERS = (0, 0, 0, 0, 1, 4, 2, 5, 6, 3, 7, 8)
"""For each of the kernel's first arguments, the index of its operand.

The operands are x, weight, y, bias, residual, the two scales, scratch memory, counters."""


def launch_boxes(config: Config, work: Launch, whole: tuple[Tensor, Tensor, Tensor] | None = None) -> Plan:
    """Fill work.y, which must not be empty.

    The operands of the plan are x, weight and y (or the three tensors of `whole`, of which those are views), bias, residual and
    scales.
    """
    x, y = work.x, work.y
    device = card_of(x)
    (n, rows, cols, o), (kh, kw), c = y.shape, work.weight.shape[1:3], x.shape[3]
    block_m, block_n, turns = config["BLOCK_M"], config["BLOCK_N"], config["TURNS"]
    taps, extra, filter_h = (kh, next_pow2(kh - 1), 1) if config["COLUMN"] else (1, 0, kh)
    block_k = _block_k(c, x.element_size())
    box = _box(config, n, rows, cols)
    stride_h, stride_w = work.stride
    phases = phases_of((kh, kw), work.stride, work.padding, work.dilation)
    heights = (box[0], extra) if extra else (box[0],)
    # A box is [rows, images, columns, channels]: a row of all images comes before the next row.
    x_descs = [
        descriptor(x[:, h::stride_h, w::stride_w].transpose(0, 1), [height, *box[1:], block_k])
        for height, (h, w) in product(heights, phases)
    ]
    w_desc = descriptor(work.weight, [block_n, 1, 1, block_k] if work.w_major == "k" else [block_k, 1, 1, block_n])
    # The residual is loaded through the stages of x, so its blocks must not be wider than those of x.
    y_box = [*box, _WIDTH if work.residual is None else min(_WIDTH, block_k * x.element_size() // y.element_size())]
    y_desc, residual_desc = (None if t is None else descriptor(t.transpose(0, 1), y_box) for t in (y, work.residual))
    down, deep, across = _box_count(box, n, rows, cols)
    count = down * deep * across
    steps = filter_h * kw * _blocks(c, block_k)
    tiles = _blocks(count, 1 if turns else 2) * _blocks(o, block_n)
    programs, waves, share, parts = shares(tiles, steps, device.sms, config["SPLIT_K"])
    stream = config["SPLIT_K"] != 1
    left = tiles - waves * programs
    scratch = max(1, left * (parts - 1) * block_m * block_n) if stream else None
    pieces, counters = _shared(scratch, left * 2, x.device)
    stages, tile_bufs = _ring(device, config, box, taps, extra, block_k * x.element_size(), y_box[3])
    x_descs += [None] * (4 - len(x_descs))
    arguments = (
        *x_descs, w_desc, residual_desc, y_desc, work.x_scales, work.w_scales, work.bias, pieces, counters,
        n, o, o if work.bias is None else work.bias.shape[0], filter_h, kw, *work.padding, *work.dilation,
        count, down, across, steps, waves, share, parts - 1,
    )  # fmt: skip
    constants = {
        "STRIDE_H": stride_h, "STRIDE_W": stride_w, "PHASES": tuple(h * stride_w + w for h, w in phases),
        "W_MAJOR": work.w_major, "TAPS": taps, "EXTRA": extra, "BACKWARD": extra > 0 and work.dilation[0] < 0,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "GROUP_M": 8, "TILE_BUFS": tile_bufs, "STREAM": stream,
        "ACTIVATION": work.activation, "num_warps": 4,
    }  # fmt: skip
    operands = (*(whole or (x, work.weight, y)), work.bias, work.residual, work.x_scales, work.w_scales, pieces, counters)
    launched = first_launch(conv_sm90_kernel, (programs,), arguments, constants, _OWNERS, operands)
    return Plan(launched, memory=None if scratch is None else lambda device: _shared(scratch, left * 2, device))
