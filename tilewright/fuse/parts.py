"""Values of the float graph that are only a part of the result of one node of the fused graph.

A product of merged linears gives the columns of each of them; its rows may be in another order than in the float model. The
node's
`meta[FLOAT_PARTS]` says where each value is, so that it can be compared (check.layer_errors).
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["FLOAT_PARTS", "Part"]

FLOAT_PARTS = "float_parts"
"""Key of a fused node's `meta`: a list of `Part`."""


class Part(NamedTuple):
    """One value, and where it is."""

    node: str
    """Name in the float graph."""
    anchor: str
    """The name of the node after which its layer is called."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Positions of its elements in the fused node's memory."""

    def of(self, given: Tensor) -> Tensor:
        """The value within the result of the fused node, as a view."""
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)
