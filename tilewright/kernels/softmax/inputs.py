"""Example arguments of softmax, the losses and their gradients, made from dimensions: the `Op.make` of each."""

import torch

from tilewright.op import Args, Inputs

__all__ = [
    "cross_entropy_arguments",
    "cross_entropy_gradient_arguments",
    "log_softmax_backward_arguments",
    "softmax_arguments",
    "softmax_backward_arguments",
]

_BF16 = torch.bfloat16


def softmax_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N]."""
    return (inputs.randn(M, N, dtype=dtype, scale=2.0),)


def cross_entropy_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, smoothing: bool = False
) -> Args:  # fmt: skip
    """Logits [M, N], targets [M]; no target is ignored."""
    return inputs.randn(M, N, dtype=dtype, scale=2.0), inputs.randint(0, N, M), -100, 0.1 if smoothing else 0.0, 0.0


def cross_entropy_gradient_arguments(
    inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, smoothing: bool = False
) -> Args:  # fmt: skip
    """The arguments of `cross_entropy_arguments`, and a factor for each row."""
    logits, targets, *options = cross_entropy_arguments(inputs, M=M, N=N, dtype=dtype, smoothing=smoothing)
    return logits, targets, inputs.randn(M), *options


def softmax_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """dy [M, N], and the softmax of random numbers."""
    y = inputs.randn(M, N, scale=2.0)
    return inputs.randn(M, N, dtype=dtype), torch.softmax(y, -1).to(dtype)


def log_softmax_backward_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """dy [M, N], and the log-softmax of random numbers."""
    y = inputs.randn(M, N, scale=2.0)
    return inputs.randn(M, N, dtype=dtype), torch.log_softmax(y, -1).to(dtype)
