"""The structure that decoder families share: embedding, blocks of attention and a feed-forward layer, a norm, a head.

A builder (dense.py, mixtures.py, layer_norms.py) passes what is specific to its family. Windows, wavelengths, tied weights and
factors come from the config.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Block, Decoder, FeedForward, Norm
from tilewright.nn import MLP, Attention, Embedding, GatedMLP, Linear, NoRotation, RMSNorm, Rope, unfilled

__all__ = ["MakeBlock", "MakeFeedForward", "MakeNorm", "frame", "head_place", "pre_norm"]

MakeNorm = Callable[[], Norm]
MakeBlock = Callable[[Attention, FeedForward, MakeNorm], nn.Module]
MakeFeedForward = Callable[[int], FeedForward]


def pre_norm(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
    """The usual block."""
    return Block(attn_norm=norm(), attn=attn, ffn_norm=norm(), ffn=ffn)


class _Positions:
    """The tables of angles that the layers of a model share."""

    def __init__(self, config: ModelConfig, device: torch.device, interleaved: bool, norm_after_rotation: bool):
        self.unrotated, self.late_norms = set(config.unrotated), norm_after_rotation
        longest = config.max_position_embeddings
        table: dict[str, Any] = {"max_positions": longest, "interleaved": interleaved, "device": device}
        used = config.ropes if len(self.unrotated) < config.num_hidden_layers else ()
        self.ropes = [Rope(config.rotated_dim, base=theta, scaling=scaling, **table) for theta, scaling in used]
        self.still = None
        if norm_after_rotation or self.unrotated:
            self.still = NoRotation(max_positions=longest, device=device)

    def of(self, layer: int, window: int | None) -> dict[str, Any]:
        """Arguments of a layer's `nn.Attention`. Layers with a window may have other wavelengths."""
        rope = self.still if layer in self.unrotated else self.ropes[0 if window is None else -1]
        return {"rope": self.still, "early_rope": rope} if self.late_norms else {"rope": rope}


@unfilled()
def frame(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    mlp_bias: bool = False,
    block: MakeBlock = pre_norm,
    feed_forward: MakeFeedForward | None = None,
    embed: Embedding | None = None,
    norms: Callable[..., Norm] = RMSNorm,
    norm: Norm | None = None,
    head: Linear | None = None,
    norm_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    norm_after_rotation: bool = False,
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
        norms: makes a norm, from its size and eps.
        norm: the last norm; None: one like the others.
        head: the head; None: the plain one. A tied one shares the embedding's parameter.
        norm_dtype: of the norms' weights; None: as the others.
        interleaved: whether neighbouring dims are rotated together.
        norm_after_rotation: whether norms over heads come after the rotation and not before it.
        attention: arguments of `nn.Attention` that differ between families.
    """
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    size, positions = config.hidden_size, _Positions(config, device, interleaved, norm_after_rotation)
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    heads |= {"scale": config.attention_scale, "softcap": config.attention_softcap, "norm_dtype": norm_dtype}

    def plain_norm() -> Norm:
        return norms(size, eps=config.rms_norm_eps, device=device, dtype=norm_dtype or dtype)

    def plain_ffn(layer: int) -> FeedForward:
        kind = GatedMLP if config.gated else MLP
        return kind(size, config.intermediate_size, activation=config.activation, bias=mlp_bias, **place)

    blocks = []
    for layer, window in enumerate(config.windows):
        attn = Attention(size, **heads, **positions.of(layer, window), window=window, **attention, **place)
        blocks.append(block(attn, (feed_forward or plain_ffn)(layer), plain_norm))
    embed = embed or Embedding(config.vocab_size, size, **place)
    head = head or Linear(size, config.vocab_size, bias=False, **head_place(config, device, dtype))
    if config.tie_word_embeddings:
        head.weight = embed.weight
    return Decoder(config, embed=embed, blocks=blocks, norm=norm or plain_norm(), head=head)


def head_place(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The device of a head: "meta" if it will share the embedding's parameter."""
    return {"device": "meta" if config.tie_word_embeddings else device, "dtype": dtype}
