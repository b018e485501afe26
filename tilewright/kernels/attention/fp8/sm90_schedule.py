"""Which tile a program of `scaled_attention_sm90_kernel` computes, and the warps that deal, and fetch what it needs.

Tiles are numbered as in attention/sm90_schedule.py: heads in sections that keep the SMs busy, in a section the longest first. A
program begins with its own number and then draws tickets, for tiles differ in length. A unit of the ring is what a consumer
multiplies in one step, the values of a block and the keys of the next: one barrier says that both are there, one that both are
done with.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.kernels.hopper.primitives import BEHIND, hand_out, load_box, next_tile, release, take

__all__ = ["CONSUMERS", "KEYS", "PLACE", "ROWS", "SLOT", "deal_tiles", "load_tiles"]


CONSUMERS = gl.constexpr(3)
ROWS = gl.constexpr(64)  # query rows of a consumer
KEYS = gl.constexpr(128)  # keys of a block, and of a scale
SLOT = gl.constexpr(4)  # from one tile's numbers to the next one's
PLACE = gl.constexpr(3)  # numbers that describe a tile


@gluon.jit
def _tile_of(tile, where, CAUSAL: gl.constexpr):
    """(first row, sequence * H + head, last block of keys) of a tile.

    Heads in sections that keep the SMs busy; in a section the longest tiles first.
    """
    blocks, heads, section, queries, keys = where
    # From the end, so that a section of few heads is the first one: as the last it kept SMs waiting for its longest tiles.
    before = blocks * heads - 1 - tile
    first = before // (section * blocks) * section
    within = before % (section * blocks)
    width = gl.minimum(section, heads - first)
    row = within // width * (CONSUMERS * ROWS)
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, row + keys - queries + CONSUMERS * ROWS)
    # A tile that sees no key goes through one block, all masked: its result is zero by the same formulae.
    return row, first + within % width, gl.maximum(gl.cdiv(gl.maximum(seen, 0), KEYS) - 1, 0)


# ---- the producer


@gluon.jit
def _fetch(descs, group, start, u, last, bufs, full, empty, it):
    """Unit u of a tile, the program's it-th, when its stage is free: the u-th block of keys, the values of the block before.

    The first unit has no values, the last no keys: a tile of n blocks has n + 1 units.
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


# ---- the warp that deals


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
