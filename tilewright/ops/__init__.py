"""The operators: plain functions, and `ALL`, the tuple of every Op behind them."""

from tilewright.kernels.activation import gated_mul_op, gelu_mul_op, silu_mul_op
from tilewright.kernels.add_layer_norm import add_layer_norm_op
from tilewright.kernels.attention import attention_op
from tilewright.kernels.attention_backward import attention_backward_op
from tilewright.kernels.batch_norm_backward import batch_norm_backward_op
from tilewright.kernels.batch_statistics import batch_statistics_op
from tilewright.kernels.biased_attention import biased_attention_op
from tilewright.kernels.block_scaled_linear import block_scaled_linear, block_scaled_linear_op
from tilewright.kernels.cast_linear import cast_linear, cast_linear_op
from tilewright.kernels.channels import channel_affine_op, channel_sums_op
from tilewright.kernels.conv import conv_op
from tilewright.kernels.conv_codes import conv_codes, conv_codes_op
from tilewright.kernels.conv_transpose import conv_transpose_op
from tilewright.kernels.conv_weight_gradient import conv_weight_gradient_op
from tilewright.kernels.cross_entropy import cross_entropy_gradient_in_place_op, cross_entropy_gradient_op, cross_entropy_op
from tilewright.kernels.dropout import dropout_op
from tilewright.kernels.edit_logits import edit_logits, edit_logits_op
from tilewright.kernels.embedding import embedding_bag_op
from tilewright.kernels.embedding_backward import embedding_backward_op
from tilewright.kernels.gated_backward import gated_backward_op
from tilewright.kernels.kv_cache import kv_cache_write, kv_cache_write_op
from tilewright.kernels.layer_norm import layer_norm_op
from tilewright.kernels.layer_norm_quantize import layer_norm_quantize, layer_norm_quantize_op
from tilewright.kernels.layer_norm_stats import layer_norm_stats_op
from tilewright.kernels.logprobs import token_logprobs, token_logprobs_op
from tilewright.kernels.matmul import linear_op, matmul
from tilewright.kernels.mixed_linear import mixed_linear, mixed_linear_op
from tilewright.kernels.mla import mla_attention, mla_attention_op
from tilewright.kernels.mla_write import mla_rope_write, mla_rope_write_op
from tilewright.kernels.mx_linear import mx_linear, mx_linear_op
from tilewright.kernels.norm_backward import layer_norm_backward_op, rms_norm_backward_op
from tilewright.kernels.normalize_channels import normalize_channels_op
from tilewright.kernels.optimizer.adamw import adamw_op
from tilewright.kernels.optimizer.adamw_8bit import adamw_8bit_op
from tilewright.kernels.optimizer.grad_norm import clip_scale_op, grad_squares_op
from tilewright.kernels.optimizer.sgd import momentum_op, sgd_op
from tilewright.kernels.paged_attention import paged_attention, paged_attention_op
from tilewright.kernels.paged_checks import check_paged
from tilewright.kernels.permute import permute_op
from tilewright.kernels.pointwise import activation_op
from tilewright.kernels.pointwise_backward import activation_backward_op
from tilewright.kernels.pooling import avg_pool_op, max_pool_op
from tilewright.kernels.pooling_backward import avg_pool_backward_op, max_pool_backward_op
from tilewright.kernels.quantize import quantize_rows, quantize_rows_op
from tilewright.kernels.quantize_blocks import quantize_blocks, quantize_blocks_op, quantize_mx, quantize_mx_op
from tilewright.kernels.quantize_fold import quantize_fold, quantize_fold_op
from tilewright.kernels.quantize_fused import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_op,
    rms_norm_quantize,
    rms_norm_quantize_op,
    silu_mul_quantize,
    silu_mul_quantize_op,
)
from tilewright.kernels.quantize_keys_values import quantize_keys_values_op
from tilewright.kernels.quantize_tensor import quantize_static, quantize_static_op, quantize_tensor, quantize_tensor_op
from tilewright.kernels.reduction import reduce_max_op, reduce_sum_op
from tilewright.kernels.rms_norm import add_rms_norm_op, rms_norm_op
from tilewright.kernels.rope import rope_op
from tilewright.kernels.rope_kv_write import rope_kv_write, rope_kv_write_op
from tilewright.kernels.sample import sample, sample_op
from tilewright.kernels.scale_in_place import scale_in_place_op
from tilewright.kernels.scaled_attention import scaled_attention_op
from tilewright.kernels.scaled_linear import scaled_linear, scaled_linear_op
from tilewright.kernels.softmax import log_softmax_op, softmax_op
from tilewright.kernels.softmax_backward import log_softmax_backward_op, softmax_backward_op
from tilewright.kernels.upsample import upsample_op
from tilewright.kernels.upsample_backward import upsample_backward_op
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
from tilewright.ops.linear import linear, linear_codes
from tilewright.ops.linear_cross_entropy import linear_cross_entropy
from tilewright.ops.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
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
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "argmax",
    "attention",
    "avg_pool",
    "batch_norm",
    "block_scaled_linear",
    "cast_linear",
    "check_paged",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_codes",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "dropout",
    "edit_logits",
    "embedding",
    "embedding_bag",
    "fold_batch_norm",
    "gated_mul",
    "gelu_mul",
    "glu",
    "group_norm",
    "instance_norm",
    "kv_cache_write",
    "layer_norm",
    "layer_norm_quantize",
    "linear",
    "linear_codes",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "max",
    "max_pool",
    "mean",
    "mixed_linear",
    "mla_attention",
    "mla_rope_write",
    "mx_linear",
    "paged_attention",
    "permute",
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
    "sum",
    "token_logprobs",
    "transpose",
    "upsample",
]

