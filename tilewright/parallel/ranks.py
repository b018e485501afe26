"""A group of ranks and its collective operations. Sums follow the order of the tree (reduce.py) or the library's order.

For a sum in the order of the tree, each rank receives its part of the summands from all others, adds them itself, and sends the
sum to all. This takes two rounds and sends the same number of bytes as a ring all-reduce. The library's order depends on the
library and on the number of ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.parallel.reduce import tree

__all__ = ["ALONE", "Ranks"]

T = TypeVar("T")

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, if it exists
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SMALL = 8192
"""Up to this number of elements, every rank receives all summands and computes the whole sum: one round instead of two."""


class Ranks:
    """One dimension of the mesh, from the point of view of one of its ranks.

    Args:
        group: the torch.distributed group; None for a single rank.
        rank: the place of this rank in the group.
        size: the number of ranks.
        invariant: sum in the order of the tree; otherwise in the library's order.
    """

    def __init__(self, group: Any = None, rank: int = 0, size: int = 1, invariant: bool = True):
        self.group, self.rank, self.size, self.invariant = group, rank, size, invariant

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors: a new tensor, or `x` for a single rank. A sum in the order of the tree is float32."""
        if self.size == 1:
            return x
        if not self.invariant:
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            return total
        flat = x.float().reshape(-1)
        if flat.numel() <= _SMALL:
            return tree(self._gathered(flat).unbind()).view(x.shape)
        part = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, part * self.size - flat.numel()))
        total = self._gathered(self._sum_of_parts(padded.view(self.size, part)))
        return total.view(-1)[: flat.numel()].view(x.shape)

    def all_reduce_into(self, x: Tensor) -> Tensor:
        """As `all_reduce`, for a tensor that is no longer needed: in the library's order, the sum overwrites `x`."""
        if self.size > 1 and not self.invariant:
            dist.all_reduce(x, group=self.group)
            return x
        return self.all_reduce(x)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's tensor. On the other ranks it overwrites `x`."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank at place `to`."""
        dist.send(x, group=self.group, group_dst=to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Receive a tensor from the rank at place `source`; it overwrites `x`, which is returned."""
        dist.recv(x, group=self.group, group_src=source)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part, along the first dimension, of the sum of all ranks' tensors. The first dimension must be a multiple
        of `size`."""
        if self.size == 1:
            return x
        parts = x.contiguous().unflatten(0, (self.size, -1))
        if self.invariant:
            return self._sum_of_parts(parts.float())
        total = torch.empty_like(parts[0])
        _scatter(total, parts.flatten(0, 1), group=self.group)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors, which must have the same shape, concatenated along the first dimension."""
        return x if self.size == 1 else self._gathered(x.contiguous()).flatten(0, 1)

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...] -> [size, ...]. Part i of the input goes to rank i; part i of the result comes from rank i."""
        if self.size == 1:
            return x
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=self.group)
        return received

    def shift(self, x: Tensor) -> Callable[[], Tensor]:
        """Start sending a tensor to the next rank. Returns a function that waits for the previous rank's tensor and returns
        it."""
        received = torch.empty_like(x)
        ends = ((dist.isend, x, (self.rank + 1) % self.size), (dist.irecv, received, (self.rank - 1) % self.size))
        works = dist.batch_isend_irecv([dist.P2POp(op, tensor, group=self.group, group_peer=peer) for op, tensor, peer in ends])

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows. The first `sent[0]` rows go to rank 0, the next `sent[1]` rows to rank 1, and so on. Returns the
        received rows in the order of the ranks: `received[i]` rows from rank i."""
        if self.size == 1:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.group)
        return out

    def own(self, x: Tensor) -> Tensor:
        """This rank's part, along the first dimension, of a tensor that all ranks hold."""
        return x if self.size == 1 else x.unflatten(0, (self.size, -1))[self.rank]

    def texts(self, text: str) -> Sequence[str]:
        """The texts of all ranks."""
        if self.size == 1:
            return [text]
        raw = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8).clone()  # an empty text cannot be sent
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_cards() else torch.device("cpu")
        sizes = self._gathered(torch.tensor([raw.numel()], device=device)).view(-1).tolist()
        padded = torch.nn.functional.pad(raw, (0, max(sizes) - raw.numel())).to(device)
        return [bytes(row[: size - 1].tolist()).decode() for row, size in zip(self._gathered(padded).cpu(), sizes)]

    def first(self, work: Callable[[], T]) -> T:
        """Do the work on the first rank; when it has finished, on the other ranks."""
        if self.size == 1:
            return work()
        found = work() if self.rank == 0 else None
        dist.barrier(group=self.group, device_ids=[torch.cuda.current_device()] if self._on_cards() else None)
        return work() if found is None else found

    def _on_cards(self) -> bool:
        return dist.get_backend(self.group) == "nccl"

    def _sum_of_parts(self, parts: Tensor) -> Tensor:
        return tree(self.all_to_all(parts).unbind())

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        _gather(out.view(-1), x.reshape(-1), group=self.group)
        return out


ALONE = Ranks()
"""A group with a single rank."""
