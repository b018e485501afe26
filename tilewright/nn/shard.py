"""How the layers of a model are divided among ranks, as data for the trainer, the loader and the planner.

    Column     the rows of each merged projection (`Linear.parts`) are divided: a slice computes some of the outputs
    Row        the columns of the weight are divided: a slice computes one summand of each output, the slices are added
    Replicate  every slice has the whole parameter, and the gradient is the sum over slices

A slice of a layer is a narrower layer of the same kind, with some of the heads or a part of the feed-forward width. The result
of the layer is the sum of the results of its slices.
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
    """The columns of the weight are divided; a bias is added once, after the sum over slices."""


@dataclass(frozen=True)
class Replicate:
    """Every slice has the whole parameter."""


Shard = Column | Row | Replicate

SHARDS: dict[type[nn.Module], dict[str, Shard]] = {
    Attention: {"qkv": Column(), "out": Row(), "q_norm": Replicate(), "k_norm": Replicate(), "sinks": Column()},
    GatedMLP: {"gate_up": Column(), "down": Row()},
    MLP: {"up": Column(), "down": Row()},
}
"""Class of the layer -> name of its linear layer or parameter -> how that is divided."""
