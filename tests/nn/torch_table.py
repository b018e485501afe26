"""The classes of torch.nn that tilewright.nn has: how to draw a random configuration of each, and what of it is refused.

`tests/nn/test_torch_nn.py` runs every row against torch.nn; `python -m tests.nn.torch_table` writes docs/torch_nn.md from them.
"""

import inspect
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.source import ROOT
from tilewright import nn

__all__ = ["PAGE", "ROWS", "TORCH", "Drawn", "Row", "page"]

PAGE = ROOT / "docs" / "torch_nn.md"
TORCH = ".".join(torch.__version__.split(".")[:2])
"""Its classes gain an argument now and then, and with it the page."""


class Drawn(NamedTuple):
    """One configuration: the constructor's arguments, then the inputs of `forward`."""

    options: dict[str, Any]
    inputs: tuple[Any, ...]


class Row(NamedTuple):
    """A class. `refused`: arguments, each of which alone is refused; `extra`: arguments that torch's class lacks."""

    draw: Callable[[random.Random], Drawn]
    refused: tuple[dict[str, Any], ...] = ()
    needed: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple's default, never written)
    note: str = ""


def randn(rng: random.Random, *shape: int) -> Tensor:
    """Float64 numbers of this configuration."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)), dtype=torch.float64)


def _any_shape(rng: random.Random) -> Tensor:
    return randn(rng, *(rng.randint(1, 5) for _ in range(rng.randint(1, 4))))


def _elementwise(**choices: list[Any]) -> Callable[[random.Random], Drawn]:
    return lambda rng: Drawn({name: rng.choice(values) for name, values in choices.items()}, (_any_shape(rng),))


def _glu(rng: random.Random) -> Drawn:
    dim = rng.randint(-3, 2)
    shape = [rng.randint(1, 4) for _ in range(3)]
    shape[dim] *= 2
    return Drawn({"dim": dim}, (randn(rng, *shape),))


def _image(rng: random.Random, spatial: int, channels: int, sizes: tuple[int, int]) -> Tensor:
    """Channels-first or channels-last in memory; now and then without a batch."""
    x = randn(rng, 2, channels, *(rng.randint(*sizes) for _ in range(spatial)))
    if rng.random() < 0.5:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x if rng.random() < 0.8 else x[0]


def _window(rng: random.Random, spatial: int) -> dict[str, Any]:
    kernel = [rng.randint(1, 3) for _ in range(spatial)]
    return {
        "kernel_size": tuple(kernel),
        "stride": rng.choice([None, rng.randint(1, 3)]),
        "padding": tuple(rng.randint(0, k // 2) for k in kernel),
        "ceil_mode": rng.random() < 0.5,
    }


def _max_pool(spatial: int) -> Callable[[random.Random], Drawn]:
    def draw(rng: random.Random) -> Drawn:
        more = {"dilation": rng.randint(1, 2), "return_indices": rng.random() < 0.3}
        return Drawn(_window(rng, spatial) | more, (_image(rng, spatial, 3, (5, 8)),))

    return draw


def _avg_pool(spatial: int) -> Callable[[random.Random], Drawn]:
    def draw(rng: random.Random) -> Drawn:
        more: dict[str, Any] = {"count_include_pad": rng.random() < 0.5}
        if spatial > 1:
            more["divisor_override"] = rng.choice([None, 5])
        return Drawn(_window(rng, spatial) | more, (_image(rng, spatial, 3, (5, 8)),))

    return draw


def _adaptive(spatial: int, maximum: bool) -> Callable[[random.Random], Drawn]:
    def draw(rng: random.Random) -> Drawn:
        options: dict[str, Any] = {"output_size": rng.choice([1, 3, tuple(rng.randint(1, 6) for _ in range(spatial))])}
        if maximum:
            options["return_indices"] = rng.random() < 0.3
        return Drawn(options, (_image(rng, spatial, 3, (3, 7)),))

    return draw


def _upsample(rng: random.Random) -> Drawn:
    mode = rng.choice(["nearest", "linear", "bilinear", "bicubic", "trilinear"])
    spatial = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(mode) or rng.randint(1, 3)
    sizes: list[dict[str, Any]] = [{"scale_factor": 2}, {"size": (7, 5, 3)[:spatial]}]
    options = {"mode": mode} | rng.choice(sizes)
    if mode != "nearest":
        options["align_corners"] = rng.random() < 0.5
    return Drawn(options, (randn(rng, 2, 3, *(rng.randint(1, 5) for _ in range(spatial))),))


def _ids(rng: random.Random, *shape: int) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


_TABLE = {"num_embeddings": 7, "embedding_dim": 5}


def _embedding(rng: random.Random) -> Drawn:
    more = {"padding_idx": rng.choice([None, 3, -1]), "scale_grad_by_freq": rng.random() < 0.5}
    return Drawn(_TABLE | more, (_ids(rng, 3, 4),))


def _embedding_bag(rng: random.Random) -> Drawn:
    mode = rng.choice(["sum", "mean", "max"])
    ends = rng.random() < 0.5
    options = _TABLE | {"mode": mode, "padding_idx": rng.choice([None, 3]), "include_last_offset": ends}
    if rng.random() < 0.3:
        return Drawn(options | {"include_last_offset": False}, (_ids(rng, 3, 4),))
    weights = (randn(rng, 9),) if mode == "sum" and rng.random() < 0.5 else ()
    return Drawn(options, (_ids(rng, 9), torch.tensor([0, 2, 2, 9 if ends else 7]), *weights))


def _linear(rng: random.Random) -> Drawn:
    sizes = {"in_features": rng.randint(1, 6), "out_features": rng.randint(1, 6), "bias": rng.random() < 0.5}
    return Drawn(sizes, (randn(rng, *(rng.randint(1, 3) for _ in range(rng.randint(1, 3))), sizes["in_features"]),))


def _conv(spatial: int, transposed: bool) -> Callable[[random.Random], Drawn]:
    def draw(rng: random.Random) -> Drawn:
        groups = rng.choice([1, 2, 4])
        kernel, stride = rng.randint(1, 3), rng.randint(1, 2)
        options: dict[str, Any] = {
            "in_channels": 4, "out_channels": 4 * rng.randint(1, 2), "kernel_size": kernel, "stride": stride, "groups": groups,
            "dilation": rng.randint(1, 2), "bias": rng.random() < 0.5, "padding": rng.randint(0, kernel // 2),
        }  # fmt: skip
        if transposed:
            options["output_padding"] = rng.randint(0, max(stride, options["dilation"]) - 1)
        else:
            options["padding_mode"] = rng.choice(["zeros", "reflect", "replicate", "circular"])
            if stride == 1 and rng.random() < 0.3:
                options["padding"] = rng.choice(["same", "valid"])
        return Drawn(options, (_image(rng, spatial, 4, (5, 6)),))

    return draw


def _norm(spatial: int, batched: bool) -> Callable[[random.Random], Drawn]:
    """Batch and instance norm: [N, C, *S], batch norm of vectors too."""

    def draw(rng: random.Random) -> Drawn:
        options = {
            "num_features": 4,
            "eps": rng.choice([1e-5, 1e-2]),
            "momentum": rng.choice([0.1, None] if batched else [0.1]),
        }
        options |= {"affine": rng.random() < 0.5, "track_running_stats": rng.random() < 0.5}
        vector = batched and spatial == 1 and rng.random() < 0.5
        x = randn(rng, 3, 4, *(rng.randint(2, 4) for _ in range(0 if vector else spatial)))
        return Drawn(options, (x if rng.random() < 0.5 else x.movedim(1, -1).contiguous().movedim(-1, 1),))

    return draw


def _group_norm(rng: random.Random) -> Drawn:
    options = {"num_groups": rng.choice([1, 2, 4]), "num_channels": 4, "eps": 1e-3, "affine": rng.random() < 0.5}
    return Drawn(options, (randn(rng, 2, 4, *(rng.randint(2, 4) for _ in range(rng.randint(0, 2)))),))


def _layer_norm(rng: random.Random) -> Drawn:
    shape = [rng.randint(2, 4) for _ in range(rng.randint(1, 2))]
    options = {"normalized_shape": shape, "eps": 1e-3, "elementwise_affine": rng.random() < 0.7, "bias": rng.random() < 0.5}
    return Drawn(options, (randn(rng, 2, 3, *shape),))


def _rms_norm(rng: random.Random) -> Drawn:
    shape = [rng.randint(2, 4) for _ in range(rng.randint(1, 2))]
    options = {"normalized_shape": shape, "eps": rng.choice([1e-3, None]), "elementwise_affine": rng.random() < 0.7}
    return Drawn(options, (randn(rng, 2, 3, *shape),))


def _softmax(rng: random.Random) -> Drawn:
    return Drawn({"dim": rng.randint(-3, 2)}, (randn(rng, *(rng.randint(1, 5) for _ in range(3))),))


def _cross_entropy(rng: random.Random) -> Drawn:
    options = {
        "ignore_index": rng.choice([-100, 2]), "reduction": rng.choice(["mean", "sum", "none"]),
        "label_smoothing": rng.choice([0.0, 0.1]),
    }  # fmt: skip
    if not options["label_smoothing"]:
        options["weight"] = rng.choice([None, randn(rng, 7).abs()])
    return Drawn(options, (randn(rng, 6, 7), _ids(rng, 6)))


_INPLACE = ({"inplace": True},)
_SPARSE = ({"max_norm": 1.0}, {"norm_type": 1.0}, {"sparse": True})

ROWS: dict[str, Row] = {
    **{f"AdaptiveAvgPool{d}d": Row(_adaptive(d, False)) for d in (1, 2, 3)},
    **{f"AdaptiveMaxPool{d}d": Row(_adaptive(d, True)) for d in (1, 2, 3)},
    **{f"AvgPool{d}d": Row(_avg_pool(d)) for d in (1, 2, 3)},
    **{f"Conv{d}d": Row(_conv(d, False)) for d in (1, 2, 3)},
    **{f"BatchNorm{d}d": Row(_norm(d, True)) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": Row(_conv(d, True), note="none; as in torch, `padding_mode` must be zeros") for d in (1, 2, 3)},
    "CrossEntropyLoss": Row(
        _cross_entropy,
        ({"size_average": True}, {"reduce": True}),
        note="`weight` and `label_smoothing` cannot be combined; targets cannot be class probabilities; the loss is float32",
    ),
    "Dropout": Row(
        lambda rng: Drawn({"p": rng.choice([0.0, 1.0])}, (_any_shape(rng),)),
        _INPLACE,
        note="zeroes different elements than torch for the same seed",
    ),
    "ELU": Row(_elementwise(alpha=[1.0, 0.3]), _INPLACE),
    "Embedding": Row(_embedding, _SPARSE, _TABLE),
    "EmbeddingBag": Row(_embedding_bag, (*_SPARSE, {"scale_grad_by_freq": True}), _TABLE),
    "GELU": Row(_elementwise(approximate=["none", "tanh"])),
    "GLU": Row(_glu),
    "GroupNorm": Row(_group_norm),
    "Hardswish": Row(_elementwise(), _INPLACE),
    **{f"InstanceNorm{d}d": Row(_norm(d, False)) for d in (1, 2, 3)},
    "LayerNorm": Row(_layer_norm),
    "LeakyReLU": Row(_elementwise(negative_slope=[0.01, 0.3]), _INPLACE),
    "LogSoftmax": Row(_softmax, ({"dim": None},)),
    **{f"MaxPool{d}d": Row(_max_pool(d)) for d in (1, 2, 3)},
    "Mish": Row(_elementwise(), _INPLACE),
    "Linear": Row(_linear),
    "RMSNorm": Row(_rms_norm),
    "ReLU": Row(_elementwise(), _INPLACE),
    "SiLU": Row(_elementwise(), _INPLACE),
    "Sigmoid": Row(_elementwise()),
    "Softmax": Row(_softmax, ({"dim": None},)),
    "Tanh": Row(_elementwise()),
    "Upsample": Row(_upsample, ({"mode": "area"}, {"recompute_scale_factor": True})),
}


def _supported(name: str, row: Row) -> str:
    """The arguments of torch's class that ours has, without those that take one value only."""
    values = {argument: sum(argument in refused for refused in row.refused) for argument in parameters(name)}
    whole = [argument for argument, times in values.items() if not times or argument in ("dim", "mode")]
    return ", ".join(whole)


