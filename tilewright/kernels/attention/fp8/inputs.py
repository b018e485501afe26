"""Example arguments of the ops of 8-bit attention, made from dimensions: the `Op.make` of each."""

# B sequences, H query heads, G key/value heads, D head dim

import torch

from tilewright.kernels.attention.fp8.layout import KEYS, padded_rows
from tilewright.op import Args, Inputs

__all__ = ["quantize_keys_values_arguments", "scaled_attention_arguments"]

_BF16 = torch.bfloat16


def quantize_keys_values_arguments(
    inputs: Inputs, *, B: int, KV: int, G: int = 8, D: int = 128, format: str = "fp8", dtype: torch.dtype = _BF16
) -> Args:
    """k and v of KV keys, in `format` int8 or fp8."""
    k, v = (inputs.randn(B, KV, G, D, dtype=dtype) for _ in range(2))
    return k, v, format


def scaled_attention_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 32, G: int = 8, D: int = 128, causal: bool = False,
    format: str = "fp8", dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """Queries of `dtype` (Q of them, default KV), and codes with the scales that normally distributed numbers would have."""
    padded = padded_rows(KV)
    coded = format == "fp8"

    def codes(*shape: int) -> torch.Tensor:
        if coded:
            # torch rounds numbers above 464 to NaN.
            return inputs.randn(*shape, scale=100.0).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        return inputs.randint(-100, 101, *shape, dtype=torch.int8)

    q = inputs.randn(B, KV if Q is None else Q, H, D, dtype=dtype)
    k = codes(B, G, padded, D)
    v = codes(B, G, D, padded) if coded else inputs.randn(B, KV, G, D, dtype=dtype)
    k_scale = inputs.randn(B, G, padded // KEYS).abs() * 0.001 + (0.01 if coded else 0.017)
    v_scale = inputs.tensor([0.0078125], torch.float32).expand(B, G, padded // KEYS).contiguous() if coded else None
    return q, k, v, k_scale, v_scale, KV, D**-0.5, causal
