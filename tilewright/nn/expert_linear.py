"""One projection of all experts of a mixture: their weights stacked along the rows, plain or quantised.

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
    """y = x @ weight[e].T + bias[e], where e is the row's expert. `weight` [X R, C] is a float parameter or a quantised weight.

    Args:
        experts: X.
        parts: rows of the projections that an expert's weight merges: (gate, up), or one. R is their sum. Checkpoints store
            them separately.
        in_features: C.
        bias: whether there is one, [X R], which begins as zeros.

    The attribute `parts` lists those of every expert, one after the other.
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
        """Replace the float weight, which is freed, by a quantised one."""
        rows = weight.shape[0] // self.experts
        del self.weight  # torch does not let a module replace a parameter of the same name
        self.weight = weight.by_rows() if rows % weight.block[0] else weight

    def stacked(self) -> Tensor | ExpertWeights:
        """The weight as the grouped products take it: [X, R, C], a view."""
        if isinstance(self.weight, QuantizedWeight):
            return ExpertWeights(self.weight, self.experts)
        return self.weight.unflatten(0, (self.experts, -1))

    def forward(self, x: Tensor, order: ops.ByExpert, activation: str = "none", *, gather: bool = False) -> Tensor:
        """[T K, C], or with gather [T, C] -> [T K, R] by expert (half as wide if the activation is gated)."""
        bias = None if self.bias is None else self.bias.unflatten(0, (self.experts, -1))
        return ops.grouped_linear(x, self.stacked(), order, bias, activation, gather=gather)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return f"{self.experts} x {cols} -> {rows // self.experts}, bias={self.bias is not None}"
