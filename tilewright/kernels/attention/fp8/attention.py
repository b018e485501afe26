"""Attention over 8-bit codes: `attention` for long prompts, with both products in 8 bits, or only the first.

    # B sequences, S queries, SK keys padded to PK rows, H query heads, G key/value heads, D head dim
    q8[s] = round(q[s] / q_scale[s]),  q_scale[s] = max |q[s]| / largest          (largest 448 or 127)
    z[s, t] = (q8[s] . k[t]) * q_scale[s] * k_scale[t // 128] * scale * log2(e)     m[s] = ceil(max_t z[s, t])
    out[s] = sum_t p[s, t] v[t] / sum_t p[s, t]                                     p[s, t] = exp2(z[s, t] - m[s])

q [B, S, H, D] is bf16 or fp16. Keys and values are the output of quantize_kv.py, which describes their memory layout; rows
from SK on are padding. Queries are quantised here, row by row, since each is read once. Causal masks align the last query with
the last key; a query that sees no key gives zeros. There are two formats, distinguished by v_scale:

    fp8     q8, k and v are float8 e4m3. Weights are also rounded to float8, as 2^8 p: e4m3 has 3 mantissa bits from 2^-6 to
    448,
            so a weight keeps them down to 2^-14 of the largest
    int8    q8 and k are int8, with exact products in int32; v has the result's dtype, to which weights are rounded

**Why maxima are whole numbers.** A kernel sees the keys in blocks, and rounds the weights of a block relative to the maximum
known so far. Relative to any power of two the rounded mantissas are the same. So they do not depend on the blocks or their
order, this definition can specify them, and corrections of earlier sums are exact. Sums of weights are not rounded.

**The error of 8 bits.** e4m3 keeps 4 significant bits, an RMS error of 2.6 % per number; the errors of many keys average out,
as the values themselves do. int8 scores are more exact if no channel has much larger values than the others, because the codes
of a block are evenly spaced. Hopper adds float8 products with some 14 bits; docs/log.md#8-bits has the figures.

Limited by the tensor cores, and on Hopper equally by the exponentials: at D = 128 an SM needs 1024 cycles for the 8-bit
products of 128 x 128 scores, and 1024 for their exponentials. The implementations, best first:

    sm90      Hopper, fp8, D 64 and 128 (sm90_kernel.py)
    triton    sm_80 and up for int8, sm_89 and up for fp8 (tile.py)

Not supported: packed sequences, windows and other options that change scores, the log-sum-exp (smoothed keys change it),
gradients.
"""

import math

import torch
from torch import Tensor

from tilewright.formats import FORMATS
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.fp8.inputs import scaled_attention_arguments
from tilewright.kernels.attention.fp8.layout import KEYS, SMALLEST, key_order, padded_rows, problem_of
from tilewright.kernels.attention.fp8.sm90 import SM90
from tilewright.kernels.attention.fp8.tile import TRITON
from tilewright.kernels.attention.problem import LOG2_E, pairs_seen
from tilewright.op import Example, Inputs, Op

__all__ = ["scaled_attention_op"]

# ---- reference


def _decoded(codes: Tensor, scale: Tensor, wide: torch.dtype) -> Tensor:
    """[B, G, PK, D] of codes times their block's scale."""
    return codes.to(wide) * scale.to(wide).repeat_interleave(KEYS, 2)[..., None]


def _coded_queries(q: Tensor, codes: torch.dtype, wide: torch.dtype) -> Tensor:
    """Rows of q [B, H, S, D], rounded to the numbers that their codes represent. The rounding is float32 for every dtype."""
    largest = FORMATS["int8" if codes == torch.int8 else "fp8"].largest
    q = q.float()
    amax = q.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    scaled = q * torch.full_like(amax, largest).div(amax)  # `largest / amax` would round twice
    rounded = scaled.round() if codes == torch.int8 else scaled.to(codes)
    return rounded.to(wide) * (amax / largest).to(wide)


