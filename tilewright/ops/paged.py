"""Attention over a paged cache and the operators that write to it, re-exported with the helpers that layers and engine need."""

from tilewright.kernels.attention.mla.attention import mla_attention
from tilewright.kernels.attention.mla.rope_cache_write import mla_rope_write
from tilewright.kernels.attention.paged.attention import CODES, FEW_QUERIES, paged_attention
from tilewright.kernels.attention.paged.cache_write import kv_cache_write
from tilewright.kernels.attention.paged.checks import check_paged
from tilewright.kernels.attention.paged.rope_cache_write import rope_kv_write

__all__ = [
    "CODES",
    "FEW_QUERIES",
    "check_paged",
    "kv_cache_write",
    "mla_attention",
    "mla_rope_write",
    "paged_attention",
    "rope_kv_write",
]
