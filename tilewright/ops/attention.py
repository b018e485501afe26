"""`attention` with gradients: the forward op, and where one is asked for, the backward op behind it.

The forward pass keeps q, k, v, its result and one logarithm a row; the backward pass computes the weights again
(kernels/attention_backward.py). Gradients are those of q, k and v. Not differentiable, and refused with a sentence: windows,
prefixes, soft caps, sinks, ALiBi, values that are narrower than keys, and lse as an input of what follows.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.attention import attention as forward
from tilewright.kernels.attention_backward import attention_backward_op

__all__ = ["attention"]


class _Attention(torch.autograd.Function):
    """(out, lse) of `attention`, differentiable in q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None,
        max_k: int | None, scale: float, causal: bool, deterministic: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Runs without gradients, as torch does inside of a Function."""
        out, lse = forward(q, k, v, causal=causal, scale=scale, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.options = (
            q.shape[-3] if max_q is None else max_q,
            k.shape[-3] if max_k is None else max_k,
            scale,
            causal,
            deterministic,
        )
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """(of q, of k, of v), and nothing for the rest."""
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        if lse.dim() == 3:  # [B, H, S], and the op has [H, B S]
            lse = lse.transpose(0, 1).flatten(1)
        # A gradient may be an expanded scalar, or come from a transposed view.
        do = grads[0] if grads[0].stride() == out.stride() else grads[0].contiguous()
        dq, dk, dv = attention_backward_op(do, q, k, v, out, lse.contiguous(), cu_q, cu_k, *ctx.options)
        return dq, dk, dv, None, None, None, None, None, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, cu_q: Tensor | None = None,
    cu_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None, return_lse: bool = False,
    window: int | tuple[int | None, int | None] | None = None, prefix: int | Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v for each head, over sequences of equal length, or packed ones of any length.

    Args:
        q: [B, S, H, D] bf16, fp16 or fp32, D at most 256; or packed, [T, H, D]. The last dimension is dense.
        k: [B, SK, G, D], H a multiple of G; or packed, [TK, G, D].
        v: [B, SK, G, V], V at most 256; or packed, [TK, G, V].
        causal: each query sees the keys up to its own; the last query's is the last key.
        scale: factor on q . k, above 0; None for 1 / sqrt(D).
        cu_q: for packed operands: int32 [B + 1], sequence b has rows cu_q[b] .. cu_q[b + 1] of q. On a GPU it is trusted.
        cu_k: the same for k and v.
        max_q: for packed operands: the longest sequence's queries, or more.
        max_k: the same for its keys.
        return_lse: also return the logarithms of the softmax's sums.
        window: (left, right): a query sees the keys from `left` before its own to `right` behind it, None for all on that side.
            One number w: its own and w - 1 before it, and as many behind it unless causal.
        prefix: with causal: every query also sees the first `prefix` keys of its sequence; int32 [B] for one number each.
        softcap: scores z become softcap * tanh(z / softcap); above 0.
        sinks: [H], floating point: a score that joins each softmax of the head and whose value is zero.
        alibi_slopes: float32 [H]: scores lose slope * |distance to the query's own key|.
        deterministic: whether the same gradients must come out of the same call every time, at a price
            (docs/log.md#attention-backward). So does `torch.use_deterministic_algorithms(True)`.

    Returns:
        The averages, in q's dtype, [B, S, H, V] or packed [T, H, V], contiguous. With `return_lse` also lse, float32, [B, H, S]
        or packed [H, T] (natural logarithm), which has no gradient. A query that sees no key gives zeros and -inf, or its
        head's sink.

    Raises:
        ValueError: shapes, dtypes, devices, strides, lengths, the scale, or what bends the scores do not fit; or a gradient is
            asked for that there is none of.
    """
    bends = {"window": window, "prefix": prefix, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    lengths: Any = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max_q, "max_k": max_k}
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs):
        return forward(q, k, v, causal=causal, scale=scale, return_lse=return_lse, **lengths, **bends)
    if given := [name for name, value in bends.items() if value is not None]:
        raise ValueError(f"attention: there is no gradient with {', '.join(given)} yet; call it under torch.no_grad()")
    if v.shape != k.shape:
        raise ValueError(f"attention: a gradient wants v as k is, got {list(v.shape)} and {list(k.shape)}")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    out, lse = _Attention.apply(q, k, v, cu_q, cu_k, max_q, max_k, factor, causal, fixed)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, lse) if return_lse else out
