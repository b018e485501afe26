"""Decoders whose feed-forward layers are mixtures of experts. Everything follows the models' code in transformers.

DeepSeek's models, which also have latent attention, are in deepseek.py.
"""

import torch

from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Decoder, FeedForward
from tilewright.models.dense import ernie4_5, granite, qwen2, qwen3
from tilewright.models.frame import MakeFeedForward, frame
from tilewright.nn import ClampedMoE, GatedMLP, MoE

__all__ = ["ernie4_5_moe", "glm4_moe", "gpt_oss", "granite_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


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
            size, experts.inner, shared=experts.shared, shared_gate=experts.shared_gate, routing=experts.routing,
            activation=config.activation, **place,
        )  # fmt: skip

    return feed_forward


def mixtral(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Mixtral (Jiang et al., 2024): a Mistral whose feed-forward layers are mixtures."""
    return frame(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def qwen2_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen1.5's and Qwen2's mixtures (Yang et al., 2024): a Qwen2 whose mixtures have a shared expert behind a gate."""
    return qwen2(config, device, dtype, qkv_bias=config.attention_bias, feed_forward=_mixture(config, device, dtype))


def olmoe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """OLMoE (Muennighoff et al., 2024): norms over all queries and all keys of a token, mixtures everywhere."""
    bias, eps, mixture = config.attention_bias, config.rms_norm_eps, _mixture(config, device, dtype)
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, wide_norm_eps=eps, feed_forward=mixture)


def granite_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Granite 3's mixtures (IBM, 2024)."""
    return granite(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def glm4_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """GLM-4.5 and 4.6 (GLM Team, 2025): mixtures that are routed as DeepSeek-V3's, after some dense layers; a part of each head
    is rotated, and in some models heads are normalised."""
    eps = config.rms_norm_eps if config.head_norms else None
    mixture = _mixture(config, device, dtype)
    return frame(config, device, dtype, qkv_bias=config.attention_bias, head_norm_eps=eps, feed_forward=mixture)


def ernie4_5_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """ERNIE 4.5's mixtures (Baidu, 2025), in some layers."""
    return ernie4_5(config, device, dtype, feed_forward=_mixture(config, device, dtype))


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
