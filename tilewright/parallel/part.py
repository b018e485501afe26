"""From a whole model to what a rank has of it."""

from typing import Any

from torch import nn

from tilewright.parallel.mesh import Mesh
from tilewright.parallel.pieces import Part, whole_pieces
from tilewright.parallel.plan import Plan

__all__ = ["make_part"]


def make_part(model: Any, plan: Plan, mesh: Mesh, *, invariant: bool) -> Part:
    """Cut a decoder (`embed`, `blocks`, `norm`, `head`) as the plan says. Its modules are taken over; it is not to be used again."""
    pieces = whole_pieces(model)
    uses: dict[str, list[str]] = {}
    if model.head.weight is model.embed.weight:
        # Two places of use, two sums: so it does not matter whether one rank has both.
        model.head.weight = nn.Parameter(model.embed.weight.data)
        uses["embed.weight"] = ["head.weight"]
    return Part(model=model, pieces=pieces, uses=uses)