def _values(v: Tensor, v_scale: Tensor | None, wide: torch.dtype) -> Tensor:
    """[B, G, PK, D] (or [B, G, SK, D] if the values are not codes), in the order of the keys."""
    if v_scale is None:
        return v.to(wide).transpose(1, 2)
    of_key = key_order(v.shape[3], v.device).argsort()
    return _decoded(v.to(wide).mT[:, :, of_key], v_scale, wide)


def _rounded(weights: Tensor, coded: bool, dtype: torch.dtype) -> Tensor:
    """Weights, rounded as for the second product."""
    if coded:
        return (weights * 256.0).float().to(torch.float8_e4m3fn).to(weights.dtype) / 256.0
    return weights.to(dtype).to(weights.dtype)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor | None, keys: int, scale: float, causal: bool
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    coded = v_scale is not None
    queries, shared = q.shape[1], q.shape[2] // k.shape[1]
    of_q = _coded_queries(q.transpose(1, 2), torch.float8_e4m3fn if coded else torch.int8, wide)
    of_k = _decoded(k, k_scale, wide)[:, :, :keys].repeat_interleave(shared, 1)
    of_v = _values(v, v_scale, wide)[:, :, :keys].repeat_interleave(shared, 1)
    scores = of_q @ of_k.mT * (scale * LOG2_E)
    if causal:
        own = torch.arange(keys - queries, keys, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > own, -math.inf)
    if not keys:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    top = scores.amax(-1, keepdim=True).ceil()
    weights = (scores - top.masked_fill(top == -math.inf, 0.0)).exp2()
    total = weights.sum(-1, keepdim=True)
    out = _rounded(weights, coded, v.dtype) @ of_v / total.masked_fill(total == 0.0, 1.0)
    return out.transpose(1, 2).to(q.dtype).contiguous()


# ---- cost and examples


def _cost(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor | None, keys: int, scale: float, causal: bool
) -> Cost:
    batch, queries, heads, dim = q.shape
    pairs = batch * heads * pairs_seen(queries, keys, None, 0 if causal else None)
    return Cost(flops=4 * pairs * dim, bytes=2 * q.nbytes + k.nbytes + v.nbytes)


@Example.of
def _example(
    inputs: Inputs, format: str, queries: int, keys: int, heads: tuple[int, int] = (2, 1), dim: int = 64, batch: int = 1,
    causal: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> tuple[object, ...]:  # fmt: skip
    h, g = heads
    q, k, v, k_scale, v_scale, *rest = scaled_attention_arguments(
        inputs, B=batch, Q=queries, KV=keys, H=h, G=g, D=dim, causal=causal, format=format, dtype=dtype
    )
    # The padding that the quantiser writes. It must not reach a result.
    k[:, :, keys:] = 0
    if v_scale is not None:
        hidden = (key_order(padded_rows(keys), v.device) < keys).to(v.device)
        v = (v.float() * hidden).to(v.dtype)
        steps = torch.arange(v_scale.numel(), device=v.device).view(v_scale.shape) % 3
        v_scale = v_scale * 2.0**steps  # powers of two, not all equal
    return q, k, v, k_scale, v_scale, *rest


EXAMPLES = (
    _example("full", "fp8", 130, 300, dim=128),
    _example("causal", "fp8", 140, 140, (4, 2), causal=True),
    _example("few queries", "fp8", 3, 200, (1, 1), causal=True, dtype=torch.float16),
    _example("no key seen", "fp8", 150, 20, (1, 1), causal=True),
    _example("int8", "int8", 70, 200, (2, 1), 64, batch=2),
    _example("int8 causal", "int8", 130, 130, (1, 1), 128, causal=True, dtype=torch.float16),
    _example("int8 no key seen", "int8", 66, 20, (1, 1), 32, causal=True),
    _example("no keys", "fp8", 3, 0, (1, 1)),
)


scaled_attention_op = Op(
    name="scaled_attention",
    reference=_reference,
    problem=problem_of,
    cost=_cost,
    examples=EXAMPLES,
    impls=(SM90, TRITON),
    make=scaled_attention_arguments,
    fake=lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    rows_in_problem=True,
    roundings=2,  # the weights, then the result
    codes_inside=True,
)
