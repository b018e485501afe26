"""Rows of an operand that the kernel produces itself before it multiplies them: work items, counters, fences.

The rows are divided into items. Groups of warps draw items from an atomic counter until none is left, and do not wait for other
programs while they do. So a program waits only for items that running programs have drawn or that its own warps will draw.
Therefore there is no deadlock, in whatever order programs start. Rows are written through the generic proxy, and TMA reads them
through the async proxy, so both sides need a proxy fence.

The counters are all zero between launches: the number of items drawn, the number of groups of warps that have left, and then,
for each READY_ROWS rows, the number of finished rows.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.hopper.primitives import block_barrier

__all__ = ["READY_ROWS", "await_rows", "counters_of", "draw_item", "fence_proxies", "leave", "say_done"]

READY_ROWS = gl.constexpr(128)
"""The number of rows that share a counter of finished rows."""
_DRAWN = gl.constexpr(0)
_LEFT = gl.constexpr(1)
_READY = gl.constexpr(2)


def counters_of(rows: int) -> int:
    """The number of counters for an operand of `rows` rows."""
    return _READY.value - (-rows // READY_ROWS.value)


@gluon.jit
def fence_proxies(x):
    """Order this thread's memory accesses before later TMA accesses, and the reverse (proxy fence). Returns x."""
    return gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def draw_item(counters_ptr):
    """Draw the next item. It exists if it is below the number of rows divided by the rows per item."""
    return gl.atomic_add(counters_ptr + _DRAWN, 1, sem="relaxed")


@gluon.jit
def say_done(counters_ptr, first, count):
    """Count `count` rows that this group of warps has written as finished. READY_ROWS is a multiple of the rows per item."""
    # One thread counts for all, so the writes of all threads must come before.
    first = fence_proxies(first)
    block_barrier()
    gl.atomic_add(counters_ptr + _READY + first // READY_ROWS, count, sem="release")


@gluon.jit
def await_rows(counters_ptr, first, rows, COUNT: gl.constexpr):
    """Wait until TMA may load the COUNT rows from `first` on, or as many of them as exist."""
    block = first // READY_ROWS
    for i in gl.static_range(COUNT // READY_ROWS + 1):
        at = (block + i) * READY_ROWS
        if at < gl.minimum(first + COUNT, rows):
            wanted = gl.minimum(rows - at, READY_ROWS)
            while gl.atomic_add(counters_ptr + _READY + block + i, 0, sem="acquire") < wanted:
                pass
    fence_proxies(first)


@gluon.jit
def leave(counters_ptr, rows, GROUPS: gl.constexpr):
    """Each of a program's GROUPS groups of warps calls this after its last draw and wait. The last call resets the counters."""
    if gl.atomic_add(counters_ptr + _LEFT, 1, sem="acq_rel") == GROUPS * gl.num_programs(0) - 1:
        for i in range(gl.cdiv(rows, READY_ROWS)):
            gl.store(counters_ptr + _READY + i, 0)
        gl.store(counters_ptr + _DRAWN, 0)
        gl.store(counters_ptr + _LEFT, 0)
