"""Decoders whose feed-forward layers are mixtures of experts. Everything follows the models' code in transformers.

DeepSeek's models, which also have latent attention, are in deepseek.py.
"""

import torch

from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Decoder, FeedForward
from tilewright.models.dense import qwen3
from tilewright.models.frame import MakeFeedForward, frame
from tilewright.nn import ClampedMoE, GatedMLP, MoE

__all__ = ["gpt_oss", "mixtral", "qwen3_moe"]


def _mixture(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> MakeFeedForward:
    experts = config.experts
    assert experts is not None
    size, place = config.hidden_size, {"device": device, "dtype": dtype}

    def feed_forward(layer: int) -> FeedForward:
        if not experts.in_layer(layer):
            return GatedMLP(size, config.intermediate_size, activation=config.activation, **place)
        if experts.clamped is not None:
            alpha, limit = experts.clamped
            return ClampedMoE(size, experts.inner, routing=experts.routing, alpha=alpha, limit=limit, **place)
        return MoE(
            size, experts.inner, shared=experts.shared, routing=experts.routing, activation=config.activation, **place
        )  # fmt: skip

    return feed_forward


def mixtral(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Mixtral (Jiang et al., 2024): a Mistral whose feed-forward layers are mixtures."""
    return frame(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def qwen3_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen3's mixtures (Yang et al., 2025): a Qwen3 with mixtures in all layers or some."""
    return qwen3(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def gpt_oss(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """gpt-oss (OpenAI, 2025): biases everywhere, attention sinks, windows in every other layer, mixtures with a clamped
    gate."""
    bias = config.attention_bias
    return frame(
        config, device, dtype, qkv_bias=bias, out_bias=bias, sinks=True, feed_forward=_mixture(config, device, dtype)
    )  # fmt: skip
