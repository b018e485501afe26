"""Rotary position embedding (Su et al., "RoFormer", 2021): the table of angles that the attention layers of a model share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tilewright.ops.pointwise import rope_table

__all__ = ["NoRotation", "Rope"]


class Rope(nn.Module):
    """Holds `cos_sin`, [max_positions, 2, rotated_dim / 2], always float32, and not part of the state dict.

    Args:
        rotated_dim: number of leading dimensions of a head that are rotated; even.
        max_positions: number of positions in the table. On a GPU the ops do not check positions, so the code that accepts a
            sequence must check its length.
        base: theta, the base of the wavelengths.
        scaling: how frequencies are changed for longer contexts: "rope_type" and its parameters, as in `rope_table`; None:
            they are not changed.
        interleaved: rotate pairs (2i, 2i + 1) instead of (i, i + rotated_dim / 2).
    """

    cos_sin: torch.Tensor

    def __init__(
        self,
        rotated_dim: int,
        *,
        max_positions: int,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.interleaved = interleaved
        self._made_of = (rotated_dim, max_positions, base, scaling)
        table = torch.empty(max_positions, 2, rotated_dim // 2, dtype=torch.float32, device="meta")
        self.register_buffer("cos_sin", table, persistent=False)
        if device is None or torch.device(device).type != "meta":
            self.materialise(device)

    def materialise(self, device: torch.device | str | None) -> None:
        """Compute the table on `device`, for a layer that was created on "meta" and so has no values."""
        self.cos_sin = rope_table(*self._made_of, device)

    def extra_repr(self) -> str:
        positions, _, half = self.cos_sin.shape
        return f"{2 * half} dims, {positions} positions, interleaved={self.interleaved}"


class NoRotation(Rope):
    """The table of layers without rotary positions: angles of zero, which leave every head as it is, bit by bit.

    Args:
        max_positions: as in `Rope`.
        device: as in `Rope`.
    """

    def __init__(self, *, max_positions: int, device: torch.device | str | None = None):
        super().__init__(2, max_positions=max_positions, device=device)

    def materialise(self, device: torch.device | str | None) -> None:
        """A cosine of 1 and a sine of 0 for each position."""
        self.cos_sin = torch.zeros(self.cos_sin.shape, device=device)
        self.cos_sin[:, 0] = 1.0
