"""Arguments of every op from its dimensions: what `tilewright tune`, `explain` and `bench` call an op with.

Each function is an `Op.make`: its keywords are the dimensions that the commands take. Random data, never zeros: a card draws
less power on zeros and runs faster than it will. With `Inputs("meta")` nothing is allocated.

    # M rows, N columns, K the summed dimension, T tokens, H query heads, G key/value heads, D head dim, S tokens a page
"""

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.op import Inputs

__all__ = [
    "add_norm_arguments",
    "add_norm_quantize_arguments",
    "attention_arguments",
    "block_scaled_linear_arguments",
    "dense_attention_arguments",
    "edit_logits_arguments",
    "gated_arguments",
    "gated_quantize_arguments",
    "gelu_arguments",
    "kv_write_arguments",
    "layer_norm_arguments",
    "linear_arguments",
    "logprob_arguments",
    "mixed_linear_arguments",
    "mx_linear_arguments",
    "norm_arguments",
    "norm_quantize_arguments",
    "quantize_blocks_arguments",
    "quantize_mx_arguments",
    "quantize_rows_arguments",
    "quantize_static_arguments",
    "quantize_tensor_arguments",
    "rope_arguments",
    "rope_write_arguments",
    "sample_arguments",
    "scaled_linear_arguments",
    "softmax_arguments",
    "top_logprob_arguments",
]

_BF16 = torch.bfloat16
Args = tuple[Any, ...]


def softmax_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N]."""
    return (inputs.randn(M, N, dtype=dtype, scale=2.0),)


def norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x [M, N], weight [N]."""
    return inputs.randn(M, N, dtype=dtype), inputs.randn(N, dtype=dtype), 1e-6


def add_norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """x and residual [M, N], weight [N]."""
    return inputs.randn(M, N, dtype=dtype), *norm_arguments(inputs, M=M, N=N, dtype=dtype)


def layer_norm_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, bias: bool = True) -> Args:
    """x [M, N], weight and bias [N]."""
    x, weight, _ = norm_arguments(inputs, M=M, N=N, dtype=dtype)
    return x, weight, inputs.randn(N, dtype=dtype) if bias else None, 1e-5


def gated_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16) -> Args:
    """gate and up [M, N], the halves of one [M, 2 N] as a merged projection gives them."""
    both = inputs.randn(M, 2 * N, dtype=dtype)
    return both[:, :N], both[:, N:]


def gelu_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, approximate: bool = False) -> Args:
    """The same, and which GELU."""
    return *gated_arguments(inputs, M=M, N=N, dtype=dtype), approximate


def linear_arguments(
    inputs: Inputs,
    *,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = _BF16,
    layout: str = "nt",
    batch: int = 0,
    bias: bool = False,
    activation: str = "none",
    residual: bool = False,
    offset: str = "none",
) -> Args:
    """x [M, K], weight [N, K], or a batch of both. `layout`: "nt" both dense along K, "nn" the weight along N, "tn" x along M.

    offset: "x" or "weight" starts one element into its memory, as a view may.

    Raises:
        ValueError: an unknown layout or operand.
    """
    if layout not in ("nt", "nn", "tn"):
        raise ValueError(f"linear: layout is {layout!r}, wanted nt, nn or tn")
    if offset not in ("none", "x", "weight"):
        raise ValueError(f"linear: offset is {offset!r}, wanted none, x or weight")
    lead = (batch,) if batch else ()

    def matrix(rows: int, cols: int, transposed: bool, scale: float, shifted: bool) -> Tensor:
        shape = (*lead, cols, rows) if transposed else (*lead, rows, cols)
        start = int(shifted)
        t = inputs.randn(math.prod(shape) + start, dtype=dtype, scale=scale)[start:].view(shape)
        return t.mT if transposed else t

    width = N // 2 if activation.endswith("_mul") else N
    return (
        matrix(M, K, layout == "tn", 1.0, offset == "x"),
        matrix(N, K, layout != "nt", max(K, 1) ** -0.5, offset == "weight"),
        inputs.randn(N, dtype=dtype) if bias else None,
        activation,
        inputs.randn(*lead, M, width, dtype=dtype) if residual else None,
    )


