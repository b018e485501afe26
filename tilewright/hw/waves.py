"""How evenly a grid fills a card: full waves of blocks, and the tail.

A card runs `sms * blocks_per_sm` blocks at a time. A grid with one block more than that takes twice as long, if all blocks take
the same time. The standard example is a product with tiles of 256 x 128 on an A100 with 108 SMs and one block per SM (NVIDIA,
"Matrix Multiplication Background User's Guide", wave quantization). 1792 x 1792 is 7 x 14 = 98 tiles, one wave; 1793 x 1793 is
8 x 15 = 120 tiles, two waves for 0.1 % more work:

    >>> waves(98, sms=108).waves, waves(120, sms=108).waves
    (1, 2)
    >>> round(waves(120, sms=108).efficiency, 3)
    0.556

Not here: persistent kernels, whose grid has the size of the card; pass their number of tiles as `blocks`.
"""

from dataclasses import dataclass

__all__ = ["Waves", "waves"]


@dataclass(frozen=True, kw_only=True)
class Waves:
    """How a grid is distributed on a card."""

    blocks: int
    slots: int
    """Blocks that run at once."""
    full: int
    """Waves in which every slot has a block."""
    tail: int
    """The number of blocks in the last wave if it is not full, else 0."""

    @property
    def waves(self) -> int:
        """Waves in all, the tail included."""
        return self.full + (self.tail > 0)

    @property
    def total(self) -> float:
        """Blocks divided by slots: the number of waves as a fraction."""
        return self.blocks / self.slots

    @property
    def efficiency(self) -> float:
        """The share of slot time that is used, at most 1; 1 for an empty grid."""
        return self.total / self.waves if self.waves else 1.0


def waves(blocks: int, *, sms: int, blocks_per_sm: int = 1) -> Waves:
    """How a grid of `blocks` runs on a card of `sms` SMs that hold `blocks_per_sm` each.

    Raises:
        ValueError: a negative grid, or a card without room for a block.
    """
    if blocks < 0 or sms < 1 or blocks_per_sm < 1:
        raise ValueError(
            f"got a grid of {blocks} blocks, {sms} SMs and {blocks_per_sm} blocks per SM; wanted at least 0, 1 and 1"
        )
    slots = sms * blocks_per_sm
    return Waves(blocks=blocks, slots=slots, full=blocks // slots, tail=blocks % slots)
