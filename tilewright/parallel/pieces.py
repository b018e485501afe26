"""Which part of each parameter of the whole model a rank has: what gradients, norms, checkpoints and loading are led by.

A rank's model has parameters of its own, each a piece of a parameter of the whole model: some rows, and all columns or a range.
A vector is a matrix of one column. Where a piece is used in several places of which each has a gradient of its own, the places
are parameters that share its memory: `uses` of the first.
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
    """A part of the parameter `of`.

    shape: of the whole parameter.
    rows: spans of its rows, in the order in which they lie here.
    columns: the span of its columns.
    """

    of: str
    shape: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: Span

    @property
    def size(self) -> tuple[int, ...]:
        """The shape that it has here."""
        count = sum(stop - start for start, stop in self.rows)
        return (count,) if len(self.shape) == 1 else (count, self.columns[1] - self.columns[0], *self.shape[2:])

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter itself."""
        return self.rows == ((0, self.shape[0]),) and self.size == self.shape

    def narrowed(self, start: int, stop: int) -> "Piece":
        """Of its rows, counted here, those from `start` to before `stop`."""
        found: list[Span] = []
        at = 0
        for low, high in self.rows:
            first, last = max(start - at, 0), min(stop - at, high - low)
            if first < last:
                found.append((low + first, low + last))
            at += high - low
        return replace(self, rows=tuple(found))

    def cut(self, whole: Any) -> Tensor:
        """This piece of a tensor shaped like the parameter, or of a slice of a safetensors file."""
        if len(self.shape) == 1:
            found = [whole[start:stop] for start, stop in self.rows]
        else:
            found = [whole[start:stop, self.columns[0] : self.columns[1]] for start, stop in self.rows]
        return torch.cat(found) if found else torch.empty(self.size)

    def paste(self, piece: Tensor, whole: Tensor) -> None:
        """Write the piece to where it belongs in a tensor shaped like the parameter."""
        at = 0
        for start, stop in self.rows:
            place = whole[start:stop] if len(self.shape) == 1 else whole[start:stop, self.columns[0] : self.columns[1]]
            place.copy_(piece[at : at + stop - start])
            at += stop - start

    def places(self) -> Tensor:
        """Of each of its rows, the place in a list of all sums over rows of all ranges of columns of the parameter, int64."""
        ranges, index = 1, 0
        if len(self.shape) > 1 and (width := self.columns[1] - self.columns[0]):
            ranges, index = self.shape[1] // width, self.columns[0] // width
        rows = [torch.arange(start, stop) for start, stop in self.rows]
        return torch.cat(rows) * ranges + index if rows else torch.empty(0, dtype=torch.int64)

    def table(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> "Piece":
        """What `table` gave, through JSON."""
        spans = tuple((start, stop) for start, stop in table["rows"])
        low, high = table["columns"]
        return cls(of=table["of"], shape=tuple(table["shape"]), rows=spans, columns=(low, high))


def _whole(name: str, shape: Sequence[int]) -> Piece:
    return Piece(of=name, shape=tuple(shape), rows=((0, shape[0]),), columns=(0, shape[1] if len(shape) > 1 else 1))


def whole_pieces(model: nn.Module) -> dict[str, Piece]:
    """Every parameter of a model that is trained as the piece that it is of itself; a tied one once."""
    return {name: _whole(name, p.shape) for name, p in model.named_parameters() if p.requires_grad}


def rows_of(count: int, part: int, parts: int) -> Span:
    """The rows of a part, where rows are dealt out in runs of one length; the last ones may have fewer."""
    each = -(-count // parts)
    return min(part * each, count), min((part + 1) * each, count)


def merged_rows(parts: Iterable[int], index: int, count: int) -> tuple[Span, ...]:
    """The rows of slice `index` of `count` of a merged projection: its part of each projection, in their order."""
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    return tuple(
        (start + (stop - start) * index // count, start + (stop - start) * (index + 1) // count)
        for start, stop in pairwise(ends)
    )


@dataclass(kw_only=True)
class Part:
    """What a rank has of a model.

    model: its modules, which take and give what those of the whole model do.
    pieces: parameter here -> what it is. The parameters that an optimizer is given.
    uses: parameter here -> further parameters that share its memory, in the order of the tree.
    summed: parameters that several ranks along tp use, each with a gradient of its own.
    tied: parameters that the first and the last part of the layers both have, each with a gradient of its own.
    dealt: parameters of experts that other ranks of ep do not have.
    fetched: modules that hold rows of their weights alone, in the order of their parameters.
    """

    model: Any
    pieces: dict[str, Piece]
    uses: dict[str, list[str]]
    summed: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    dealt: frozenset[str] = frozenset()
    fetched: list[Any] = field(default_factory=list)