def scaled_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.int8, bias: bool = False, activation: str = "none",
    residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of `dtype` in rows of a multiple of 16 bytes, scales such that the product is about 1."""

    def matrix(rows: int) -> Tensor:
        padded = -(-K // 16) * 16
        if dtype == torch.int8:
            return inputs.randint(-127, 128, rows, padded, dtype=dtype)[:, :K]
        return inputs.randn(rows, padded, scale=60.0).clamp(-448, 448).to(dtype)[:, :K]

    width = N // 2 if activation.endswith("_mul") else N
    spread = 73.0 if dtype == torch.int8 else 60.0
    return (
        matrix(M),
        matrix(N),
        inputs.randn(M).abs().add(0.1).div(spread),
        inputs.randn(N).abs().add(0.1).div(spread * max(K, 1) ** 0.5),
        inputs.randn(N, dtype=out) if bias else None,
        activation,
        inputs.randn(M, width, dtype=out) if residual else None,
        out,
    )


def block_scaled_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.float8_e4m3fn, block_rows: int = 128,
    bias: bool = False, activation: str = "none", residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of a float8 `dtype`, scales for 128 of K such that the product is about 1.

    `block_rows`: rows of the weight that share a scale, 128 or 1.
    """
    padded, blocks = -(-K // 16) * 16, -(-K // 128)
    x, weight = (inputs.randn(rows, padded, scale=60.0).clamp(-448, 448).to(dtype)[:, :K] for rows in (M, N))
    width = N // 2 if activation.endswith("_mul") else N
    return (
        x,
        weight,
        # Dense along M, as quantisers leave them.
        inputs.randn(blocks, M).abs().add(0.1).div(60.0).t(),
        inputs.randn(-(-N // block_rows), blocks).abs().add(0.1).div(60.0 * max(K, 1) ** 0.5),
        inputs.randn(N, dtype=out) if bias else None,
        activation,
        inputs.randn(M, width, dtype=out) if residual else None,
        out,
    )


def mx_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = torch.float8_e4m3fn, bias: bool = False,
    activation: str = "none", residual: bool = False, out: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """x [M, K] and weight [N, K] of a float8 `dtype`, E8M0 scales for 32 of K such that the product is about 1."""
    x, weight = (inputs.randn(rows, K, scale=60.0).clamp(-448, 448).to(dtype) for rows in (M, N))
    low = 121 - max(K, 1).bit_length() // 2

    def scales(rows: int, lowest: int) -> Tensor:
        return inputs.randint(lowest, lowest + 3, rows, K // 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    width = N // 2 if activation.endswith("_mul") else N
    return (
        x,
        weight,
        scales(M, 120),
        scales(N, low),
        inputs.randn(N, dtype=out) if bias else None,
        activation,
        inputs.randn(M, width, dtype=out) if residual else None,
        out,
    )


def mixed_linear_arguments(
    inputs: Inputs, *, M: int, N: int, K: int, dtype: torch.dtype = _BF16, format: str = "int4", group: int = 0,
    block_rows: int = 1, zeros: bool = False, bias: bool = False, activation: str = "none", residual: bool = False,
) -> Args:  # fmt: skip
    """x [M, K] of `dtype`, codes of a weight [N, K] (int8, int4, e4m3 or e5m2), scales such that the product is about 1.

    int4 codes are drawn in the order in which the op takes them: whole chunks of 128 columns.

    Raises:
        ValueError: an unknown format.
    """
    if format not in ("int8", "int4", "e4m3", "e5m2"):
        raise ValueError(f"mixed_linear: format is {format!r}, wanted int8, int4, e4m3 or e5m2")
    spread = {"int8": 73.0, "int4": 4.6}.get(format, 60.0)
    shape = (-(-N // block_rows), -(-K // group)) if group else (N,)
    if format == "int8":
        codes = inputs.randint(-127, 128, N, K, dtype=torch.int8)
    elif format == "int4":
        codes = inputs.randint(0, 256, N, -(-K // 128) * 64, dtype=torch.uint8)
    else:
        float8 = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
        codes = inputs.randn(N, K, scale=spread).clamp(-448, 448).to(float8)
    return (
        inputs.randn(M, K, dtype=dtype),
        codes,
        inputs.randn(*shape).abs().add(0.1).div(spread * max(K, 1) ** 0.5),
        inputs.randint(5, 12, *shape, dtype=torch.uint8) if zeros else None,
        inputs.randn(N, dtype=dtype) if bias else None,
        activation,
        inputs.randn(M, N // 2 if activation.endswith("_mul") else N, dtype=dtype) if residual else None,
        block_rows,
        group,
    )


def rope_arguments(
    inputs: Inputs, *, T: int, H: int = 32, G: int = 8, D: int = 128, dtype: torch.dtype = _BF16, interleaved: bool = False
) -> Args:
    """q [T, H, D], k [T, G, D], positions [T], cos_sin [T, 2, D / 2]."""
    q, k = (inputs.randn(T, heads, D, dtype=dtype) for heads in (H, G))
    return q, k, inputs.randint(0, max(T, 1), T), inputs.randn(max(T, 1), 2, D // 2), interleaved


def _caches(inputs: Inputs, pages: int, G: int, S: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return inputs.randn(pages, G, S, D, dtype=dtype), inputs.randn(pages, G, S, D, dtype=dtype)


def _coded_caches(inputs: Inputs, pages: int, G: int, S: int, D: int, cache: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of keys, of values by columns, and scales with which they are about 1."""
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
    """k and v [T, G, D] to scattered slots of a cache with twice the room; `cache`: "int8" or "fp8" for codes."""
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

    norm: with norms of the heads. cache: "int8" or "fp8" for codes.
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
    """B sequences of KV tokens in scattered pages; the last Q of each are the queries (1: decode).

    cache: "int8" or "fp8" for codes with a scale for each token and head. ragged: lengths from KV / 200 to KV in equal steps.
    chunk: so many queries of the last sequence instead of Q, as a prompt's chunk beside others that decode.

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


def dense_attention_arguments(
    inputs: Inputs, *, B: int, KV: int, Q: int | None = None, H: int = 32, G: int = 8, D: int = 128, V: int | None = None,
    causal: bool = False, packed: bool = False, lse: bool = False, window: int | None = None, prefix: int = 0,
    sinks: bool = False, alibi: bool = False, dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """B sequences of KV keys and Q queries (KV of them unless given), in a row; `packed`: with cumulative lengths.

    V: of the values' heads, D unless given. window: a query sees its own key and window - 1 before it, and behind it unless
    causal. prefix: keys that every query sees.
    """
    queries = KV if Q is None else Q
    q = inputs.randn(B, queries, H, D, dtype=dtype)
    k, v = (inputs.randn(B, KV, G, width, dtype=dtype) for width in (D, V or D))
    cu_q = cu_k = None
    if packed:
        cu_q, cu_k = (inputs.tensor([i * rows for i in range(B + 1)], torch.int32) for rows in (queries, KV))
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    left = None if window is None else window - 1
    sink = inputs.randn(H, dtype=dtype) if sinks else None
    slopes = inputs.tensor([2.0 ** (-8.0 * (i + 1) / H) for i in range(H)], torch.float32) if alibi else None
    right = None if causal else left
    return q, k, v, cu_q, cu_k, queries, KV, D**-0.5, causal, lse, left, right, prefix, None, None, sink, slopes


def sample_arguments(
    inputs: Inputs, *, M: int, N: int = 151936, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, dtype: torch.dtype = _BF16,
) -> Args:  # fmt: skip
    """logits [M, N], M rows with the same parameters."""
    each = ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    parameters = [inputs.tensor([value] * M, dtype) for value, dtype in each]
    seeds, positions = inputs.randint(-(2**62), 2**62, M), inputs.randint(0, 2**20, M)
    return inputs.randn(M, N, dtype=dtype, scale=3.0), *parameters, seeds, positions


def edit_logits_arguments(inputs: Inputs, *, M: int, N: int = 151936, entries: int = 16, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N] and tables of M slots: each other one has penalties and one token in eight seen, all have entries."""
    slots = inputs.permutation(M)
    counts = inputs.randint(-48, 8, M, N).clamp_min(0).to(torch.int16)
    penalties = inputs.tensor([[1.1, 0.5, 0.25] if slot % 2 else [1.0, 0.0, 0.0] for slot in range(M)], torch.float32)
    ids = (inputs.permutation(N)[:entries] if entries <= N else inputs.permutation(N)).to(torch.int32).repeat(M, 1)
    values = [inputs.randn(M, ids.shape[1], dtype=torch.float32) for _ in range(2)]
    until, positions = inputs.randint(0, 100, M), inputs.randint(0, 100, M)
    allowed = inputs.tensor([[-1]], torch.int32).repeat(M, -(-N // 32))
    return inputs.randn(M, N, dtype=dtype, scale=3.0), slots, positions, counts, penalties, ids, *values, until, allowed


def logprob_arguments(inputs: Inputs, *, M: int, N: int = 151936, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N], ids [M]."""
    return inputs.randn(M, N, dtype=dtype, scale=3.0), inputs.randint(0, N, M)


def top_logprob_arguments(inputs: Inputs, *, M: int, N: int = 151936, top: int = 5, dtype: torch.dtype = _BF16) -> Args:
    """logits [M, N], ids [M]; every row wants its `top` likeliest tokens."""
    return *logprob_arguments(inputs, M=M, N=N, dtype=dtype), inputs.tensor([top] * M, torch.int32), max(top, 1)


def quantize_rows_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_blocks_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "fp8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_mx_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "mxfp8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_tensor_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N] and the format."""
    return inputs.randn(M, N, dtype=dtype), format


def quantize_static_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N], a scale that some numbers exceed, and the format."""
    return inputs.randn(M, N, dtype=dtype), inputs.tensor(0.02, torch.float32), format


def norm_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x [M, N], weight [N], eps and the format."""
    return *norm_arguments(inputs, M=M, N=N, dtype=dtype), format


def add_norm_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """x and residual [M, N], weight [N], eps and the format."""
    return *add_norm_arguments(inputs, M=M, N=N, dtype=dtype), format


def gated_quantize_arguments(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = _BF16, format: str = "int8") -> Args:
    """gate and up [M, N], the halves of one [M, 2 N], and the format."""
    return *gated_arguments(inputs, M=M, N=N, dtype=dtype), format
