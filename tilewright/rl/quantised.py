"""A policy that is sampled by quantised weights and learns in the weights that they are made of.

Each linear layer of the blocks keeps its float weight, which the optimizer updates, and has codes beside it
(`nn.Linear.coded`). Engine and trainer multiply by the codes, so both have the numbers of one quantised model; gradients go
straight through to the float weight (`ops.linear_coded`). Embedding, head and norms stay as they are. After an update the
codes are made again where they lie: captured graphs go on reading them. Served with `--quantize` and the same format, the saved
policy is the one that was trained.

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

__all__ = ["FORMATS", "code", "recode", "uncode"]

FORMATS = tuple(name for name, format in WEIGHT_FORMATS.items() if format.kind is not MXWeight)
"""What a policy may be sampled by."""


def code(model: Model, format: str) -> Model:
    """Put codes of a format beside the weights of a model's blocks. Returns the model.

    Raises:
        ValueError: the card or the dtype cannot multiply such codes, a layer's inputs are not divided by the format's groups,
            or the model has experts.
    """
    weight = model.embed.weight
    if weight.is_cuda:
        check_card(format, device_of(weight.get_device()), weight.dtype)
    if any(isinstance(module, ExpertLinear) for module in model.modules()):
        raise ValueError(f"quantize is {format!r}, but the model has experts, which are not sampled by codes: leave it out")
    for layer, float_weight in _layers(model):
        layer.coded = quantize_weight(float_weight.detach(), format)
    return model


@torch.no_grad()
def recode(model: Model) -> None:
    """Make the codes again of what the weights have become, in the memory where they are."""
    for layer, weight in _layers(model):
        if layer.coded is not None:
            made = quantize_weight(weight.detach(), layer.coded.format)
            for old, new in zip(layer.coded.buffers(), made.buffers(), strict=True):
                old.copy_(new)


def uncode(model: Model) -> None:
    """Leave the weights alone."""
    for layer, _ in _layers(model):
        layer.coded = None


def _layers(model: Model) -> Iterator[tuple[Linear, Tensor]]:
    for module in model.blocks.modules():
        if isinstance(module, Linear) and isinstance(module.weight, Tensor):
            yield module, module.weight
