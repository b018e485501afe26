"""A policy that samples with quantised weights and trains the float weights behind them.

Each linear layer of the blocks keeps its float weight, which the optimizer updates, and has a quantised weight as well
(`nn.Linear.quantized_weight`). Engine and trainer multiply by the quantised one, so both have the numbers of the same quantised
model; gradients go to the float weight by the straight-through estimator (`ops.linear_straight_through`). Embedding, head and
norms are not quantised. After an update the weights are quantised again in the same memory, because captured graphs read it. A
saved policy that is served with `--quantize` and the same format is the policy that was trained.

Not here: experts, and formats whose scales change their shape with the weight's values (mxfp8).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.models import Model
from tilewright.nn import ExpertLinear, Linear
from tilewright.ops.weights import WEIGHT_FORMATS, MXWeight, quantize_weight
from tilewright.quant.convert import check_card

__all__ = ["FORMATS", "add_quantised_weights", "remove_quantised_weights", "requantise"]

FORMATS = tuple(name for name, format in WEIGHT_FORMATS.items() if format.kind is not MXWeight)
"""Formats with which a policy may sample."""


def add_quantised_weights(model: Model, format: str) -> Model:
    """Add quantised weights in a format to the layers of a model's blocks. Returns the model.

    Raises:
        ValueError: the card or the dtype does not support the format, a layer's inputs are not a multiple of the format's
            group, or the model has experts.
    """
    weight = model.embed.weight
    if weight.is_cuda:
        check_card(format, device_of(weight.get_device()), weight.dtype)
    if any(isinstance(module, ExpertLinear) for module in model.modules()):
        raise ValueError(f"quantize is {format!r}, but the model has experts, for which this is not supported: leave it out")
    for layer, float_weight in _layers(model):
        layer.quantized_weight = quantize_weight(float_weight.detach(), format)
    return model


@torch.no_grad()
def requantise(model: Model) -> None:
    """Quantise the present weights again, into the same memory."""
    for layer, weight in _layers(model):
        if layer.quantized_weight is not None:
            made = quantize_weight(weight.detach(), layer.quantized_weight.format)
            for old, new in zip(layer.quantized_weight.buffers(), made.buffers(), strict=True):
                old.copy_(new)


def remove_quantised_weights(model: Model) -> None:
    """Remove the quantised weights."""
    for layer, _ in _layers(model):
        layer.quantized_weight = None


def _layers(model: Model) -> Iterator[tuple[Linear, Tensor]]:
    for module in model.blocks.modules():
        if isinstance(module, Linear) and isinstance(module.weight, Tensor):
            yield module, module.weight
