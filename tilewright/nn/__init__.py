"""Layers: `torch.nn.Module`s that hold weights and call `tilewright.ops`; forward only, so no parameter asks for a gradient.

A layer takes sizes, a device and a dtype, never a model's config. Its parameters are created uninitialised (on "meta" too);
`tilewright.models` fills them.
"""

from tilewright.nn.attention import Attention
from tilewright.nn.batch import Batch, KVCache, LatentCache
from tilewright.nn.embedding import Embedding
from tilewright.nn.ffn import GatedMLP
from tilewright.nn.linear import Linear
from tilewright.nn.mla import MLA
from tilewright.nn.moe import MoE, Routing
from tilewright.nn.multi_head import CrossAttention, Lengths, SelfAttention
from tilewright.nn.norm import LayerNorm, RMSNorm
from tilewright.nn.rope import Rope

__all__ = [
    "MLA",
    "Attention",
    "Batch",
    "CrossAttention",
    "Embedding",
    "GatedMLP",
    "KVCache",
    "LatentCache",
    "LayerNorm",
    "Lengths",
    "Linear",
    "MoE",
    "RMSNorm",
    "Rope",
    "Routing",
    "SelfAttention",
]
