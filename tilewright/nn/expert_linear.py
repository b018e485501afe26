"""One projection of all experts of a mixture of experts. The weights, float or quantised, are stacked along their rows.

# X experts, R rows of an expert's weight, C columns, T tokens, K experts per token
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
        parts: the number of rows of each projection that is merged into an expert's weight: (gate, up), or only one number. R
            is their sum. Checkpoints store the projections separately.
        in_features: C.
        bias: whether there is a bias [X R]; it is initialised with zeros.

    The attribute `parts` lists the numbers of rows of all experts, one expert after the other.
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
        """Replace the float weight by a quantised one; the float weight is freed."""
        rows = weight.shape[0] // self.experts
        del self.weight  # torch does not let a module replace a parameter of the same name
        self.weight = weight.by_rows() if rows % weight.block[0] else weight

    def stacked(self) -> Tensor | ExpertWeights:
        """The weight as the grouped products need it: [X, R, C], without a copy."""
        if isinstance(self.weight, QuantizedWeight):
            return ExpertWeights(self.weight, self.experts)
        return self.weight.unflatten(0, (self.experts, -1))

    def forward(self, x: Tensor, order: ops.ByExpert, activation: str = "none", *, gather: bool = False) -> Tensor:
        """x [T K, C], or with gather [T, C] -> [T K, R], or [T K, R / 2] with a gated activation; rows are sorted by expert."""
        bias = None if self.bias is None else self.bias.unflatten(0, (self.experts, -1))
        return ops.grouped_linear(x, self.stacked(), order, bias, activation, gather=gather)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return f"{self.experts} x {cols} -> {rows // self.experts}, bias={self.bias is not None}"
