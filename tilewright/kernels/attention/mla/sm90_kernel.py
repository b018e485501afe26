"""Latent attention over a paged cache for Hopper, written in Gluon: the kernel of `mla_attention`'s `sm90`.

A program processes 64 heads of one query token and a range of its keys, in tiles of 64 rows of the cache, from the last to the
first. Only the tile that is processed first can end inside a page, and is masked. Rows are 512 latent numbers, which are also
the values, and 64 rotated ones. One program per SM, whose warps have three roles (the design published as FlashMLA,
DeepSeek-AI, 2025):

    producer  one warp: loads Q once by TMA, then tile by tile of latents into two stages of 72 KB. A tile is loaded once, and
              read both as keys and as values
    lead      a warpgroup: S = Q K^T and its softmax. It stores the weights P in shared memory, and computes P V for the left
    256
              columns before the next tile's S. Each of a tile's three parts is released to the producer after its last use
    second    a warpgroup: P V for the right 256 columns, because one warpgroup's registers cannot hold 64 x 512 accumulators

With few heads per token it is limited by the bytes of the cache. With 128 heads, the 1152 bytes of a row are used in
2 * 128 * 1088 operations, 242 per byte. Then it is limited by the tensor cores, and equally by shared memory, from which both
operands of S are read (64 x 64 tiles of 4 KB in 32 cycles are its full bandwidth).

The host side is sm90.py, which refuses problems that this kernel does not support.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

# H heads, S tokens per page, R = 512 latent dims in two halves, E = 64 rotated dims

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.hopper.primitives import clear_end, load_box, release, scaled_rows
from tilewright.kernels.hopper.ring import barriers

__all__ = ["mla_sm90_kernel"]


ROWS = gl.constexpr(64)  # heads per program, and keys per tile
HALF = gl.constexpr(256)  # latent dims per consumer
TURNED = gl.constexpr(64)
STAGES = gl.constexpr(2)

# ---- producer


@gluon.jit
def _fetch(desc, at, buf, full, empty, j, COLS: gl.constexpr):
    """Load a part of the j-th tile, as soon as its stage is free."""
    stage = j % STAGES
    mbarrier.wait(empty.index(stage), j // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), ROWS * COLS * 2)
    load_box(desc, at, full.index(stage), buf)


@gluon.jit
def _load(descs, bufs, bars, table_ptr, q_row, where, S: gl.constexpr):
    q_wide_desc, q_turned_desc, k_wide_desc, k_turned_desc = descs
    q_wide, q_turned, k_wide, k_turned, _p, _alpha = bufs
    q_full, full, empty, _p_full, _p_empty = bars
    last, count, _limit = where
    mbarrier.expect(q_full, ROWS * (2 * HALF + TURNED) * 2)
    load_box(q_wide_desc, [q_row, 0], q_full, q_wide.index(0))
    load_box(q_wide_desc, [q_row, HALF], q_full, q_wide.index(1))
    load_box(q_turned_desc, [q_row, 2 * HALF], q_full, q_turned)
    for j in range(count):
        key = (last - j) * ROWS
        page = gl.load(table_ptr + key // S)
        row = page * S + key % S
        stage = j % STAGES
        _fetch(k_turned_desc, [row, 2 * HALF], k_turned.index(stage), full[2], empty[2], j, TURNED)
        _fetch(k_wide_desc, [row, 0], k_wide.index(stage * 2), full[0], empty[0], j, HALF)
        _fetch(k_wide_desc, [row, HALF], k_wide.index(stage * 2 + 1), full[1], empty[1], j, HALF)


# ---- consumers


@gluon.jit
def _scores(bufs, full, j):
    """Issue Q K^T of the j-th tile: three products in flight, each issued when its part is loaded."""
    q_wide, q_turned, k_wide, k_turned, _p, _alpha = bufs
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    stage = j % STAGES
    phase = j // STAGES & 1
    s = gl.zeros([ROWS, ROWS], gl.float32, layout)
    mbarrier.wait(full[2].index(stage), phase)
    s = warpgroup_mma(q_turned, k_turned.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full[0].index(stage), phase)
    s = warpgroup_mma(q_wide.index(0), k_wide.index(stage * 2).permute((1, 0)), s, is_async=True)
    mbarrier.wait(full[1].index(stage), phase)
    return warpgroup_mma(q_wide.index(1), k_wide.index(stage * 2 + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def _exponentials(s, m, scale):
    """(p, m', 2^(m - m')) of a tile's scores. In a range without keys m stays -inf, and all weights are 0."""
    high = gl.maximum(m, gl.max(s, 1))
    base = gl.where(high == float("-inf"), 0.0, high)
    return gl.exp2(s * scale - gl.expand_dims(base * scale, 1)), high, gl.exp2((m - base) * scale)


