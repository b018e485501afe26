"""The operators: plain functions, and `ALL`, the tuple of every Op behind them."""

from tilewright.kernels.activation import gelu_mul, gelu_mul_op, silu_mul, silu_mul_op
from tilewright.kernels.attention import attention_op
from tilewright.kernels.block_scaled_linear import block_scaled_linear, block_scaled_linear_op
from tilewright.kernels.kv_cache import kv_cache_write, kv_cache_write_op
from tilewright.kernels.layer_norm import layer_norm, layer_norm_op
from tilewright.kernels.logprobs import token_logprobs, token_logprobs_op
from tilewright.kernels.matmul import linear_op, matmul
from tilewright.kernels.mixed_linear import mixed_linear, mixed_linear_op
from tilewright.kernels.mla import mla_attention, mla_attention_op
from tilewright.kernels.mla_write import mla_rope_write, mla_rope_write_op
from tilewright.kernels.mx_linear import mx_linear, mx_linear_op
from tilewright.kernels.paged_attention import paged_attention, paged_attention_op
from tilewright.kernels.quantize import quantize_rows, quantize_rows_op
from tilewright.kernels.quantize_blocks import quantize_blocks, quantize_blocks_op, quantize_mx, quantize_mx_op
from tilewright.kernels.quantize_fold import quantize_fold, quantize_fold_op
from tilewright.kernels.quantize_fused import add_rms_norm_quantize, rms_norm_quantize, silu_mul_quantize
from tilewright.kernels.quantize_tensor import quantize_static, quantize_static_op, quantize_tensor, quantize_tensor_op
from tilewright.kernels.rms_norm import add_rms_norm, add_rms_norm_op, rms_norm, rms_norm_op
from tilewright.kernels.rope import rope, rope_op
from tilewright.kernels.rope_kv_write import rope_kv_write, rope_kv_write_op
from tilewright.kernels.sample import sample, sample_op
from tilewright.kernels.scaled_linear import scaled_linear, scaled_linear_op
from tilewright.kernels.softmax import softmax, softmax_op
from tilewright.ops.attention import attention
from tilewright.ops.linear import linear
from tilewright.ops.sdpa import sdpa

__all__ = [
    "ALL",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "attention",
    "block_scaled_linear",
    "gelu_mul",
    "kv_cache_write",
    "layer_norm",
    "linear",
    "matmul",
    "mixed_linear",
    "mla_attention",
    "mla_rope_write",
    "mx_linear",
    "paged_attention",
    "quantize_blocks",
    "quantize_fold",
    "quantize_mx",
    "quantize_rows",
    "quantize_static",
    "quantize_tensor",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "sample",
    "scaled_linear",
    "sdpa",
    "silu_mul",
    "silu_mul_quantize",
    "softmax",
    "token_logprobs",
]

ALL = (
    add_rms_norm_op,
    attention_op,
    block_scaled_linear_op,
    gelu_mul_op,
    kv_cache_write_op,
    layer_norm_op,
    linear_op,
    mixed_linear_op,
    mla_attention_op,
    mla_rope_write_op,
    mx_linear_op,
    paged_attention_op,
    quantize_blocks_op,
    quantize_fold_op,
    quantize_mx_op,
    quantize_rows_op,
    quantize_static_op,
    quantize_tensor_op,
    rms_norm_op,
    rope_kv_write_op,
    rope_op,
    sample_op,
    scaled_linear_op,
    silu_mul_op,
    softmax_op,
    token_logprobs_op,
)
