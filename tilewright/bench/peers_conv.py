"""The peers of convolutions in benchmarks: torch's calls (cuDNN with `benchmark` enabled) with channels-last tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernels.conv.conv import convolved
from tilewright.kernels.device.activations import activated

__all__ = ["PEERS", "SHAPES", "conv"]

Call = Callable[[], Any]


def _after(y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    return activated(y if residual is None else y + residual, activation)


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int], x_scales: Tensor | None,
    w_scales: Tensor | None, dtype: torch.dtype, after: Callable[[Tensor, Tensor | None, str], Tensor] = _after,
) -> Call:  # fmt: skip
    """cuDNN's convolution, then the residual and the activation.

    The peer of int8 is the same convolution in `dtype`, with operands cast outside of the call.
    """
    weight = weight.contiguous()
    scale = None
    if x_scales is not None and w_scales is not None:
        x, weight = x.to(dtype), weight.to(dtype)
        scale = (x_scales.view(-1, *(1,) * (x.dim() - 1)) * w_scales).to(dtype)

    def call() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
            y = convolved(x, weight, None if scale is not None else bias, stride, padding, dilation, groups, size)
        if scale is not None:
            y = y * scale if bias is None else y * scale + bias
        return after(y, residual, activation)

    return call


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, size: Sequence[int],
) -> Call:  # fmt: skip
    """torch's transposed convolution, then the activation."""
    numbers = zip(x.shape[1:-1], weight.shape[1:-1], stride, padding, dilation, size, strict=True)
    extra = tuple(y - ((n - 1) * s + d * (k - 1) + 1 - 2 * p) for n, k, s, p, d, y in numbers)
    options = (tuple(stride), tuple(padding), extra, groups, tuple(dilation))
    channels_first, filters = x.movedim(-1, 1), weight.contiguous().movedim(-1, 1)
    transpose = _TRANSPOSED[len(size)]

    def call() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
            return activated(transpose(channels_first, filters, bias, *options), activation).movedim(1, -1)

    return call


