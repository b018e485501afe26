"""One projection of all experts of a mixture: a weight for each, above each other, plain or quantised.

# X experts, R rows of an expert's weight, C columns, T tokens, K experts of a token
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import parameter, uniform
from tilewright.ops.expert_weights import ExpertWeights
from tilewright.ops.weights import QuantizedWeight

__all__ = ["ExpertLinear"]


class ExpertLinear(nn.Module):
    """y = x @ weight[e].T + bias[e], each row by its expert e. `weight` [X R, C] is a float parameter, or codes in its place.

    Args:
        experts: X.
        parts: rows of what an expert's weight merges, (gate, up) or one; R is their sum. A checkpoint has them apart.
        in_features: C.
        bias: whether there is one, [X R], which begins as zeros.

    `parts` lists those of every expert, one after the other.
    """

    def __init__(
        self,
        experts: int,
        parts: tuple[int, ...],
        in_features: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.experts, self.parts = experts, parts * experts
        rows = sum(self.parts)
        self.weight: nn.Parameter | QuantizedWeight = parameter(
            rows, in_features, fill=uniform(in_features), device=device, dtype=dtype
        )
        self.bias = parameter(rows, fill=nn.init.zeros_, device=device, dtype=dtype) if bias else None

    def replace_weight(self, weight: QuantizedWeight) -> None:
        """Put a quantised weight in the place of the weight, which is freed."""
        rows = weight.shape[0] // self.experts
        del self.weight  # torch lets no module take the name of a parameter
        self.weight = weight.by_rows() if rows % weight.block[0] else weight

    def stacked(self) -> Tensor | ExpertWeights:
        """The weight as the grouped products take it: [X, R, C], a view."""
        if isinstance(self.weight, QuantizedWeight):
            return ExpertWeights(self.weight, self.experts)
        return self.weight.unflatten(0, (self.experts, -1))

    def forward(self, x: Tensor, order: ops.ByExpert, activation: str = "none", *, gather: bool = False) -> Tensor:
        """[T K, C], or with gather [T, C] -> [T K, R] (half as wide where the activation multiplies two halves), by expert."""
        bias = None if self.bias is None else self.bias.unflatten(0, (self.experts, -1))
        return ops.grouped_linear(x, self.stacked(), order, bias, activation, gather=gather)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return f"{self.experts} x {cols} -> {rows // self.experts}, bias={self.bias is not None}"
