"""Norms over the last dimension."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import begins_empty, parameter
from tilewright.nn.linear import Linear
from tilewright.ops import add_rms_norm_quantize, rms_norm_quantize
from tilewright.ops.linear import QuantizedActivation, activation_format

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions, with torch.nn.RMSNorm's arguments.

    Args:
        normalized_shape: the last dimensions of x.
        eps: added to the mean square. None: the machine epsilon of x's dtype. Language models use 1e-5 or 1e-6.
        elementwise_affine: whether there is a weight; it is initialised with ones (filling.py).
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, eps, elementwise_affine
        self.weight: Tensor
        if elementwise_affine:
            self.weight = parameter(*shape, fill=nn.init.ones_, device=device, dtype=dtype)
        else:
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.elementwise_affine:
            nn.init.ones_(self.weight)

    def eps_of(self, x: Tensor) -> float:
        """The number that is added to the mean square of x."""
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape] -> the same. Raises ValueError if x has other last dimensions."""
        shape = self.normalized_shape
        if len(shape) == 1 and self.elementwise_affine:
            return ops.rms_norm(x, self.weight, self.eps_of(x))
        if tuple(x.shape[-len(shape) :]) != shape:
            raise ValueError(f"RMSNorm: the last dimensions of x must be {list(shape)}, got {list(x.shape)}")
        rows = x.flatten(-len(shape))
        weight = self.weight.flatten() if self.elementwise_affine else rows.new_ones(rows.shape[-1])
        return ops.rms_norm(rows, weight, self.eps_of(x)).view(x.shape)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual) in one pass; residual None: (norm(x), x).

        This method and `add_for` need a weight with one dimension."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps_of(x)), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps_of(x))

    def add_for(
        self, reader: Linear, x: Tensor, residual: Tensor | None, adapters: Tensor | None = None
    ) -> tuple[Tensor | QuantizedActivation, Tensor]:
        """`add` whose first result is read only by the layer `reader`. If `reader` would quantise it, the norm does so instead.

        adapters: the adapters of the batch. If an adapter of the reader applies to it, nothing is quantised, because adapters
        need the float values.
        """
        format = None if reader.adapted(adapters) else activation_format(reader.weight, x)
        if format is None:
            return self.add(x, residual)
        if residual is None:
            codes, scales = rms_norm_quantize(x, self.weight, self.eps_of(x), format)
            return QuantizedActivation(codes, scales, x.dtype), x
        codes, scales, total = add_rms_norm_quantize(x, residual, self.weight, self.eps_of(x), format)
        return QuantizedActivation(codes, scales, x.dtype), total

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.normalized_shape))}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions, with torch.nn.LayerNorm's arguments."""

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.requires_grad_(not begins_empty())

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape] -> the same. Raises ValueError if x has other last dimensions."""
        shape = tuple(self.normalized_shape)
        if tuple(input.shape[-len(shape) :]) != shape:
            raise ValueError(f"LayerNorm: the last dimensions of x must be {list(shape)}, got {list(input.shape)}")
        x = input.flatten(-len(shape)) if len(shape) > 1 else input
        weight = torch.ones(x.shape[-1:], dtype=x.dtype, device=x.device) if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return ops.layer_norm(x, weight, bias, self.eps).view(input.shape)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add`. This and `add_for` need a weight with one dimension."""
        if residual is None:
            return ops.layer_norm(x, self.weight, self.bias, self.eps), x
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def add_for(
        self, reader: Linear, x: Tensor, residual: Tensor | None, adapters: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `RMSNorm.add_for`, but the reader quantises its input itself."""
        return self.add(x, residual)
