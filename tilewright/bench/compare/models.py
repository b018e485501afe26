"""Models for comparing engines: plain torch.nn, by their published definitions, with random weights from a seed.

    resnet18, resnet50   He et al., "Deep residual learning for image recognition", 2016; the stride of a bottleneck at its 3x3
                         ("v1.5"); [B, 3, 224, 224] -> [B, 1000]
    vit_b16              Dosovitskiy et al., "An image is worth 16x16 words", 2021; [B, 3, 224, 224] -> [B, 1000]
    bert_base            Devlin et al., "BERT", 2019; token ids [B, 128] -> hidden states [B, 128, 768]
    tabular_mlp          Gorishniy et al., "Revisiting deep learning models for tabular data", 2021; [B, 64] -> [B, 1]
    small_cnn            three convolutions and a linear layer; [B, 3, 32, 32] -> [B, 10]
    small_encoder        two pre-norm transformer blocks; [B, 64, 128] -> [B, 64, 128]

A name may include a batch: "resnet50@32". `module:function` is a user's own, imported from the current directory: the function
takes no arguments and returns (model, example inputs). FILE.onnx is a model of another framework. No model here uses
tilewright's own layers, and nothing is downloaded: speed does not depend on the values of weights, and correctness is measured
against the same weights in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.host.config import ONNX
from tilewright.host.users import users_model

__all__ = ["BUILT_IN", "Model", "load_model"]

# B images or sequences, S tokens, E features of a token


@dataclass(frozen=True)
class Model:
    """A module in eval mode, what it is called with, and what it is called."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


# ---- convolutional


