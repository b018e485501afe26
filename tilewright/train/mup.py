"""muP: initialisation and learning rates for which the best learning rate does not depend on the width of the model.

The rules for Adam (Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", 2022,
table 8). They are factors relative to the usual parametrisation, with m = hidden_size / base width:

    weights               standard deviation     learning rate
    embedding             1                      1
    matrices              1 / sqrt(m)            1 / m
    head                  0                      1 / m
    norms, biases         1                      1

The weights of the head are 0 at first, as section D.2 of the paper advises, because random logits would shrink with the width.
At the base width, this is the only difference from the usual parametrisation. The rules concern only weights and learning
rates. So the model itself is not changed, and is saved and served like any other model. The model must have a separate head,
because a tied head would need two standard deviations at once. All widths must have the same head dimension, so that the scale
of attention, 1 / sqrt(head_dim), is constant.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from tilewright.models import ModelConfig

__all__ = ["MuP", "mup_for"]


@dataclass(frozen=True)
class MuP:
    """The rules for one width. The methods receive the names of the model's parameters.

    m: hidden_size / base width.
    """

    m: float

    def std(self, name: str, parameter: Tensor) -> float:
        """The factor on the standard deviation of a parameter's random weights."""
        if _is_head(name):
            return 0.0
        return 1 / math.sqrt(self.m) if _is_matrix(name, parameter) else 1.0

    def rate(self, name: str, parameter: Tensor) -> float:
        """The factor on the learning rate of a parameter."""
        return 1 / self.m if _is_head(name) or _is_matrix(name, parameter) else 1.0

    def decay(self, weight_decay: float, name: str, parameter: Tensor) -> float:
        """The weight decay of a parameter. An update removes lr * rate * decay, which must be the same at every width."""
        return weight_decay / self.rate(name, parameter) if parameter.ndim >= 2 else 0.0


def mup_for(shape: ModelConfig, base: int, optimizer: str) -> MuP:
    """The rules for a model.

    Args:
        base: the hidden_size at which the rules equal the usual parametrisation.
        optimizer: name of the optimizer; the rules are for Adam.

    Raises:
        ValueError: the rules do not apply to this model or optimizer.
    """
    if shape.tie_word_embeddings:
        raise ValueError(
            "mup_base needs a separate head, but this model uses its embedding as the head; set tie_word_embeddings to "
            "false in the model's config"
        )
    if not optimizer.startswith("adamw"):
        raise ValueError(f"mup_base supports only the optimizers adamw and adamw-8bit, but optimizer is {optimizer}")
    return MuP(shape.hidden_size / base)


def _is_head(name: str) -> bool:
    return name.startswith("head.") and not name.endswith("bias")  # "head." also begins the names of its slices


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.startswith("embed.") and not _is_head(name)
