"""Rows of an operand that are made by the kernel that multiplies them, item by item: tickets, counters, fences.

Items are drawn by ticket. A group of warps that draws until none is left waits for nobody, so programs wait for items that
running programs have drawn or that their own warps will draw: no order of programs can hang. Rows are written through the
generic proxy and read by the copy engine, the async one: both sides fence.

Counters, all zero between launches: items drawn, groups of warps that have left, then rows done for each READY_ROWS rows.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.hopper.primitives import block_barrier

__all__ = ["READY_ROWS", "await_rows", "counters_of", "draw_item", "fence_proxies", "leave", "say_done"]

READY_ROWS = gl.constexpr(128)
"""Rows that share a counter of rows done."""
_DRAWN = gl.constexpr(0)
_LEFT = gl.constexpr(1)
_READY = gl.constexpr(2)


def counters_of(rows: int) -> int:
    """How many counters an operand of so many rows has."""
    return _READY.value - (-rows // READY_ROWS.value)


@gluon.jit
def fence_proxies(x):
    """Order this thread's writes to memory before what the copy engine reads, and the other way round; returns x."""
    return gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def draw_item(counters_ptr):
    """The next item that nobody has drawn; there are as many as rows, divided by an item's."""
    return gl.atomic_add(counters_ptr + _DRAWN, 1, sem="relaxed")


@gluon.jit
def say_done(counters_ptr, first, count):
    """Count rows as done that this group of warps has written; READY_ROWS is a multiple of an item's."""
    # One thread counts for all: every thread's rows must be out before.
    first = fence_proxies(first)
    block_barrier()
    gl.atomic_add(counters_ptr + _READY + first // READY_ROWS, count, sem="release")


@gluon.jit
def await_rows(counters_ptr, first, rows, COUNT: gl.constexpr):
    """Wait until COUNT rows from `first` on, of all those that there are, may be fetched by the copy engine."""
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
    """By each of a program's GROUPS groups of warps when it draws and waits no more; the last sets the counters back."""
    if gl.atomic_add(counters_ptr + _LEFT, 1, sem="acq_rel") == GROUPS * gl.num_programs(0) - 1:
        for i in range(gl.cdiv(rows, READY_ROWS)):
            gl.store(counters_ptr + _READY + i, 0)
        gl.store(counters_ptr + _DRAWN, 0)
        gl.store(counters_ptr + _LEFT, 0)
