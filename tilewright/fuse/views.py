"""The arithmetic of views: describes the result of a chain of reshape, transpose, select ... as positions in one dense buffer.

For each dimension, a `View` has a list of atoms. An atom is a pair (size, stride). The first atom varies slowest, and the
product of the sizes is the size of the dimension. A reshape regroups atoms, and splits them if necessary. A permutation
reorders dimensions. A copy changes nothing, because memory is only read when a tensor is needed. In this way this chain, for
which torch needs a copy in the middle, becomes strides of the first buffer:

    [S, B, 3 E] -> [S, B, 3, E] -> ... -> [S, B H, D] -> [B, H, S, D]

`strides` merges the atoms of each dimension into one stride if possible. Otherwise it is None, and a copy is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["View", "channels_last", "dense"]

Atom = tuple[int, int]
"""(size, stride), in elements."""


@dataclass(frozen=True)
class View:
    """The positions of a tensor's elements in a buffer."""

    dims: tuple[tuple[Atom, ...], ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(math.prod(size for size, _ in dim) for dim in self.dims)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """One stride for each dimension, or None if strides cannot express the view."""
        found = [_merged(dim) for dim in self.dims]
        if any(atom is None for atom in found):
            return None
        # A dim of size 1 may have any stride. Kernels derive alignment from strides, so it gets the stride of a dense tensor.
        steps, reach = [], 1
        for size, stride in reversed([atom for atom in found if atom is not None]):
            steps.append(stride if size != 1 else reach)
            reach = max(reach, size * steps[-1])
        return tuple(reversed(steps))

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """The atoms of all dimensions. They are sizes and strides of a tensor that can be reshaped to `shape`."""
        return tuple(atom for dim in self.dims for atom in dim)

    def is_dense(self) -> bool:
        """Whether the elements are in order and without gaps, beginning at the start of the buffer."""
        return self.offset == 0 and dense(self.shape).strides == self.strides

    def reshape(self, sizes: Sequence[int]) -> "View | None":
        """The same elements in the same order, with other sizes; None if the atoms cannot be split in this way."""
        if 0 in sizes or 0 in self.shape:
            return None
        rest = [atom for atom in reversed(self.atoms) if atom[0] != 1]
        dims: list[tuple[Atom, ...]] = []
        for size in sizes:
            taken: list[Atom] = []
            while size > 1:
                if not rest:
                    return None
                count, stride = rest.pop()
                if size % count == 0:
                    taken.append((count, stride))
                    size //= count
                elif count % size == 0:
                    inner = count // size
                    taken.append((size, stride * inner))
                    rest.append((inner, stride))
                    size = 1
                else:
                    return None
            dims.append(tuple(taken) or ((1, 1),))
        return View(tuple(dims), self.offset) if not rest else None

    def permute(self, order: Sequence[int]) -> "View":
        """Reorder dimensions: dimension i of the result is dimension order[i] of this view."""
        return View(tuple(self.dims[d] for d in order), self.offset)

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> "View | None":
        """Select elements start, start + step ... of a dimension; None if this dimension has several strides."""
        atom = _merged(self.dims[dim])
        if atom is None:
            return None
        dims = list(self.dims)
        dims[dim] = ((length, atom[1] * step),)
        return View(tuple(dims), self.offset + start * atom[1])

    def select(self, dim: int, index: int) -> "View | None":
        """The view at one index of a dimension, without this dimension."""
        found = self.narrow(dim, index, 1)
        return None if found is None else View(found.dims[:dim] + found.dims[dim + 1 :], found.offset)

    def squeeze(self, dims: Sequence[int]) -> "View":
        """Remove these dimensions if their size is 1."""
        return View(tuple(d for i, d in enumerate(self.dims) if i not in dims or self.shape[i] != 1), self.offset)

    def unsqueeze(self, dim: int) -> "View":
        """Insert a dimension of size 1 before `dim`."""
        return View((*self.dims[:dim], ((1, 1),), *self.dims[dim:]), self.offset)

    def expand(self, sizes: Sequence[int]) -> "View":
        """Repeat dimensions of size 1 and add new ones in front; -1 keeps a size."""
        new = len(sizes) - len(self.dims)
        dims: list[tuple[Atom, ...]] = [((size, 0),) for size in sizes[:new]]
        for size, dim, had in zip(sizes[new:], self.dims, self.shape, strict=True):
            dims.append(dim if size in (-1, had) else ((size, 0),))
        return View(tuple(dims), self.offset)

    def rows(self) -> tuple[tuple[Atom, ...], int] | None:
        """(atoms of the leading dimensions, K) if the last dimension has K adjacent elements; otherwise None."""
        last = _merged(self.dims[-1])
        if last is None or (last[1] != 1 and last[0] != 1):
            return None
        return tuple(atom for dim in self.dims[:-1] for atom in dim if atom[0] != 1), last[0]

    def memory_order(self) -> "tuple[View, View] | None":
        """The rows along the last dimension, in memory order; None unless the rows fill a range of memory without gaps.

        Returns:
            (the rows as a dense view [R, K] from `offset`, a view of an [R, 1] buffer that has the leading dims of this view).
            An operation on rows can run on the first view; the second view locates its results.
        """
        found = self.rows()
        if found is None:
            return None
        leads, k = found
        expected = k
        for size, stride in sorted(leads, key=lambda atom: atom[1]):
            if stride != expected:
                return None
            expected *= size
        count = math.prod(size for size, _ in leads)
        back = tuple(tuple((size, stride // k) if size != 1 else (1, 1) for size, stride in dim) for dim in self.dims[:-1])
        return View((((count, k),), ((k, 1),)), self.offset), View(back)

    def with_columns(self, n: int, base: int) -> "View":
        """Append a last dimension: the first n columns of an [R, base] buffer.

        This view must be the second result of `memory_order`, a view of an [R, 1] buffer.
        """
        dims = tuple(tuple((size, stride * base) for size, stride in dim) for dim in self.dims)
        return View((*dims, ((n, 1),)), self.offset * base)


def _merged(dim: tuple[Atom, ...]) -> Atom | None:
    """The atoms of one dimension, merged into one atom; None if this is impossible."""
    real = [atom for atom in dim if atom[0] != 1]
    if not real:
        return (1, 1)
    size, stride = real[-1]
    for count, step in reversed(real[:-1]):
        if step != size * stride:
            return None
        size *= count
    return size, stride


def dense(shape: Sequence[int]) -> View:
    """The view of a contiguous tensor of this shape."""
    dims, stride = [], 1
    for size in reversed(shape):
        dims.append(((size, stride if size != 1 else 1),))
        stride *= max(1, size)
    return View(tuple(reversed(dims)))


def channels_last(shape: Sequence[int]) -> View:
    """The view of a channels-last tensor [N, C, *S], whose order in memory is [N, *S, C]."""
    last = dense((shape[0], *shape[2:], shape[1]))
    return View((last.dims[0], last.dims[-1], *last.dims[1:-1]))
