"""Benchmark: attention in 8 bits, including its quantiser, against `ops.attention` of the same tensors in 16 bits."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilewright import ops
from tilewright.bench.dims import nearest
from tilewright.bench.harness import interleaved_us, sets_for
from tilewright.bench.op import checked
from tilewright.bench.provenance import Hashes, ran_by
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_of
from tilewright.kernels.attention.fp8.attention import scaled_attention_op
from tilewright.kernels.attention.fp8.quantize_kv import FORMATS_OF_ATTENTION
from tilewright.op import Inputs

__all__ = ["rows", "shapes_of"]

_USUAL = tuple(
    f"B={max(1, 16384 // keys)} KV={keys} {heads} causal={causal}"
    for causal in ("true", "false")
    for keys in (8192, 16384, 32768)
    for heads in ("H=16 G=16", "H=32 G=8")
)


def shapes_of(formats: Sequence[str], shapes: str | None) -> list[tuple[str, dict[str, Any]]]:
    """(words, dimensions) of each shape for `scaled_attention`, without the format.

    Args:
        formats: 8-bit formats; only checked here.
        shapes: such as "B=2 KV=8192;B=1 KV=16384 causal=true"; None: the usual shapes.

    Raises:
        ValueError: a format or a dimension is unknown, a format or a dtype is among the dimensions, or `shapes` is empty.
    """
    for name in formats:
        if name not in FORMATS_OF_ATTENTION:
            raise ValueError(f"there is no format {name!r}: {nearest(name, FORMATS_OF_ATTENTION)}")
    texts = [" ".join(text.replace(",", " ").split()) for text in shapes.split(";")] if shapes else _USUAL
    found = [(text, checked(scaled_attention_op, text.split())) for text in texts if text]
    if any("format" in dims or "dtype" in dims for _, dims in found):
        raise ValueError(
            "format and dtype cannot be given here, because the formats come before the options and the 16-bit side is bfloat16"
        )
    if not found:
        raise ValueError(
            f'--shapes is {shapes!r}, which contains no shape; wanted shapes such as "B=2 KV=8192 H=16 G=16 causal=true"'
        )
    return found


def rows(
    formats: Sequence[str], shapes: Sequence[tuple[str, dict[str, Any]]], say: Callable[[str], None], settle: float = 0.0
) -> Iterator[dict[str, Any]]:
    """A row for each shape and format. us: time in 8 bits; bf16_us: time of `ops.attention` in bfloat16 (microseconds).

    A ratio above 1 means that 8 bits are faster. `settle`: as in `harness.interleaved_us`.
    """
    for text, dims in shapes:
        say(text)
        ((bf16, _), *quantized), ran = _measure(formats, dims, settle)
        for name, (us, spread), kernels in zip(formats, quantized, ran, strict=True):
            row = {"format": name, "dims": text, "us": round(us, 1), "spread_us": round(spread, 1)}
            row |= {"bf16_us": round(bf16, 1), "ratio": round(bf16 / us, 3), "kernels": kernels}
            say(f"  {name} {row['us']} us; bf16 {row['bf16_us']} us, ratio {row['ratio']}")
            yield row
        torch.cuda.empty_cache()


def _measure(formats: Sequence[str], dims: dict[str, Any], settle: float) -> tuple[list[tuple[float, float]], list[Hashes]]:
    """(microseconds, spread) of bfloat16 and of each format; and for each format its kernels and those of bfloat16."""
    assert scaled_attention_op.make is not None
    made = scaled_attention_op.make(Inputs("meta"), **dims)
    q, k, _, _, _, keys, _, causal = made
    call_us = 1e6 * scaled_attention_op.cost(*made).flops / max(ceilings(device_of(0)).flops.values())
    batch, kv_heads, _, dim = k.shape  # of codes: heads first, keys rounded up
    sizes = (q.shape, (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
    operands = [[_normal(size) for size in sizes] for _ in range(sets_for(2 * sum(math.prod(size) for size in sizes)))]

    def call(precision: str | None) -> Callable[[int], Any]:
        return lambda i: ops.attention(*operands[i], causal=causal, precision=precision)

    with torch.inference_mode():
        calls = [call(None), *map(call, formats)]
        base, *ran = (ran_by(lambda one=one: one(0)) for one in calls)
        return interleaved_us(calls, sets=len(operands), settle=settle, call_us=call_us), [base | each for each in ran]


def _normal(size: Sequence[int]) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)
