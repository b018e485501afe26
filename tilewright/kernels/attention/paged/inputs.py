"""Example arguments, made from dimensions, for paged attention and for the ops that write its cache: the `Op.make` of each."""

import torch
from torch import Tensor

from tilewright.op import Args, Inputs

__all__ = ["attention_arguments", "capped_arguments", "kv_write_arguments", "rope_write_arguments"]

_BF16 = torch.bfloat16


def _caches(inputs: Inputs, pages: int, G: int, S: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return inputs.randn(pages, G, S, D, dtype=dtype), inputs.randn(pages, G, S, D, dtype=dtype)


def _coded_caches(inputs: Inputs, pages: int, G: int, S: int, D: int, cache: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of keys, codes of values by columns, and scales that bring their values to about 1."""
    if cache not in ("int8", "fp8"):
        raise ValueError(f"cache is {cache!r}, wanted none, int8 or fp8")
    k_scale, v_scale = (inputs.randn(pages, G, S).abs().add(0.1).div(73.0 if cache == "int8" else 60.0) for _ in range(2))
    if cache == "int8":
        k, v = (inputs.randint(-127, 128, pages, G, *tile, dtype=torch.int8) for tile in ((S, D), (D, S)))
    else:
        k, v = (inputs.randn(pages, G, *tile, scale=60.0).clamp(-448, 448).to(torch.float8_e4m3fn) for tile in ((S, D), (D, S)))
    return k, v, k_scale, v_scale


def kv_write_arguments(
    inputs: Inputs, *, T: int, G: int = 8, D: int = 128, S: int = 16, cache: str = "none", dtype: torch.dtype = _BF16
) -> Args:
    """k and v [T, G, D] for scattered slots of a cache with twice as many slots; `cache`: "int8" or "fp8" for codes."""
    k, v = (inputs.randn(T, G, D, dtype=dtype) for _ in range(2))
    pages = 1 + 2 * T // S
    slots = inputs.permutation(pages * S)[:T]
    if cache == "none":
        return k, v, *_caches(inputs, pages, G, S, D, dtype), slots, None, None
    k_cache, v_cache, k_scale, v_scale = _coded_caches(inputs, pages, G, S, D, cache)
    return k, v, k_cache, v_cache, slots, k_scale, v_scale


def rope_write_arguments(
    inputs: Inputs,
    *,
    T: int,
    H: int = 32,
    G: int = 8,
    D: int = 128,
    S: int = 16,
    dtype: torch.dtype = _BF16,
    norm: bool = False,
    interleaved: bool = False,
    cache: str = "none",
) -> Args:
    """q [T, H, D], k and v [T, G, D] as views of one merged projection.

    norm: with a norm over each head. cache: "int8" or "fp8" for codes.
    """
    q, k, v = inputs.randn(T, H + 2 * G, D, dtype=dtype).split((H, G, G), 1)
    pages = 1 + 2 * T // S
    norms = (inputs.randn(D, dtype=dtype), inputs.randn(D, dtype=dtype)) if norm else (None, None)
    table = inputs.randn(max(T, 1), 2, D // 2)
    slots = inputs.permutation(pages * S)[:T]
    places = inputs.randint(0, max(T, 1), T)
    if cache == "none":
        caches, scales = _caches(inputs, pages, G, S, D, dtype), (None, None)
    else:
        k_cache, v_cache, *scales = _coded_caches(inputs, pages, G, S, D, cache)
        caches = k_cache, v_cache
    return q, k, v, places, table, *caches, slots, *norms, 1e-6, interleaved, *scales


def attention_arguments(
    inputs: Inputs,
    *,
    B: int,
    KV: int,
    Q: int = 1,
    H: int = 32,
    G: int = 8,
    D: int = 128,
    S: int = 16,
    window: int | None = None,
    cache: str = "none",
    ragged: bool = False,
    chunk: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = _BF16,
) -> Args:
    """B sequences of KV tokens in scattered pages; the last Q tokens of each are the queries (1: decode).

    cache: "int8" or "fp8" for codes with a scale for each token and head. ragged: lengths from KV / 200 to KV in equal steps.
    chunk: the number of queries of the last sequence instead of Q, like a chunk of a prompt beside sequences that decode.
    Raises:
        ValueError: more queries than tokens, or an unknown cache.
    """
    last = Q if chunk is None else chunk
    if not 1 <= min(Q, last) <= max(Q, last) <= KV:
        raise ValueError(
            f"paged_attention: Q is {Q}, chunk {chunk} and KV {KV}, wanted 1 <= Q <= KV, and chunk too: "
            "queries are the last tokens of a sequence"
        )
    least = max(Q, KV // 200) if ragged else KV
    lengths = [least + (KV - least) * i // max(B - 1, 1) for i in range(B)] if ragged else [KV] * B
    per = -(-KV // S)
    table = inputs.permutation(B * per).to(torch.int32).view(B, per)
    q = inputs.randn((B - 1) * Q + last, H, D, dtype=dtype)
    lens = inputs.tensor(lengths, torch.int32)
    cu_q = inputs.tensor([*(i * Q for i in range(B)), (B - 1) * Q + last], torch.int32)
    if cache == "none":
        caches, scales = _caches(inputs, B * per, G, S, D, dtype), (None, None)
    else:
        k_cache, v_cache, *scales = _coded_caches(inputs, B * per, G, S, D, cache)
        caches = k_cache, v_cache
    return q, *caches, table, lens, cu_q, max(Q, last), D**-0.5, window, *scales, inputs.randn(H) if sinks else None


def capped_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int = 1, H: int = 32, G: int = 8, D: int = 128, S: int = 16,
    window: int | None = None, ragged: bool = False, softcap: float = 50.0, dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """The arguments of `attention_arguments`, without codes and sinks."""
    args = attention_arguments(inputs, B=B, KV=KV, Q=Q, H=H, G=G, D=D, S=S, window=window, ragged=ragged, dtype=dtype)
    return *args[:9], softcap
