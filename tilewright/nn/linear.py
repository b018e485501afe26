"""The linear layer, plain or merged from several projections of the same input.

A merged layer is one matmul instead of several. Its attribute `parts` holds the number of rows of each projection, for code
that fills, shards or splits the weight. The weight's type decides which product runs (`ops.linear`): quantising replaces
`weight`, not the layer. Low-rank adapters are separate modules (lora.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.lora import Lora, LoraStack
from tilewright.ops.linear import QuantizedActivation
from tilewright.ops.linear_fp8 import Fp8Recipe
from tilewright.ops.weights import QuantizedWeight

__all__ = ["Linear"]


class Linear(nn.Module):
    """y = x @ weight.T + bias. `weight` is a float parameter, or a `QuantizedWeight` that replaced it.

    Args:
        in_features: the last dimension of x.
        out_features: the number of rows of the weight; or a sequence, for merged projections in this order, such as (q, k, v)
            or (gate, up).
        bias: whether there is a bias, [sum of out_features].

    Weight and bias are initialised as in torch.nn.Linear; see filling.py.
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
        self.adapter: Lora | LoraStack | None = None
        self.fp8: Fp8Recipe | None = None
        """For training with float8 products (`ops.linear_fp8`). None: no float8. Without gradients the products use the float
        weight."""
        self.quantized_weight: QuantizedWeight | None = None
        """The quantised weight by which x is multiplied while the float weight is trained (`ops.linear_straight_through`)."""

    def reset_parameters(self) -> None:
        """As in torch.nn.Linear: uniform, with a bound of 1 / sqrt(in_features)."""
        for each in self.parameters():
            uniform(self.weight.shape[1])(each)

    def replace_weight(self, weight: QuantizedWeight) -> None:
        """Replace the float weight by a quantised one; the float weight is freed."""
        del self.weight  # torch does not let a module replace a parameter of the same name
        self.weight = weight

    def adapted(self, adapters: Tensor | None) -> bool:
        """Whether an adapter contributes to a batch with these adapter ids. If so, x must not be a `QuantizedActivation`."""
        return self.adapter is not None and self.adapter.applies(adapters)

    def forward(self, x: Tensor | QuantizedActivation, activation: str = "none", adapters: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; or [..., out / 2] if the activation is gated ("silu_mul", "gelu_mul").

        adapters: the adapter of each token in a `LoraStack`, as in `Batch`.
        """
        if self.adapter is None or not self.adapter.applies(adapters):
            if self.fp8 is not None and torch.is_grad_enabled() and isinstance(x, Tensor):
                assert isinstance(self.weight, Tensor)
                return ops.linear_fp8(x, self.weight, self.bias, activation, *self.fp8)
            if self.quantized_weight is not None and isinstance(x, Tensor):
                assert isinstance(self.weight, Tensor)
                return ops.linear_straight_through(x, self.weight, self.quantized_weight, self.bias, activation)
            return ops.linear(x, self.weight, self.bias, activation)
        assert isinstance(x, Tensor)
        return self.adapter.activated(ops.linear(x, self.weight, self.bias), x, adapters, activation)

    def extra_repr(self) -> str:
        rows, cols = self.weight.shape
        return f"{cols} -> {' + '.join(map(str, self.parts)) if len(self.parts) > 1 else rows}, bias={self.bias is not None}"
