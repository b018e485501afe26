"""Activations and dropout with torch.nn's names and arguments; differentiable, without parameters.

`inplace=True` raises an error: on a GPU it saves no memory traffic, and changing a tensor that is still used elsewhere is a bug
that is hard to find.
"""

import torch
from torch import Tensor, nn

from tilewright import ops

__all__ = ["ELU", "GELU", "GLU", "Dropout", "Hardswish", "LeakyReLU", "Mish", "ReLU", "SiLU", "Sigmoid", "Tanh"]


def _only(name: str, argument: str, value: object, wanted: object) -> None:
    if value != wanted:
        raise ValueError(f"{name}: {argument}={value!r} is not supported, only {argument}={wanted!r}")


class _Activation(nn.Module):
    """f(x) for x of any shape in bf16, fp16 or fp32; the result has the strides of x."""

    kind: str
    alpha = 1.0

    def __init__(self, inplace: bool = False):
        super().__init__()
        _only(type(self).__name__, "inplace", inplace, False)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return ops.activation(x, self.kind, self.alpha)


class ReLU(_Activation):
    """max(x, 0)."""

    kind = "relu"


class SiLU(_Activation):
    """x sigmoid(x)."""

    kind = "silu"


class Hardswish(_Activation):
    """x min(max(x + 3, 0), 6) / 6."""

    kind = "hardswish"


class Mish(_Activation):
    """x tanh(log(1 + exp(x)))."""

    kind = "mish"


class Sigmoid(_Activation):
    """1 / (1 + exp(-x))."""

    kind = "sigmoid"

    def __init__(self) -> None:
        super().__init__()


class Tanh(_Activation):
    """The hyperbolic tangent."""

    kind = "tanh"

    def __init__(self) -> None:
        super().__init__()


class GELU(_Activation):
    """x Phi(x), where Phi is the normal CDF. approximate: "none" for the exact form (erf), "tanh" for the tanh form."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GELU: approximate is {approximate!r}, wanted 'none' or 'tanh'")
        self.approximate = approximate
        self.kind = "gelu_tanh" if approximate == "tanh" else "gelu"

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class ELU(_Activation):
    """x if x > 0 else alpha (exp(x) - 1)."""

    kind = "elu"

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = alpha

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class LeakyReLU(_Activation):
    """x if x > 0 else negative_slope x."""

    kind = "leaky_relu"

    def __init__(self, negative_slope: float = 1e-2, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = negative_slope

    def extra_repr(self) -> str:
        return f"negative_slope={self.alpha}"


class GLU(nn.Module):
    """The first half of x along `dim` times the sigmoid of the second half."""

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x of an even size along `dim` -> a tensor of half that size along `dim`."""
        return ops.glu(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Dropout(nn.Module):
    """In training: sets each element to zero with probability p and scales the others by 1 / (1 - p). Otherwise: returns x.

    The mask is computed from two numbers of torch's generator (`ops.dropout`), so a seed gives a different mask than in torch.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__()
        _only("Dropout", "inplace", inplace, False)
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout: p is {p}, wanted 0 <= p <= 1")
        self.p = p

    def forward(self, x: Tensor, state: torch.Tensor | None = None) -> Tensor:
        """Any shape -> the same; `state` as in `ops.dropout`."""
        return ops.dropout(x, self.p, state) if self.training and self.p else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