def parameters(name: str) -> list[str]:
    """The public arguments of torch.nn's class."""
    given = inspect.signature(getattr(torch.nn, name).__init__).parameters
    return [p for p in given if p not in ("self", "args", "kwargs") and not p.startswith("_")]


def page() -> str:
    """docs/torch_nn.md."""
    lines = [
        "# torch.nn, class by class",
        "",
        "Each class of `tilewright.nn` below replaces the class of `torch.nn` with the same name: it accepts the listed",
        "arguments, loads the same state dicts, and computes the same outputs and gradients. The column *refused* has",
        "arguments that raise a `ValueError`, which names the argument.",
        "",
        "This page is written by `python -m tests.nn.torch_table`. `tests/nn/test_torch_nn.py` compares each class on random",
        f"configurations against torch.nn {TORCH}, and checks that the refused arguments are refused.",
        "",
        "| class | arguments | refused | differences from torch.nn |",
        "|---|---|---|---|",
    ]
    for name, row in sorted(ROWS.items()):
        told = ((k, "a tensor" if isinstance(v, Tensor) else repr(v)) for options in row.refused for k, v in options.items())
        refused = ", ".join(f"{argument}={value}" for argument, value in told)
        lines.append(f"| {name} | {_supported(name, row)} | {refused} | {row.note} |")
    return "\n".join([*lines, "", f"{len(ROWS)} classes.", ""])


if __name__ == "__main__":
    PAGE.write_text(page())
    assert all(hasattr(nn, name) for name in ROWS)
