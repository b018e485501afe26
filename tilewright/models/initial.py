"""Random weights to begin training with, as the papers of the architectures say."""

import math
from typing import Any

import torch
from torch import nn

from tilewright.models.decoder import Decoder

__all__ = ["initialise"]


@torch.no_grad()
def initialise(model: Decoder, *, std: float = 0.02, depth_scaled: bool = True, seed: int = 0) -> None:
    """Draw all weights anew, on their device: matrices from a normal distribution, norms of 1, biases of 0.

    std is that of GPT-2, Llama and Qwen (`initializer_range` in their configs).

    Args:
        std: standard deviation of embedding, head and matrices.
        depth_scaled: matrices that write into the residual stream have std / sqrt(2 * layers), so that the stream's variance
            does not grow with depth (Radford et al., "GPT-2", 2019).
        seed: the same one gives the same weights, on one kind of device.
    """
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    blocks: list[Any] = list(model.blocks)
    writers = {id(layer.weight) for block in blocks for layer in (block.attn.out, getattr(block.ffn, "down", None)) if layer}
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = 1 / math.sqrt(2 * len(blocks)) if depth_scaled and id(parameter) in writers else 1.0
            drawn = torch.empty(parameter.shape, device=parameter.device).normal_(0.0, std * scale, generator=generator)
            parameter.copy_(drawn)
        elif name.endswith(("bias", "sinks")):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
