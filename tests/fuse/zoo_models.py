"""Sixteen models that were not written with `optimize` in mind: of timm, transformers, torch.nn, and three of no package here.

All have their full architecture and the weights of their own initialisers. `small` builds the same structure with fewer and
narrower layers, for tests.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 1000
"""Ids of tables are below this in every model: the size of a vocabulary says nothing of a graph."""


class Entry(NamedTuple):
    """A model and its call."""

    make: Callable[[bool], nn.Module]
    """`small` -> the model."""
    inputs: Callable[[int, bool], dict[str, Tensor] | tuple[Tensor, ...]]
    """(batch, small) -> arguments, by name or by position."""
    package: str = ""
    """What must be installed."""
    images: bool = False
    """Whether channels-last memory helps torch."""


def missing(name: str) -> str:
    """Why a model cannot be made here, or ""."""
    package = MODELS[name].package
    if not package or find_spec(package) is not None or (BESIDE / package).is_dir():
        return ""
    return f"{name} is of {package}, which is not installed: `make setup-test` does, or pip install {package}"


# ---- packages


BESIDE = Path(__file__).parents[2] / ".data/zoo"
"""Where the Makefile installs timm and torchvision: transformers imports a torchvision that it finds in the environment."""


def _package(name: str) -> Any:
    """timm or transformers; both import torchvision where there is one.

    The wheel of torchvision on PyPI is built for CUDA: beside a CPU build of torch its own library does not load, and its
    import ends at two operators that have no schema. No model here calls them.
    """
    before = list(sys.path)
    sys.path.append(str(BESIDE))
    try:
        if name == "timm" or find_spec("torchvision") is not None:
            try:
                import_module("torchvision")
            except RuntimeError as error:
                if "torchvision::nms does not exist" not in str(error):
                    raise
                for schema in ("nms", "qnms"):
                    torch.library.define(
                        f"torchvision::{schema}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
                import_module("torchvision")
        return import_module(name)
    finally:
        sys.path[:] = before


def _vision(name: str, **small: Any) -> Entry:
    def make(is_small: bool) -> nn.Module:
        return _package("timm").create_model(name, num_classes=10 if is_small else 1000, **(small if is_small else {}))

    def inputs(batch: int, is_small: bool) -> tuple[Tensor, ...]:
        side = small.get("img_size", 64) if is_small else 224
        return (torch.randn(batch, 3, side, side),)

    return Entry(make, inputs, "timm", images=True)


def _hugging(kind: str, config: dict[str, Any], small: dict[str, Any], **inputs: Callable[[int, int], Tensor]) -> Entry:
    """A model of transformers from its configuration; inputs by name, each from (batch, length)."""

    def make(is_small: bool) -> nn.Module:
        model = getattr(_package("transformers"), kind)
        return model(model.config_class(**config, **(small if is_small else {})))

    def given(batch: int, is_small: bool) -> dict[str, Tensor]:
        return {name: made(batch, 12 if is_small else 128) for name, made in inputs.items()}

    return Entry(make, given, "transformers")


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def _padded(batch: int, length: int) -> Tensor:
    """1 where there is a token: the first row is full, the others end earlier and earlier."""
    ends = length - (torch.arange(batch) * length // (2 * max(batch, 2)))
    return (torch.arange(length) < ends[:, None]).long()


def _pixels(batch: int, length: int) -> Tensor:
    side = 32 if length < 100 else 224
    return torch.randn(batch, 3, side, side)


# ---- of no package


class Encoder(nn.Module):
    """torch's own encoder on sequences of several lengths; what is padding is said by a mask."""

    def __init__(self, small: bool):
        super().__init__()
        width, heads, layers = (32, 2, 2) if small else (512, 8, 6)
        self.table = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, activation="gelu", norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(self.table(ids), src_key_padding_mask=mask == 0)


class Forecaster(nn.Module):
    """An LSTM over the past, a head for the steps to come, beside the last value (a common baseline of forecasting)."""

    def __init__(self, small: bool):
        super().__init__()
        hidden, self.steps = (16, 4) if small else (256, 24)
        self.inward, self.lstm = nn.Linear(8, hidden), nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.norm, self.hidden, self.head = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, self.steps),
        )

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(F.gelu(self.inward(x)))
        return x[:, -1, :1] + self.head(F.gelu(self.hidden(self.norm(states[:, -1]))))


