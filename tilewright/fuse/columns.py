"""Locates the columns of a matrix product, or the channels of a convolution, in a value after views.

A factor, a bias or a batch norm after a product can be folded into the weight if each of its numbers applies to the elements of
one column only. The arithmetic of views (views.py) decides this. The result of the product is a dense buffer, and its columns
correspond to certain strides. After reshapes and permutations the strides of each dimension are still known, and so are the
dimensions that run over columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from tilewright.fuse.anchors import Anchor, symbolic, tensor_of
from tilewright.fuse.view_calls import follow
from tilewright.fuse.views import Atom, View, dense

__all__ = ["Columns", "Spread", "columns_of"]


@dataclass(frozen=True)
class Spread:
    """Maps the elements of an operand to columns. The operand broadcasts against a value with these columns."""

    dims: tuple[tuple[Atom, ...], ...]
    """For each dimension of the value: its parts that run over columns, as (size, stride); a stride of 1 is one column."""
    count: int
    """The number of columns."""

    @property
    def _flat(self) -> list[Atom]:
        return [atom for dim in self.dims for atom in dim]

    def in_order(self, shape: Sequence[int]) -> bool:
        """Whether an operand of this shape has one number for each column, in the order of the columns."""
        strides = [stride for _, stride in self._flat]
        return math.prod(shape) == self.count and strides == sorted(strides, reverse=True)

    def vector(self, operand: Tensor) -> Tensor:
        """Convert an operand that broadcasts against the value to a vector [N], with one number for each column."""
        sizes = [math.prod(size for size, _ in dim) for dim in self.dims]
        atoms = self._flat
        order = sorted(range(len(atoms)), key=lambda i: -atoms[i][1])
        return operand.expand(sizes).reshape([size for size, _ in atoms]).permute(order).reshape(self.count)


@dataclass(frozen=True)
class Columns:
    """An anchor's result after views, and which of its strides belong to columns."""

    view: View
    count: int
    step: int
    """The distance from one column to the next in the dense result."""
    known: bool = True
    """Whether all sizes are known. If not, the columns are one dimension, and all other sizes are written as 1."""

    def behind(self, node: Node) -> "Columns | None":
        """The columns after a view call; None if they cannot be determined."""
        if self.known:
            view = follow(node, self.view)
            return None if view is None else Columns(view, self.count, self.step)
        out = tensor_of(node)
        last = self.view.dims[-1]
        if out is None or len(last) != 1 or last[0][0] != self.count or not isinstance(out.shape[-1], int):
            return None
        return _unknown(out.dim(), out.dim() - 1, self.count) if out.shape[-1] == self.count else None

    def spread(self, shape: Sequence[int]) -> Spread | None:
        """How an operand of this shape, broadcast against the value, maps to the columns; None if it does not."""
        high = self.step * self.count
        dims = tuple(
            tuple((size, stride // self.step) for size, stride in dim if size != 1 and self.step <= stride < high)
            for dim in self.view.dims
        )
        lead = len(dims) - len(shape)
        if lead < 0 or math.prod(size for dim in dims for size, _ in dim) != self.count:
            return None
        fits = (wide == 1 or math.prod(size for size, _ in dim) == wide for dim, wide in zip(dims[lead:], shape, strict=True))
        return Spread(dims, self.count) if all(fits) else None


def _unknown(rank: int, at: int, count: int) -> Columns:
    return Columns(View(tuple(((count if i == at else 1, 1),) for i in range(rank))), count, 1, False)


def columns_of(anchor: Anchor) -> Columns | None:
    """The columns of an anchor's own result; None for an anchor without columns."""
    value = tensor_of(anchor.node)
    if value is None or anchor.kind not in ("conv", "conv_transpose", "linear"):
        return None
    if anchor.kind == "conv_transpose" and anchor.options["groups"] != 1:
        return None  # the weight [C, O / groups, *K] does not have a row for each channel of the result
    at = value.dim() - 1
    if anchor.kind != "linear":
        at = value.dim() - 1 - len(anchor.options["stride"])
    if symbolic(value.shape):
        return _unknown(value.dim(), at, value.shape[at]) if isinstance(value.shape[at], int) else None
    return Columns(dense(value.shape), value.shape[at], math.prod(value.shape[at + 1 :]))
