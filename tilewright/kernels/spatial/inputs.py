"""Arguments of pooling, upsampling and their gradients, made from dimensions: square images, channels last.

# B images, S their height and width, N channels, K the window's height and width
"""

import torch

from tilewright.op import Args, Inputs

__all__ = [
    "avg_pool_arguments",
    "avg_pool_backward_arguments",
    "max_pool_arguments",
    "max_pool_backward_arguments",
    "upsample_arguments",
    "upsample_backward_arguments",
]

_BF16 = torch.bfloat16


def _geometry(S: int, K: int, stride: int, adaptive: int) -> tuple[int, tuple[list[int], ...]]:
    """(height of the result, the ops' arguments out, kernel, stride and padding)."""
    if adaptive:
        return adaptive, ([1, adaptive, adaptive], [], [], [])
    out = (S + 2 * (K // 2) - K) // stride + 1
    return out, ([1, out, out], [1, K, K], [1, stride, stride], [0, K // 2, K // 2])


def max_pool_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, K: int = 3, stride: int = 2, adaptive: int = 0, dtype: torch.dtype = _BF16
) -> Args:
    """x [B, 1, S, S, N], padded by K // 2; the op also returns indices. `adaptive`: height of the result, without a window."""
    return inputs.randn(B, 1, S, S, N, dtype=dtype), *_geometry(S, K, stride, adaptive)[1], [] if adaptive else [1, 1, 1], True


def avg_pool_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, K: int = 3, stride: int = 2, adaptive: int = 0, dtype: torch.dtype = _BF16
) -> Args:
    """As for max pooling. The zeros of the padding count in the mean."""
    return inputs.randn(B, 1, S, S, N, dtype=dtype), *_geometry(S, K, stride, adaptive)[1], not adaptive, None


def max_pool_backward_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, K: int = 3, stride: int = 2, dtype: torch.dtype = _BF16
) -> Args:
    """The gradient of the result, the positions of the maxima (the middle of each window), the size of x, the window."""
    out, geometry = _geometry(S, K, stride, 0)
    middle = [min(o * stride, S - 1) for o in range(out)]
    places = inputs.tensor([[h * S + w for w in middle] for h in middle], torch.int32)
    indices = places[None, None, :, :, None].expand(B, 1, out, out, N).contiguous()
    return inputs.randn(B, 1, out, out, N, dtype=dtype), indices, [1, S, S], *geometry[1:], [1, 1, 1]


def avg_pool_backward_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, K: int = 3, stride: int = 2, adaptive: int = 0, dtype: torch.dtype = _BF16
) -> Args:
    """The gradient of the result, the size of x, the window."""
    out, geometry = _geometry(S, K, stride, adaptive)
    return inputs.randn(B, 1, out, out, N, dtype=dtype), [1, S, S], *geometry[1:], not adaptive, None


def upsample_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, factor: int = 2, mode: str = "linear", corners: bool = False,
    dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [B, S, S, N], the size of the result, the mode, and the step in x per step in the result."""
    out = S * factor
    return inputs.randn(B, S, S, N, dtype=dtype), [out, out], mode, *_steps(S, out, corners)


def upsample_backward_arguments(
    inputs: Inputs, *, B: int, N: int, S: int = 14, factor: int = 2, mode: str = "linear", corners: bool = False,
    dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """The gradient of the result, the size of x, then as for `upsample`."""
    out = S * factor
    return inputs.randn(B, out, out, N, dtype=dtype), [S, S], mode, *_steps(S, out, corners)


def _steps(size: int, out: int, corners: bool) -> tuple[list[int], list[int], bool]:
    num, den = (size - 1, max(out - 1, 1)) if corners else (size, out)
    return [num, num], [den, den], corners
