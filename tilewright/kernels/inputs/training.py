"""Arguments of losses, layout changes, gradients of norms and reductions, as common.py has those of the other ops."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import Inputs

__all__ = [
    "channel_affine_arguments",
    "channel_sums_arguments",
    "cross_entropy_arguments",
    "cross_entropy_gradient_arguments",
    "layer_norm_backward_arguments",
    "log_softmax_backward_arguments",
    "permute_arguments",
    "reduce_max_arguments",
    "reduce_sum_arguments",
    "rms_norm_backward_arguments",
    "row_statistics",
    "scale_in_place_arguments",
    "softmax_backward_arguments",
]

_BF16 = torch.bfloat16
Args = tuple[Any, ...]


def cross_entropy_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, smoothing: bool = False
) -> Args:  # fmt: skip
    """Logits [M, N], targets [M]; nothing ignored."""
    return inputs.randn(M, N, dtype=dtype, scale=2.0), inputs.randint(0, N, M), -100, 0.1 if smoothing else 0.0, 0.0


def cross_entropy_gradient_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, smoothing: bool = False
) -> Args:  # fmt: skip
    """The same, and a factor for each row."""
    logits, targets, *options = cross_entropy_arguments(inputs, M=M, N=N, dtype=dtype, smoothing=smoothing)
    return logits, targets, inputs.randn(M), *options


def scale_in_place_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N] and a factor that is not 1."""
    return inputs.randn(M, N, dtype=dtype), inputs.tensor(0.5, torch.float32)


def permute_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 0, dtype: torch.dtype = _BF16, int8: bool = False, rows: bool = False
) -> Args:  # fmt: skip
    """x [M, N] or a batch of B, to be transposed; int8 instead of dtype, if asked.

    rows: x [M, N, 128] instead, whose rows of 128 elements stay whole.
    """
    dtype = torch.int8 if int8 else dtype
    shape = (*((B,) if B else ()), M, N, *((128,) if rows else ()))
    lead = len(shape) - (3 if rows else 2)
    dims = [*range(lead), lead + 1, lead, *range(lead + 2, len(shape))]
    x = inputs.randn(*shape, dtype=torch.float32 if not dtype.is_floating_point else dtype, scale=1.0)
    return x.mul(100).to(dtype) if not dtype.is_floating_point else x, dims


def softmax_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """dy [M, N], and the softmax of something."""
    y = inputs.randn(M, N, scale=2.0)
    return inputs.randn(M, N, dtype=dtype), torch.softmax(y, -1).to(dtype)


def log_softmax_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """dy [M, N], and the logarithm of the softmax of something."""
    y = inputs.randn(M, N, scale=2.0)
    return inputs.randn(M, N, dtype=dtype), torch.log_softmax(y, -1).to(dtype)


def row_statistics(x: Tensor, eps: float) -> Tensor:
    """Mean and 1 / sqrt(variance + eps) of each row of x [..., D]: float32 [2, rows]."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    return torch.stack((mean.flatten(), torch.rsqrt((wide - mean).square().mean(-1) + eps).flatten()))


def layer_norm_backward_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, stats: bool = False
) -> Args:  # fmt: skip
    """dy and x [M, N], weight [N]; with `stats` what the forward pass kept of x's rows."""
    dy, x, weight = inputs.randn(M, N, dtype=dtype), inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype)
    return dy, x, weight, 1e-5, row_statistics(x, 1e-5) if stats else None


def rms_norm_backward_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, more: bool = False
) -> Args:  # fmt: skip
    """The same, and what else reached x."""
    dy, x, weight, *_ = layer_norm_backward_arguments(inputs, M=M, N=N, dtype=dtype)
    return dy, x, weight, inputs.randn(M, N, dtype=dtype) if more else None, 1e-6


def channel_sums_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 2, dtype: torch.dtype = _BF16, first: bool = False, backward: bool = False
) -> Args:
    """x [B, M places, N channels], dense along the channels, or with `first` along the places; a shift; with `backward` dy."""
    x, dy = (inputs.randn(B, N, M, dtype=dtype).mT if first else inputs.randn(B, M, N, dtype=dtype) for _ in range(2))
    return x, inputs.randn(B, N), dy if backward else None


def channel_affine_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 2, dtype: torch.dtype = _BF16, first: bool = False, backward: bool = False
) -> Args:
    """The same x, factors and summands of its channels; with `backward` dy and its factors."""
    x, a, dy = channel_sums_arguments(inputs, M=M, N=N, B=B, dtype=dtype, first=first, backward=backward)
    return x, a, inputs.randn(B, N), dy, inputs.randn(B, N) if backward else None


def reduce_max_arguments(inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False) -> Args:
    """x [B, M, N] to be reduced over M; with `rows` the numbers that are reduced lie next to each other."""
    return (inputs.randn(B, N, M, dtype=dtype).mT if rows else inputs.randn(B, M, N, dtype=dtype),)


def reduce_sum_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = _BF16, rows: bool = False, mean: bool = False
) -> Args:
    """The same, and whether the mean is wanted."""
    return *reduce_max_arguments(inputs, M=M, N=N, B=B, dtype=dtype, rows=rows), mean
