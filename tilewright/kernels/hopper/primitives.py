"""What the Gluon kernels for Hopper share: names that Triton's versions spell differently, and small device functions.

No launchers and no kernels. Triton 3.7 renamed the barrier of a block, 3.9 the copies of boxes and the view of shared memory
as another shape.
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
"""The version of the module that is imported, whatever the package is called that brought it."""


@gluon.jit
def release(bar, pred=True, PRODUCTS: gl.constexpr = False):
    """Tell another group of warps that this one is done: with a slot of a ring, which may be filled again, or with its turn.

    One thread arrives for all warps of the group, so all of them meet first: none may still be reading what is given back.
    `mbarrier.arrive` does not see to that. Triton puts a barrier before it only where its analysis finds a hazard in shared
    memory, and knows neither of reads of global memory (`take`) nor that an arrival lets others write to another buffer.
    PRODUCTS: the group has only multiplied from it and waited for the products, which complete for its four warps together.
    """
    if not PRODUCTS:
        block_barrier()
    mbarrier.arrive(bar, count=1, pred=pred)


@gluon.jit
def viewed(bufs, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as other buffers."""
    if _RENAMED:
        return bufs.reinterpret(dtype, shape, layout)
    else:
        return bufs._reinterpret(dtype, shape, layout)


@gluon.jit
def row_parts(p):
    """Sums along the rows of what each thread has: [rows, 4], one column for each of the threads that share a row."""
    # What wgmma deals out: a thread has pairs of columns, 8 apart.
    apart = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(apart, 3), 1)


@gluon.jit
def scaled_rows(x, alpha):
    """x [rows, any] times alpha [rows]. Each thread has the alphas of its rows."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.expand_dims(gl.convert_layout(alpha, layout, assert_trivial=True), 1)


@gluon.jit
def clear_end(buf, rows, ACROSS: gl.constexpr):
    """Zero what a tile of values holds beyond its first `rows`: it may be anything, and 0 * inf would be NaN.

    By four warps, of which ACROSS threads are beside each other in a row.
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


# ---- tiles by ticket
#
# A warp of its own draws tickets and hands tiles out, to the warp that fetches and to those that multiply, through two slots
# guarded by barriers. It is asked when all but BEHIND of a tile's blocks are under way: a ticket is a trip to L2, and finding
# its tile takes divisions, so that the warp that fetches would come late for the next block. A ticket that is drawn as a tile
# begins would reserve the next one for as long as this one takes, while other SMs are idle: by a simulation of tiles under a
# diagonal (scripts/tickets.py) 3 to 18 % of the time, and 0 to 3 if it is drawn at the end.

BEHIND = gl.constexpr(2)


@gluon.jit
def next_tile(counter_ptr, total):
    """The next tile, or one past the last. A launch draws `total` tickets in all: who draws the last one sets them back."""
    ticket = gl.atomic_add(counter_ptr, 1)
    if ticket == total - 1:
        gl.store(counter_ptr, 0)
    return gl.minimum(gl.num_programs(0) + ticket, total)


@gluon.jit
def hand_out(tile, place, n, slots_ptr, tile_full, tile_empty, SLOT: gl.constexpr):
    """Tell the groups that multiply their n-th tile, with the numbers that describe it: divisions would delay them.

    SLOT: numbers from one tile's to the next one's.
    """
    mbarrier.wait(tile_empty.index(n & 1), n >> 1 & 1 ^ 1)
    ptr = slots_ptr + (n & 1) * SLOT
    gl.store(ptr, tile)
    for i in gl.static_range(len(place)):
        gl.store(ptr + 1 + i, place[i])
    release(tile_full.index(n & 1))


@gluon.jit
def take(n, slots_ptr, tile_full, tile_empty, SLOT: gl.constexpr, COUNT: gl.constexpr):
    """(tile, the COUNT numbers that describe it): the n-th of this program, as `hand_out` told it."""
    mbarrier.wait(tile_full.index(n & 1), n >> 1 & 1)
    ptr = slots_ptr + (n & 1) * SLOT
    tile = gl.load(ptr, volatile=True)
    place = ()
    for i in gl.static_range(COUNT):
        place += (gl.load(ptr + 1 + i, volatile=True),)
    release(tile_empty.index(n & 1))
    return tile, place
