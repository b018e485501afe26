"""Norms over the last dimension."""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.kernels.quantize_fused import add_rms_norm_quantize, rms_norm_quantize
from tilewright.nn.linear import Linear, empty_parameter
from tilewright.ops.linear import Codes, codes_for

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = empty_parameter(features, device=device, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> the same."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual) in one pass; `residual` None: nothing was added up yet, the sum is x."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def add_for(self, reader: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor | Codes, Tensor]:
        """`add` for the one layer that reads the norm; where that would quantise its input, codes are written here instead."""
        format = codes_for(reader.weight, x)
        if format is None:
            return self.add(x, residual)
        if residual is None:
            codes, scales = rms_norm_quantize(x, self.weight, self.eps, format)
            return Codes(codes, scales, x.dtype), x
        codes, scales, total = add_rms_norm_quantize(x, residual, self.weight, self.eps, format)
        return Codes(codes, scales, x.dtype), total

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = empty_parameter(features, device=device, dtype=dtype)
        self.bias = empty_parameter(features, device=device, dtype=dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] -> the same."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"
