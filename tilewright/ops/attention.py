"""`attention` with gradients: the forward op, and the backward op if an input requires a gradient.

The forward pass saves q, k, v, the result and the log-sum-exp of each row (lse). The backward pass recomputes the softmax
weights from them (kernels/attention/backward/backward.py). q, k, v and sinks have gradients, with every mask, softcap and
ALiBi slope. An error is raised if ALiBi slopes require a gradient, or if any operand requires one together with `bias` or
`precision`. The returned lse is marked as not differentiable.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.attention.attention import attention as forward
from tilewright.kernels.attention.backward.backward import attention_backward_op
from tilewright.kernels.attention.biased import biased_attention
from tilewright.kernels.attention.checks import window_bounds
from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.ops.scaled_attention import scaled_attention

__all__ = ["attention"]


class _Attention(torch.autograd.Function):
    """(out, lse) of `attention`; differentiable in q, k, v and sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, cu_q: Tensor | None,
        cu_k: Tensor | None, max_q: int | None, max_k: int | None, prefix: int | Tensor | None, scale: float, causal: bool,
        deterministic: bool, window: int | tuple[int | None, int | None] | None, softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """torch disables autograd during this function."""
        out, lse = forward(
            q, k, v, causal=causal, scale=scale, cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, return_lse=True, window=window,
            prefix=prefix, softcap=softcap, sinks=sinks, alibi_slopes=slopes,
        )  # fmt: skip
        of_all, of_each = (0, prefix) if isinstance(prefix, Tensor) else (prefix or 0, None)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, of_each, sinks, slopes)
        ctx.lengths = (q.shape[-3] if max_q is None else max_q, k.shape[-3] if max_k is None else max_k)
        ctx.options = (scale, causal, deterministic, *window_bounds(window, causal), of_all)
        ctx.softcap = softcap
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """(gradients of q, k, v, sinks), and None for the rest."""
        q, k, v, out, lse, cu_q, cu_k, prefixes, sinks, slopes = ctx.saved_tensors
        if lse.dim() == 3:  # [B, H, S]; the op expects [H, B S]
            lse = lse.transpose(0, 1).flatten(1)
        # A gradient may be an expanded scalar, or a transposed view.
        do = grads[0] if grads[0].stride() == out.stride() else grads[0].contiguous()
        bends = (prefixes, ctx.softcap, sinks, slopes)
        dq, dk, dv, dsinks = attention_backward_op(
            do, q, k, v, out, lse.contiguous(), cu_q, cu_k, *ctx.lengths, *ctx.options, *bends
        )
        return dq, dk, dv, None if sinks is None else dsinks, *[None] * 11


def _with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None, others: dict[str, Any]) -> Tensor:
    if names := [name for name, value in others.items() if value is not None and value is not False]:
        raise ValueError(
            f"attention: bias cannot be combined with {', '.join(names)}; express these by the bias, or leave bias out"
        )
    if wants_gradient(q, k, v, bias):
        raise ValueError("attention: bias has no backward pass; call it under torch.no_grad(), or use torch's own attention")
    return biased_attention(q, k, v, bias, scale=scale)


def _check_order(q: Tensor, k: Tensor) -> None:
    """Raise a ValueError if the head counts show that operands are in the order of torch's own attention, [B, H, S, D]."""
    if q.dim() == 4 == k.dim() and k.shape[2] and q.shape[2] % k.shape[2] and k.shape[1] and not q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads; operands must "
            f"be [B, S, H, D], got q {list(q.shape)} and k {list(k.shape)}; for [B, H, S, D] call ops.sdpa, or "
            "transpose(1, 2)"
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, cu_q: Tensor | None = None,
    cu_k: Tensor | None = None, max_q: int | None = None, max_k: int | None = None, return_lse: bool = False,
    window: int | tuple[int | None, int | None] | None = None, prefix: int | Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, deterministic: bool = False, precision: str | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v for each head; sequences have equal length or are packed. For [B, H, S, D] use `ops.sdpa`.

    Args:
        q: [B, S, H, D] bf16, fp16 or fp32, D at most 256; or packed, [T, H, D]. The last dimension is dense.
        k: [B, SK, G, D], H a multiple of G; or packed, [TK, G, D].
        v: [B, SK, G, V], V at most 256; or packed, [TK, G, V].
        causal: each query sees the keys up to its own position; the last query is at the position of the last key.
        scale: factor on q . k, above 0; None for 1 / sqrt(D).
        cu_q: only for packed operands: int32 [B + 1]; sequence b is q[cu_q[b] : cu_q[b + 1]]. Not checked on a GPU.
        cu_k: the same for k and v.
        max_q, max_k: only for packed operands: upper bounds of the number of queries and of keys in a sequence.
        return_lse: also return lse, the log-sum-exp of the scores of each query.
        window: (left, right): a query sees `left` keys before its position and `right` after it; None: all on that side.
            A number w: its own position, w - 1 before it, and unless causal w - 1 after it.
        prefix: only with causal: every query also sees the first `prefix` keys of its sequence; int32 [B]: one for each.
        softcap: scores z become softcap * tanh(z / softcap); above 0.
        sinks: [H], floating point: for each head a further score in every softmax; the value that belongs to it is zero.
        alibi_slopes: float32 [H]: slope * |distance to the query's position| is subtracted from scores.
        deterministic: the same call always gives bitwise the same gradients, at a cost in time
            (docs/experiments/attention-backward.md). So does `torch.use_deterministic_algorithms(True)`.
        precision: "fp8" or "int8": quantise, then multiply 8-bit values (ops/scaled_attention.py). This is faster for long
            prompts and less exact. Forward only; the mask is causal or absent. None: products in the operands' dtype.
        bias: expandable to [B, H, S, SK]. Bool: True marks a key that is seen. Floating point: added to the scores. Forward
            only, not for packed operands, and not together with another mask; `scale` may then be any number.

    Returns:
        The weighted averages, in q's dtype, [B, S, H, V] or packed [T, H, V], contiguous. With `return_lse` also lse, float32,
        [B, H, S] or packed [H, T] (natural logarithm), which has no gradient. For a query that sees no key, the result is zero,
        and lse is its head's sink, or -inf without sinks.

    Raises:
        ValueError: shapes, dtypes, devices, strides, lengths or options do not fit, or an input for which there is no gradient
            requires one.
    """
    _check_order(q, k)
    lengths: Any = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max_q, "max_k": max_k}
    bends: Any = {"window": window, "prefix": prefix, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if bias is not None:
        others = {**lengths, **bends, "causal": causal, "return_lse": return_lse, "precision": precision}
        return _with_bias(q, k, v, bias, scale, others)
    if precision is not None:
        given = {**lengths, **bends, "return_lse": return_lse}
        return scaled_attention(q, k, v, precision, causal=causal, scale=scale, given=given)
    if not wants_gradient(q, k, v, sinks, alibi_slopes):
        return forward(q, k, v, causal=causal, scale=scale, return_lse=return_lse, **lengths, **bends)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("attention: alibi_slopes has no gradient; pass alibi_slopes.detach()")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    out, lse = _Attention.apply(  # pyright: ignore[reportGeneralTypeIssues]
        q, k, v, sinks, alibi_slopes, cu_q, cu_k, max_q, max_k, prefix, factor, causal, fixed, window, softcap
    )
    return (out, lse) if return_lse else out
