"""How the layers of a model are cut across ranks, as data: what the trainer, the loader and the planner read.

    Column     rows of the weight, of each of the merged projections (`Linear.parts`): a slice computes some of the outputs
    Row        columns of the weight: a slice computes a term of each output; the outputs are the sum over slices
    Replicate  every slice has all of it, and the gradient is the sum over slices

A slice of a layer is a narrower layer of the same kind, with a share of the heads or of the feed-forward width; the layer's
result is the sum of its slices' results.
"""

from dataclasses import dataclass

from torch import nn

from tilewright.nn.attention import Attention
from tilewright.nn.ffn import GatedMLP

__all__ = ["SHARDS", "Column", "Replicate", "Row", "Shard"]


@dataclass(frozen=True)
class Column:
    """Rows of each merged projection are cut."""


@dataclass(frozen=True)
class Row:
    """Columns are cut; a bias is added once, behind the sum."""


@dataclass(frozen=True)
class Replicate:
    """Nothing is cut."""


Shard = Column | Row | Replicate

SHARDS: dict[type[nn.Module], dict[str, Shard]] = {
    Attention: {"qkv": Column(), "out": Row(), "q_norm": Replicate(), "k_norm": Replicate(), "sinks": Column()},
    GatedMLP: {"gate_up": Column(), "down": Row()},
}
"""Layer -> its linear layers and parameters -> how they are cut."""
