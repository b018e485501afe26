"""Describes which piece of each parameter of the whole model a rank holds. Gradients, norms, checkpoints and loading use this
description.

The model on a rank has parameters of its own. Each is a piece of a parameter of the whole model: some of its rows, and all of
its columns or a range of them. A vector is treated as a matrix with one column. A piece may be used in several places, each
with its own gradient. Then each place has a separate parameter, and all of them share the memory of the first one. The others
are called the `uses` of the first one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Part", "Piece", "rows_of", "whole_pieces"]

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of the parameter that is called `of` in the whole model.

    shape: shape of the whole parameter.
    rows: the row ranges of the piece, in the order in which this rank stores them.
    columns: the column range of the piece.
    """

    of: str
    shape: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: Span

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the piece."""
        count = sum(stop - start for start, stop in self.rows)
        return (count,) if len(self.shape) == 1 else (count, self.columns[1] - self.columns[0], *self.shape[2:])

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the whole parameter."""
        return self.rows == ((0, self.shape[0]),) and self.size == self.shape

    def narrowed(self, start: int, stop: int) -> "Piece":
        """The part of this piece with the rows from `start` up to, but not including, `stop`. Rows are counted within this
        piece."""
        found: list[Span] = []
        at = 0
        for low, high in self.rows:
            first, last = max(start - at, 0), min(stop - at, high - low)
            if first < last:
                found.append((low + first, low + last))
            at += high - low
        return replace(self, rows=tuple(found))

    def cut(self, whole: Any) -> Tensor:
        """Cut this piece out of a tensor with the whole parameter's shape, or out of a slice of a safetensors file."""
        if len(self.shape) == 1:
            found = [whole[start:stop] for start, stop in self.rows]
        else:
            found = [whole[start:stop, self.columns[0] : self.columns[1]] for start, stop in self.rows]
        return torch.cat(found) if found else torch.empty(self.size)

    def paste(self, piece: Tensor, whole: Tensor) -> None:
        """Write `piece` to its place in a tensor with the whole parameter's shape."""
        at = 0
        for start, stop in self.rows:
            place = whole[start:stop] if len(self.shape) == 1 else whole[start:stop, self.columns[0] : self.columns[1]]
            place.copy_(piece[at : at + stop - start])
            at += stop - start

    def places(self) -> Tensor:
        """int64: for each row of the piece, the index of its sum of squares in a list. The list has one sum for each row and
        each column range of the whole parameter."""
        ranges, index = 1, 0
        if len(self.shape) > 1 and (width := self.columns[1] - self.columns[0]):
            ranges, index = self.shape[1] // width, self.columns[0] // width
        rows = [torch.arange(start, stop) for start, stop in self.rows]
        return torch.cat(rows) * ranges + index if rows else torch.empty(0, dtype=torch.int64)

    def table(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> "Piece":
        """The inverse of `table`, also after a conversion to JSON and back."""
        spans = tuple((start, stop) for start, stop in table["rows"])
        low, high = table["columns"]
        return cls(of=table["of"], shape=tuple(table["shape"]), rows=spans, columns=(low, high))


def _whole(name: str, shape: Sequence[int]) -> Piece:
    return Piece(of=name, shape=tuple(shape), rows=((0, shape[0]),), columns=(0, shape[1] if len(shape) > 1 else 1))


def whole_pieces(model: nn.Module) -> dict[str, Piece]:
    """Each trainable parameter of a model as a piece that is the whole parameter. A tied parameter occurs once."""
    return {name: _whole(name, p.shape) for name, p in model.named_parameters() if p.requires_grad}


def rows_of(count: int, part: int, parts: int) -> Span:
    """The row range of part number `part` if `count` rows are divided into `parts` equal parts. The last parts may have fewer
    rows."""
    each = -(-count // parts)
    return min(part * each, count), min((part + 1) * each, count)


def merged_rows(parts: Iterable[int], index: int, count: int) -> tuple[Span, ...]:
    """The rows of slice `index` of `count` of a merged projection: the slice's share of each projection, in order."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    return tuple(
        (start + (stop - start) * index // count, start + (stop - start) * (index + 1) // count)
        for start, stop in pairwise(ends)
    )


@dataclass(kw_only=True)
class Part:
    """One rank's part of a model.

    model: the modules of this rank; the part has the same inputs and outputs as the whole model.
    pieces: name of a parameter here -> its piece. The optimizer receives these parameters.
    uses: name of a parameter here -> names of the parameters that share its memory, in the order of the tree.
    summed: parameters that several ranks along tp use, each with its own gradient.
    tied: parameters that both the first and the last part of the layers hold, each with its own gradient.
    dealt: parameters of experts that the other ranks of ep do not hold.
    fetched: modules that store only some rows of their weights, in the order of their parameters.
    """

    model: Any
    pieces: dict[str, Piece]
    uses: dict[str, list[str]]
    summed: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    dealt: frozenset[str] = frozenset()
    fetched: list[Any] = field(default_factory=list)
