"""The problems of `regret.py`, and their arguments made on the device itself: drawn on the host they would take minutes.

A case is a plain dict: "op", "batch" (cases that are compiled together, as most of their kernels are the same) and the
dimensions, which `arguments` understands:

    linear            M N K, and "w" = "n" for a weight that is dense along N
    rms_norm softmax  M N
    paged_attention   H G D S, and "lengths": "63x1:100-1600 1x512:512", so many sequences x queries : tokens in all, a range
                      drawn with a fixed seed
"""

import random
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["BATCHES", "arguments", "label", "lengths_of", "torch_call"]

_BF16 = torch.bfloat16


def _linear() -> dict[str, list[tuple[Any, ...]]]:
    aligned = [
        (1, 4096, 4096), (1, 1024, 3072), (1, 28672, 4096), (1, 4096, 14336), (1, 128256, 4096), (2, 6144, 4096),
        (4, 4096, 4096), (8, 6144, 4096), (16, 1024, 4096), (16, 4096, 14336), (32, 6144, 4096), (64, 4096, 4096),
        (64, 4096, 14336), (64, 28672, 4096), (128, 1024, 8192), (128, 4096, 4096), (256, 6144, 4096), (512, 512, 8192),
        (512, 4096, 14336), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
        (8192, 1024, 4096), (4096, 28672, 4096), (3000, 768, 768), (1792, 1792, 4096), (512, 4096, 4096, "n"),
    ]  # fmt: skip
    odd = [(1000, 1000, 1000), (300, 5000, 3000), (4, 4095, 4095), (2049, 2049, 2049), (1793, 1793, 1793), (4095, 4095, 4095)]
    return {"linear": aligned, "linear odd": odd}


_ROWS = {
    "rms_norm": (
        (65536, 128), (4096, 1024), (4096, 3000), (64, 4096), (8192, 4096), (4096, 5120), (16, 8192), (4096, 8192),
        (4096, 16384), (2048, 32768), (1024, 131072),
    ),
    "softmax": (
        (262144, 128), (16384, 1000), (64, 4096), (8192, 4096), (4096, 8192), (4096, 16384), (2048, 50257), (1024, 131072),
    ),
}  # fmt: skip
_ATTENTION = {
    "attention 32/8": (
        32, 8, 128,
        ("1x1:300", "1x1:8192", "4x1:2048", "16x1:100-1600", "16x1:8192", "64x1:100-1600", "256x1:100-1600", "256x1:1024",
         "1x2048:2048", "1x8192:8192", "8x512:512", "2x512:4096", "63x1:100-1600 1x512:512", "16x128:1024"),
    ),
    "attention 16/8": (16, 8, 64, ("1x1:4096", "32x1:500-4000", "128x1:100-1600", "1x2048:2048", "60x1:100-1600 4x256:256")),
}  # fmt: skip


def _batches() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for batch, shapes in _linear().items():
        found[batch] = [dict(zip("MNKw", shape, strict=False)) | {"op": "linear"} for shape in shapes]
    for batch, (heads, kv_heads, dim, mixtures) in _ATTENTION.items():
        dims = {"op": "paged_attention", "H": heads, "G": kv_heads, "D": dim, "S": 16}
        found[batch] = [dims | {"lengths": mixture} for mixture in mixtures]
    for op, shapes in _ROWS.items():
        for m, n in shapes:
            found.setdefault(f"{op} {n}", []).append({"op": op, "M": m, "N": n})
    # What compiles fast and measures long first: the GPU has work while the rest compiles.
    order = ["linear", "attention 32/8", "linear odd", "attention 16/8"]
    return {name: found[name] for name in (*order, *(name for name in found if name not in order))}


BATCHES = _batches()
"""Name -> the cases that are compiled together, in the order in which they run."""


def label(case: dict[str, Any]) -> str:
    """A case as a table shows it."""
    return " ".join(f"{k}={v}" for k, v in case.items() if k != "op")


def lengths_of(mixture: str) -> list[tuple[int, int]]:
    """(queries, tokens in all) of each sequence of "63x1:100-1600 1x512:512"."""
    drawn = random.Random(mixture)
    found = []
    for part in mixture.split():
        count, _, rest = part.partition("x")
        queries, _, tokens = rest.partition(":")
        low, _, high = tokens.partition("-")
        found += [(int(queries), drawn.randint(int(low), int(high or low))) for _ in range(int(count))]
    return found


def _randn(*shape: int, device: str, scale: float = 1.0) -> torch.Tensor:
    if device == "meta":
        return torch.empty(*shape, dtype=_BF16, device=device)
    return torch.randn(*shape, dtype=_BF16, device=device).mul_(scale)


def arguments(case: dict[str, Any], device: str) -> tuple[Any, ...]:
    """One set of arguments of the op; on "meta" without values."""
    if case["op"] == "linear":
        m, n, k = case["M"], case["N"], case["K"]
        scale = k**-0.5
        weight = _randn(k, n, device=device, scale=scale).mT if "w" in case else _randn(n, k, device=device, scale=scale)
        return _randn(m, k, device=device), weight, None, "none", None
    if case["op"] == "paged_attention":
        return _attention(case, device)
    x = _randn(case["M"], case["N"], device=device)
    return (x,) if case["op"] == "softmax" else (x, _randn(case["N"], device=device), 1e-6)


def _attention(case: dict[str, Any], device: str) -> tuple[Any, ...]:
    lengths, size = lengths_of(case["lengths"]), case["S"]
    needed = [-(-kv // size) for _, kv in lengths]
    widest = max(needed)
    ends = [0]
    for queries, _ in lengths:
        ends.append(ends[-1] + queries)
    caches = [_randn(sum(needed), case["G"], size, case["D"], device=device) for _ in range(2)]
    table = torch.zeros(len(lengths), widest, dtype=torch.int32)
    order = torch.randperm(sum(needed), dtype=torch.int32)
    at = 0
    for b, pages in enumerate(needed):
        table[b, :pages] = order[at : at + pages]
        at += pages
    kv_lens = torch.tensor([kv for _, kv in lengths], dtype=torch.int32)
    cu_q = torch.tensor(ends, dtype=torch.int32)
    q = _randn(ends[-1], case["H"], case["D"], device=device)
    longest = max(queries for queries, _ in lengths)
    return q, *caches, table.to(device), kv_lens.to(device), cu_q.to(device), longest, case["D"] ** -0.5, None


def torch_call(op: str) -> Any:
    """torch's own kernel for the op, with the op's arguments, to stand beside ours; None where torch has none."""
    if op == "rms_norm":
        return lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps)
    return (lambda x: torch.softmax(x, -1)) if op == "softmax" else None
