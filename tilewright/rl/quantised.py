"""A policy that samples with quantised weights, while the optimizer trains the float weights from which they are made.

Each linear layer of the blocks keeps its float weight, which the optimizer updates, and also has a quantised weight
(`nn.Linear.quantized_weight`). Engine and trainer both multiply by the quantised weight, so both compute with the same
quantised model. Gradients go to the float weight by the straight-through estimator (`ops.linear_straight_through`). Embedding,
head and norms are not quantised. After an update, the weights are quantised again into the same memory, because captured graphs
read it. If a saved policy is served with `--quantize` and the same format, it is the policy that was trained.

Not supported: experts, and formats whose scales change their shape with the values of the weight (mxfp8).
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
"""The formats with which a policy can sample."""


def add_quantised_weights(model: Model, format: str) -> Model:
    """Add quantised weights in a format to the linear layers of a model's blocks. Returns the model.

    Raises:
        ValueError: the GPU or the dtype does not support the format, the number of inputs of a layer is not a multiple of the
            format's group size, or the model has experts.
    """
    weight = model.embed.weight
    if weight.is_cuda:
        check_card(format, device_of(weight.get_device()), weight.dtype)
    if any(isinstance(module, ExpertLinear) for module in model.modules()):
        raise ValueError(f"quantize is {format!r}, but models with experts are not supported; leave quantize out")
    for layer, float_weight in _layers(model):
        layer.quantized_weight = quantize_weight(float_weight.detach(), format)
    return model


@torch.no_grad()
def requantise(model: Model) -> None:
    """Quantise the current weights again, into the same memory."""
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
