"""Micro-batches for training: pieces of documents packed one after the other, with the token to predict at each position."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewright.nn import Packed

__all__ = ["IGNORED", "Piece", "TrainBatch", "pack"]

IGNORED = -100
"""The target of a position that has no loss."""

Piece = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The token ids of a piece of a document, and for each of them the target: the next token, or `IGNORED`."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One micro-batch.

    token_ids: [T] int64.
    targets: [T] int64, the token to predict at each position; `IGNORED` at positions without a loss.
    packed: where the documents begin. Attention stays within each document.
    n_targets: the number of targets that are not `IGNORED`, stored on the host.
    """

    token_ids: Tensor
    targets: Tensor
    packed: Packed
    n_targets: int

    def to(self, device: torch.device | str) -> "TrainBatch":
        """The same batch on a device; copies are asynchronous."""
        packed = replace(
            self.packed,
            positions=self.packed.positions.to(device, non_blocking=True),
            cu_q=self.packed.cu_q.to(device, non_blocking=True),
        )
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            packed=packed,
        )


def pack(pieces: Sequence[Piece], pin: bool = False) -> TrainBatch:
    """Concatenate pieces on the CPU. With `pin`, the tensors are in pinned memory, for asynchronous copies.

    Raises:
        ValueError: there are no tokens.
    """
    lengths = [len(ids) for ids, _ in pieces if len(ids)]
    if not lengths:
        raise ValueError("pack: the pieces have no tokens; give at least one piece with tokens")
    targets = np.concatenate([targets for _, targets in pieces]).astype(np.int64)
    arrays = (
        np.concatenate([ids for ids, _ in pieces]).astype(np.int64),
        targets,
        np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        np.cumsum([0, *lengths], dtype=np.int64).astype(np.int32),
    )
    tensors = [torch.from_numpy(array) for array in arrays]
    token_ids, wanted, positions, cu_q = (tensor.pin_memory() for tensor in tensors) if pin else tensors
    packed = Packed(positions=positions, cu_q=cu_q, max_q_len=max(lengths))
    return TrainBatch(token_ids=token_ids, targets=wanted, packed=packed, n_targets=int((targets != IGNORED).sum()))
