"""Dense decoders with RMS norms. Everything follows the models' code in transformers."""

from typing import Any

import torch
from torch import nn

from tilewright.models.blocks import CappedHead, PostNormBlock, SandwichBlock, ScaledBlock, ScaledEmbedding, ScaledNorm
from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Decoder, FeedForward
from tilewright.models.frame import MakeNorm, frame, head_place
from tilewright.nn import Attention, unfilled

__all__ = [
    "ernie4_5", "exaone4", "gemma2", "gemma3", "glm", "glm4", "granite", "hunyuan", "llama", "mistral", "olmo2", "phi3",
    "qwen2", "qwen3", "seed_oss",
]  # fmt: skip


def _sandwich(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
    return SandwichBlock(
        attn_norm=norm(), attn=attn, attn_post_norm=norm(), ffn_norm=norm(), ffn=ffn, ffn_post_norm=norm()
    )  # fmt: skip


def _post_norm(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
    return PostNormBlock(attn=attn, attn_post_norm=norm(), ffn=ffn, ffn_post_norm=norm())


def llama(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Llama 1 to 3 (Touvron et al., 2023): biases on all four attention projections, or on none.

    Also SmolLM3 (Hugging Face, 2025), in which some layers have no rotary positions, and Arcee's AFM (Arcee AI, 2025), whose
    feed-forward layers have no gate: both follow from the config.
    """
    bias = config.attention_bias
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias, **more)


def ernie4_5(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """ERNIE 4.5 (Baidu, 2025): a Llama that rotates neighbouring pairs."""
    return llama(config, device, dtype, interleaved=True, **more)


def seed_oss(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Seed-OSS (ByteDance Seed, 2025): biases on q, k and v, and by another setting on the projection behind attention."""
    out_bias = config.attention_out_bias
    return frame(config, device, dtype, qkv_bias=config.attention_bias, out_bias=out_bias, mlp_bias=config.mlp_bias)


def hunyuan(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """HunYuan's dense models (Tencent, 2025): a norm over each query and key head, after the rotation."""
    bias, eps = config.attention_bias, config.rms_norm_eps
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, head_norm_eps=eps, norm_after_rotation=True)


def mistral(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Mistral 7B and similar models (Jiang et al., 2023): no biases."""
    return frame(config, device, dtype)


def phi3(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): no biases; parts of heads may be rotated, with a factor for each pair."""
    return frame(config, device, dtype)


def qwen2(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Qwen2 and Qwen2.5 (Yang et al., 2024): biases on q, k and v, always."""
    return frame(config, device, dtype, **{"qkv_bias": True, **more})


def qwen3(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Qwen3 (Yang et al., 2025): a norm over each query and key head."""
    bias = config.attention_bias
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, head_norm_eps=config.rms_norm_eps, **more)


def glm(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """GLM-4 of 2024 (GLM Team, "ChatGLM", 2024): biases on q, k and v; a part of each head is rotated, in neighbouring
    pairs."""
    return frame(config, device, dtype, qkv_bias=config.attention_bias, interleaved=True, **more)


def glm4(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """GLM-4-0414 (Z.ai, 2025): as `glm`, with norms on both sides."""
    return glm(config, device, dtype, block=_sandwich)


def olmo2(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """OLMo 2 and 3 (OLMo Team, 2024 and 2025): norms only after the layers, and over all queries and all keys of a token.

    OLMo 3 has windows in three of four layers, whose rotation is not stretched; both follow from the config.
    """
    bias, eps = config.attention_bias, config.rms_norm_eps
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, block=_post_norm, wide_norm_eps=eps)


def exaone4(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """EXAONE 4 (LG AI Research, 2025): norms only after the layers, and over heads; among layers with windows, those without
    have no rotary positions."""
    return frame(config, device, dtype, block=_post_norm, head_norm_eps=config.rms_norm_eps)


def gemma2(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Gemma 2 (Gemma Team, 2024): norms on both sides, windows in every other layer, caps on scores and logits.

    Checkpoints store the weights of norms minus 1. They are float32 here, because that 1 is added (names.py).
    """
    bias, size = config.attention_bias, config.hidden_size
    # The published code rounds the factor to the model's dtype.
    scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
    with unfilled():
        embed = ScaledEmbedding(config.vocab_size, size, scale=scale, device=device, dtype=dtype)
        head = None
        if config.logit_softcap is not None:
            head = CappedHead(size, config.vocab_size, cap=config.logit_softcap, **head_place(config, device, dtype))
    return frame(
        config, device, dtype, qkv_bias=bias, out_bias=bias, block=_sandwich, embed=embed, head=head,
        norm_dtype=torch.float32, **more,
    )  # fmt: skip


def gemma3(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Gemma 3's text models (Gemma Team, 2025): as `gemma2`, with norms over heads, and short wavelengths within windows."""
    return gemma2(config, device, dtype, head_norm_eps=config.rms_norm_eps)


def granite(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Granite 3 (IBM, 2024): a Llama with factors on the embedding, on the outputs of layers, and on the logits."""
    bias, size = config.attention_bias, config.hidden_size

    def scaled(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
        return ScaledBlock(attn_norm=norm(), attn=attn, ffn_norm=norm(), ffn=ffn, scale=config.residual_scale)

    with unfilled():
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        embed = ScaledEmbedding(config.vocab_size, size, scale=config.embedding_scale, **place)
        norm = ScaledNorm(size, scale=config.logit_scale, eps=config.rms_norm_eps, **place)
    return frame(
        config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias, block=scaled, embed=embed, norm=norm,
        **more,
    )  # fmt: skip
