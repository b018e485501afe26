"""Image classifiers by their published definitions, with the names of torchvision and timm, so that their state dicts load.

    resnet18, resnet50   He et al., "Deep residual learning", 2016; the stride of a bottleneck at its 3x3 ("v1.5"); torchvision
    convnext_tiny        Liu et al., "A ConvNet for the 2020s", 2022; timm
    vit_b16              Dosovitskiy et al., "An image is worth 16x16 words", 2021; timm

Images are [B, 3, H, W]; channels_last images are read without a copy. Not supported: stochastic depth, dropout, and image sizes
other than that of the position table (ViT).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.channel_norm import BatchNorm2d
from tilewright.nn.conv import Conv2d
from tilewright.nn.linear import Linear
from tilewright.nn.norm import LayerNorm
from tilewright.nn.pooling import AdaptiveAvgPool2d, MaxPool2d

__all__ = ["ConvNeXt", "ResNet", "ViT", "convnext_tiny", "resnet18", "resnet50", "vit_b16"]

# B images, C channels, H W height and width, S tokens, E features of a token

# ---- ResNet


class _Residual(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3, 1x1, and the input, projected where its shape changes."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool, place: dict[str, Any]):
        super().__init__()
        out = 4 * width if bottleneck else width
        plan = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        plan = plan if bottleneck else [(channels, width, 3, stride), (width, width, 3, 1)]
        self.depth = len(plan)
        for i, (before, after, kernel, step) in enumerate(plan, 1):
            self.add_module(f"conv{i}", Conv2d(before, after, kernel, step, kernel // 2, bias=False, **place))
            self.add_module(f"bn{i}", BatchNorm2d(after, **place))
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(Conv2d(channels, out, 1, stride, bias=False, **place), BatchNorm2d(out, **place))

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        parts = self._modules
        for i in range(1, self.depth + 1):
            norm: Any = parts[f"bn{i}"]
            conv: Any = parts[f"conv{i}"]
            x = norm(conv(x), "relu", kept if i == self.depth else None)
        return x


class ResNet(nn.Module):
    """A 7x7 stem, four stages of residual blocks, the mean over all places, a linear layer.

    Args:
        blocks: of each stage.
        bottleneck: which kind of block.
        classes: of the linear layer.
        width: channels of the first stage.
    """

    def __init__(
        self, blocks: Sequence[int], *, bottleneck: bool, classes: int = 1000, width: int = 64,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.conv1, self.bn1 = Conv2d(3, width, 7, 2, 3, bias=False, **place), BatchNorm2d(width, **place)
        self.maxpool, self.avgpool = MaxPool2d(3, 2, 1), AdaptiveAvgPool2d(1)
        channels = width
        for i, count in enumerate(blocks):
            stage = []
            for j in range(count):
                stage.append(_Residual(channels, width << i, 2 if i and not j else 1, bottleneck, place))
                channels = (width << i) * (4 if bottleneck else 1)
            self.add_module(f"layer{i + 1}", nn.Sequential(*stage))
        self.stages = len(blocks)
        self.fc = Linear(channels, classes, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, classes]."""
        x = self.maxpool(self.bn1(self.conv1(x), "relu"))
        for i in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(**options: Any) -> ResNet:
    """torchvision's resnet18: 11.7 M parameters. `options`: classes, width, device, dtype."""
    return ResNet((2, 2, 2, 2), bottleneck=False, **options)


def resnet50(**options: Any) -> ResNet:
    """torchvision's resnet50: 25.6 M parameters. `options`: classes, width, device, dtype."""
    return ResNet((3, 4, 6, 3), bottleneck=True, **options)


# ---- ConvNeXt


