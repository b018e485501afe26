"""How the layers of a model are divided among ranks, as data for the trainer, the loader and the planner.

    Column     by rows of the weight, in each of the merged projections (`Linear.parts`): a slice computes some of the outputs
    Row        by columns of the weight: a slice computes a summand of each output; the outputs are the sum over slices
    Replicate  every slice has all of it, and the gradient is the sum over slices

A slice of a layer is a narrower layer of the same kind, with some of the heads or a part of the feed-forward width. The layer's
result is the sum of its slices' results.
"""

from dataclasses import dataclass

from torch import nn

from tilewright.nn.attention import Attention
from tilewright.nn.ffn import MLP, GatedMLP

__all__ = ["SHARDS", "Column", "Replicate", "Row", "Shard"]


@dataclass(frozen=True)
class Column:
    """The rows of each merged projection are divided."""


@dataclass(frozen=True)
class Row:
    """The columns are divided; a bias is added once, after the sum."""


@dataclass(frozen=True)
class Replicate:
    """Nothing is divided."""


Shard = Column | Row | Replicate

SHARDS: dict[type[nn.Module], dict[str, Shard]] = {
    Attention: {"qkv": Column(), "out": Row(), "q_norm": Replicate(), "k_norm": Replicate(), "sinks": Column()},
    GatedMLP: {"gate_up": Column(), "down": Row()},
    MLP: {"up": Column(), "down": Row()},
}
"""Layer -> its linear layers and parameters -> how they are divided."""
