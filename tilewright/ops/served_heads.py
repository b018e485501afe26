"""Queries and keys computed exactly as the inference server does, but with gradients: training gets the same bits as serving.

The server normalises and rotates heads in one launch, which rounds once, and writes keys into pages (`rope_kv_write`). The same
op is used here with pages of one token. The written keys then have the layout [T, G, D], which attention over packed rows reads
without a copy.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.hw.device import device_of
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.paged.attention import paged_attention_op
from tilewright.kernels.attention.paged.rope_cache_write import rope_kv_write
from tilewright.kernels.elementwise.rope import rope
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.kernels.norm.backward import rms_norm_backward_op
from tilewright.op import Scope, scope

__all__ = ["paged_is_packed", "served_heads"]

# T tokens, H query heads, G key/value heads, D head dim


class _ServedHeads(torch.autograd.Function):
    """(q, k) normalised and rotated; differentiable once in q, k and the weights of the norms."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, positions: Tensor,
        slots: Tensor, cos_sin: Tensor, eps: float, interleaved: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """torch disables autograd during this function."""
        ctx.save_for_backward(q, k, q_norm, k_norm, positions, cos_sin)
        ctx.options = eps, interleaved
        keys, values = torch.empty(2, k.shape[0], k.shape[1], 1, k.shape[2], dtype=k.dtype, device=k.device).unbind()
        turned = rope_kv_write(q, k, v, positions, cos_sin, keys, values, slots, q_norm, k_norm, eps, interleaved)
        return turned, keys.view(k.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(gradient of q, gradient of k, None, gradients of the two norm weights), and None for the rest."""
        q, k, q_norm, k_norm, positions, cos_sin = ctx.saved_tensors
        eps, interleaved = ctx.options
        dq, dk = rope(grads[0].contiguous(), grads[1].contiguous(), positions, cos_sin, interleaved, True)
        of_q_norm = of_k_norm = None
        if q_norm is not None and k_norm is not None:
            dq, of_q_norm = rms_norm_backward_op(dq, rows_ready(q), q_norm, None, eps)
            dk, of_k_norm = rms_norm_backward_op(dk, rows_ready(k), k_norm, None, eps)
        return dq, dk, None, of_q_norm, of_k_norm, *[None] * 5


def served_heads(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The queries that `ops.rope_kv_write` returns and the keys that it writes, as tensors with gradients.

    Args:
        q: [T, H, D], bf16, fp16 or fp32. It may be a view of a merged projection, which is read without a copy.
        k, v: [T, G, D] of q's dtype.
        positions: [T] int64.
        slots: [T] int64, 0, 1, ... T - 1; all layers can share this tensor.
        cos_sin: [max_pos, 2, R/2] float32.
        q_norm, k_norm: [D], weights of an RMS norm of each head, applied before the rotation; None for no norm.
        eps: added to the mean square in these norms.
        interleaved: as in `ops.rope`.

    Returns:
        (q [T, H, D], k [T, G, D]), contiguous.
    """
    return _ServedHeads.apply(q, k, v, q_norm, k_norm, positions, slots, cos_sin, eps, interleaved)  # pyright: ignore[reportReturnType]


def paged_is_packed(q: Tensor, kv_heads: int, page_size: int, window: int | None, sinks: Tensor | None) -> bool:
    """Whether paged attention, in the active scope, computes exactly the same as `ops.attention` with a causal mask.

    This holds for the invariant Hopper kernels. Both have the same config, which depends on the head dim, and loop over blocks
    of keys that begin at the same positions. q: [T, H, D], the queries of either function.
    """
    return _one_loop(q.get_device(), q.dtype, q.shape[1], kv_heads, q.shape[2], page_size, window, sinks is not None, scope())


@lru_cache
def _one_loop(
    index: int, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_size: int, window: int | None, sinks: bool,
    within: Scope,
) -> bool:  # fmt: skip
    if not within.invariant:
        return False

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    q, k, cu = tensor(2, heads, dim), tensor(2, kv_heads, dim), tensor(2, kind=torch.int32)
    sink = tensor(heads) if sinks else None
    cache, table, left = tensor(1, kv_heads, page_size, dim), tensor(1, 1, kind=torch.int32), window and window - 1
    packed = attention_op.problem(q, k, k, cu, cu, 2, 2, 1.0, True, True, left, None, 0, None, None, sink)
    paged = paged_attention_op.problem(q, cache, cache, table, cu[:1], cu, 2, 1.0, window, None, None, sink)
    on = within.card or device_of(index)
    return (attention_op.choose(on, packed).impl.name, paged_attention_op.choose(on, paged).impl.name) == (
        "sm90_invariant", "invariant_sm90",
    )  # fmt: skip
