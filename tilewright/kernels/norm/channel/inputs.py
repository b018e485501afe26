"""Example arguments of the norms of channels from dimensions: the `Op.make` of each."""

import torch
from torch import Tensor

from tilewright.op import Args, Inputs

__all__ = [
    "batch_norm_backward_arguments",
    "batch_statistics_arguments",
    "channel_affine_arguments",
    "channel_sums_arguments",
    "group_norm_arguments",
    "normalize_channels_arguments",
]

_BF16 = torch.bfloat16


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


def group_norm_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 2, groups: int = 8, dtype: torch.dtype = torch.float16, first: bool = False,
    added: bool = False, activation: str = "none",
) -> Args:  # fmt: skip
    """x of B images, M places, N channels, which are dense, or with `first` the places are; with `added` [B, N] of its type."""
    x = inputs.randn(B, N, M, dtype=dtype).mT if first else inputs.randn(B, M, N, dtype=dtype)
    weight, bias = inputs.randn(N), inputs.randn(N)
    return x, inputs.randn(B, N, dtype=dtype) if added else None, weight, bias, groups, 1e-5, activation


def normalize_channels_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 2, dtype: torch.dtype = torch.float16, first: bool = False,
    residual: bool = False, activation: str = "none",
) -> Args:  # fmt: skip
    """x of B images, M places, N channels, which are dense, or with `first` the places are; float32 vectors."""

    def image() -> Tensor:
        return inputs.randn(B, N, M, dtype=dtype).mT if first else inputs.randn(B, M, N, dtype=dtype)

    x, mean, spread, weight, bias = image(), *(inputs.randn(N) for _ in range(4))
    return x, mean, spread.square() + 0.5, weight, bias, image() if residual else None, 1e-5, activation


def batch_statistics_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = torch.float16, first: bool = False
) -> Args:
    """x of B images with M places and N channels, dense along the channels, or with `first` the places; running statistics."""
    x = inputs.randn(B, N, M, dtype=dtype).mT if first else inputs.randn(B, M, N, dtype=dtype)
    return x, inputs.randn(N), inputs.randn(N).square() + 0.5, 0.1


def batch_norm_backward_arguments(
    inputs: Inputs, *, M: int, N: int, B: int = 1, dtype: torch.dtype = torch.float16, first: bool = False, relu: bool = True
) -> Args:
    """dy and x of such a batch, with `relu` y behind one; statistics and a weight."""
    dy, x, y = (inputs.randn(B, N, M, dtype=dtype).mT if first else inputs.randn(B, M, N, dtype=dtype) for _ in range(3))
    mean, variance, weight = inputs.randn(N) / 4, inputs.randn(N).square() + 0.5, inputs.randn(N)
    return dy, x, y.relu() if relu else None, mean, variance, weight, 1e-5
