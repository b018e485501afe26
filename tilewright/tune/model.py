"""An analytical model of a launch: what it does, and how long a card needs for that."""

from dataclasses import dataclass

__all__ = ["Work"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one launch really does with a config, padding and repeated reads included."""

    blocks: int
    """Thread blocks of the grid."""
    flops: float
    """Arithmetic of all blocks, with the padding of ragged tiles."""
    unit: str
    """Which arithmetic ceiling counts: "bf16", "fp16", "tf32", "int8", "fp8" (tensor cores), "fp32" (the others)."""
    dram_bytes: float
    """What must come from or go to memory, each byte once."""
    l2_bytes: float
    """What the blocks ask of L2 in all, repeats included."""
