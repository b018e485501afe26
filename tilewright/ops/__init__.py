"""The operators as plain functions, and `ALL`, the tuple of the `Op`s that they use."""
# ruff: noqa: F401 (an imported Op is used: it becomes part of ALL)

from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.backward.backward import attention_backward_op
from tilewright.kernels.attention.biased import biased_attention_op
from tilewright.kernels.attention.fp8.attention import scaled_attention_op
from tilewright.kernels.attention.fp8.quantize_kv import quantize_keys_values_op
from tilewright.kernels.attention.mla.attention import mla_attention_op
from tilewright.kernels.attention.mla.rope_cache_write import mla_rope_write_op
from tilewright.kernels.attention.paged.attention import capped_paged_attention_op, paged_attention_op
from tilewright.kernels.attention.paged.cache_write import kv_cache_write_op
from tilewright.kernels.attention.paged.decode_inputs import decode_inputs, decode_inputs_op
from tilewright.kernels.attention.paged.rope_cache_write import rope_kv_write_op
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.int8 import conv_codes, conv_codes_op
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.weight_gradient.conv_weight_gradient import conv_weight_gradient_op
from tilewright.kernels.dedup.band_keys import band_keys, band_keys_op
from tilewright.kernels.dedup.minhash import minhash, minhash_op
from tilewright.kernels.elementwise.activation import activation_op
from tilewright.kernels.elementwise.activation_backward import activation_backward_op
from tilewright.kernels.elementwise.dropout import dropout_op
from tilewright.kernels.elementwise.glu import gated_mul_op, gelu_mul_op, silu_mul_op
from tilewright.kernels.elementwise.glu_backward import gated_backward_op
from tilewright.kernels.elementwise.rope import rope_op
from tilewright.kernels.elementwise.scale_in_place import scale_in_place_op
from tilewright.kernels.embedding.embedding_backward import embedding_backward_op
from tilewright.kernels.embedding.embedding_bag import embedding_bag_op
from tilewright.kernels.experts.combine import combine_gradient_op, combine_tokens_op
from tilewright.kernels.experts.permute import permute_tokens_op
from tilewright.kernels.experts.route import route_experts_op
from tilewright.kernels.experts.sort import sort_by_expert_op
from tilewright.kernels.gemm.grouped.block_scaled import grouped_block_scaled_linear, grouped_block_scaled_linear_op
from tilewright.kernels.gemm.grouped.linear import grouped_linear_op
from tilewright.kernels.gemm.grouped.row_scaled import grouped_scaled_linear, grouped_scaled_linear_op
from tilewright.kernels.gemm.grouped.weight_gradient import grouped_weight_gradient_op
from tilewright.kernels.gemm.grouped.weight_only import grouped_mixed_linear, grouped_mixed_linear_op
from tilewright.kernels.gemm.linear import linear_op, matmul
from tilewright.kernels.gemm.lora.expand import lora_expand_add, lora_expand_add_op
from tilewright.kernels.gemm.lora.expand_silu_mul import lora_expand_silu_mul, lora_expand_silu_mul_op
from tilewright.kernels.gemm.lora.shrink import adapter_order, lora_shrink, lora_shrink_op
from tilewright.kernels.gemm.quantized.block_scaled import block_scaled_linear, block_scaled_linear_op
from tilewright.kernels.gemm.quantized.mx import mx_linear, mx_linear_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear, cast_linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear, scaled_linear_op
from tilewright.kernels.gemm.weight_only.linear import mixed_linear, mixed_linear_op
from tilewright.kernels.layout.permute import permute_op
from tilewright.kernels.norm.add_layer_norm import add_layer_norm_op
from tilewright.kernels.norm.backward import layer_norm_backward_op, rms_norm_backward_op
from tilewright.kernels.norm.channel.append_affine import append_affine_op
from tilewright.kernels.norm.channel.batch_norm_apply import normalize_channels_op
from tilewright.kernels.norm.channel.batch_norm_backward import batch_norm_backward_op
from tilewright.kernels.norm.channel.batch_statistics import batch_statistics_op
from tilewright.kernels.norm.channel.group_norm import group_norm_op
from tilewright.kernels.norm.channel.sums_and_affine import channel_affine_op, channel_sums_op
from tilewright.kernels.norm.layer_norm import layer_norm_op, layer_norm_stats_op
from tilewright.kernels.norm.rms_norm import add_rms_norm_op, rms_norm_op
from tilewright.kernels.optimizer.adamw import adamw_op
from tilewright.kernels.optimizer.adamw_8bit import adamw_8bit_op
from tilewright.kernels.optimizer.grad_norm import clip_scale_op, grad_squares_op
from tilewright.kernels.optimizer.pack import pack_tensors_op
from tilewright.kernels.optimizer.sgd import momentum_op, sgd_op
from tilewright.kernels.quantize.both_ways import quantize_both_ways, quantize_both_ways_op
from tilewright.kernels.quantize.fused import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_op,
    rms_norm_quantize,
    rms_norm_quantize_op,
    silu_mul_quantize,
    silu_mul_quantize_op,
)
from tilewright.kernels.quantize.layer_norm_fused import layer_norm_quantize, layer_norm_quantize_op
from tilewright.kernels.quantize.mx_to_block import quantize_fold, quantize_fold_op
from tilewright.kernels.quantize.per_block import quantize_blocks, quantize_blocks_op, quantize_mx, quantize_mx_op
from tilewright.kernels.quantize.per_row import quantize_rows, quantize_rows_op
from tilewright.kernels.quantize.per_tensor import quantize_static, quantize_static_op, quantize_tensor, quantize_tensor_op
from tilewright.kernels.reduce.reduction import reduce_max_op, reduce_sum_op
from tilewright.kernels.sampling.edit_logits import edit_logits, edit_logits_op
from tilewright.kernels.sampling.mask_logits import mask_logits, mask_logits_op
from tilewright.kernels.sampling.sample import sample, sample_op
from tilewright.kernels.sampling.token_logprobs import token_logprobs, token_logprobs_op, top_logprobs, top_logprobs_op
from tilewright.kernels.softmax.backward import log_softmax_backward_op, softmax_backward_op
from tilewright.kernels.softmax.cross_entropy import (
    cross_entropy_gradient_in_place_op,
    cross_entropy_gradient_op,
    cross_entropy_op,
)
from tilewright.kernels.softmax.softmax import log_softmax_op, softmax_op
from tilewright.kernels.spatial.pooling import avg_pool_op, max_pool_op
from tilewright.kernels.spatial.pooling_backward import avg_pool_backward_op, max_pool_backward_op
from tilewright.kernels.spatial.upsample import upsample_op
from tilewright.kernels.spatial.upsample_backward import upsample_backward_op
from tilewright.op import Op
from tilewright.ops.arguments import in_words
from tilewright.ops.attention import attention
from tilewright.ops.channel_norms import batch_norm, group_norm, instance_norm
from tilewright.ops.conv import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    fold_batch_norm,
)
from tilewright.ops.cross_entropy import cross_entropy
from tilewright.ops.embedding import embedding, embedding_bag
from tilewright.ops.experts import (
    ByExpert,
    combine_tokens,
    grouped_linear,
    masked_grouped_linear,
    permute_tokens,
    route_experts,
    sort_by_expert,
)
from tilewright.ops.linear import linear, linear_quantize
from tilewright.ops.linear_cross_entropy import linear_cross_entropy
from tilewright.ops.linear_fp8 import linear_fp8
from tilewright.ops.linear_straight_through import linear_straight_through
from tilewright.ops.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tilewright.ops.paged import (
    check_paged,
    kv_cache_write,
    mla_attention,
    mla_rope_write,
    paged_attention,
    rope_kv_write,
)
from tilewright.ops.permute import permute, transpose
from tilewright.ops.pointwise import activation, dropout, gated_mul, gelu_mul, glu, rope, silu_mul
from tilewright.ops.pooling import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool
from tilewright.ops.reduction import argmax, max, mean, sum
from tilewright.ops.sdpa import sdpa
from tilewright.ops.softmax import log_softmax, softmax
from tilewright.ops.upsample import upsample

