"""DeepSeek-V2 and V3 (DeepSeek-AI, 2024): latent attention, dense layers first, then mixtures of experts.

They differ only in how a token's experts are chosen; V3's additional layer for predicting a second token is a draft head
(draft_heads.py). Scales and norms follow the models' code in transformers.
"""

from typing import Any

import torch

from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Block, Decoder
from tilewright.nn import MLA, Embedding, GatedMLP, Linear, MoE, RMSNorm, Rope, unfilled

__all__ = ["deepseek"]


@unfilled()
def deepseek(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """DeepSeek-V2, V2-Lite, V2.5, V3 and R1, by their configs."""
    latent, experts = config.latent, config.experts
    assert latent is not None
    assert experts is not None
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    size, eps = config.hidden_size, config.rms_norm_eps
    rope = Rope(
        latent.rope_dim,
        max_positions=config.max_position_embeddings,
        base=config.rope_theta,
        scaling=config.rope_scaling,
        interleaved=latent.interleaved,
        device=device,
    )

    def attention() -> MLA:
        return MLA(
            size,
            heads=config.num_attention_heads,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            kv_rank=latent.kv_rank,
            q_rank=latent.q_rank,
            rope=rope,
            scale=config.head_dim**-0.5 * latent.score_factor,
            bias=config.attention_bias,
            **place,
        )

    def feed_forward(layer: int) -> GatedMLP | MoE:
        if layer < experts.first_layer:
            return GatedMLP(size, config.intermediate_size, activation=config.activation, **place)
        return MoE(size, experts.inner, shared=experts.shared, routing=experts.routing, activation=config.activation, **place)

    blocks = [
        Block(
            attn_norm=RMSNorm(size, eps=eps, **place),
            attn=attention(),
            ffn_norm=RMSNorm(size, eps=eps, **place),
            ffn=feed_forward(layer),
        )
        for layer in range(config.num_hidden_layers)
    ]
    embed = Embedding(config.vocab_size, size, **place)
    head = Linear(size, config.vocab_size, bias=False, device="meta" if config.tie_word_embeddings else device, dtype=dtype)
    if config.tie_word_embeddings:
        head.weight = embed.weight
    return Decoder(config, embed=embed, blocks=blocks, norm=RMSNorm(size, eps=eps, **place), head=head)
