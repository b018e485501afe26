"""Dense decoders with RMS norms, rotary positions and gated feed-forward layers: Llama, Mistral, Qwen2, Qwen3.

They differ in which projections have biases, and in Qwen3's norms over each query and key head. Windows, rope scaling and
ties are data of the config. Biases and norms follow the models' code in transformers.
"""

from typing import Any

import torch

from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Block, Decoder
from tilewright.nn import Attention, Embedding, GatedMLP, Linear, RMSNorm, Rope, unfilled

__all__ = ["llama", "mistral", "qwen2", "qwen3"]


@unfilled()
def _dense(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, mlp_bias: bool = False, **attention: Any
) -> Decoder:
    """The common frame; `attention` are the arguments of `nn.Attention` that the families differ in."""
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    size, eps = config.hidden_size, config.rms_norm_eps
    rope = Rope(
        config.head_dim,
        max_positions=config.max_position_embeddings,
        base=config.rope_theta,
        scaling=config.rope_scaling,
        device=device,
    )
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    blocks = [
        Block(
            attn_norm=RMSNorm(size, eps=eps, **place),
            attn=Attention(size, **heads, rope=rope, window=window, **attention, **place),
            ffn_norm=RMSNorm(size, eps=eps, **place),
            ffn=GatedMLP(size, config.intermediate_size, activation=config.activation, bias=mlp_bias, **place),
        )
        for window in config.windows
    ]
    embed = Embedding(config.vocab_size, size, **place)
    head = Linear(size, config.vocab_size, bias=False, device="meta" if config.tie_word_embeddings else device, dtype=dtype)
    if config.tie_word_embeddings:
        head.weight = embed.weight
    return Decoder(config, embed=embed, blocks=blocks, norm=RMSNorm(size, eps=eps, **place), head=head)


def llama(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Llama 1 to 3 (Touvron et al., 2023): biases on all four attention projections, or on none."""
    bias = config.attention_bias
    return _dense(config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias)


def mistral(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Mistral 7B and its kin (Jiang et al., 2023): no biases."""
    return _dense(config, device, dtype)


def qwen2(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen2 and Qwen2.5 (Yang et al., 2024): biases on q, k and v, always."""
    return _dense(config, device, dtype, qkv_bias=True)


def qwen3(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Qwen3 (Yang et al., 2025): a norm over each query and key head."""
    bias = config.attention_bias
    return _dense(config, device, dtype, qkv_bias=bias, out_bias=bias, head_norm_eps=config.rms_norm_eps)