__all__ = [
    "ALL",
    "activation",
    "adapter_order",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "argmax",
    "attention",
    "avg_pool",
    "band_keys",
    "batch_norm",
    "block_scaled_linear",
    "cast_linear",
    "check_paged",
    "combine_tokens",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_codes",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "decode_inputs",
    "dropout",
    "edit_logits",
    "embedding",
    "embedding_bag",
    "fold_batch_norm",
    "gated_mul",
    "gelu_mul",
    "glu",
    "group_norm",
    "grouped_block_scaled_linear",
    "grouped_linear",
    "grouped_mixed_linear",
    "grouped_scaled_linear",
    "instance_norm",
    "kv_cache_write",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_quantize",
    "linear_straight_through",
    "log_softmax",
    "lora_expand_add",
    "lora_expand_silu_mul",
    "lora_shrink",
    "mask_logits",
    "masked_grouped_linear",
    "matmul",
    "max",
    "max_pool",
    "mean",
    "minhash",
    "mixed_linear",
    "mla_attention",
    "mla_rope_write",
    "mx_linear",
    "paged_attention",
    "permute",
    "permute_tokens",
    "quantize_blocks",
    "quantize_both_ways",
    "quantize_fold",
    "quantize_mx",
    "quantize_rows",
    "quantize_static",
    "quantize_tensor",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "route_experts",
    "sample",
    "scaled_linear",
    "sdpa",
    "silu_mul",
    "silu_mul_quantize",
    "softmax",
    "sort_by_expert",
    "sum",
    "token_logprobs",
    "top_logprobs",
    "transpose",
    "upsample",
]

ALL: tuple[Op, ...] = tuple(sorted({value for value in globals().values() if isinstance(value, Op)}, key=lambda op: op.name))
"""Every `Op` that is imported above. Importing it here includes it in tests, certificates, tuning and benchmarks."""

globals().update({name: in_words(globals()[name]) for name in __all__ if name != "ALL"})
