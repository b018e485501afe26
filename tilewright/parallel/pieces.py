"""Which piece of each parameter of the whole model a rank has; gradients, norms, checkpoints and loading follow this.

A rank's model has its own parameters. Each is a piece of a parameter of the whole model: some rows, and all columns or a range.
A vector
is treated as a matrix with one column. If a piece is used in several places, each with its own gradient, the places are
separate
parameters that share memory: the `uses` of the first one.
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
    """A piece of the parameter `of`.

    shape: of the whole parameter.
    rows: ranges of its rows, in the order in which this rank stores them.
    columns: the range of its columns.
    """

    of: str
    shape: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: Span

    @property
    def size(self) -> tuple[int, ...]:
        """Its shape on this rank."""
        count = sum(stop - start for start, stop in self.rows)
        return (count,) if len(self.shape) == 1 else (count, self.columns[1] - self.columns[0], *self.shape[2:])

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.rows == ((0, self.shape[0]),) and self.size == self.shape

    def narrowed(self, start: int, stop: int) -> "Piece":
        """The piece of its rows from `start` to before `stop`, counted within this piece."""
        found: list[Span] = []
        at = 0
        for low, high in self.rows:
            first, last = max(start - at, 0), min(stop - at, high - low)
            if first < last:
                found.append((low + first, low + last))
            at += high - low
        return replace(self, rows=tuple(found))

    def cut(self, whole: Any) -> Tensor:
        """Cut this piece out of a tensor with the parameter's shape, or out of a slice of a safetensors file."""
        if len(self.shape) == 1:
            found = [whole[start:stop] for start, stop in self.rows]
        else:
            found = [whole[start:stop, self.columns[0] : self.columns[1]] for start, stop in self.rows]
        return torch.cat(found) if found else torch.empty(self.size)

    def paste(self, piece: Tensor, whole: Tensor) -> None:
        """Write the piece to its place in a tensor with the parameter's shape."""
        at = 0
        for start, stop in self.rows:
            place = whole[start:stop] if len(self.shape) == 1 else whole[start:stop, self.columns[0] : self.columns[1]]
            place.copy_(piece[at : at + stop - start])
            at += stop - start

    def places(self) -> Tensor:
        """For each of its rows, the index in a list of all sums over rows of all column ranges of the parameter, int64."""
        ranges, index = 1, 0
        if len(self.shape) > 1 and (width := self.columns[1] - self.columns[0]):
            ranges, index = self.shape[1] // width, self.columns[0] // width
        rows = [torch.arange(start, stop) for start, stop in self.rows]
        return torch.cat(rows) * ranges + index if rows else torch.empty(0, dtype=torch.int64)

    def table(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> "Piece":
        """The inverse of `table`, after JSON."""
        spans = tuple((start, stop) for start, stop in table["rows"])
        low, high = table["columns"]
        return cls(of=table["of"], shape=tuple(table["shape"]), rows=spans, columns=(low, high))


def _whole(name: str, shape: Sequence[int]) -> Piece:
    return Piece(of=name, shape=tuple(shape), rows=((0, shape[0]),), columns=(0, shape[1] if len(shape) > 1 else 1))


def whole_pieces(model: nn.Module) -> dict[str, Piece]:
    """Every trainable parameter of a model as a piece that is the whole parameter; a tied one occurs once."""
    return {name: _whole(name, p.shape) for name, p in model.named_parameters() if p.requires_grad}


def rows_of(count: int, part: int, parts: int) -> Span:
    """The rows of one of `parts` parts of equal length; the last ones may have fewer."""
    each = -(-count // parts)
    return min(part * each, count), min((part + 1) * each, count)


def merged_rows(parts: Iterable[int], index: int, count: int) -> tuple[Span, ...]:
    """The rows of slice `index` of `count` of a merged projection: its part of each projection, in order."""
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

    model: its modules, with the inputs and outputs of those of the whole model.
    pieces: parameter here -> its piece. These parameters are passed to an optimizer.
    uses: parameter here -> further parameters that share its memory, in the order of the tree.
    summed: parameters that several ranks along tp use, each with its own gradient.
    tied: parameters that the first and the last part of the layers both have, each with its own gradient.
    dealt: parameters of experts that other ranks of ep do not have.
    fetched: modules that store only rows of their weights, in the order of their parameters.
    """

    model: Any
    pieces: dict[str, Piece]
    uses: dict[str, list[str]]
    summed: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    dealt: frozenset[str] = frozenset()
    fetched: list[Any] = field(default_factory=list)
