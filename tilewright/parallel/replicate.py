"""Sums of gradients over replicas. Every replica receives the whole sums (data parallelism), or only its own rows (ZeRO).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. The division is by rows and
not by ranges of flat memory, so that norms and checkpoints do not depend on the number of replicas.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.parallel.pieces import rows_of
from tilewright.parallel.ranks import Ranks

__all__ = ["RowShards", "all_reduced", "over_chunks"]

_BUCKET = 1 << 24
"""Elements per exchange: 64 MB of float32."""


def all_reduced(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """The sum of each tensor over the ranks."""
    if ranks.size == 1:
        return list(tensors)
    found: list[Tensor] = []
    for bucket in _buckets(tensors, [t.numel() for t in tensors]):
        flat = ranks.all_reduce(torch.cat([t.reshape(-1) for t in bucket]))
        found += [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in bucket]), bucket)]
    return found


def over_chunks(grads: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """The sum of each gradient over the ranks that hold the other tokens of the same micro-batch. Each sum has the gradient's
    dtype, as when autograd computes it."""
    return [total.to(grad.dtype) for total, grad in zip(all_reduced(grads, ranks), grads, strict=True)]


def _buckets(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    room = 0
    for tensor, size in zip(tensors, sizes):
        if not found or size > room:
            found, room = [*found, []], _BUCKET
        found[-1].append(tensor)
        room -= size
    return found


class RowShards:
    """Divides tensors into contiguous row ranges, one for each rank: ceil(rows / ranks) rows, fewer for the last ranks."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def span(self, rows: int) -> tuple[int, int]:
        """This rank's row range."""
        return rows_of(rows, self.ranks.rank, self.ranks.size)

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's rows, as a view."""
        start, stop = self.span(tensor.shape[0])
        return tensor[start:stop]

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of the sum of each tensor over the ranks."""
        found: list[Tensor] = []
        for bucket in _buckets(tensors, [t.numel() for t in tensors]):
            padded = [self._padded(t).reshape(self.ranks.size, -1) for t in bucket]
            sums = self.ranks.reduce_scatter(torch.cat(padded, 1).view(-1))
            found += self._trimmed(sums.view(1, -1), bucket)[0]
        return found

    def all_gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Write the rows of all ranks into `wholes`. `shards` are the rows of this rank."""
        at = 0
        for bucket in _buckets(wholes, [t.numel() for t in wholes]):
            mine = shards[at : at + len(bucket)]
            at += len(bucket)
            flat = [pad(m.reshape(-1), (0, self._each(w) - m.numel())) for m, w in zip(mine, bucket)]
            gathered = self.ranks.all_gather(torch.cat(flat)).view(self.ranks.size, -1)
            for rank, rows in enumerate(self._trimmed(gathered, bucket)):
                for whole, part in zip(bucket, rows):
                    start, stop = rows_of(whole.shape[0], rank, self.ranks.size)
                    whole[start:stop].copy_(part)

    def _each(self, whole: Tensor) -> int:
        """Number of elements per rank, including the padding of the last rank."""
        return -(-whole.shape[0] // self.ranks.size) * (whole.numel() // max(whole.shape[0], 1))

    def _padded(self, whole: Tensor) -> Tensor:
        flat = whole.reshape(-1)
        return pad(flat, (0, self.ranks.size * self._each(whole) - flat.numel()))

    def _trimmed(self, flats: Tensor, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """Split flat memory [ranks, elements] into the rows of each tensor, for each rank. If there is only one row of flat
        memory, it is this rank's."""
        found: list[list[Tensor]] = []
        for index, flat in enumerate(flats):
            rank = self.ranks.rank if len(flats) == 1 else index
            parts: list[Tensor] = []
            for whole, part in zip(wholes, flat.split([self._each(w) for w in wholes])):
                start, stop = rows_of(whole.shape[0], rank, self.ranks.size)
                shape = (stop - start, *whole.shape[1:])
                parts.append(part[: torch.Size(shape).numel()].view(shape))
            found.append(parts)
        return found
