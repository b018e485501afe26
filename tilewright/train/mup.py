"""muP: initialisation and learning rates with which a narrow model and a wide one have the same best learning rate.

The rules for Adam (Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", 2022,
table 8), with m = hidden_size / base width, relative to the usual parametrisation:

    weights               standard deviation     learning rate
    embedding             1                      1
    matrices              1 / sqrt(m)            1 / m
    head                  0                      1 / m
    norms, biases         1                      1

The head begins at 0, as section D.2 there advises, because random logits would shrink with the width. At the base width nothing
else changes. The rules concern only weights and rates, so the model itself is not changed, and is saved and served like any
other. It needs its own head (a tied one would need two sizes at once) and the same head dimension at all widths, so that the
scale of attention, 1 / sqrt(head_dim), is constant.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from tilewright.models import ModelConfig

__all__ = ["MuP", "mup_for"]


@dataclass(frozen=True)
class MuP:
    """The rules for one width. The methods take names of the model's parameters.

    m: hidden_size / base width.
    """

    m: float

    def std(self, name: str, parameter: Tensor) -> float:
        """Factor on the standard deviation of random weights."""
        if _is_head(name):
            return 0.0
        return 1 / math.sqrt(self.m) if _is_matrix(name, parameter) else 1.0

    def rate(self, name: str, parameter: Tensor) -> float:
        """Factor on the learning rate."""
        return 1 / self.m if _is_head(name) or _is_matrix(name, parameter) else 1.0

    def decay(self, weight_decay: float, name: str, parameter: Tensor) -> float:
        """Weight decay: an update removes lr * rate * decay, which must be the same at every width."""
        return weight_decay / self.rate(name, parameter) if parameter.ndim >= 2 else 0.0


def mup_for(shape: ModelConfig, base: int, optimizer: str) -> MuP:
    """The rules for a model.

    Args:
        base: hidden_size at which the rules equal the usual parametrisation.
        optimizer: its name; the rules are for Adam.

    Raises:
        ValueError: the rules do not apply to this model or optimizer.
    """
    if shape.tie_word_embeddings:
        raise ValueError("mup_base needs a separate head, and this model's is its embedding: tie_word_embeddings = false")
    if not optimizer.startswith("adamw"):
        raise ValueError(f"mup_base has rules for adamw and adamw-8bit; optimizer is {optimizer}")
    return MuP(shape.hidden_size / base)


def _is_head(name: str) -> bool:
    return name.startswith("head.") and not name.endswith("bias")  # or a slice of it


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.startswith("embed.") and not _is_head(name)
