"""Describes values of the float graph that are only a part of the result of a fused node.

A matrix product of merged linears computes the columns of all these linears. Its rows may be in another order than in the float
model. The node's `meta[FLOAT_PARTS]` lists the position of each value, so that the values can be compared (check.layer_errors).
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["FLOAT_PARTS", "Part"]

FLOAT_PARTS = "float_parts"
"""Key in a fused node's `meta`: a list of `Part`."""


class Part(NamedTuple):
    """One value and its position in a fused node's result."""

    node: str
    """The name of the value's node in the float graph."""
    anchor: str
    """The name of the node that gives the layer its name."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """`size`, `stride` and `offset` locate the elements in the memory of the fused node's result, as in as_strided."""

    def of(self, given: Tensor) -> Tensor:
        """The value within the result of the fused node, as a view."""
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)
