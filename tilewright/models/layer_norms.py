"""Dense decoders with layer norms, which subtract the mean. Everything follows the models' code in transformers."""

from functools import partial
from typing import Any

import torch
from torch import nn

from tilewright.models.blocks import ParallelBlock, PositionedBlock, ScaledLayerNorm
from tilewright.models.config import ModelConfig
from tilewright.models.decoder import Block, Decoder, FeedForward
from tilewright.models.frame import MakeNorm, frame, pre_norm
from tilewright.nn import Attention, Embedding, LayerNorm, Linear, unfilled

__all__ = ["cohere", "gpt2", "gpt_neox", "nemotron", "opt", "phi", "stablelm", "starcoder2"]


def _parallel(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
    return ParallelBlock(attn_norm=norm(), attn=attn, ffn=ffn)


def _parallel_norms(attn: Attention, ffn: FeedForward, norm: MakeNorm) -> nn.Module:
    return ParallelBlock(attn_norm=norm(), attn=attn, ffn_norm=norm(), ffn=ffn)


def cohere(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Command R and R7B (Cohere, 2024): parallel blocks, norms without biases, rotated neighbouring pairs, a factor on logits.

    Command R7B has windows in some layers, and the others have no rotary positions: both follow from the config.
    """
    bias, plain = config.attention_bias, {"bias": False, "eps": config.rms_norm_eps}
    with unfilled():
        norm = ScaledLayerNorm(config.hidden_size, scale=config.logit_scale, device=device, dtype=dtype, **plain)
    return frame(
        config, device, dtype, qkv_bias=bias, out_bias=bias, block=_parallel, norms=partial(LayerNorm, bias=False), norm=norm,
        interleaved=True,
    )  # fmt: skip


def stablelm(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """StableLM 2 and its 3B (Stability AI, 2023 and 2024): a part of each head is rotated; blocks may be parallel."""
    block = _parallel if config.parallel_blocks else pre_norm
    return frame(config, device, dtype, qkv_bias=config.attention_bias, block=block, norms=LayerNorm)


def starcoder2(config: ModelConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Decoder:
    """StarCoder2 (Lozhkov et al., 2024): biases on all projections or none, feed-forward layers without a gate."""
    bias = config.attention_bias
    return frame(config, device, dtype, qkv_bias=bias, out_bias=bias, mlp_bias=config.mlp_bias, norms=LayerNorm, **more)


def gpt_neox(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """GPT-NeoX-20B and Pythia (Black et al., 2022; Biderman et al., 2023): as `starcoder2`, with a part of each head rotated;
    blocks may be parallel."""
    return starcoder2(config, device, dtype, block=_parallel_norms if config.parallel_blocks else pre_norm)


def phi(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Phi-1, 1.5 and 2 (Li et al., 2023): as `starcoder2`, with parallel blocks and a bias on the logits."""
    with unfilled():
        head = Linear(config.hidden_size, config.vocab_size, bias=True, device=device, dtype=dtype)
    return starcoder2(config, device, dtype, block=_parallel, head=head)


def nemotron(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Nemotron-4 and Minitron (NVIDIA, 2024): as `starcoder2`, with squared relus and a part of each head rotated.

    Checkpoints store the weights of norms minus 1. They are float32 here, because that 1 is added (names.py).
    """
    return starcoder2(config, device, dtype, norm_dtype=torch.float32)


def gpt2(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """GPT-2 (Radford et al., 2019): learned positions instead of rotations."""
    return _positioned(starcoder2(config, device, dtype), config.max_position_embeddings)


def opt(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """OPT (Zhang et al., 2022): as `gpt2`; two rows before the first position are not used."""
    return _positioned(starcoder2(config, device, dtype), config.max_position_embeddings, 2)


@unfilled()
def _positioned(model: Decoder, longest: int, offset: int = 0) -> Decoder:
    """The model with learned positions in its first block."""
    first, weight = model.blocks[0], model.embed.weight
    assert isinstance(first, Block)
    positions = Embedding(longest + offset, weight.shape[1], device=weight.device, dtype=weight.dtype)
    model.blocks[0] = PositionedBlock(
        positions=positions, offset=offset, attn_norm=first.attn_norm, attn=first.attn, ffn_norm=first.ffn_norm, ffn=first.ffn
    )
    return model
