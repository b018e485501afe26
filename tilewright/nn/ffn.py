"""Feed-forward layers."""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.linear import Linear
from tilewright.ops.linear import QuantizedActivation

__all__ = ["MLP", "GatedMLP"]


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020), as two matmuls.

    Args:
        features: E, of input and output.
        inner: the width of gate, and of up.
        activation: "silu_mul" or "gelu_mul" (the exact GELU), which run in the epilogue of the merged gate and up projection;
            or "gelu_tanh_mul" (the tanh form of GELU), which is a separate launch.
        bias: whether the three projections have biases.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        activation: str = "silu_mul",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gate_up = Linear(features, (inner, inner), bias=bias, device=device, dtype=dtype)
        self.down = Linear(inner, features, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    @property
    def reader(self) -> Linear:
        """The only linear layer that reads the input."""
        return self.gate_up

    def forward(self, x: Tensor | QuantizedActivation, adapters: Tensor | None = None) -> Tensor:
        """[..., features], or the same quantised -> [..., features]; adapters as in `Batch`."""
        if self.activation == "gelu_tanh_mul":
            gate, up = self.gate_up(x, adapters=adapters).chunk(2, -1)
            return self.down(ops.gelu_mul(gate, up, approximate=True), adapters=adapters)
        return self.down(self.gate_up(x, self.activation, adapters), adapters=adapters)

    def extra_repr(self) -> str:
        return self.activation


class MLP(nn.Module):
    """y = down(act(up(x))): a feed-forward layer without a gate, as two matmuls.

    Args:
        features: E, of input and output.
        inner: width between the matmuls.
        activation: "relu", "gelu", "gelu_tanh" or "silu", which are epilogues of the product, or "relu2", the square of relu
            (So et al., "Primer", 2021), which squares in a launch of its own.
        bias: whether both projections have one.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.up = Linear(features, inner, bias=bias, device=device, dtype=dtype)
        self.down = Linear(inner, features, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    @property
    def reader(self) -> Linear:
        """The one layer that reads the input."""
        return self.up

    def forward(self, x: Tensor | QuantizedActivation, adapters: Tensor | None = None) -> Tensor:
        """[..., features], or the same quantised -> [..., features]; adapters as in `Batch`."""
        if self.activation == "relu2":
            inner = self.up(x, "relu", adapters)
            inner = inner * inner
        else:
            inner = self.up(x, self.activation, adapters)
        return self.down(inner, adapters=adapters)

    def extra_repr(self) -> str:
        return self.activation
