"""Small device functions for the Gluon kernels for Hopper, and names that differ between versions of Triton.

No launchers and no kernels. Triton 3.7 renamed the thread-block barrier. Triton 3.9 renamed the TMA copies and the
reinterpretation of shared memory.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

__all__ = [
    "BEHIND",
    "block_barrier",
    "clear_end",
    "hand_out",
    "load_box",
    "next_tile",
    "release",
    "row_parts",
    "scaled_rows",
    "store_box",
    "take",
    "viewed",
]

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""The version of the imported module, whatever the name of the package that contains it."""


@gluon.jit
def release(bar, pred=True, PRODUCTS: gl.constexpr = False):
    """Signal another group of warps that this one has finished: with a pipeline stage, which may be refilled, or with its turn.

    One thread arrives on behalf of all warps of the group, so these synchronise first: none may still read the released buffer.
    `mbarrier.arrive` does not ensure this. Triton inserts a barrier before it only if its analysis finds a hazard in shared
    memory. The analysis ignores reads of global memory (`take`), and writes by others that the arrival permits.
    PRODUCTS: this group read the buffer only by wgmma and has waited for it, which completes for its four warps together.
    """
    if not PRODUCTS:
        block_barrier()
    mbarrier.arrive(bar, count=1, pred=pred)


@gluon.jit
def viewed(bufs, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Reinterpret the same shared memory with another dtype, shape and layout."""
    if _RENAMED:
        return bufs.reinterpret(dtype, shape, layout)
    else:
        return bufs._reinterpret(dtype, shape, layout)


@gluon.jit
def row_parts(p):
    """Per-thread sums along the rows: [rows, 4], with one column for each of the four threads that share a row."""
    # The layout of wgmma's result: a thread has pairs of columns, 8 apart.
    apart = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(apart, 3), 1)


@gluon.jit
def scaled_rows(x, alpha):
    """x [rows, any] times alpha [rows]. Each thread already has the alphas of its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(alpha, layout, assert_trivial=True), 1)


@gluon.jit
def clear_end(buf, rows, ACROSS: gl.constexpr):
    """Set the rows of a tile after its first `rows` to zero. They may contain anything, and 0 * inf would be NaN.

    Four warps do this, with ACROSS adjacent threads per row.
    """
    CHUNK: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    for i in gl.static_range(buf.shape[0] // CHUNK):
        if rows < (i + 1) * CHUNK:
            part = buf.slice(i * CHUNK, CHUNK, dim=0)
            at = i * CHUNK + gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout)), 1)
            held = part.load(layout)
            part.store(gl.where(at < rows, held, 0.0).to(held.dtype))
    fence_async_shared()
    block_barrier()


# ---- dynamic tile scheduler
#
# A scheduler warp draws tickets from an atomic counter. It passes tiles to the producer warp and to the consumer warpgroups
# through two slots guarded by barriers. The producer requests the next tile when all but BEHIND of a tile's block loads are
# issued. There is a warp for this because a ticket needs a round trip to L2, and finding its tile needs divisions: the producer
# would issue its next load too late. If the ticket were drawn at the beginning of a tile, it would reserve the next tile for
# the duration of this one, while other SMs are idle. In a simulation of causal attention tiles (scripts/tickets.py) this costs
# 3 to 18 % of the time; a ticket drawn at the end costs 0 to 3 %.

BEHIND = gl.constexpr(2)


@gluon.jit
def next_tile(counter_ptr, total):
    """The next tile, or `total` if there is none. A launch draws `total` tickets; the last draw resets the counter."""
    ticket = gl.atomic_add(counter_ptr, 1)
    if ticket == total - 1:
        gl.store(counter_ptr, 0)
    return gl.minimum(gl.num_programs(0) + ticket, total)


@gluon.jit
def hand_out(tile, place, n, slots_ptr, tile_full, tile_empty, SLOT: gl.constexpr):
    """Pass the n-th tile to the other groups of warps, with the numbers that describe it, so that they need no divisions.

    SLOT: the distance between the two slots, in numbers.
    """
    mbarrier.wait(tile_empty.index(n & 1), n >> 1 & 1 ^ 1)
    ptr = slots_ptr + (n & 1) * SLOT
    gl.store(ptr, tile)
    for i in gl.static_range(len(place)):
        gl.store(ptr + 1 + i, place[i])
    release(tile_full.index(n & 1))


@gluon.jit
def take(n, slots_ptr, tile_full, tile_empty, SLOT: gl.constexpr, COUNT: gl.constexpr):
    """(tile, the COUNT numbers that describe it): the n-th tile of this program, from `hand_out`."""
    mbarrier.wait(tile_full.index(n & 1), n >> 1 & 1)
    ptr = slots_ptr + (n & 1) * SLOT
    tile = gl.load(ptr, volatile=True)
    place = ()
    for i in gl.static_range(COUNT):
        place += (gl.load(ptr + 1 + i, volatile=True),)
    release(tile_empty.index(n & 1))
    return tile, place