@gluon.jit
def _hand_over(e, alpha, bufs, bars, j, dtype: gl.constexpr):
    """Store tile j's weights, and the factor of the sums so far, for the second warpgroup."""
    p_buf, alpha_buf = bufs[4], bufs[5]
    p_full, p_empty = bars[3], bars[4]
    mbarrier.wait(p_empty, j & 1 ^ 1)
    p_buf.store(e.to(dtype))
    alpha_buf.store(alpha)
    fence_async_shared()
    release(p_full)


@gluon.jit
def _woven(x):
    """x [ROWS, HALF] with the columns 2 j + l and 8 + 2 j + l of every 16, which one thread holds, made adjacent: 8 bytes."""
    apart = x.reshape([ROWS, HALF // 16, 2, 4, 2])
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[ROWS, HALF],
    )  # fmt: skip
    return gl.convert_layout(apart.permute([0, 1, 3, 2, 4]).reshape([ROWS, HALF]), layout, assert_trivial=True)


@gluon.jit
def _store(o, share, out, row, live, half: gl.constexpr, SPLIT: gl.constexpr):
    """Store half of the columns of the program's rows, times share: rounded, or as a part.

    A part is float16, divided by the largest magnitude of its row's half. This halves the bytes to write and to read. The error
    is at most 2^-11 of a number, or 2^-25 of that largest magnitude.
    """
    layout: gl.constexpr = o.type.layout
    if SPLIT:
        size = gl.abs(o)
        most = gl.maximum(gl.max(gl.where(size < float("inf"), size, 0.0), 1), 1e-30)
        part = _woven((o * gl.expand_dims(1.0 / most, 1)).to(gl.float16))
        place: gl.constexpr = part.type.layout
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, place)), 1)
        cols = half * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, place)), 0)
        at = (row + rows).to(gl.int64) * gl.num_programs(1) + gl.program_id(1)
        gl.store(out[1] + at * (2 * HALF) + cols, part, mask=rows < live)
        line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        at = (row + line).to(gl.int64) * gl.num_programs(1) + gl.program_id(1)
        gl.store(out[2] + at * 2 + half, most * share, mask=line < live)
    else:
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
        cols = half * HALF + gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(0, layout)), 0)
        places = (row + rows).to(gl.int64) * (2 * HALF)
        gl.store(out[0] + places + cols, (o * gl.expand_dims(share, 1)).to(out[0].dtype.element_ty), mask=rows < live)


@gluon.jit
def _lead(bufs, bars, out, row, live, where, scale, SPLIT: gl.constexpr):
    """Scores, softmax and the left half of the values; then the logarithms of the sums."""
    k_wide = bufs[2]
    dtype: gl.constexpr = k_wide.dtype
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    q_full, full, empty, _p_full, _p_empty = bars
    last, count, limit = where
    mbarrier.wait(q_full, 0)
    s = _scores(bufs, full, 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(empty[1].index(0))
    release(empty[2].index(0))
    if limit - last * ROWS < ROWS:
        clear_end(k_wide.index(0), limit - last * ROWS, 32)
    cols = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, s.type.layout)), 0)
    s = gl.where(cols < limit - last * ROWS, s, float("-inf"))
    e, m, alpha = _exponentials(s, gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s.type.layout)), scale)
    l = gl.sum(e, 1)
    o = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    for j in range(1, count):
        before = j - 1
        _hand_over(e, alpha, bufs, bars, before, dtype)
        p = gl.convert_layout(e.to(dtype), P_LAYOUT, assert_trivial=True)
        o = scaled_rows(o, alpha)
        o = warpgroup_mma(p, k_wide.index(before % STAGES * 2), o, is_async=True)
        s = _scores(bufs, full, j)
        o, p = warpgroup_mma_wait(3, deps=(o, p))
        release(empty[0].index(before % STAGES))
        s = warpgroup_mma_wait(0, deps=(s,))
        release(empty[1].index(j % STAGES))
        release(empty[2].index(j % STAGES))
        e, m, alpha = _exponentials(s, m, scale)
        l = l * alpha + gl.sum(e, 1)
    _hand_over(e, alpha, bufs, bars, count - 1, dtype)
    p = gl.convert_layout(e.to(dtype), P_LAYOUT, assert_trivial=True)
    o = scaled_rows(o, alpha)
    o = warpgroup_mma(p, k_wide.index((count - 1) % STAGES * 2), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    share = gl.where(l == 0.0, 0.0, 1.0 / l)
    mbarrier.wait(bars[4], (count - 1) & 1)
    bufs[5].store(share)
    release(bars[3])
    _store(o, gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True), out, row, live, 0, SPLIT)
    if SPLIT:
        rows = gl.arange(0, ROWS, layout=m.type.layout)
        lse = gl.where(l == 0.0, float("-inf"), m * scale + gl.log2(l))
        gl.store(out[3] + (row + rows).to(gl.int64) * gl.num_programs(1) + gl.program_id(1), lse, mask=rows < live)


