"""Benchmark: a quantised linear layer against the float layer that it replaces, including quantising the activation.

The weights rotate through more memory than L2 holds, as in a model; the activation is the same in each call, because in a model
it has just been written by the layer before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.bench.dims import nearest
from tilewright.bench.harness import interleaved_us, sets_for
from tilewright.bench.provenance import ran_by
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_of
from tilewright.op import invariant as alike
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight, quantize_weight

__all__ = ["checked", "rows"]


def checked(formats: Sequence[str], activation: str) -> None:
    """Raise ValueError for a format or an activation that is not measured here."""
    for name in formats:
        if name not in WEIGHT_FORMATS:
            raise ValueError(f"there is no format {name!r}: {nearest(name, WEIGHT_FORMATS)}")
    if activation not in ("none", "silu_mul"):
        raise ValueError(f"activation is {activation!r}, wanted none or silu_mul")


def rows(
    formats: Sequence[str],
    shapes: Sequence[tuple[int, int, int]],
    activation: str,
    say: Callable[[str], None],
    invariant: bool = False,
    settle: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """A row for each (M, N, K) and each format; weights are made once for each (N, K).

    us: time of the layer, in microseconds. bf16_us: time of `F.linear` and torch's activation. library_us: time of torch's own
    product of the format, if there is one, with operands that are already quantised. A ratio above 1 means that our layer is
    faster. `invariant`: run our layers as in that scope; it does not affect the others. `settle`: as in
    `harness.interleaved_us`.
    """
    for n, k in dict.fromkeys((n, k) for _, n, k in shapes):
        sets = max(2, min(8, sets_for(n * k)))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(sets)]
        held = {name: [quantize_weight(w, name) for w in weights] for name in formats}
        for m in [m for m, *size in shapes if size == [n, k]]:
            say(f"M={m} N={n} K={k}")
            with torch.inference_mode(), alike() if invariant else nullcontext():
                found = _measure(m, weights, held, activation, settle)
            for row in found:
                say(f"  {row['format']} {row['us']} us; bf16 {row['bf16_us']} us, ratio {row['ratio']}")
                yield row
        del weights, held
        torch.cuda.empty_cache()


def _measure(
    m: int, weights: list[Tensor], held: dict[str, list[QuantizedWeight]], activation: str, settle: float
) -> list[dict[str, Any]]:
    n, k = weights[0].shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[int], Any]] = {"bf16": _float_layer(x, weights, activation)}
    libraries: dict[str, str] = {}
    for name, quantized in held.items():
        calls[name] = lambda i, quantized=quantized: ops.linear(x, quantized[i], None, activation)
        library = _library(name, m, n, k, len(weights)) if activation == "none" else None
        if library is not None:
            libraries[name], calls[f"library {name}"] = library
    ran = {name: ran_by(lambda name=name: calls[name](0)) for name in held}
    long = 2 * m * n * k > 1e12
    call_us = 2e6 * m * n * k / max(ceilings(device_of(0)).flops.values())
    rounds = 5 if long else 15
    times = interleaved_us(list(calls.values()), sets=len(weights), rounds=rounds, settle=settle, call_us=call_us)
    us = {name: round(median, 2) for name, (median, _) in zip(calls, times, strict=True)}
    spread = {name: round(half, 2) for name, (_, half) in zip(calls, times, strict=True)}
    table = []
    for name in held:
        row = {"format": name, "M": m, "N": n, "K": k, "activation": activation}
        row |= {"us": us[name], "spread_us": spread[name], "bf16_us": us["bf16"], "bf16_spread_us": spread["bf16"]}
        row["ratio"] = round(us["bf16"] / us[name], 3)
        if name in libraries:
            other = us[f"library {name}"]
            row |= {"library": libraries[name], "library_us": other, "library_ratio": round(other / us[name], 3)}
        table.append(row | {"kernels": ran[name]})
    return table


def _float_layer(x: Tensor, weights: list[Tensor], activation: str) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        y = F.linear(x, weights[i])
        if activation == "silu_mul":
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up
        return y

    return call


def _library(name: str, m: int, n: int, k: int, sets: int) -> tuple[str, Callable[[int], Tensor]] | None:
    """(name, call) of torch's own product of this format, without quantising; None if torch has none for the shape."""
    if name not in ("int8", "fp8") or k % 16 or n % 16 or (name == "int8" and m <= 16):
        return None
    if name == "int8":
        x = torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
        weights = [torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8) for _ in range(sets)]
        integers = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        return "torch._int_mm", lambda i: integers(x, weights[i].mT)
    codes = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    w_codes = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(sets)]
    row, col = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    floats = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return "torch._scaled_mm", lambda i: floats(codes, w_codes[i].mT, row, col, out_dtype=torch.bfloat16)
