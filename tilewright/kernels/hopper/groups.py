"""A tile schedule over groups of rows whose sizes only the device knows. It maps a tile number to a group and its rows.

A group contains the rows of one expert. Either the rows are sorted by expert and bounded by offsets [X + 1], or each expert has
space for M rows and its row count is in counts [X] (MASKED). Tiles are numbered group by group; each BLOCK_M rows have `across`
tiles. All groups of warps share one `Groups`. Each of them has a `Group`, which is its current position, and moves it forward
on its own, from one tile of its program to the next:

    at = groups.first().seek(tile)
    while at.is_tile():
        ...
        tile += gl.num_programs(0)
        at = at.seek(tile)

All groups of warps read the same bounds, which do not change while the kernel runs, so they see the same tiles in the same
order. They need not exchange tile numbers, and the producer warp fills exactly the stages that the consumers wait for. Each of
them visits a group once per launch, with two loads of numbers that stay in L1.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

__all__ = ["Group", "Groups"]


@gluon.jit
def _rows_of(bounds_ptr, group, X, R, M, MASKED: gl.constexpr):
    """(first row, end) of a group's used rows. After the last group there are no rows. Bounds are clamped to [0, R]."""
    if MASKED:
        first = group * M
        count = gl.load(bounds_ptr + group, mask=group < X, other=0)
        return first, first + gl.minimum(gl.maximum(count, 0), M)
    else:
        first = gl.load(bounds_ptr + group, mask=group < X, other=R)
        first = gl.minimum(gl.maximum(first, 0), R)
        end = gl.load(bounds_ptr + group + 1, mask=group < X, other=R)
        return first, gl.minimum(gl.maximum(end, first), R)


@aggregate
class Group:
    """The group that a tile belongs to."""

    bounds_ptr: gl.tensor
    X: gl.tensor
    R: gl.tensor
    M: gl.tensor
    across: gl.tensor
    group: gl.tensor
    before: gl.tensor
    """The number of tiles in the preceding groups."""
    first: gl.tensor
    end: gl.tensor
    BLOCK_M: gl.constexpr
    MASKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, bounds_ptr: Any, X: Any, R: Any, M: Any, across: Any, group: Any, before: Any, first: Any, end: Any,
        BLOCK_M: Any, MASKED: Any,
    ):  # fmt: skip
        self.bounds_ptr = bounds_ptr
        self.X = X
        self.R = R
        self.M = M
        self.across = across
        self.group = group
        self.before = before
        self.first = first
        self.end = end
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.MASKED = gl.constexpr(MASKED)

    @gluon.jit
    def high(self):
        """The number of BLOCK_M-row bands of tiles in the group."""
        return gl.cdiv(self.end - self.first, self.BLOCK_M)

    @gluon.jit
    def is_tile(self):
        """Whether the tile of the last `seek` exists."""
        return self.group < self.X

    @gluon.jit
    def seek(self, tile):
        """The group of a tile. The tile must not come before the first tile of this group."""
        group = self.group
        before = self.before
        first = self.first
        end = self.end
        while (group < self.X) & (tile >= before + gl.cdiv(end - first, self.BLOCK_M) * self.across):
            before += gl.cdiv(end - first, self.BLOCK_M) * self.across
            group += 1
            first, end = _rows_of(self.bounds_ptr, group, self.X, self.R, self.M, self.MASKED)
        return Group(
            self.bounds_ptr, self.X, self.R, self.M, self.across, group, before, first, end, self.BLOCK_M, self.MASKED
        )  # fmt: skip


@aggregate
class Groups:
    """Groups of rows and their bounds."""

    bounds_ptr: gl.tensor
    X: gl.tensor
    R: gl.tensor
    M: gl.tensor
    across: gl.tensor
    BLOCK_M: gl.constexpr
    MASKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, bounds_ptr: Any, X: Any, R: Any, M: Any, across: Any, BLOCK_M: Any, MASKED: Any):
        self.bounds_ptr = bounds_ptr
        self.X = X
        self.R = R
        self.M = M
        self.across = across
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.MASKED = gl.constexpr(MASKED)

    @gluon.jit
    def first(self):
        """The first group."""
        zero = gl.to_tensor(0)
        first, end = _rows_of(self.bounds_ptr, zero, self.X, self.R, self.M, self.MASKED)
        return Group(
            self.bounds_ptr, self.X, self.R, self.M, self.across, zero, gl.to_tensor(0), first, end, self.BLOCK_M, self.MASKED
        )  # fmt: skip

    @gluon.jit
    def unused(self, group):
        """(first, end) of unused rows: with MASKED those after the group's count, otherwise those after the last group."""
        _, end = _rows_of(self.bounds_ptr, group, self.X, self.R, self.M, self.MASKED)
        if self.MASKED:
            return end, (group + 1) * self.M
        else:
            return gl.where(group == self.X - 1, end, self.R), self.R