@gluon.jit
def _second(bufs, bars, out, row, live, where, scale, SPLIT: gl.constexpr):
    """The right half of the values."""
    k_wide, p_buf, alpha_buf = bufs[2], bufs[4], bufs[5]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    _q_full, full, empty, p_full, p_empty = bars
    last, count, limit = where
    mbarrier.wait(full[1].index(0), 0)
    if limit - last * ROWS < ROWS:
        clear_end(k_wide.index(1), limit - last * ROWS, 32)
    o = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    for j in range(count):
        stage = j % STAGES
        mbarrier.wait(full[1].index(stage), j // STAGES & 1)
        mbarrier.wait(p_full, j & 1)
        o = o * gl.expand_dims(alpha_buf.load(ROW_LAYOUT), 1)
        o = warpgroup_mma(p_buf, k_wide.index(stage * 2 + 1), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        release(p_empty)
        release(empty[1].index(stage))
    mbarrier.wait(p_full, count & 1)
    _store(o, alpha_buf.load(ROW_LAYOUT), out, row, live, 1, SPLIT)


# ---- kernel


@gluon.jit
def _tiles_of(token, batch, room, cu_q_ptr, kv_lens_ptr, ONE: gl.constexpr):
    """(sequence, (last tile, tiles, end of the keys that count)) of this program's share of a token's keys.

    A share without keys visits one tile, with all keys masked: the same formulae then give zero. TMA reads no row outside the
    cache, whatever the page number; `room` limits the keys to the table's row.
    """
    b = token
    limit = gl.minimum(gl.load(kv_lens_ptr + token), room) if ONE else token
    if not ONE:
        b = token * 0
        high = batch
        while b + 1 < high:
            middle = (b + high) // 2
            if gl.load(cu_q_ptr + middle) <= token:
                b = middle
            else:
                high = middle
        limit = gl.minimum(gl.load(kv_lens_ptr + b), room) - (gl.load(cu_q_ptr + b + 1) - token) + 1
    limit = gl.maximum(limit, 0)
    tiles = gl.cdiv(limit, ROWS)
    span = gl.cdiv(tiles, gl.num_programs(1))
    first = gl.program_id(1) * span
    stop = gl.minimum(first + span, tiles)
    count = gl.maximum(stop - first, 1)
    last = gl.where(stop > first, stop - 1, 0)
    return b, (last, count, gl.where(stop > first, limit, 0))


@gluon.jit(do_not_specialize=["batch", "heads", "room", "table_row_stride"])
def mla_sm90_kernel(
    q_wide_desc, q_turned_desc, k_wide_desc, k_turned_desc, o_ptr, part_ptr, scale_ptr, lse_ptr, table_ptr, kv_lens_ptr,
    cu_q_ptr, batch, heads, room, table_row_stride, scale, S: gl.constexpr, ONE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Launch with num_warps=4, on (tokens x blocks of 64 heads, ranges) programs; the other partitions bring their own warps.

    q_*_desc: q as [tokens * heads, 576]; k_*_desc: the cache as [pages * S, 576]; in boxes of 64 rows by 256 and by 64.
    ONE: whether each sequence has one query. scale: already multiplied by log2(e). SPLIT: whether there are several ranges,
    each of which stores its part.
    """
    dtype: gl.constexpr = q_wide_desc.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ALPHA_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_wide = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], q_wide_desc.layout)
    q_turned = gl.allocate_shared_memory(dtype, [ROWS, TURNED], q_turned_desc.layout)
    k_wide = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, HALF], k_wide_desc.layout)
    k_turned = gl.allocate_shared_memory(dtype, [STAGES, ROWS, TURNED], k_turned_desc.layout)
    p_buf = gl.allocate_shared_memory(dtype, [ROWS, ROWS], P_LAYOUT)
    alpha_buf = gl.allocate_shared_memory(gl.float32, [ROWS], ALPHA_LAYOUT)
    # For the left halves of tiles, for the right halves, which both warpgroups read, and for the rotated parts.
    full = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1))
    empty = (barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1))
    bars = (barriers(1).index(0), full, empty, barriers(1).index(0), barriers(1).index(0))
    bufs = (q_wide, q_turned, k_wide, k_turned, p_buf, alpha_buf)
    # Blocks of heads that share keys start one after the other, so that the second one finds the keys in L2.
    blocks = gl.cdiv(heads, ROWS)
    token = gl.program_id(0) // blocks
    first_head = gl.program_id(0) % blocks * ROWS
    b, where = _tiles_of(token, batch, room, cu_q_ptr, kv_lens_ptr, ONE)
    row = token * heads + first_head
    live = heads - first_head
    out = (o_ptr, part_ptr, scale_ptr, lse_ptr)
    table_ptr += b.to(gl.int64) * table_row_stride
    descs = (q_wide_desc, q_turned_desc, k_wide_desc, k_turned_desc)
    gl.warp_specialize([
        (_lead, (bufs, bars, out, row, live, where, scale, SPLIT)),
        (_second, (bufs, bars, out, row, live, where, scale, SPLIT)),
        (_load, (descs, bufs, bars, table_ptr, row, where, S)),
    ], [4, 1], [240, 24])  # fmt: skip
