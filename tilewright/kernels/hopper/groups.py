"""A schedule of tiles over groups of rows whose sizes only the device knows: which rows, and whose, a tile number stands for.

Groups are experts: rows sorted by expert with offsets [X + 1], or a room of M rows for each with counts [X]. Tiles are numbered
group by group, `across` beside each other for each BLOCK_M rows. A `Groups` is what all groups of warps share, a `Group` the
place where one of them stands. Each walks forward by itself, from one tile of its program to the next:

    at = groups.first().seek(tile)
    while at.is_tile():
        ...
        tile += gl.num_programs(0)
        at = at.seek(tile)

All read the same bounds, which nobody writes while they run, so all see the same tiles in the same order. Nobody has to tell
another which tile is next, and the warp that fetches fills exactly the stages that the others wait for. A walk visits a group
once for a whole launch: two loads of numbers that stay in L1.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

__all__ = ["Group", "Groups"]


@gluon.jit
def _rows_of(bounds_ptr, group, X, R, M, MASKED: gl.constexpr):
    """(first row of a group, end of those that count); behind the last group no rows. Bounds are held to [0, R]."""
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
    """Tiles of the groups before."""
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
        """How many rows of tiles the group has."""
        return gl.cdiv(self.end - self.first, self.BLOCK_M)

    @gluon.jit
    def is_tile(self):
        """Whether there was such a tile."""
        return self.group < self.X

    @gluon.jit
    def seek(self, tile):
        """The group of a tile, which is not before this one's first."""
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
        """(first, end) of rows that belong to nobody: of a group those behind its count, else those behind the last group."""
        _, end = _rows_of(self.bounds_ptr, group, self.X, self.R, self.M, self.MASKED)
        if self.MASKED:
            return end, (group + 1) * self.M
        else:
            return gl.where(group == self.X - 1, end, self.R), self.R
