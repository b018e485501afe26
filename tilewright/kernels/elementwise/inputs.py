"""Arguments of the elementwise ops, made from dimensions: the `Op.make` of activations, gates, dropout and their gradients.

# M rows, N columns
"""

import torch

from tilewright.op import Args, Inputs

__all__ = [
    "activation_arguments",
    "activation_backward_arguments",
    "dropout_arguments",
    "gated_arguments",
    "gated_backward_arguments",
    "gated_mul_arguments",
    "gelu_arguments",
    "rope_arguments",
    "scale_in_place_arguments",
]

_BF16 = torch.bfloat16


def activation_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, kind: str = "gelu") -> Args:
    """x [M, N], and which activation."""
    return inputs.randn(M, N, dtype=dtype, scale=2.0), kind, 1.0


def activation_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, kind: str = "gelu") -> Args:
    """The gradient [M, N] of the result, then the arguments of `activation`."""
    return inputs.randn(M, N, dtype=dtype), *activation_arguments(inputs, M=M, N=N, dtype=dtype, kind=kind)


def gated_mul_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, kind: str = "sigmoid") -> Args:
    """gate and up [M, N], the halves of one [M, 2 N], and which gate."""
    both = inputs.randn(M, 2 * N, dtype=dtype)
    return both[:, :N], both[:, N:], kind


def gated_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, kind: str = "silu") -> Args:
    """The gradient [M, N] of the result, then gate, up and which gate. In the op's result the gradient of gate comes first."""
    return inputs.randn(M, N, dtype=dtype), *gated_mul_arguments(inputs, M=M, N=N, dtype=dtype, kind=kind), True


def dropout_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, p: str = "0.5") -> Args:
    """x [M, N], a seed and an offset, and the share p of elements that become zero. `p` is a string ("0.1")."""
    return inputs.randn(M, N, dtype=dtype), inputs.randint(1, 1 << 40, 2), float(p)


def gated_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """gate and up [M, N], the halves of one [M, 2 N], as a merged projection returns them."""
    both = inputs.randn(M, 2 * N, dtype=dtype)
    return both[:, :N], both[:, N:]


def gelu_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, approximate: bool = False) -> Args:
    """gate and up as in `gated_arguments`, and which form of GELU."""
    return *gated_arguments(inputs, M=M, N=N, dtype=dtype), approximate


def rope_arguments(
    inputs: Inputs, *, T: int, H: int = 32, G: int = 8, D: int = 128, dtype: torch.dtype = _BF16, interleaved: bool = False
) -> Args:
    """q [T, H, D], k [T, G, D], positions [T], cos_sin [T, 2, D / 2]."""
    q, k = (inputs.randn(T, heads, D, dtype=dtype) for heads in (H, G))
    return q, k, inputs.randint(0, max(T, 1), T), inputs.randn(max(T, 1), 2, D // 2), interleaved


def scale_in_place_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N] and a factor that is not 1."""
    return inputs.randn(M, N, dtype=dtype), inputs.tensor(0.5, torch.float32)
