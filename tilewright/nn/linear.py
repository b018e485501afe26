"""The linear layer, plain or merged from several projections of the same input.

A merged layer is one matmul instead of several. `parts` remembers where each projection's rows lie, for whoever fills,
shards or takes apart the weight. What runs is decided by the weight's type, in `ops.linear`: a quantised weight replaces
`weight`, not the layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.ops.linear import Codes
from tilewright.ops.weights import QuantizedWeight

__all__ = ["Linear", "empty_parameter"]


def empty_parameter(*shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    """An uninitialised parameter that asks for no gradient."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x @ weight.T + bias. `weight` is a float parameter, or a `QuantizedWeight` that replaced it.

    Args:
        in_features: the last dimension of x.
        out_features: rows of the weight; a sequence merges projections, in order: (q, k, v) or (gate, up).
        bias: whether there is one, [sum of out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.parts: tuple[int, ...] = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        rows = sum(self.parts)
        self.weight: nn.Parameter | QuantizedWeight = empty_parameter(rows, in_features, device=device, dtype=dtype)
        self.bias = empty_parameter(rows, device=device, dtype=dtype) if bias else None

    def reset_parameters(self) -> None:
        """As torch.nn.Linear begins: uniform, with a bound of 1 / sqrt(in_features)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

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