ALL = (
    activation_backward_op,
    activation_op,
    adamw_8bit_op,
    adamw_op,
    add_layer_norm_op,
    add_rms_norm_op,
    add_rms_norm_quantize_op,
    attention_backward_op,
    attention_op,
    avg_pool_backward_op,
    avg_pool_op,
    batch_norm_backward_op,
    batch_statistics_op,
    biased_attention_op,
    block_scaled_linear_op,
    cast_linear_op,
    channel_affine_op,
    channel_sums_op,
    clip_scale_op,
    conv_op,
    conv_codes_op,
    conv_transpose_op,
    conv_weight_gradient_op,
    cross_entropy_gradient_in_place_op,
    cross_entropy_gradient_op,
    cross_entropy_op,
    dropout_op,
    edit_logits_op,
    embedding_backward_op,
    embedding_bag_op,
    gated_backward_op,
    gated_mul_op,
    gelu_mul_op,
    grad_squares_op,
    kv_cache_write_op,
    layer_norm_backward_op,
    layer_norm_op,
    layer_norm_quantize_op,
    layer_norm_stats_op,
    linear_op,
    log_softmax_backward_op,
    log_softmax_op,
    max_pool_backward_op,
    max_pool_op,
    mixed_linear_op,
    mla_attention_op,
    mla_rope_write_op,
    momentum_op,
    mx_linear_op,
    normalize_channels_op,
    paged_attention_op,
    permute_op,
    quantize_blocks_op,
    quantize_fold_op,
    quantize_keys_values_op,
    quantize_mx_op,
    quantize_rows_op,
    quantize_static_op,
    quantize_tensor_op,
    reduce_max_op,
    reduce_sum_op,
    rms_norm_backward_op,
    rms_norm_op,
    rms_norm_quantize_op,
    rope_kv_write_op,
    rope_op,
    sample_op,
    scale_in_place_op,
    scaled_attention_op,
    scaled_linear_op,
    sgd_op,
    silu_mul_op,
    silu_mul_quantize_op,
    softmax_backward_op,
    softmax_op,
    token_logprobs_op,
    upsample_backward_op,
    upsample_op,
)
