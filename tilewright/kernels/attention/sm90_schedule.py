"""Which tile a program of `attention_sm90_kernel` computes, which keys its rows see, and the scheduler and producer warps.

The tiles of a launch are numbered. The heads are divided into sections that keep the SMs busy; within a section the longest
tiles come first. If the heads do not divide evenly, the smaller section comes first, so that a launch ends with the short tiles
of a full section. A program begins with the tile of its own number and then draws tickets from an atomic counter, because tiles
differ in length. The scheduler warp draws the tickets, and passes the number and the description of the tile to the other warps
(hopper/primitives.py).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.hopper.primitives import BEHIND, hand_out, load_box, next_tile, release, take

__all__ = ["PLACE", "ROWS", "SLOT", "deal_tiles", "load_tiles"]


ROWS = gl.constexpr(64)  # query rows per consumer: the M of one wgmma instruction
SLOT = gl.constexpr(16)  # int32 from the description of one tile to the next
PLACE = gl.constexpr(10)  # numbers that describe a tile


@gluon.jit
def _span(b, cu_ptr, length):
    """(start, length) of sequence b."""
    start = b * length
    if cu_ptr is not None:
        start = gl.load(cu_ptr + b)
        length = gl.load(cu_ptr + b + 1) - start
    return start, length


@gluon.jit
def _tile_of(tile, where, BLOCK_M: gl.constexpr, N: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr):
    """(first row, head, start and length of q, start and length of k, last block of keys, blocks, whole, cut) of a tile.

    where: the grid (tiles per head, heads, section, H), lengths (cu_q_ptr, cu_k_ptr, max_q, max_k) and window (left, right).
    RIGHT, LEFT: whether the keys of a row end `right` after its own key (0 with a causal mask), and begin `left` before it.
    A tile visits the `blocks` blocks of keys that end with block `last`. Blocks from `whole` on, and blocks before `cut`,
    contain keys that must be masked.
    """
    grid, lengths, window = where
    blocks, heads, section, H = grid
    cu_q_ptr, cu_k_ptr, max_q, max_k = lengths
    left, right = window
    # Count from the end, so that a smaller section comes first: when it came last, SMs had to wait for its longest tiles.
    before = blocks * heads - 1 - tile
    first = before // (section * blocks) * section
    within = before % (section * blocks)
    width = gl.minimum(section, heads - first)
    block = within // width
    head = first + within % width
    b = head // H
    q_start, q_len = _span(b, cu_q_ptr, max_q)
    k_start, k_len = _span(b, cu_k_ptr, max_k)
    row = block * BLOCK_M
    own = row + k_len - q_len  # the first row's own key
    seen = k_len
    whole = k_len // N
    if RIGHT:
        seen = gl.minimum(k_len, own + BLOCK_M + right)
        whole = gl.minimum(whole, gl.maximum(own + 1 + right, 0) // N)
    # A tile that sees no key visits one block, with all keys masked: the same formulae then give zero.
    # A tile beyond the rows of its sequence also visits one block, and stores nothing.
    last = gl.where(row < q_len, gl.maximum(gl.cdiv(gl.maximum(seen, 0), N) - 1, 0), 0)
    count = last + 1
    cut = gl.cdiv(gl.maximum(own + BLOCK_M - 1 - left, 0), N)
    if LEFT:
        count -= gl.minimum(gl.maximum(own - left, 0) // N, last)
    return row, head % H, q_start, q_len, k_start, k_len, last, count, whole, cut


# ---- the producer


@gluon.jit
def _load(desc, tail_desc, row, col, full, buf, tail):
    """Load a box of 16-bit numbers and, with `tail_desc`, the columns that follow it."""
    D: gl.constexpr = buf.shape[1]
    if tail_desc is not None:
        mbarrier.expect(full, buf.shape[0] * (D + tail.shape[1]) * 2)
        load_box(tail_desc, [row, col + D], full, tail)
    else:
        mbarrier.expect(full, buf.shape[0] * D * 2)
    load_box(desc, [row, col], full, buf)


@gluon.jit
def _fetch(descs, cols, bufs, bars, key, it):
    """Load the it-th block of keys and of values, from row `key` on, each as soon as its stage is free."""
    _, k_desc, v_desc, _, k_tail_desc = descs
    _, k_bufs, v_bufs, _, _, k_tails = bufs
    k_full, k_empty, v_full, v_empty = bars[2], bars[3], bars[4], bars[5]
    STAGES: gl.constexpr = k_bufs.shape[0]
    stage = it % STAGES
    phase = it // STAGES & 1 ^ 1
    mbarrier.wait(k_empty.index(stage), phase)
    _load(k_desc, k_tail_desc, key, cols[0], k_full.index(stage), k_bufs.index(stage), k_tails.index(stage))
    mbarrier.wait(v_empty.index(stage), phase)
    _load(v_desc, None, key, cols[1], v_full.index(stage), v_bufs.index(stage), v_bufs.index(stage))


@gluon.jit
def load_tiles(
    descs, bufs, bars, slots_ptr, where, GROUP, head_strides, CONSUMERS: gl.constexpr,
):  # fmt: skip
    q_desc, _, _, q_tail_desc, _ = descs
    q_bufs, k_bufs, _, _, q_tails, _ = bufs
    q_head_stride, k_head_stride, v_head_stride = head_strides
    N: gl.constexpr = k_bufs.shape[1]
    Q_BUFS: gl.constexpr = q_bufs.shape[0] // CONSUMERS
    q_full, q_empty, tile_full, tile_empty = bars[0], bars[1], bars[6], bars[7]
    total = where[0][0] * where[0][1]
    it = 0
    n = 0
    tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
    while tile < total:
        row, head, q_start, _q_len, k_start, _k_len, last, count, _whole, _cut = place
        slot = n % Q_BUFS * CONSUMERS
        q_phase = n // Q_BUFS & 1
        for wg in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(slot + wg), q_phase ^ 1)
            first = q_start + row + wg * ROWS
            full = q_full.index(slot + wg)
            _load(q_desc, q_tail_desc, first, head * q_head_stride, full, q_bufs.index(slot + wg), q_tails.index(slot + wg))
        key = k_start + last * N
        cols = (head // GROUP * k_head_stride, head // GROUP * v_head_stride)
        early = gl.maximum(count - BEHIND, 0)
        for j in range(early):
            _fetch(descs, cols, bufs, bars, key - j * N, it + j)
        release(bars[8].index(0))
        for j in range(early, count):
            _fetch(descs, cols, bufs, bars, key - j * N, it + j)
        it += count
        n += 1
        tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)


# ---- the scheduler warp


@gluon.jit
def deal_tiles(
    bars, counter_ptr, slots_ptr, where, BLOCK_M: gl.constexpr, N: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    tile_full, tile_empty, asked = bars[6], bars[7], bars[8]
    total = where[0][0] * where[0][1]
    n = 0
    tile = gl.program_id(0)
    hand_out(tile, _tile_of(tile, where, BLOCK_M, N, RIGHT, LEFT), n, slots_ptr, tile_full, tile_empty, SLOT)
    while tile < total:
        mbarrier.wait(asked.index(0), n & 1)
        n += 1
        tile = next_tile(counter_ptr, total)
        place = _tile_of(gl.minimum(tile, total - 1), where, BLOCK_M, N, RIGHT, LEFT)
        hand_out(tile, place, n, slots_ptr, tile_full, tile_empty, SLOT)
