"""Convolutional models: a classifier for time series (FCN), and a U-Net for labelling each pixel of an image.

    FCN    Wang, Yan and Oates, "Time series classification from scratch", 2017: three convolutions with batch norm and relu,
           the mean over time, a linear layer
    UNet   Ronneberger, Fischer and Brox, "U-Net", 2015, with padding, so that sizes stay, and batch norm

UNet does not support sizes that its levels cannot halve evenly.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.channel_norm import BatchNorm1d, BatchNorm2d
from tilewright.nn.conv import Conv1d, Conv2d, ConvTranspose2d
from tilewright.nn.linear import Linear
from tilewright.nn.pooling import AdaptiveAvgPool1d, MaxPool2d

__all__ = ["FCN", "UNet", "UNetBlock"]

# B signals or images, C channels, L length, H W height and width


class FCN(nn.Module):
    """[B, C, L] -> [B, classes]."""

    def __init__(
        self, channels: int, classes: int, widths: Sequence[int] = (128, 256, 128), kernels: Sequence[int] = (8, 5, 3), *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        ends = (channels, *widths)
        self.convs = nn.ModuleList(
            Conv1d(a, b, kernel, padding="same", **place) for a, b, kernel in zip(ends, widths, kernels, strict=False)
        )
        self.norms = nn.ModuleList(BatchNorm1d(width, **place) for width in widths)
        self.pool = AdaptiveAvgPool1d(1)
        self.head = Linear(widths[-1], classes, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, L] -> [B, classes]."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = ops.activation(norm(conv(x)), "relu")
        return self.head(self.pool(x).flatten(1))


class UNetBlock(nn.Module):
    """Twice a 3x3 convolution, batch norm and relu: [B, C, H, W] -> [B, width, H, W]."""

    def __init__(self, channels: int, width: int, **place: Any):
        super().__init__()
        self.conv1, self.conv2 = (Conv2d(c, width, 3, padding=1, bias=False, **place) for c in (channels, width))
        self.bn1, self.bn2 = (BatchNorm2d(width, **place) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = ops.activation(self.bn1(self.conv1(x)), "relu")
        return ops.activation(self.bn2(self.conv2(x)), "relu")


class UNet(nn.Module):
    """Blocks of growing width and falling size, back up by transposed convolutions, each beside what it came from.

    Args:
        channels: of the image.
        outputs: of a place.
        width: of the first block; each level doubles it.
        levels: how often the size is halved.
    """

    def __init__(
        self, channels: int, outputs: int, *, width: int = 64, levels: int = 4, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = [width << i for i in range(levels + 1)]
        ends = [channels, *widths]
        self.down = nn.ModuleList(UNetBlock(a, b, **place) for a, b in zip(ends, widths, strict=False))
        self.pool = MaxPool2d(2)
        self.up = nn.ModuleList(ConvTranspose2d(2 * w, w, 2, 2, **place) for w in reversed(widths[:-1]))
        self.back = nn.ModuleList(UNetBlock(2 * w, w, **place) for w in reversed(widths[:-1]))
        self.head = Conv2d(width, outputs, 1, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, outputs, H, W].

        Raises:
            ValueError: H or W is no multiple of 2^levels.
        """
        levels = len(self.up)
        if any(size % (1 << levels) for size in x.shape[2:]):
            raise ValueError(f"UNet: height and width must be multiples of {1 << levels}, got {list(x.shape[2:])}")
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else self.pool(x))
            kept.append(x)
        for up, block, beside in zip(self.up, self.back, reversed(kept[:-1]), strict=True):
            x = block(torch.cat((beside, up(x)), 1))
        return self.head(x)