def conv_weight_gradient(
    dy: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    kernel: Sequence[int],
) -> Call:  # fmt: skip
    """The call that torch's autograd makes for the weight's gradient."""
    weight = x.new_empty((dy.shape[-1], *kernel, x.shape[-1] // groups)).movedim(-1, 1)
    options = (list(stride), list(padding), list(dilation), False, [0] * len(kernel), groups, [False, True, False])

    def call() -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
            found = torch.ops.aten.convolution_backward(dy.movedim(-1, 1), x.movedim(-1, 1), weight, None, *options)
        return found[1].movedim(1, -1)

    return call


def normalize_channels(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    activation: str,
) -> Call:  # fmt: skip
    """torch's batch norm in evaluation mode, then the residual and the activation."""

    def call() -> Tensor:
        y = F.batch_norm(x.mT, mean, variance, weight, bias, False, 0.0, eps).mT
        return _after(y, residual, activation)

    return call


def group_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, activation: str
) -> Call:
    """torch's group norm of a sum, then the activation."""

    w, b = (None if vector is None else vector.to(x.dtype) for vector in (weight, bias))

    def call() -> Tensor:
        y = F.group_norm(x.mT if added is None else x.mT + added[..., None], groups, w, b, eps)
        return _after(y.mT, None, activation)

    return call


def append_affine(rows: Tensor, new: Tensor, scale: Tensor, shift: Tensor, activation: str) -> Call:
    """torch's concatenation of the channels so far with the new ones, its batch norm in evaluation mode, the activation."""
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    old = rows[:, : scale.shape[0] - new.shape[1]].contiguous()

    def call() -> Tensor:
        return _after(F.batch_norm(torch.cat((old, new), 1), zeros, ones, scale, shift, False, 0.0, 0.0), None, activation)

    return call


_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
PEERS: dict[str, Callable[..., Call]] = {
    "append_affine": append_affine,
    "conv": conv,
    "conv_transpose": conv_transpose,
    "conv_weight_gradient": conv_weight_gradient,
    "group_norm": group_norm,
    "normalize_channels": normalize_channels,
}


def _shape(n: int, c: int, h: int, o: int, k: int, s: int, p: int | None = None, more: str = "") -> str:
    pad = "" if p is None else f" P={p}"
    return f"N={n} C={c} H={h} O={o} K={k} S={s}{pad}{more}"


_DENSE = (
    # 3 x 3 and 1 x 1 of ResNet-50
    *((32, 64, 56, 64, 3, 1), (32, 128, 28, 128, 3, 1), (32, 256, 14, 256, 3, 1), (32, 512, 7, 512, 3, 1)),
    *((32, 256, 56, 128, 1, 1), (32, 3, 224, 64, 7, 2), (32, 64, 56, 128, 3, 2), (32, 1024, 14, 2048, 1, 2)),
    *((32, 256, 56, 64, 1, 1), (32, 64, 56, 256, 1, 1), (32, 256, 56, 512, 1, 2)),
    *((32, 128, 56, 128, 3, 2), (32, 512, 14, 512, 3, 2)),
    # of a U-Net
    *((8, 64, 128, 64, 3, 1), (8, 128, 128, 64, 3, 1), (8, 256, 64, 128, 3, 1), (8, 512, 32, 512, 3, 1)),
    # between the stages of ConvNeXt-T
    *((32, 96, 56, 192, 2, 2, 0), (32, 192, 28, 384, 2, 2, 0), (32, 3, 224, 96, 4, 4, 0)),
)
# ConvNeXt, MobileNet, EfficientNet; ResNeXt-50 32x4d
_GROUPED = (
    *((32, 96, 56, 7, 1, 96), (32, 192, 28, 7, 1, 192), (32, 384, 14, 7, 1, 384), (32, 768, 7, 7, 1, 768)),
    *((32, 144, 56, 3, 1, 144), (32, 240, 28, 5, 1, 240), (32, 144, 56, 3, 2, 144)),
    *((32, 128, 56, 3, 1, 32), (32, 256, 28, 3, 1, 32), (32, 512, 14, 3, 1, 32)),
)
SHAPES: dict[str, tuple[str, ...]] = {
    # layers of DenseNet-121: the first and the last of its blocks
    "append_affine": tuple(
        f"M={b * h * h} N={n} width={width} new=32 activation=relu"
        for b in (1, 32)
        for h, width, counts in ((56, 256, (96, 256)), (28, 512, (160, 512)), (14, 1024, (288, 1024)), (7, 1024, (544, 1024)))
        for n in counts
    ),
    "conv": (
        *(_shape(n, c, h, o, k, s, pad[0] if pad else None) for n, c, h, o, k, s, *pad in _DENSE),
        *(_shape(n, c, h, c, k, s, more=f" groups={g}") for n, c, h, k, s, g in _GROUPED),
        *(_shape(32, c, h, c, 3, 1, more=" bias=true activation=relu residual=true") for c, h in ((64, 56), (256, 14))),
    ),
    "conv_codes": (
        *(_shape(32, c, h, c, 3, 1, more=" bias=true activation=relu") for c, h in ((64, 56), (128, 28), (256, 14), (512, 7))),
        *(f"N=32 C={c} H={h} O={4 * c} K=1 bias=true activation=relu residual=true" for c, h in ((64, 56), (512, 7))),
    ),
    # a U-Net's way up; of stride 2 and 1 as gradients
    "conv_transpose": (
        *(f"N=8 C={2 * c} H={h} O={c} K=2 S=2" for c, h in ((64, 64), (128, 32), (256, 16))),
        *("N=8 C=128 H=64 O=64 K=4 S=2 P=1", "N=32 C=128 H=28 O=64 K=3 S=2 P=1", "N=32 C=128 H=28 O=128 K=3 S=1 P=1"),
        "N=32 C=96 H=56 O=96 K=7 S=1 P=3 groups=96",
    ),
    "conv_weight_gradient": (
        *("N=32 C=64 H=56 O=64", "N=32 C=128 H=28 O=128", "N=32 C=256 H=14 O=256", "N=32 C=512 H=7 O=512"),
        *("N=32 C=256 H=56 O=128 K=1", "N=32 C=3 H=224 O=64 K=7 S=2", "N=32 C=64 H=56 O=128 S=2"),
        "N=32 C=96 H=56 O=96 K=7 groups=96",
    ),
    # of U-Nets of diffusion models
    "group_norm": tuple(
        f"B={b} M={m * m} N={n} groups={g} activation=silu{more}"
        for b in (1, 32)
        for m, n, g in ((32, 64, 8), (16, 256, 8), (64, 320, 32))
        for more in ("", " added=true")
    ),
    "normalize_channels": (
        *(f"B={b} M={m * m} N={n}" for b in (1, 32) for m, n in ((112, 64), (56, 256), (14, 256), (7, 2048))),
        "B=32 M=3136 N=256 residual=true activation=relu",
    ),
}
