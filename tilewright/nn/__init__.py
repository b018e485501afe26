"""Layers: `torch.nn.Module`s that hold weights and call `tilewright.ops`.

The arguments of a layer are sizes, a device and a dtype, never a model's config. Parameters are initialised like those of
torch.nn, and are trainable. Inside `unfilled()`, where `tilewright.models` builds models for a checkpoint, they are
uninitialised (this also works on "meta") and do not require gradients. docs/torch_nn.md lists the classes with torch.nn's names
and arguments, and their differences.
"""

from tilewright.nn.activation import (
    ELU,
    GELU,
    GLU,
    Dropout,
    Hardswish,
    LeakyReLU,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
)
from tilewright.nn.attention import Attention
from tilewright.nn.batch import Batch, Packed
from tilewright.nn.channel_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)
from tilewright.nn.clamped_moe import ClampedMoE
from tilewright.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from tilewright.nn.embedding import (
    Embedding,
    EmbeddingBag,
)
from tilewright.nn.expert_linear import ExpertLinear
from tilewright.nn.ffn import MLP, GatedMLP
from tilewright.nn.filling import unfilled
from tilewright.nn.keys_values import KeysValues, KVCache, LatentCache, PackedKeysValues, PagedKeysValues, ServedKeysValues
from tilewright.nn.linear import Linear
from tilewright.nn.lora import Lora, LoraStack, without_adapters
from tilewright.nn.loss import CrossEntropyLoss, LogSoftmax, Softmax
from tilewright.nn.mla import MLA
from tilewright.nn.moe import MoE, Routing
from tilewright.nn.multi_head import CrossAttention, Lengths, SelfAttention
from tilewright.nn.norm import LayerNorm, RMSNorm
from tilewright.nn.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    Upsample,
)
from tilewright.nn.rope import NoRotation, Rope

__all__ = [
    "ELU",
    "GELU",
    "GLU",
    "MLA",
    "MLP",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "Attention",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Batch",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "ClampedMoE",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossAttention",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "ExpertLinear",
    "GatedMLP",
    "GroupNorm",
    "Hardswish",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KVCache",
    "KeysValues",
    "LatentCache",
    "LayerNorm",
    "LeakyReLU",
    "Lengths",
    "Linear",
    "LogSoftmax",
    "Lora",
    "LoraStack",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "MoE",
    "NoRotation",
    "Packed",
    "PackedKeysValues",
    "PagedKeysValues",
    "RMSNorm",
    "ReLU",
    "Rope",
    "Routing",
    "SelfAttention",
    "ServedKeysValues",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "Upsample",
    "unfilled",
    "without_adapters",
]
