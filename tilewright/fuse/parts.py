"""Values of the float graph that stand somewhere inside of what one node of the fused graph gives.

A product of linears that are merged gives the columns of each; rows may lie in another order than the float model has them. The
node's `meta[FLOAT_PARTS]` says which value is where, so that it can be compared (check.layer_errors).
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["FLOAT_PARTS", "Part"]

FLOAT_PARTS = "float_parts"
"""Key of a fused node's `meta`: a list of `Part`."""


class Part(NamedTuple):
    """One value, and where it stands."""

    node: str
    """Name in the float graph."""
    anchor: str
    """The name of the one that its layer is called by."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements of the fused node's memory."""

    def of(self, given: Tensor) -> Tensor:
        """The value in what the fused node gave, as a view of that."""
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)
