"""Which keys a program of `attention_backward_sm90_kernel` has, and the warps beside those that multiply: deal, fetch, store.

Tiles of a launch are blocks of keys of one key/value head. Either a program has one, or there is a program an SM, which begins
with its own number and then draws tickets from a counter, for under a mask tiles differ in length. The warp that draws hands
the number, and what it found out of the tile, to the others (hopper/primitives.py).

What a program that stays gains is that nothing waits between its tiles: with two sets of buffers for keys and values the next
tile's are fetched while this one is computed, and a set holds the tile's dk and dv in the end, which a warp of its own stores.
With one set (256 dims) the next keys are fetched while dk and dv go out from registers.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.kernels.hopper.primitives import BEHIND, hand_out, load_box, next_tile, release, store_box, take

__all__ = ["PLACE", "ROWS", "SLOT", "deal_tiles", "keys_of", "load_one", "load_tiles", "store_tiles", "turn"]


ROWS = gl.constexpr(64)  # of a product: what the tensor cores take at once
SLOT = gl.constexpr(8)  # from one tile's numbers to the next one's
PLACE = gl.constexpr(5)  # numbers that describe a tile


@gluon.jit
def keys_of(tile, tiles, shape, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, order_ptr):
    """(block of keys, key/value head, sequence, first block of queries that sees the keys, one past the last) of a tile.

    Heads go in sections; inside of one the longest blocks come first under a diagonal, but where additions keep an order:
    nobody may wait for a program that begins later. Of packed documents a block of keys is seen to the end of its last key's.
    """
    key_blocks, section, KV_H, _GROUP, max_q, max_k, left, ends_ptr = shape
    before = tile // (section * key_blocks) * section
    within = tile % (section * key_blocks)
    heads = tiles // key_blocks
    width = gl.minimum(section, heads - before)
    block = within // width
    # The last heads first: what was prepared last is still in L2, and what is rounded first will be.
    head = heads - 1 - before - within % width
    first = 0
    last = gl.cdiv(max_q, M)
    if CAUSAL:
        if order_ptr is not None:
            block = key_blocks - 1 - block
        first = gl.maximum(block * KEYS - (max_k - max_q), 0) // M
    if LEFT:
        last = gl.minimum(gl.cdiv(gl.maximum(block * KEYS + KEYS + left - (max_k - max_q), 0), M), last)
        last = gl.maximum(last, first)
    if ends_ptr is not None:
        end = gl.load(ends_ptr + gl.minimum(block * KEYS + KEYS, max_k) - 1)
        last = gl.minimum(gl.cdiv(end, M), last)
    return block, head % KV_H, head // KV_H, first, last


@gluon.jit
def turn(block, j, shape, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr):
    """How many other blocks of keys add to the j-th block of queries before this one.

    Under a diagonal the last keys that it sees come first: these begin with it, and the others come to it in their order. Of
    packed documents they go back to the block in which that of its first query begins, and none is left out.
    """
    if CAUSAL:
        key_blocks, _section, _KV_H, _GROUP, max_q, max_k, _left, _ends_ptr = shape
        # The last block of keys whose first block of queries is the j-th or one before.
        last = gl.minimum(((j + 1) * M - 1 + max_k - max_q) // KEYS, key_blocks - 1)
        return last - block
    else:
        return block


# ---- the producer


@gluon.jit
def _load_keys(descs, bufs, bars, place, head_strides, kv, KEYS: gl.constexpr):
    """K and V of a tile, into the kv-th set of buffers."""
    k_desc, v_desc = descs[2], descs[3]
    k_bufs, v_bufs = bufs[2], bufs[3]
    PARTS: gl.constexpr = KEYS // ROWS
    D: gl.constexpr = k_bufs.shape[3]
    block, kv_head, b, _first, _last = place
    full = bars[0].index(kv)
    mbarrier.expect(full, 2 * KEYS * D * 2)
    for i in gl.static_range(PARTS):
        key = block * KEYS + i * ROWS
        load_box(k_desc, [b, key, kv_head * head_strides[2]], full, k_bufs.index(kv * PARTS + i))
        load_box(v_desc, [b, key, kv_head * head_strides[3]], full, v_bufs.index(kv * PARTS + i))


@gluon.jit
def _load_queries(descs, bufs, bars, b, h, heads, j, blocks, head_strides, it):
    """The j-th block of queries of a head, and of dO, as the it-th of the program, each when its stage is free."""
    q_desc, do_desc, _, _, lse_desc, delta_desc = descs
    q_bufs, do_bufs, _k_bufs, _v_bufs, _ds_bufs, _p_bufs, lse_bufs, delta_bufs = bufs
    q_full, q_empty, do_full, do_empty = bars[1], bars[2], bars[3], bars[4]
    STAGES: gl.constexpr = q_bufs.shape[0]
    M: gl.constexpr = q_bufs.shape[2]
    D: gl.constexpr = q_bufs.shape[3]
    stage = it % STAGES
    phase = it // STAGES & 1 ^ 1
    row = ((b * heads + h) * blocks + j) * M
    mbarrier.wait(q_empty.index(stage), phase)
    mbarrier.expect(q_full.index(stage), M * D * 2 + M * 4)
    load_box(q_desc, [b, j * M, h * head_strides[0]], q_full.index(stage), q_bufs.index(stage))
    load_box(lse_desc, [row], q_full.index(stage), lse_bufs.index(stage))
    mbarrier.wait(do_empty.index(stage), phase)
    mbarrier.expect(do_full.index(stage), M * D * 2 + M * 4)
    load_box(do_desc, [b, j * M, h * head_strides[1]], do_full.index(stage), do_bufs.index(stage))
    load_box(delta_desc, [row], do_full.index(stage), delta_bufs.index(stage))


@gluon.jit
def load_one(
    descs, bufs, bars, shape, head_strides, order_ptr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """For a program that has one tile."""
    M: gl.constexpr = bufs[0].shape[2]
    GROUP = shape[3]
    place = keys_of(gl.program_id(0), gl.num_programs(0), shape, KEYS, M, CAUSAL, LEFT, order_ptr)
    _, kv_head, b, first, last = place
    _load_keys(descs, bufs, bars, place, head_strides, 0, KEYS)
    blocks = gl.cdiv(shape[4], M)
    it = 0
    for member in range(GROUP):
        for j in range(first, last):
            _load_queries(descs, bufs, bars, b, kv_head * GROUP + member, shape[2] * GROUP, j, blocks, head_strides, it)
            it += 1


@gluon.jit
def load_tiles(descs, bufs, bars, shape, total, slots_ptr, head_strides, KEYS: gl.constexpr, SETS: gl.constexpr):
    """For a program that stays: fetches what its tiles need."""
    M: gl.constexpr = bufs[0].shape[2]
    kv_empty, asked = bars[6], bars[8][2]
    GROUP = shape[3]
    heads = shape[2] * GROUP
    blocks = gl.cdiv(shape[4], M)
    it = 0
    n = 0
    tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)
    while tile < total:
        _, kv_head, b, first, last = place
        count = last - first
        steps = GROUP * count
        head = kv_head * GROUP
        ahead = 0
        if SETS == 1:
            # The set is in use to the end of the tile before, stages are free sooner.
            ahead = gl.minimum(steps, 1)
            if steps > 0:
                _load_queries(descs, bufs, bars, b, head, heads, first, blocks, head_strides, it)
        mbarrier.wait(kv_empty.index(n % SETS), n // SETS & 1 ^ 1)
        _load_keys(descs, bufs, bars, place, head_strides, n % SETS, KEYS)
        early = gl.maximum(steps - BEHIND, ahead)
        for step in range(ahead, early):
            j = first + step % count
            _load_queries(descs, bufs, bars, b, head + step // count, heads, j, blocks, head_strides, it + step)
        release(asked.index(0))
        for step in range(early, steps):
            j = first + step % count
            _load_queries(descs, bufs, bars, b, head + step // count, heads, j, blocks, head_strides, it + step)
        it += steps
        n += 1
        tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)


# ---- the warp that deals


@gluon.jit
def deal_tiles(
    bars, shape, total, counter_ptr, slots_ptr, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    tile_full, tile_empty, asked = bars[8]
    n = 0
    tile = gl.program_id(0)
    hand_out(tile, keys_of(tile, total, shape, KEYS, M, CAUSAL, LEFT, None), n, slots_ptr, tile_full, tile_empty, SLOT)
    while tile < total:
        mbarrier.wait(asked.index(0), n & 1)
        n += 1
        tile = next_tile(counter_ptr, total)
        place = keys_of(gl.minimum(tile, total - 1), total, shape, KEYS, M, CAUSAL, LEFT, None)
        hand_out(tile, place, n, slots_ptr, tile_full, tile_empty, SLOT)


# ---- the warp that stores


@gluon.jit
def store_tiles(dk_desc, dv_desc, bufs, bars, total, slots_ptr, KEYS: gl.constexpr, SETS: gl.constexpr):
    """dk and dv of each tile, from the set of buffers that had its keys and values. Then the set is free."""
    k_bufs, v_bufs = bufs[2], bufs[3]
    PARTS: gl.constexpr = KEYS // ROWS
    D: gl.constexpr = k_bufs.shape[3]
    kv_empty, out_full = bars[6], bars[7][1]
    n = 0
    tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)
    while tile < total:
        block, kv_head, b, _first, _last = place
        kv = n % SETS
        mbarrier.wait(out_full.index(kv), n // SETS & 1)
        for i in gl.static_range(PARTS):
            at = [b, block * KEYS + i * ROWS, kv_head * D]
            store_box(dv_desc, at, v_bufs.index(kv * PARTS + i))
            store_box(dk_desc, at, k_bufs.index(kv * PARTS + i))
        tma.store_wait(pendings=0)
        release(kv_empty.index(kv))
        n += 1
        tile, place = take(n, slots_ptr, bars[8][0], bars[8][1], SLOT, PLACE)
