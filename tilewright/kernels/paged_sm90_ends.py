"""How a pair of paged attention's kernels for Hopper ends: its result, or a part of it and their combination. No launchers.

A pair that a range does not hold whole leaves its (m, l, o) in scratch memory, and whoever draws the pair's last ticket
combines the parts, in the order of the ranges: the same bits in every run. m is in units of the scaled scores times log2(e).
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

# B sequences, H query heads, G key/value heads, D head dim, S tokens a page

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.hopper import block_barrier

__all__ = ["end_pair"]


@gluon.jit
def _normalise(o, m, l, sink_ptr, heads, live, HAS_SINKS: gl.constexpr):
    """o / l of each row; a row without keys gives zeros. sink_ptr: [H], logits that take weight and have no value."""
    if HAS_SINKS:
        sink = gl.load(sink_ptr + heads, mask=live, other=0.0).to(gl.float32) * 1.4426950408889634  # log2(e)
        top = gl.maximum(m, sink)
        fade = gl.exp2(m - top)
        return o * gl.expand_dims(fade / (l * fade + gl.exp2(sink - top)), 1)
    else:
        return o / gl.expand_dims(gl.where(l == 0.0, 1.0, l), 1)


@gluon.jit
def _answer(
    o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens,
    G: gl.constexpr, GROUP: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Write the result of a pair's first HELD rows, whose sums are o [rows, D]."""
    LAYOUT: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    rows = gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    token = q_begin + rows // GROUP
    live = (rows < HELD) & (rows // GROUP < q_len) & (token >= 0) & (token < tokens)
    heads = g * GROUP + rows % GROUP
    m = gl.convert_layout(m, gl.SliceLayout(1, LAYOUT))
    l = gl.convert_layout(l, gl.SliceLayout(1, LAYOUT))
    out = _normalise(o, m, l, sink_ptr, heads, live, HAS_SINKS).to(o_ptr.dtype.element_ty)
    places = gl.expand_dims((token * G * GROUP + heads) * D, 1) + gl.expand_dims(dims, 0)
    gl.store(o_ptr + places, out, mask=gl.expand_dims(live, 1))


@gluon.jit
def _leave(o, m, l, part_ptr, sums_ptr, place, HELD: gl.constexpr):
    """A pair's part to its place: o [HELD, D], then m and l apart."""
    LAYOUT: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    rows = gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims((place * HELD + rows) * D, 1) + gl.expand_dims(dims, 0)
    gl.store(part_ptr + at, o, mask=gl.expand_dims(rows < HELD, 1))
    row = gl.arange(0, o.shape[0], layout=m.type.layout)
    gl.store(sums_ptr + place * (2 * HELD) + row, m, mask=row < HELD)
    gl.store(sums_ptr + place * (2 * HELD) + HELD + row, l, mask=row < HELD)


@gluon.jit
def _combine(
    part_ptr, sums_ptr, o_ptr, sink_ptr, owner, parts, g, q_begin, q_len, tokens,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
    BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Combine the parts owner .. owner + parts of a pair, AT_ONCE at a time, and write the result."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([AT_ONCE, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUM_LAYOUT: gl.constexpr = gl.SliceLayout(0, ROW_LAYOUT)
    which = gl.expand_dims(gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, ROW_LAYOUT)), 1)
    rows = gl.expand_dims(gl.arange(0, BLOCK_R, layout=SUM_LAYOUT), 0)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 0)
    m = gl.full([BLOCK_R], float("-inf"), gl.float32, SUM_LAYOUT)
    l = gl.zeros([BLOCK_R], gl.float32, SUM_LAYOUT)
    o = gl.zeros([BLOCK_R, D], gl.float32, gl.SliceLayout(0, LAYOUT))
    for start in range(0, parts, AT_ONCE):
        i = start + which
        there = (i < parts) & (rows < HELD)
        # The first range ends in the pair, the others begin in it.
        place = (owner + i) * 2 + gl.where(i == 0, 1, 0)
        # .cg: other SMs wrote these, so this SM's L1 must not answer. All are asked for before any is used.
        at = gl.expand_dims((place * HELD + rows) * D, 2) + dims
        o_i = gl.load(part_ptr + at, mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg")
        sums = sums_ptr + place * (2 * HELD) + rows
        m_i = gl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg")
        l_i = gl.load(sums + HELD, mask=there, other=0.0, cache_modifier=".cg")
        high = gl.maximum(m, gl.max(m_i, 0))
        base = gl.where(high == float("-inf"), 0.0, high)
        share = gl.exp2(m_i - gl.expand_dims(base, 0))
        fade = gl.exp2(m - base)
        l = l * fade + gl.sum(l_i * share, 0)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)), assert_trivial=True)
        o = o * gl.expand_dims(fade, 1) + gl.sum(o_i * gl.expand_dims(share, 2), 0)
        m = high
    _answer(o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens, G, GROUP, HELD, HAS_SINKS)


@gluon.jit
def end_pair(
    o, m, l, at, count, share, b, g, pair_at, tiles, q_begin, q_len, tokens, part_ptr, ticket_ptr, o_ptr, sink_ptr,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, HAS_SINKS: gl.constexpr,
    BLOCK_R: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """After the tiles at .. at + count of a pair, which has `tiles` from pair_at on: o [rows, D], HELD of them real; m, l."""
    sums_ptr = part_ptr + 2 * gl.num_programs(0) * HELD * D
    if (at == pair_at) & (count == tiles):
        _answer(o, m, l, o_ptr, sink_ptr, g, q_begin, q_len, tokens, G, GROUP, HELD, HAS_SINKS)
    else:
        _leave(o, m, l, part_ptr, sums_ptr, gl.program_id(0) * 2 + gl.where(at == pair_at, 1, 0), HELD)
        block_barrier()
        ticket = gl.atomic_add(ticket_ptr + b * G + g, 1, sem="acq_rel", scope="gpu")
        owner = pair_at // share
        parts = (pair_at + tiles - 1) // share - owner + 1
        if ticket == parts - 1:
            gl.store(ticket_ptr + b * G + g, 0)
            _combine(
                part_ptr, sums_ptr, o_ptr, sink_ptr, owner, parts, g, q_begin, q_len, tokens,
                G, GROUP, D, HELD, HAS_SINKS, BLOCK_R, AT_ONCE,
            )  # fmt: skip
