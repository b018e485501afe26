"""The operators: plain functions, and `ALL`, the tuple of every Op behind them."""

from tilewright.kernels.activation import gelu_mul, gelu_mul_op, silu_mul, silu_mul_op
from tilewright.kernels.kv_cache import kv_cache_write, kv_cache_write_op, rope_kv_write, rope_kv_write_op
from tilewright.kernels.paged_attention import paged_attention, paged_attention_op
from tilewright.kernels.rms_norm import add_rms_norm, add_rms_norm_op, rms_norm, rms_norm_op
from tilewright.kernels.rope import rope, rope_op

__all__ = [
    "ALL",
    "add_rms_norm",
    "gelu_mul",
    "kv_cache_write",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "silu_mul",
]

ALL = (add_rms_norm_op, gelu_mul_op, kv_cache_write_op, paged_attention_op, rms_norm_op, rope_kv_write_op, rope_op, silu_mul_op)