class _Basic(nn.Module):
    """Two 3x3 convolutions and the input, projected where its shape changes."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = _projection(channels, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class _Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and the input, projected where its shape changes."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = _projection(channels, 4 * width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def _projection(channels: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class _ResNet(nn.Module):
    """torchvision's names: its state dicts load."""

    def __init__(self, block: type[_Basic] | type[_Bottleneck], depths: tuple[int, int, int, int]):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        channels = 64
        for i, depth in enumerate(depths):
            stage: list[nn.Module] = []
            for j in range(depth):
                stage.append(block(channels, 64 << i, 2 if i and not j else 1))
                channels = (64 << i) * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*stage))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(4):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _small_cnn() -> nn.Module:
    def part(channels: int, out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]

    body = [*part(3, 32, 1), *part(32, 64, 2), *part(64, 128, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


# ---- transformers


class _Attention(nn.Module):
    """Self-attention; q, k and v are one product."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, features: int, heads: int, eps: float = 1e-6):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(features, eps=eps), _Attention(features, heads)
        self.norm2 = nn.LayerNorm(features, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _ViT(nn.Module):
    """Patches of 16x16, a class token, learnt positions; the class token is read."""

    def __init__(self, features: int = 768, depth: int = 12, heads: int = 12):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, features, 16, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, features) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + 14 * 14, features) * 0.02)
        self.blocks = nn.Sequential(*(_Block(features, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(features, eps=1e-6), nn.Linear(features, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class _BertLayer(nn.Module):
    """Post-norm: norm(x + attention(x)), then norm(x + mlp(x)); three products for q, k and v, as published code has it."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(features, features) for _ in range(3))
        self.dense, self.attention_norm = nn.Linear(features, features), nn.LayerNorm(features, eps=1e-12)
        self.intermediate, self.output = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.output_norm = nn.LayerNorm(features, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dense(attended))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class _Bert(nn.Module):
    """Hidden states of whole sequences: one token type, no mask, no pooler."""

    def __init__(self, features: int = 768, depth: int = 12, heads: int = 12, words: int = 30522, places: int = 512):
        super().__init__()
        self.word, self.position = nn.Embedding(words, features), nn.Embedding(places, features)
        self.token_type, self.norm = nn.Embedding(2, features), nn.LayerNorm(features, eps=1e-12)
        self.layers = nn.Sequential(*(_BertLayer(features, heads) for _ in range(depth)))
        self.register_buffer("positions", torch.arange(places), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.get_buffer("positions")[: ids.shape[1]]
        x = self.word(ids) + self.position(places) + self.token_type.weight[0]
        return self.layers(self.norm(x))


# ---- tables of built-in models


def _tabular_mlp() -> nn.Module:
    ends = [64, 256, 256, 256]
    body = [part for a, b in pairwise(ends) for part in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*body, nn.Linear(ends[-1], 1))


def _numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


BUILT_IN: dict[str, tuple[Callable[[], nn.Module], int, Callable[[int], Tensor]]] = {
    "resnet18": (lambda: _ResNet(_Basic, (2, 2, 2, 2)), 1, _numbers(3, 224, 224)),
    "resnet50": (lambda: _ResNet(_Bottleneck, (3, 4, 6, 3)), 1, _numbers(3, 224, 224)),
    "vit_b16": (_ViT, 1, _numbers(3, 224, 224)),
    "bert_base": (_Bert, 8, lambda batch: torch.randint(30522, (batch, 128))),
    "tabular_mlp": (_tabular_mlp, 1, _numbers(64)),
    "small_cnn": (_small_cnn, 8, _numbers(3, 32, 32)),
    "small_encoder": (lambda: nn.Sequential(_Block(128, 4), _Block(128, 4)), 4, _numbers(64, 128)),
}
"""Name -> (module, usual batch, example input of a batch)."""


def load_model(
    text: str, *, seed: int = 0, device: torch.device | str = "cpu", shapes: Mapping[str, Sequence[int]] | None = None
) -> Model:
    """A built-in model ("resnet50@32") or a user's ("package.module:function", FILE.onnx), in eval mode on `device`.

    `shapes`: of an ONNX model's inputs, where the file leaves dimensions open.

    The process' random state is as it was afterwards. ValueError: no such model, a batch that is none, or a user's function
    that fails (with its line) or returns something else.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = users_model(text, shapes) if ":" in text or text.endswith(ONNX) else _built_in(text)
    return Model(text, module.eval().requires_grad_(False).to(device), tuple(x.to(device) for x in inputs))


def _built_in(text: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    name, at, batch = text.partition("@")
    if name not in BUILT_IN:
        raise ValueError(
            f"there is no model {name!r}; wanted one of {', '.join(BUILT_IN)}, MODULE:FUNCTION for your own, or FILE.onnx"
        )
    if at and not (batch.isdecimal() and 0 < int(batch) <= 4096):
        raise ValueError(f"the batch of {text!r} is {batch!r}, wanted a number from 1 to 4096, as in {name}@32")
    build, usual, example = BUILT_IN[name]
    module = build()
    _settle(module, name)
    return module, (example(int(batch) if at else usual),)


def _settle(module: nn.Module, name: str) -> None:
    """Batch norms that mean something: statistics of random images, random scales; else 16 residual blocks overflow fp16.

    The last norm of a residual branch has a small scale, as in trained networks: with random weights and branches as large as
    what they are added to, rounding grows a hundredfold over 50 layers, which no network in use does.
    """
    norms = {name: m for name, m in module.named_modules() if isinstance(m, nn.BatchNorm2d)}
    if not norms:
        return
    for path, norm in norms.items():
        block, _, own = path.rpartition(".")
        last = isinstance(module.get_submodule(block), _Basic | _Bottleneck) and f"{block}.bn{int(own[-1]) + 1}" not in norms
        norm.momentum = None  # the plain mean of what comes by
        nn.init.uniform_(norm.weight, 0.1 if last else 0.5, 0.3 if last else 1.0)
        nn.init.normal_(norm.bias, std=0.1)
    size = 32 if name == "small_cnn" else 96
    with torch.no_grad():
        module.train()(torch.randn(8, 3, size, size))
    module.eval()
