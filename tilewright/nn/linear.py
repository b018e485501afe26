"""The linear layer, plain or merged from several projections of the same input.

A merged layer is one matmul instead of several. `parts` remembers where each projection's rows lie, for whoever fills,
shards or takes apart the weight. What runs is decided by the weight's type, in `ops.linear`: a quantised weight replaces
`weight`, not the layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import parameter, uniform
from tilewright.ops.linear import Codes
from tilewright.ops.weights import QuantizedWeight

__all__ = ["Linear"]


class Linear(nn.Module):
    """y = x @ weight.T + bias. `weight` is a float parameter, or a `QuantizedWeight` that replaced it.

    Args:
        in_features: the last dimension of x.
        out_features: rows of the weight; a sequence merges projections, in order: (q, k, v) or (gate, up).
        bias: whether there is one, [sum of out_features].

    Weight and bias begin as those of torch.nn.Linear; see filling.py.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.parts: tuple[int, ...] = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        rows = sum(self.parts)
        self.weight: nn.Parameter | QuantizedWeight = parameter(
            rows, in_features, fill=uniform(in_features), device=device, dtype=dtype
        )
        self.bias = parameter(rows, fill=uniform(in_features), device=device, dtype=dtype) if bias else None

    def reset_parameters(self) -> None:
        """As torch.nn.Linear begins: uniform, with a bound of 1 / sqrt(in_features)."""
        for each in self.parameters():
            uniform(self.weight.shape[1])(each)

    def replace_weight(self, weight: QuantizedWeight) -> None:
        """Put a quantised weight in the place of the weight, which is freed."""
        del self.weight  # torch lets no module take the name of a parameter
        self.weight = weight

    def forward(self, x: Tensor | Codes, activation: str = "none") -> Tensor:
        """[..., in] -> [..., out]; or [..., out / 2] where the activation multiplies two halves ("silu_mul", "gelu_mul")."""
        return ops.linear(x, self.weight, self.bias, activation)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return f"{cols} -> {' + '.join(map(str, self.parts)) if len(self.parts) > 1 else rows}, bias={self.bias is not None}"
