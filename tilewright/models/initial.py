"""Random initial weights for training, as described in the papers of the architectures."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.decoder import Decoder

__all__ = ["initialise"]

_WRITERS = ("attn.out", "ffn.down", "ffn.experts_down", "ffn.shared.down")
"""Layers of a block that write into the residual stream."""


@torch.no_grad()
def initialise(
    model: Decoder, *, std: float = 0.02, depth_scaled: bool = True, seed: int = 0,
    scale: Callable[[str, Tensor], float] = lambda name, parameter: 1.0,
) -> None:  # fmt: skip
    """Draw all weights anew, on their device: matrices from a normal distribution, norms of 1, biases of 0.

    std is that of GPT-2, Llama and Qwen (`initializer_range` in their configs).

    Args:
        std: standard deviation of embedding, head and matrices.
        depth_scaled: matrices that write into the residual stream have std / sqrt(2 * layers), so that the stream's variance
            does not grow with depth (Radford et al., "GPT-2", 2019).
        seed: the same one gives the same weights, on one kind of device.
        scale: factor on the standard deviation of each parameter.
    """
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    blocks: list[Any] = list(model.blocks)
    writers = {id(layer.weight) for block in blocks for name, layer in block.named_modules() if name in _WRITERS}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            depth = 1 / math.sqrt(2 * len(blocks)) if depth_scaled and id(parameter) in writers else 1.0
            drawn = torch.empty(parameter.shape, device=parameter.device)
            drawn.normal_(0.0, std * depth * scale(name, parameter), generator=generator)
            parameter.copy_(drawn)
        elif name.endswith(("bias", "sinks")):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