class TabTransformer(nn.Module):
    """Attention over the embeddings of categories, a network over them and the normed numbers (Huang and others, 2020)."""

    def __init__(self, small: bool):
        super().__init__()
        width, heads, layers, columns, numbers = (16, 2, 2, 5, 4) if small else (32, 8, 6, 26, 13)
        self.tables = nn.ModuleList(nn.Embedding(50, width) for _ in range(columns))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.LayerNorm(numbers)
        inner = columns * width + numbers
        self.head = nn.Sequential(
            nn.Linear(inner, 4 * inner), nn.SELU(), nn.Linear(4 * inner, 2 * inner), nn.SELU(), nn.Linear(2 * inner, 1)
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        tokens = torch.stack([table(categories[:, at]) for at, table in enumerate(self.tables)], 1)
        return self.head(torch.cat([self.encoder(tokens).flatten(1), self.norm(numbers)], 1))


class _Res(nn.Module):
    """Norm, SiLU, convolution, twice, beside the input: the block of diffusion models."""

    def __init__(self, inward: int, out: int, time: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inward), nn.Conv2d(inward, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(inward, out, 1) if inward != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class _Attention(nn.Module):
    """Attention over pixels."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.out(y.unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """The network of denoising diffusion (Ho and others, 2020) as it is commonly written: GroupNorm, skips joined by `cat`."""

    def __init__(self, small: bool):
        super().__init__()
        widths = (16, 32) if small else (64, 128, 256, 256)
        time = 4 * widths[0]
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.exp(-torch.arange(widths[0] // 2) * 9.2 / (widths[0] // 2)))
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.inward = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        last = widths[0]
        for width in widths:
            self.down.append(nn.ModuleList([_Res(last, width, time), nn.Conv2d(width, width, 3, 2, 1)]))
            last = width
        self.middle = nn.ModuleList([_Res(last, last, time), _Attention(last), _Res(last, last, time)])
        for width in reversed(widths):
            up = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(last, width, 3, padding=1))
            self.up.append(nn.ModuleList([up, _Res(2 * width, width, time)]))
            last = width
        self.norm, self.out = nn.GroupNorm(8, last), nn.Conv2d(last, 3, 3, padding=1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        angle = step[:, None] * self.frequencies
        t = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h, skips = self.inward(x), []
        for res, down in self.down:  # pyright: ignore[reportGeneralTypeIssues]
            skips.append(res(h, t))
            h = down(skips[-1])
        h = self.middle[2](self.middle[1](self.middle[0](h, t)), t)
        for up, res in self.up:  # pyright: ignore[reportGeneralTypeIssues]
            h = res(torch.cat([up(h), skips.pop()], 1), t)
        return self.out(F.silu(self.norm(h)))


_LAYERS, _TEXT = {"vocab_size": VOCABULARY}, {"input_ids": _ids, "attention_mask": _padded}
_WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = {
    "mobilenetv3": _vision("mobilenetv3_large_100"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "densenet121": _vision("densenet121", block_config=(2, 2), growth_rate=8),
    "convnext_tiny": _vision("convnext_tiny", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    "swin_tiny": _vision("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    "regnety_008": _vision("regnety_008"),
    "vit_small": _vision("vit_small_patch16_224", img_size=64, depth=2),
    "unet": Entry(UNet, lambda b, small: (torch.randn(b, 3, *[16 if small else 32] * 2), torch.arange(b) * 10.0 + 1)),
    "bert": _hugging("BertModel", _LAYERS, _WIDTHS, **_TEXT),
    "distilbert": _hugging("DistilBertModel", _LAYERS, {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, **_TEXT),
    "gpt2": _hugging(
        "GPT2LMHeadModel", {**_LAYERS, "use_cache": False}, {"n_embd": 32, "n_layer": 2, "n_head": 2}, input_ids=_ids
    ),
    "t5_encoder": _hugging(
        "T5EncoderModel", _LAYERS, {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}, **_TEXT
    ),
    "clip_vision": _hugging("CLIPVisionModel", {}, {**_WIDTHS, "image_size": 32, "patch_size": 8}, pixel_values=_pixels),
    "torch_encoder": Entry(Encoder, lambda b, small: (_ids(b, 12 if small else 128), _padded(b, 12 if small else 128))),
    "lstm": Entry(Forecaster, lambda b, small: (torch.randn(b, 10 if small else 96, 8),)),
    "tab_transformer": Entry(
        TabTransformer, lambda b, small: (torch.randint(50, (b, 5 if small else 26)), torch.randn(b, 4 if small else 13))
    ),
}  # fmt: skip
"""By the names that the table has."""
