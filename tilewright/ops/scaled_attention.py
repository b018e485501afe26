"""`attention` in 8 bits, for long prompts. Two launches: quantise keys and values, then attention with the quantised operands.

Forward only. It runs only if the caller requests it with `ops.attention(precision=...)`. kernels/attention/fp8/quantize_kv.py
and kernels/attention/fp8/attention.py describe what is rounded and how exact the result is; measurements are in
docs/experiments/attention-8bit.md.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.kernels.attention.checks import check_operands
from tilewright.kernels.attention.fp8.attention import scaled_attention_op
from tilewright.kernels.attention.fp8.quantize_kv import FORMATS_OF_ATTENTION, quantize_keys_values_op
from tilewright.kernels.launch.autograd import wants_gradient

__all__ = ["scaled_attention"]


def scaled_attention(
    q: Tensor, k: Tensor, v: Tensor, precision: str, *, causal: bool = False, scale: float | None = None,
    given: Mapping[str, object] | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T) v for each head, with 8-bit operands.

    Args:
        q: [B, S, H, D] bf16 or fp16, D a multiple of 16, at most 256. The last dimension is dense.
        k: [B, SK, G, D], H a multiple of G.
        v: in the shape of k.
        precision: "fp8": both products in float8 e4m3. "int8": q k^T in int8, the product with v in the dtype of v.
        causal: each query sees the keys up to its own position; the last query is at the position of the last key.
        scale: factor on q . k, above 0; None for 1 / sqrt(D).
        given: the other options of `ops.attention` by name. All must be None or False, because 8-bit attention supports none.

    Returns:
        The averages, in q's dtype, [B, S, H, D], contiguous. A query that sees no key gives zeros.

    Raises:
        ValueError: operands, precision or scale do not fit, an option is given, or an input requires a gradient.
        Refused: fp8 on a card older than sm_89.
    """
    if precision not in FORMATS_OF_ATTENTION:
        raise ValueError(f"attention: precision is {precision!r}, wanted {' or '.join(FORMATS_OF_ATTENTION)}, or None")
    if names := [name for name, value in (given or {}).items() if value is not None and value is not False]:
        raise ValueError(f"attention: {', '.join(names)} cannot be combined with precision {precision}; leave one of them out")
    if wants_gradient(q, k, v):
        raise ValueError(
            f"attention: precision {precision} has no backward pass; call it under torch.no_grad(), or leave precision out"
        )
    check_operands(q, k, v)
    if q.dim() != 4:
        raise ValueError(f"attention: precision {precision} needs sequences of one length, q [B, S, H, D]; got {list(q.shape)}")
    if v.shape != k.shape:
        raise ValueError(
            f"attention: precision {precision} needs v of the same shape as k, got {list(v.shape)} and {list(k.shape)}"
        )
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"attention: precision {precision} needs bfloat16 or float16, got {q.dtype}")
    if q.shape[3] % 16:
        raise ValueError(f"attention: precision {precision} needs a head dim that is a multiple of 16, got {q.shape[3]}")
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not 0.0 < factor < math.inf:
        raise ValueError(f"attention: scale is {factor}, wanted a finite number above 0 (for a negative one negate q)")
    k_codes, v_codes, k_scale, v_scale = quantize_keys_values_op(k, v, precision)
    values, of_values = (v_codes, v_scale) if precision == "fp8" else (v, None)
    return scaled_attention_op(q, k_codes, values, k_scale, of_values, k.shape[1], factor, causal)
