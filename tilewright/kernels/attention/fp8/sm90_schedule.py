"""Which tile a program of `scaled_attention_sm90_kernel` computes, and its scheduler and producer warps.

Tiles are numbered as in attention/sm90_schedule.py: heads are divided into sections that keep the SMs busy, and within a
section the longest tiles come first. A program begins with the tile of its own number and then draws tickets, because tiles
differ in length. A unit of the ring is what a consumer multiplies in one step: the values of a block and the keys of the next.
One barrier signals that both are loaded, another that both are no longer needed.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.hopper.primitives import BEHIND, hand_out, load_box, next_tile, release, take

__all__ = ["CONSUMERS", "KEYS", "PLACE", "ROWS", "SLOT", "deal_tiles", "load_tiles"]


CONSUMERS = gl.constexpr(3)
ROWS = gl.constexpr(64)  # query rows per consumer
KEYS = gl.constexpr(128)  # keys per block, and per scale
SLOT = gl.constexpr(4)  # int32 from the description of one tile to the next
PLACE = gl.constexpr(3)  # numbers that describe a tile


@gluon.jit
def _tile_of(tile, where, CAUSAL: gl.constexpr):
    """(first row, sequence * H + head, last block of keys) of a tile.

    Heads are computed in sections that keep the SMs busy; within a section the longest tiles come first.
    """
    blocks, heads, section, queries, keys = where
    # Count from the end, so that a smaller section comes first: when it came last, SMs had to wait for its longest tiles.
    before = blocks * heads - 1 - tile
    first = before // (section * blocks) * section
    within = before % (section * blocks)
    width = gl.minimum(section, heads - first)
    row = within // width * (CONSUMERS * ROWS)
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, row + keys - queries + CONSUMERS * ROWS)
    # A tile that sees no key visits one block, with all keys masked: the same formulae then give zero.
    return row, first + within % width, gl.maximum(gl.cdiv(gl.maximum(seen, 0), KEYS) - 1, 0)


# ---- the producer


@gluon.jit
def _fetch(descs, group, start, u, last, bufs, full, empty, it):
    """Load unit u of a tile, the it-th of the program, as soon as its stage is free.

    Unit u contains the u-th block of keys and the values of the preceding block. The first unit has no values and the last no
    keys: a tile of n blocks has n + 1 units.
    """
    _, k_desc, v_desc, _ = descs
    _, k_bufs, v_bufs, _, _ = bufs
    STAGES: gl.constexpr = k_bufs.shape[0]
    D: gl.constexpr = k_bufs.shape[2]
    stage = it % STAGES
    mbarrier.wait(empty.index(stage), it // STAGES & 1 ^ 1)
    keys = u <= last
    values = u >= 1
    mbarrier.expect(full.index(stage), 2 * KEYS * D, pred=keys & values)
    mbarrier.expect(full.index(stage), KEYS * D, pred=keys ^ values)
    load_box(k_desc, [start + (last - u) * KEYS, 0], full.index(stage), k_bufs.index(stage), pred=keys)
    load_box(v_desc, [group * D, (last - u + 1) * KEYS], full.index(stage), v_bufs.index(stage), pred=values)


@gluon.jit
def load_tiles(descs, bufs, bars, slots_ptr, where, H, SHARED, q_head_stride, padded_k):
    """SHARED: query heads that share a head of keys."""
    q_desc = descs[0]
    raw_bufs = bufs[4]
    D: gl.constexpr = raw_bufs.shape[2]
    raw_full, raw_empty, full, empty, tile_full, tile_empty, asked = bars
    total = where[0] * where[1]
    it = 0
    n = 0
    tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)
    while tile < total:
        row, head, last = place
        first = head // H * where[3] + row
        for wg in gl.static_range(CONSUMERS):
            mbarrier.wait(raw_empty.index(wg), n & 1 ^ 1)
            mbarrier.expect(raw_full.index(wg), 2 * ROWS * D)
            load_box(q_desc, [first + wg * ROWS, head % H * q_head_stride], raw_full.index(wg), raw_bufs.index(wg))
        group = head // SHARED
        start = group * padded_k
        early = gl.maximum(last + 2 - BEHIND, 0)
        for u in range(early):
            _fetch(descs, group, start, u, last, bufs, full, empty, it + u)
        release(asked.index(0))
        for u in range(early, last + 2):
            _fetch(descs, group, start, u, last, bufs, full, empty, it + u)
        it += last + 2
        n += 1
        tile, place = take(n, slots_ptr, tile_full, tile_empty, SLOT, PLACE)


# ---- the scheduler warp


@gluon.jit
def deal_tiles(bars, counter_ptr, slots_ptr, where, CAUSAL: gl.constexpr):
    tile_full, tile_empty, asked = bars[4], bars[5], bars[6]
    total = where[0] * where[1]
    n = 0
    tile = gl.program_id(0)
    hand_out(tile, _tile_of(tile, where, CAUSAL), n, slots_ptr, tile_full, tile_empty, SLOT)
    while tile < total:
        mbarrier.wait(asked.index(0), n & 1)
        n += 1
        tile = next_tile(counter_ptr, total)
        place = _tile_of(gl.minimum(tile, total - 1), where, CAUSAL)
        hand_out(tile, place, n, slots_ptr, tile_full, tile_empty, SLOT)
