"""Sums in a fixed order: a binary tree over the index of the summands. The order does not depend on where the summands are.

    sum of 8 terms = ((t0 + t1) + (t2 + t3)) + ((t4 + t5) + (t6 + t7))

A range of 2^k neighbouring terms that begins at a multiple of 2^k is summed first. A rank that holds such a range therefore
computes a subtree of the same tree. So 8 terms on one rank, 4 on each of two ranks, or 1 on each of eight ranks give bitwise
the same result. Terms are added in float32, element by element, so the order does not depend on shapes, libraries or the number
of threads.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["RunningSum", "TreeSum", "row_squares", "running_sum", "tree", "tree_sum"]


class TreeSum:
    """Sums of lists of tensors, in the order of the tree. Stores one list for each power of two up to the number of terms."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Tensor]]] = []  # (number of terms, their sum), longer runs first

    def add(self, part: Sequence[Tensor]) -> None:
        """Add the next term: `part[i]` is added to sum i."""
        size, total = 1, [tensor.float() for tensor in part]
        while self._held and self._held[-1][0] == size:
            total = [a + b for a, b in zip(self._held.pop()[1], total, strict=True)]
            size *= 2
        self._held.append((size, total))

    def result(self) -> list[Tensor]:
        """The sums. Raises ValueError if there were no terms."""
        if not self._held:
            raise ValueError("tree_sum: there are no micro-batches to sum")
        total = self._held.pop()[1]
        while self._held:
            total = [a + b for a, b in zip(self._held.pop()[1], total, strict=True)]
        return total


class RunningSum:
    """Sums of lists of tensors, one term after the other, in float32 and in place. Stores one list."""

    def __init__(self) -> None:
        self._total: list[Tensor] | None = None

    def add(self, part: Sequence[Tensor]) -> None:
        """Add the next term: `part[i]` is added to sum i. Later calls may overwrite the tensors of the first term."""
        if self._total is None:
            self._total = list(part)
        elif self._total[1:] and self._total[1].dtype != torch.float32:
            self._total = [a.float() + b for a, b in zip(self._total, part, strict=True)]
        else:
            for a, b in zip(self._total, part, strict=True):
                a += b

    def result(self) -> list[Tensor]:
        """The sums. Raises ValueError if there were no terms."""
        if self._total is None:
            raise ValueError("running_sum: there are no micro-batches to sum")
        total, self._total = self._total, None
        return total


def tree_sum(parts: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over micro-batches, in the order of the tree, in float32."""
    total = TreeSum()
    for part in parts:
        total.add(part)
    return total.result()


def running_sum(parts: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over micro-batches, one after the other, in float32."""
    total = RunningSum()
    for part in parts:
        total.add(part)
    return total.result()


def tree(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the tensors in the order of the tree, in float32. A single tensor is only converted to float32."""
    return tree_sum([term] for term in terms)[0]


def row_squares(grad: Tensor) -> Tensor:
    """The sum of squares of each row of a matrix, or the square of each element of a vector: float32 [rows].

    The right half of the columns is repeatedly added to the left half. This order depends only on the number of columns, so the
    sum of a row has the same bits in any part of the matrix that contains the row.
    """
    squares = grad.float().square()
    if squares.dim() < 2:
        return squares
    squares = squares.flatten(1)
    while (width := squares.shape[1]) > 1:
        half = (width + 1) // 2
        folded = squares[:, :half].clone()
        folded[:, : width - half] += squares[:, half:]
        squares = folded
    return squares[:, 0]
