"""Decides which layers of a run use float8 products (`ops.linear_fp8`), and explains why the other layers do not."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.hw.ceilings import Ceilings, ceilings
from tilewright.hw.device import device_of
from tilewright.models import Model
from tilewright.nn import Linear
from tilewright.ops.linear_fp8 import Fp8Recipe, fp8_seconds
from tilewright.train.config import TrainConfig

__all__ = ["refusal", "set_compute"]

_RECIPES = {
    "fp8": Fp8Recipe("row"),
    "fp8-tensor": Fp8Recipe("tensor"),
    "fp8-all": Fp8Recipe("row", weight_gradient=True),
}
_LAUNCH_S = 3e-6
"""Seconds for a launch that follows another launch on the same stream, on an H100, if the host is ahead of the device, as with
`graphs`."""
_GAIN = 1.2
"""The least speed-up of float8 for all products that use it. Those of y and dx take a quarter to two fifths of an update. A
smaller speed-up would save less than 3 % of an update, which is within the error of the rooflines."""


def set_compute(config: TrainConfig, model: Model, device: torch.device) -> list[str]:
    """Set the precision of the products in the blocks' linear layers. Embedding, head, routers and experts are not changed.

    The choice depends on the shapes, on the tokens of a micro-batch and on the GPU, but not on how the run is distributed.

    Returns:
        The choices as text. Layers with the same reason are listed together.

    Raises:
        ValueError: the GPU does not support float8, the dtype is not supported, or no layer becomes faster.
    """
    if config.compute == "dtype":
        return []
    found = _card(config, device)
    kept: dict[str, list[str]] = {}
    count = 0
    for name, layer in _layers(model):
        why = refusal(layer, config, found)
        if why is None:
            layer.fp8, count = _RECIPES[config.compute], count + 1
        else:
            kept.setdefault(why, []).append(name)
    reasons = [f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}" for why, names in kept.items()]
    if not count:
        raise ValueError(
            f"compute is {config.compute}, but no layer gets faster with it; set it to dtype. {'; '.join(reasons)}"
        )
    return [f"{config.compute}: {count} layers", *(f"not {reason}" for reason in reasons)]


def refusal(layer: Linear, config: TrainConfig, card: Ceilings | None) -> str | None:
    """The reason why a layer does not use float8, or None. `card`: None for a CPU, which runs the reference implementation, so
    that speed does not matter."""
    assert isinstance(layer.weight, Tensor)
    rows, cols = layer.weight.shape
    slices, tokens = config.parallel.slices, config.row_tokens * config.micro_rows // config.parallel.chunks
    if rows % (16 * slices) or cols % (16 * slices):
        parts = f" in {slices} slices" if slices > 1 else ""
        return f"a weight of {rows} x {cols}{parts} has sides that are not multiples of 16"
    if card is None:
        return None
    recipe = _RECIPES[config.compute]
    plain, fp8 = fp8_seconds(tokens, rows, cols, card, _LAUNCH_S, *recipe)
    if plain < _GAIN * fp8:
        products = "y, dx and dw" if recipe.weight_gradient else "y and dx"
        return (
            f"by the rooflines of the GPU, {products} of {rows} x {cols} with {tokens} tokens take {plain * 1e6:.0f} "
            f"us in bfloat16 and {fp8 * 1e6:.0f} us in float8 including the quantisation, which must be {_GAIN} "
            "times as fast"
        )
    return None


def _card(config: TrainConfig, device: torch.device) -> Ceilings | None:
    if device.type != "cuda":
        return None
    card = device_of(device.index or 0)
    found = ceilings(card)
    if card.arch < 89 or "fp8" not in found.flops:
        raise ValueError(
            f"compute is {config.compute}, which needs sm_89 or later, but {card.name} is sm_{card.arch}; set it to dtype"
        )
    if config.dtype != "bfloat16":
        raise ValueError(f"compute is {config.compute}, which on a GPU needs dtype bfloat16, but dtype is {config.dtype}")
    return found


def _layers(model: Model) -> Iterator[tuple[str, Linear]]:
    for index, block in enumerate(model.blocks):
        for name, module in block.named_modules(prefix=f"blocks.{index}"):
            if isinstance(module, Linear) and isinstance(module.weight, Tensor):
                yield name, module
