"""Dense decoders with rotary positions and gated feed-forward layers, and models with experts in the same structure.

A builder passes what is specific to its family: which projections have biases, norms over queries and keys, another block,
embedding, norm or head. Windows, wavelengths, tied weights and factors come from the config. Everything follows the models'
code in transformers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilewright.models.blocks import CappedHead, PostNormBlock, SandwichBlock, ScaledBlock, ScaledEmbedding, ScaledNorm
from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Block, Decoder, FeedForward
from tilewright.nn import Attention, ClampedMoE, Embedding, GatedMLP, Linear, MoE, RMSNorm, Rope, unfilled

__all__ = [
    "gemma2", "gemma3", "glm", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3",
    "qwen3_moe",
]  # fmt: skip

Norm = Callable[[], RMSNorm]
MakeBlock = Callable[[Attention, FeedForward, Norm], nn.Module]
MakeFeedForward = Callable[[int], FeedForward]


def _pre_norm(attn: Attention, ffn: FeedForward, norm: Norm) -> nn.Module:
    return Block(attn_norm=norm(), attn=attn, ffn_norm=norm(), ffn=ffn)


def _sandwich(attn: Attention, ffn: FeedForward, norm: Norm) -> nn.Module:
    return SandwichBlock(
        attn_norm=norm(), attn=attn, attn_post_norm=norm(), ffn_norm=norm(), ffn=ffn, ffn_post_norm=norm()
    )  # fmt: skip


def _post_norm(attn: Attention, ffn: FeedForward, norm: Norm) -> nn.Module:
    return PostNormBlock(attn=attn, attn_post_norm=norm(), ffn=ffn, ffn_post_norm=norm())


@unfilled()
def _dense(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mlp_bias: bool = False,
    block: MakeBlock = _pre_norm,
    feed_forward: MakeFeedForward | None = None,
    embed: Embedding | None = None,
    norm: RMSNorm | None = None,
    head: Linear | None = None,
    norm_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    **attention: Any,
) -> Decoder:
    """The structure shared by all families.

    Args:
        config: config of the model.
        device: of its parameters.
        dtype: of its parameters.
        mlp_bias: whether dense feed-forward layers have biases.
        block: combines an attention, a feed-forward layer and norms.
        feed_forward: makes the feed-forward part of a layer; None: dense layers.
        embed: the embedding; None: the plain one.
        norm: the last norm; None: the plain one.
        head: the head; None: the plain one. A tied one shares the embedding's parameter.
        norm_dtype: of the norms' weights; None: as the others.
        interleaved: whether neighbouring dims are rotated together.
        attention: arguments of `nn.Attention` that differ between families.
    """
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    size, eps = config.hidden_size, config.rms_norm_eps
    ropes = [
        Rope(
            config.rotated_dim, max_positions=config.max_position_embeddings, base=theta, scaling=scaling,
            interleaved=interleaved, device=device,
        )
        for theta, scaling in config.ropes
    ]  # fmt: skip
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    heads |= {"scale": config.attention_scale, "softcap": config.attention_softcap, "norm_dtype": norm_dtype}

    def plain_norm() -> RMSNorm:
        return RMSNorm(size, eps=eps, device=device, dtype=norm_dtype or dtype)

    def gated(layer: int) -> FeedForward:
        return GatedMLP(size, config.intermediate_size, activation=config.activation, bias=mlp_bias, **place)

    blocks = []
    for layer, window in enumerate(config.windows):
        # Layers with a window may have other wavelengths.
        attn = Attention(size, **heads, rope=ropes[0 if window is None else -1], window=window, **attention, **place)
        blocks.append(block(attn, (feed_forward or gated)(layer), plain_norm))
    embed = embed or Embedding(config.vocab_size, size, **place)
    head = head or Linear(size, config.vocab_size, bias=False, **head_place(config, device, dtype))
    if config.tie_word_embeddings:
        head.weight = embed.weight
    return Decoder(config, embed=embed, blocks=blocks, norm=norm or plain_norm(), head=head)


def head_place(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The device of a head: "meta" if it will share the embedding's parameter."""
    return {"device": "meta" if config.tie_word_embeddings else device, "dtype": dtype}


def llama(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Llama 1 to 3 (Touvron et al., 2023): biases on all four attention projections, or on none."""
    bias = config.attention_bias
    return _dense(config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)


def mistral(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Mistral 7B and similar models (Jiang et al., 2023): no biases."""
    return _dense(config, device, dtype)


def phi3(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): no biases; parts of heads may be rotated, with a factor for each pair."""
    return _dense(config, device, dtype)


def qwen2(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen2 and Qwen2.5 (Yang et al., 2024): biases on q, k and v, always."""
    return _dense(config, device, dtype, qkv_bias=True)


def qwen3(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """Qwen3 (Yang et al., 2025): a norm over each query and key head."""
    bias = config.attention_bias
    return _dense(config, device, dtype, qkv_bias=bias, out_bias=bias, head_norm_eps=config.rms_norm_eps, **more)


def glm(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """GLM-4 of 2024 (GLM Team, "ChatGLM", 2024): biases on q, k and v; a part of each head is rotated, in neighbouring
    pairs."""
    return _dense(config, device, dtype, qkv_bias=config.attention_bias, interleaved=True, **more)


def glm4(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """GLM-4-0414 (Z.ai, 2025): as `glm`, with norms on both sides."""
    return glm(config, device, dtype, block=_sandwich)


def olmo2(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """OLMo 2 (OLMo Team, 2024): norms only after the layers, and over all queries and all keys of a token."""
    bias, eps = config.attention_bias, config.rms_norm_eps
    return _dense(config, device, dtype, qkv_bias=bias, out_bias=bias, block=_post_norm, wide_norm_eps=eps)


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
    return _dense(
        config, device, dtype, qkv_bias=bias, out_bias=bias, block=_sandwich, embed=embed, head=head,
        norm_dtype=torch.float32, **more,
    )  # fmt: skip


def gemma3(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Gemma 3's text models (Gemma Team, 2025): as `gemma2`, with norms over heads, and short wavelengths within windows."""
    return gemma2(config, device, dtype, head_norm_eps=config.rms_norm_eps)


def granite(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Granite 3 (IBM, 2024): a Llama with factors on the embedding, on the outputs of layers, and on the logits."""
    bias, size = config.attention_bias, config.hidden_size

    def scaled(attn: Attention, ffn: FeedForward, norm: Norm) -> nn.Module:
        return ScaledBlock(attn_norm=norm(), attn=attn, ffn_norm=norm(), ffn=ffn, scale=config.residual_scale)

    with unfilled():
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        embed = ScaledEmbedding(config.vocab_size, size, scale=config.embedding_scale, **place)
        norm = ScaledNorm(size, scale=config.logit_scale, eps=config.rms_norm_eps, **place)
    return _dense(
        config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias, block=scaled, embed=embed, norm=norm
    )  # fmt: skip


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
    return _dense(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def qwen3_moe(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen3's mixtures (Yang et al., 2025): a Qwen3 with mixtures in all layers or some."""
    return qwen3(config, device, dtype, feed_forward=_mixture(config, device, dtype))


def gpt_oss(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """gpt-oss (OpenAI, 2025): biases everywhere, attention sinks, windows in every other layer, mixtures with a clamped
    gate."""
    bias = config.attention_bias
    return _dense(
        config, device, dtype, qkv_bias=bias, out_bias=bias, sinks=True, feed_forward=_mixture(config, device, dtype)
    )  # fmt: skip
