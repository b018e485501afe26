"""`linear` through torch, that is cuBLAS: the implementation `vendor`.

cuBLAS applies in its own epilogue what it supports: a bias, ReLU or the tanh form of GELU after a bias, or a residual alone.
The rest is composed of further kernels: the product is rounded to x's dtype, then the activation and the residual each round
again. So 16-bit results have up to two roundings more than the single one of the definition. torch's own switches apply (TF32
and reduced-precision reductions are on or off as the program set them). The bits of a row depend on the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernels.elementwise.glu import gelu_mul, silu_mul
from tilewright.kernels.gemm.work import library_activates, vendor_work
from tilewright.op import Impl
from tilewright.tune.space import Config

__all__ = ["VENDOR"]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() == 2:
        return F.linear(x, weight, bias)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    if activation == "none" and bias is None and residual is not None:
        multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
        return multiply(residual, x, weight.mT)
    whole = x.is_cuda and x.numel() and weight.numel()
    if bias is not None and whole and library_activates(x.dtype, activation, True, x.dim() == 3):
        # A private torch function for cuBLASLt's epilogue, which torch's own encoder layers use. On a CPU it computes the exact
        # (erf) GELU instead.
        y = torch.ops.aten._addmm_activation(bias, x, weight.mT, use_gelu=activation == "gelu_tanh")
        return y if residual is None else y.add_(residual)
    y = _product(x, weight, bias)
    match activation:
        case "relu":
            y.relu_()
        case "gelu":
            y = F.gelu(y)
        case "gelu_tanh":
            y = F.gelu(y, approximate="tanh")
        case "silu":
            F.silu(y, inplace=True)
        case "silu_mul":
            y = silu_mul(*y.chunk(2, -1))
        case "gelu_mul":
            y = gelu_mul(*y.chunk(2, -1))
    return y if residual is None else y.add_(residual)


VENDOR = Impl(name="vendor", library=True, launch=_launch, extra_roundings=1, work=vendor_work)
