"""The peers of elementwise ops and embeddings in benchmarks, and the dimensions to measure. Part of bench/peers.py.

Dropout and rope have no peer: PyTorch draws other random numbers, and has no single call for a rotation.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PEERS", "SHAPES"]

Call = Callable[[], Any]


def _forward(x: Tensor, kind: str, alpha: float) -> Call:
    if kind in ("elu", "leaky_relu"):
        return lambda: getattr(F, kind)(x, alpha)
    if kind in ("gelu", "gelu_tanh"):
        return lambda: F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return lambda: getattr(F, kind)(x)


_aten = torch.ops.aten
# The kernels that autograd launches, called without its graph: autograd would run them on the stream of the forward pass, where
# a CUDA graph would not capture them.
_SLOPES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "elu": lambda dy, x, alpha: _aten.elu_backward(dy, alpha, 1.0, 1.0, False, x),
    "gelu": lambda dy, x, alpha: _aten.gelu_backward(dy, x),
    "gelu_tanh": lambda dy, x, alpha: _aten.gelu_backward(dy, x, approximate="tanh"),
    "hardswish": lambda dy, x, alpha: _aten.hardswish_backward(dy, x),
    "leaky_relu": lambda dy, x, alpha: _aten.leaky_relu_backward(dy, x, alpha, False),
    "mish": lambda dy, x, alpha: _aten.mish_backward(dy, x),
    "relu": lambda dy, x, alpha: _aten.threshold_backward(dy, x, 0.0),
    "silu": lambda dy, x, alpha: _aten.silu_backward(dy, x),
    # The gradients of these two are computed from the result, which autograd keeps.
    "sigmoid": lambda dy, y, alpha: _aten.sigmoid_backward(dy, y),
    "tanh": lambda dy, y, alpha: _aten.tanh_backward(dy, y),
}


def _backward(dy: Tensor, x: Tensor, kind: str, alpha: float) -> Call:
    kept = _forward(x, kind, alpha)() if kind in ("sigmoid", "tanh") else x
    return lambda: _SLOPES[kind](dy, kept, alpha)


_GATES = {"relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu}


def _gated(gate: Tensor, up: Tensor, kind: str) -> Call:
    return lambda: _GATES[kind](gate) * up


def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: str, gate_first: bool) -> Call:
    act = _GATES[kind](gate)

    def call() -> Tensor:
        dup, dact = dy * act, dy * up
        dgate = _SLOPES[kind](dact, act if kind == "sigmoid" else gate, 1.0)
        return torch.cat((dgate, dup) if gate_first else (dup, dgate), -1)

    return call


def _embedding_bag(weight: Tensor, ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str, padding: int | None) -> Call:
    return lambda: F.embedding_bag(ids, weight, offsets, mode=mode, per_sample_weights=scales, padding_idx=padding)


def _embedding_backward(
    dy: Tensor, ids: Tensor, bags: None, scales: None, chosen: None, rows: int, padding: int | None
) -> Call:
    return lambda: _aten.embedding_dense_backward(dy, ids, rows, -1 if padding is None else padding, False)


def _image(x: Tensor) -> Any:
    """[N, 1, H, W, C] as torch sees it: [N, C, H, W], channels last."""
    return x.squeeze(1).movedim(-1, 1)


def _max_pool(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], indices: bool
) -> Call:
    image = _image(x)
    if not kernel:
        return lambda: _aten.adaptive_max_pool2d(image, out[1:])[0].movedim(1, -1)
    window = (kernel[1:], stride[1:], padding[1:], dilation[1:])
    return lambda: _aten.max_pool2d_with_indices(image, *window)[0].movedim(1, -1)


def _avg_pool(
    x: Tensor, out: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool, divisor: int | None
) -> Call:
    image = _image(x)
    if not kernel:
        return lambda: _aten.adaptive_avg_pool2d(image, out[1:]).movedim(1, -1)
    return lambda: F.avg_pool2d(image, kernel[1:], stride[1:], padding[1:], False, include_pad, divisor).movedim(1, -1)


def _max_pool_backward(
    dy: Tensor, indices: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Call:
    grad, places = _image(dy), _image(indices).long()
    x = torch.empty((dy.shape[0], *size[1:], dy.shape[4]), dtype=dy.dtype, device=dy.device).movedim(-1, 1)
    window = (kernel[1:], stride[1:], padding[1:], dilation[1:])
    return lambda: _aten.max_pool2d_with_indices_backward(grad, x, *window, False, places).movedim(1, -1)


def _avg_pool_backward(
    dy: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], include_pad: bool,
    divisor: int | None,
) -> Call:  # fmt: skip
    grad = _image(dy)
    x = torch.empty((dy.shape[0], *size[1:], dy.shape[4]), dtype=dy.dtype, device=dy.device).movedim(-1, 1)
    if not kernel:
        return lambda: _aten._adaptive_avg_pool2d_backward(grad, x).movedim(1, -1)
    window = (kernel[1:], stride[1:], padding[1:])
    return lambda: _aten.avg_pool2d_backward(grad, x, *window, False, include_pad, divisor).movedim(1, -1)


def _upsample(x: Tensor, out: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Call:
    image = x.movedim(-1, 1)
    if mode == "nearest":
        return lambda: _aten.upsample_nearest2d(image, out).movedim(1, -1)
    return lambda: _aten.upsample_bilinear2d(image, out, corners).movedim(1, -1)


def _upsample_backward(dy: Tensor, size: list[int], mode: str, num: list[int], den: list[int], corners: bool) -> Call:
    grad, whole = dy.movedim(-1, 1), [dy.shape[0], dy.shape[3], *size]
    if mode == "nearest":
        return lambda: _aten.upsample_nearest2d_backward(grad, list(grad.shape[2:]), whole).movedim(1, -1)
    return lambda: _aten.upsample_bilinear2d_backward(grad, list(grad.shape[2:]), whole, corners).movedim(1, -1)


PEERS: dict[str, Callable[..., Call]] = {
    "activation": _forward,
    "activation_backward": _backward,
    "avg_pool": _avg_pool,
    "avg_pool_backward": _avg_pool_backward,
    "embedding_backward": _embedding_backward,
    "embedding_bag": _embedding_bag,
    "gated_backward": _gated_backward,
    "gated_mul": _gated,
    "max_pool": _max_pool,
    "max_pool_backward": _max_pool_backward,
    "upsample": _upsample,
    "upsample_backward": _upsample_backward,
}

_FLAT = tuple(f"M=8192 N={n} kind={kind}" for n in (4096, 16384) for kind in ("gelu", "relu"))
_POOLS = ("B=32 N=64 S=112", "B=32 N=256 S=56 K=2", "B=32 N=192 S=35 stride=1")
_UPSAMPLED = ("B=16 N=128 S=64", "B=16 N=128 S=64 mode=nearest", "B=16 N=64 S=32 factor=4 corners=true")
SHAPES: dict[str, tuple[str, ...]] = {
    "activation": (*_FLAT, "M=64 N=4096", "M=1023 N=4095"),
    "activation_backward": (*_FLAT, "M=64 N=4096", "M=1023 N=4095"),
    "avg_pool": (*_POOLS, "B=32 N=2048 S=7 adaptive=1"),
    "avg_pool_backward": (*_POOLS, "B=32 N=2048 S=7 adaptive=1"),
    "dropout": ("M=8192 N=4096", "M=8192 N=16384 p=0.1", "M=64 N=4096"),
    "embedding_backward": ("M=16384 N=4096 V=32000", "M=16384 N=1024 V=128000", "M=262144 N=64 V=100000"),
    "embedding_bag": ("M=262144 N=64 V=1000000", "M=16384 N=4096 V=32000", "M=262144 N=128 V=1000000 mode=max"),
    "gated_backward": ("M=8192 N=4096", "M=8192 N=14336", "M=64 N=4096"),
    "gated_mul": ("M=8192 N=4096", "M=8192 N=14336 kind=relu", "M=64 N=4096"),
    "max_pool": _POOLS,
    "max_pool_backward": _POOLS,
    "upsample": _UPSAMPLED,
    "upsample_backward": _UPSAMPLED,
}