class _ChannelNorm(LayerNorm):
    """Layer norm over the channels of [B, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class _MLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, features: int, inner: int, place: dict[str, Any]):
        super().__init__()
        self.fc1, self.fc2 = Linear(features, inner, bias=True, **place), Linear(inner, features, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x, "gelu"))


class _ConvNeXtBlock(nn.Module):
    """x + gamma * mlp(norm(7x7 depthwise convolution))."""

    def __init__(self, channels: int, place: dict[str, Any]):
        super().__init__()
        self.conv_dw = Conv2d(channels, channels, 7, padding=3, groups=channels, **place)
        self.norm = LayerNorm(channels, eps=1e-6, **place)
        self.mlp = _MLP(channels, 4 * channels, place)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6, **place))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv_dw(x).movedim(1, -1)))
        return x + (y * self.gamma).movedim(-1, 1)


class ConvNeXt(nn.Module):
    """A 4x4 stem, four stages of blocks with 2x2 convolutions between, the mean, a norm, a linear layer."""

    def __init__(
        self, blocks: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768), *, classes: int = 1000,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.stem = nn.Sequential(Conv2d(3, widths[0], 4, 4, **place), _ChannelNorm(widths[0], eps=1e-6, **place))
        self.stages = nn.ModuleList()
        for i, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            before = widths[max(i - 1, 0)]
            down = (_ChannelNorm(before, eps=1e-6, **place), Conv2d(before, width, 2, 2, **place))
            stage = nn.ModuleDict({"blocks": nn.Sequential(*(_ConvNeXtBlock(width, place) for _ in range(count)))})
            self.stages.append(nn.ModuleDict({"downsample": nn.Sequential(*down), **stage}) if i else stage)
        norm = LayerNorm(widths[-1], eps=1e-6, **place)
        self.head = nn.ModuleDict({"norm": norm, "fc": Linear(widths[-1], classes, bias=True, **place)})
        self.pool = AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, classes]."""
        x = self.stem(x)
        for stage in self.stages:
            for part in stage.values():  # pyright: ignore[reportCallIssue]
                x = part(x)
        return self.head["fc"](self.head["norm"](self.pool(x).flatten(1)))


def convnext_tiny(**options: Any) -> ConvNeXt:
    """timm's convnext_tiny: 28.6 M parameters. `options`: classes, device, dtype."""
    return ConvNeXt(**options)


# ---- ViT


class _Attention(nn.Module):
    """Self-attention with timm's names; q, k and v are one product."""

    def __init__(self, features: int, heads: int, place: dict[str, Any]):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(features, 3 * features, bias=True, **place)
        self.proj = Linear(features, features, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        attended = ops.attention(q, k, v)
        assert isinstance(attended, Tensor), "without return_lse there is one result"
        return self.proj(attended.flatten(-2))


class _ViTBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, features: int, heads: int, place: dict[str, Any]):
        super().__init__()
        self.norm1, self.norm2 = (LayerNorm(features, eps=1e-6, **place) for _ in range(2))
        self.attn = _Attention(features, heads, place)
        self.mlp = _MLP(features, 4 * features, place)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, a class token and learned positions, pre-norm blocks, a norm, a linear layer of the class token.

    Args:
        size: height and width of an image, a multiple of patch.
        patch: height and width of a patch.
        features: E.
        layers: blocks.
        heads: a divisor of E.
        classes: of the linear layer.
    """

    def __init__(
        self, size: int = 224, patch: int = 16, features: int = 768, layers: int = 12, heads: int = 12, *, classes: int = 1000,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if size % patch or features % heads:
            raise ValueError(
                f"ViT: size must be a multiple of patch, and features a multiple of heads; got size {size}, patch "
                f"{patch}, features {features} and heads {heads}"
            )
        place = {"device": device, "dtype": dtype}
        self.patch_embed = nn.ModuleDict({"proj": Conv2d(3, features, patch, patch, **place)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, features, **place))
        self.pos_embed = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, features, **place))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.blocks = nn.Sequential(*(_ViTBlock(features, heads, place) for _ in range(layers)))
        self.norm = LayerNorm(features, eps=1e-6, **place)
        self.head = Linear(features, classes, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, size, size] -> [B, classes]."""
        tokens = self.patch_embed["proj"](x).flatten(2).mT
        x = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_b16(**options: Any) -> ViT:
    """timm's vit_base_patch16_224: 86.6 M parameters. `options`: classes, size, device, dtype."""
    return ViT(**options)
