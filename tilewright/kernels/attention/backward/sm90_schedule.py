"""Which keys a program of `attention_backward_sm90_kernel` has, and its warps that schedule, load and store.

The tiles of a launch are blocks of keys of one key/value head. Either each program has one tile, or there is one persistent
program per SM. A persistent program begins with the tile of its own number and then draws tickets from an atomic counter,
because under a mask tiles differ in length. The scheduler warp draws the tickets, and passes the number and the description of
the tile to the other warps (hopper/primitives.py).

In a persistent program nothing waits between tiles. With two sets of buffers for keys and values, the next tile's are loaded
while this tile is computed. At the end of a tile its set holds dk and dv, which a separate warp stores. With one set (256 dims)
the next keys are loaded while dk and dv are stored from registers.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.kernels.hopper.primitives import BEHIND, hand_out, load_box, next_tile, release, store_box, take

__all__ = ["PLACE", "ROWS", "SLOT", "deal_tiles", "keys_of", "load_one", "load_tiles", "store_tiles", "turn"]


ROWS = gl.constexpr(64)  # rows per product: the M of one wgmma instruction
SLOT = gl.constexpr(8)  # int32 from the description of one tile to the next
PLACE = gl.constexpr(5)  # numbers that describe a tile


@gluon.jit
def keys_of(tile, tiles, shape, KEYS: gl.constexpr, M: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, order_ptr):
    """(block of keys, key/value head, sequence, first block of queries that sees the keys, one past the last) of a tile.

    Heads are computed in sections. Under a causal mask, the longest blocks of a section come first. With ordered additions the
    order is reversed, because a program may only wait for programs that begin earlier. With packed documents, a block of keys
    is seen by queries up to the end of the document of its last key.
    """
    key_blocks, section, KV_H, _GROUP, max_q, max_k, left, ends_ptr = shape
    before = tile // (section * key_blocks) * section
    within = tile % (section * key_blocks)
    heads = tiles // key_blocks
    width = gl.minimum(section, heads - before)
    block = within // width
    # The last heads come first: their prepared rows are the newest in L2, and the heads that are rounded first are then also
    # there.
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
    """The number of other blocks of keys that add to the j-th block of queries before this one.

    Under a causal mask, the last block of keys that it sees adds first: that program begins with this block of queries. The
    other blocks follow in descending order. With packed documents these reach back, without a gap, to the block in which the
    document of its first query begins.
    """
    if CAUSAL:
        key_blocks, _section, _KV_H, _GROUP, max_q, max_k, _left, _ends_ptr = shape
        # The last block of keys whose first block of queries is the j-th or an earlier one.
        last = gl.minimum(((j + 1) * M - 1 + max_k - max_q) // KEYS, key_blocks - 1)
        return last - block
    else:
        return block


# ---- the producer


@gluon.jit
def _load_keys(descs, bufs, bars, place, head_strides, kv, KEYS: gl.constexpr):
    """Load K and V of a tile into the kv-th set of buffers."""
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
    """Load the j-th block of queries of a head, and of dO, as the program's it-th block, each as soon as its stage is free."""
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
    """The producer of a program that has one tile."""
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
    """The producer of a persistent program."""
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
            # The set is in use until the end of the preceding tile. Stages are free earlier, so load the first queries now.
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


# ---- the scheduler warp


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
    """Store dk and dv of each tile from the set of buffers that contained its keys and values. Then release the set."""
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
