"""Attention whose scores include a tensor: a mask, or a bias.

    # B sequences, S queries and K keys of each, H query heads, G key/value heads, D head dim, V value head dim
    out[b, i, h] = sum_j p[j] v[b, j, g]      p = softmax_j(z[j])      g = h // (H / G)
    z[j] = scale * q[b, i, h] . k[b, j, g] + bias[b mod N, h, i, j]            with a floating-point bias
    z[j] = scale * q[b, i, h] . k[b, j, g], or `fill` where bias is False      with a bool bias (True: the query sees the key)

q [B, S, H, D], k [B, K, G, D], v [B, K, G, V] are bf16, fp16 or fp32, V and D at most 256; the result is [B, S, H, V]. bias is
[N | 1, H | 1, S | 1, K | 1], with any strides. A dimension of 1 is broadcast. If N is less than B, the biases are repeated: for
example the windows of an image, which have the same masks in every image. `scale` is any number.

A row whose scores are all -inf gives zeros, as in torch's scaled_dot_product_attention, or with `empty_nan` NaN, as an explicit
softmax gives. If the mask fills with a finite number instead, such a row is the average over all keys in both cases.

Tiling and the incremental softmax are those of attention.py. But the scores are scaled before the bias is added, and the
maximum is subtracted before the multiplication by log2(e): a bias of float32's lowest number times log2(e) would be -inf. A
bias that differs for all heads and rows is 2 to 4 bytes per score, and reading it takes the time of 16 to 32 multiply-adds. So
each use reads it only once, and no scores are written. The weights are rounded to the operands' dtype for the second product,
and the result is rounded once: two roundings.

    triton    sm_80 and up (this file); a row's bits do not depend on other rows
    vendor    scaled_dot_product_attention with attn_mask

Not supported: gradients, packed sequences, paged caches, dropout. For causal masks and windows that need no tensor use
attention.py, which skips the keys that no query sees; this kernel visits all keys.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.checks import check_operands
from tilewright.kernels.attention.inputs import biased_attention_arguments
from tilewright.kernels.attention.problem import DTYPES, LARGEST_HEAD_DIM
from tilewright.kernels.attention.tile import widths
from tilewright.kernels.attention.tile_masks import load_rows, strides_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["biased_attention", "biased_attention_op"]

_LOG2_E = tl.constexpr(1.4426950408889634)

# ---- reference


def _empty(q: Tensor, v: Tensor) -> Tensor:
    return torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)


def _reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    shared = q.shape[2] // k.shape[2]
    heads = [t.to(wide).transpose(1, 2) for t in (q, k, v)]
    keys, values = (t.repeat_interleave(shared, 1) for t in heads[1:])
    scores = heads[0] @ keys.mT * scale
    of_each = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1) if bias.shape[0] > 1 else bias
    scores = scores.masked_fill(~of_each, fill) if bias.dtype == torch.bool else scores + of_each
    weights = scores.softmax(-1)
    if not empty_nan:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return (weights @ values).transpose(1, 2).to(q.dtype).contiguous()


def _cost(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool) -> Cost:
    pairs = q.shape[:-1].numel() * k.shape[1]
    out_bytes = q.shape[:-1].numel() * v.shape[-1] * q.element_size()
    return Cost(flops=2 * pairs * (q.shape[-1] + v.shape[-1]), bytes=q.nbytes + k.nbytes + v.nbytes + bias.nbytes + out_bytes)


# ---- problem, space and examples


class Problem(NamedTuple):
    """All properties that a choice may depend on. Counts of sequences and rows are rounded up to powers of two."""

    dtype: torch.dtype
    bias_dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    repeated: bool
    """Whether there are several biases, but fewer than sequences."""
    heads_share: bool
    rows_share: bool
    """Whether all queries have the same bias: a mask of keys."""
    filled: bool
    """Whether hidden keys get a finite score."""
    empty_nan: bool


def _problem(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool) -> Problem:
    return Problem(
        q.dtype, bias.dtype, next_pow2(q.shape[0]), q.shape[2], k.shape[2], next_pow2(q.shape[1]), next_pow2(k.shape[1]),
        q.shape[3], v.shape[3], bias.shape[0] not in (1, q.shape[0]), bias.shape[1] == 1, bias.shape[2] == 1,
        bias.dtype == torch.bool and fill != -math.inf, empty_nan,
    )  # fmt: skip


def _default(device: Device, problem: Problem) -> Config:
    # Chosen by compiling, not by measuring: tiles that do not spill on sm_90 and sm_100; on sm_80 they spill up to 416 bytes at
    # head dim 128. 64 rows, because the windows of an image have 49 and a padded text 128.
    width, shared = max(widths(problem)), device.multiplies_by_warpgroup
    if problem.dtype.itemsize == 4:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if width > 128:
        return {"BLOCK_M": 64 if shared else 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64 if width <= 64 else 32, "num_warps": 4, "num_stages": 2}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width, of_values = widths(problem)
    tiles = c["BLOCK_M"] * width + c["num_stages"] * c["BLOCK_N"] * (width + of_values)
    if tiles * problem.dtype.itemsize > device.smem_bytes:
        return "more shared memory than the device has"
    if c["BLOCK_M"] < 64 and device.multiplies_by_warpgroup:
        return "BLOCK_M must be at least 64, the rows that a warpgroup multiplies at once"
    if c["BLOCK_M"] // c["num_warps"] < 16 and width <= 128 and problem.dtype.itemsize == 2:
        return "a warp needs at least 16 rows: two warps exchange the rows that they share through shared memory"
    # Registers per thread: the weighted sum, the scores, the bias, and the weights in 16 bits.
    registers = c["BLOCK_M"] * (2 * of_values + 5 * c["BLOCK_N"]) // (64 * c["num_warps"])
    if not device.multiplies_by_warpgroup:
        registers += c["BLOCK_M"] * width // (64 * c["num_warps"])  # the queries too
    return "the accumulators need more registers than a thread has" if registers > 168 else None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)},
    refusal=_config_refusal,
)


@Example.of
def _example(
    inputs: Inputs, batch: int, rows: tuple[int, int], heads: tuple[int, int] = (2, 2), dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, *, bias: tuple[int, int, int, int], kind: torch.dtype = torch.bool,
    value_dim: int | None = None, fill: float = -math.inf, empty_nan: bool = False, blind: int | None = None,
    turned: bool = False, scale: float | None = None,
) -> tuple[object, ...]:  # fmt: skip
    """`blind`: the index of a query that sees no key. `turned`: the bias is stored with its keys outermost."""
    q = inputs.randn(batch, rows[0], heads[0], dim, dtype=dtype)
    k, v = (inputs.randn(batch, rows[1], heads[1], width, dtype=dtype) for width in (dim, value_dim or dim))
    shape = (*bias[:2], bias[3], bias[2]) if turned else bias
    given = inputs.randn(*shape)
    given = given > -0.5 if kind == torch.bool else given.to(kind)
    given = given.mT if turned else given
    if blind is not None:
        given[:, :, blind] = False if kind == torch.bool else -math.inf
    return q, k, v, given, dim**-0.5 if scale is None else scale, fill, empty_nan


EXAMPLES = (
    _example("mask of keys", 3, (70, 130), (4, 4), bias=(3, 1, 1, 130)),
    _example("bias of heads", 2, (49, 49), (4, 4), 32, torch.float16, bias=(1, 4, 49, 49), kind=torch.float16),
    _example("bias of each", 2, (66, 70), (4, 2), 128, bias=(2, 4, 66, 70), kind=torch.bfloat16, blind=3),
    _example("windows", 6, (16, 16), (2, 2), 32, torch.float16, bias=(3, 2, 16, 16), kind=torch.float32),
    _example("sees nothing", 2, (70, 33), bias=(1, 1, 70, 33), blind=65, dtype=torch.float16),
    _example("sees nothing, NaN", 1, (20, 90), bias=(1, 2, 20, 90), blind=0, empty_nan=True),
    _example("finite fill", 2, (20, 40), (2, 1), bias=(2, 1, 20, 40), fill=-1e4, blind=7, dtype=torch.float16),
    _example("least fill", 1, (20, 80), bias=(1, 1, 20, 80), fill=torch.finfo(torch.float32).min, blind=7),
    _example("turned", 1, (35, 70), dim=80, bias=(1, 2, 35, 70), kind=torch.float32, turned=True, value_dim=40),
    _example("one query", 3, (1, 100), (6, 2), 128, bias=(3, 1, 1, 100)),
    _example("constant along keys", 1, (20, 50), bias=(1, 1, 20, 1), kind=torch.float16, dtype=torch.float16),
    _example("wide", 1, (70, 66), (2, 1), 256, bias=(1, 1, 70, 66), kind=torch.bfloat16),
    _example("fp32", 2, (35, 50), (2, 1), 20, torch.float32, bias=(2, 1, 1, 50), kind=torch.float32, scale=-0.3),
    _example("fp32 mask", 1, (5, 40), (1, 1), 8, torch.float32, bias=(1, 1, 5, 40), scale=0.0),
    _example("no keys", 2, (3, 0), bias=(2, 1, 3, 0)),
    _example("no rows", 2, (0, 5), bias=(1, 1, 0, 5), empty_nan=True),
)

# ---- kernel


@triton.jit
def _biased_step(
    q, acc, m, l, k_ptr, v_ptr, bias_ptr, start, rows, n_queries, n_keys, scale, fill, k_row_stride, v_row_stride,
    bias_row_stride, bias_key_stride, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOOL: tl.constexpr, ROWS_SHARE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. start + BLOCK_N to (acc, m, l). The pointers point to the first key of the head."""
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, keys, k_row_stride, D, BLOCK_D, RAGGED, n_keys)
    v = load_rows(v_ptr, keys, v_row_stride, DV, BLOCK_DV, RAGGED, n_keys)
    bias_at = bias_ptr + keys[None, :].to(tl.int64) * bias_key_stride
    inside = keys[None, :] < n_keys
    if not ROWS_SHARE:
        bias_at += rows[:, None].to(tl.int64) * bias_row_stride
        inside &= (rows < n_queries)[:, None]
    bias = tl.load(bias_at, mask=inside, other=0)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32)) * scale
    if BOOL:
        s = tl.where(bias != 0, s, fill)
    else:
        s += bias.to(tl.float32)
    if RAGGED:
        s = tl.where(keys[None, :] < n_keys, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # If all scores of a row were -inf so far, the weights are exp2(-inf) = 0, not NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2((s - base[:, None]) * _LOG2_E)
    alpha = tl.exp2((m - base) * _LOG2_E)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, tl.fma(l, alpha, tl.sum(p, 1))


@triton.jit(do_not_specialize=["tiles", "n_queries", "n_keys", "biases", "H", "GROUP", "scale", "fill"])
def _biased_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, tiles, n_queries, n_keys, biases, H, GROUP, scale, fill,
    q_batch_stride, q_row_stride, q_head_stride, k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride, bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
    D: tl.constexpr, DV: tl.constexpr, BOOL: tl.constexpr, ROWS_SHARE: tl.constexpr, EMPTY_NAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # The tiles of a head are neighbours, so that they share its keys in L2.
    first = tl.program_id(0) % tiles * BLOCK_M
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    rows = first + tl.arange(0, BLOCK_M)
    q_ptr += b * q_batch_stride + h * q_head_stride
    k_ptr += b * k_batch_stride + h // GROUP * k_head_stride
    v_ptr += b * v_batch_stride + h // GROUP * v_head_stride
    bias_ptr += b % biases * bias_batch_stride + h * bias_head_stride
    q = load_rows(q_ptr, rows, q_row_stride, D, BLOCK_D, True, n_queries)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    whole = n_keys // BLOCK_N * BLOCK_N
    for at in tl.range(0, whole, BLOCK_N):
        acc, m, l = _biased_step(
            q, acc, m, l, k_ptr, v_ptr, bias_ptr, at, rows, n_queries, n_keys, scale, fill, k_row_stride, v_row_stride,
            bias_row_stride, bias_key_stride, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BOOL, ROWS_SHARE, False,
        )  # fmt: skip
    if whole < n_keys:
        acc, m, l = _biased_step(
            q, acc, m, l, k_ptr, v_ptr, bias_ptr, whole, rows, n_queries, n_keys, scale, fill, k_row_stride, v_row_stride,
            bias_row_stride, bias_key_stride, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, BOOL, ROWS_SHARE, True,
        )  # fmt: skip
    if not EMPTY_NAN:
        l = tl.where(m == float("-inf"), 1.0, l)  # 0 / 1 instead of 0 / 0
    dims = tl.arange(0, BLOCK_DV)
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    live = (rows < n_queries)[:, None] & (dims < DV)[None, :]
    at = (b * n_queries + rows[:, None]) * H + h
    tl.store(out_ptr + at * DV + dims[None, :], out, mask=live)


# ---- launchers and op


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in DTYPES or problem.bias_dtype not in (*DTYPES, torch.bool):
        return f"supports bf16, fp16 and fp32, and a bias of these or bool, not {problem.dtype} and {problem.bias_dtype}"
    if max(problem.head_dim, problem.value_dim) > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM} only, not {problem.head_dim} and {problem.value_dim}"
    return None


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool,
) -> Tensor:  # fmt: skip
    out = _empty(q, v)
    if not out.numel():
        return out
    batch, queries, heads, d = q.shape
    keys, dv = k.shape[1], v.shape[-1]
    tiles = ceil_div(queries, config["BLOCK_M"])
    of_bias = [stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    coded = bias.dtype == torch.bool
    _biased_kernel[(tiles * batch * heads,)](
        q, k, v, bias.view(torch.uint8) if coded else bias, out,
        tiles, queries, keys, bias.shape[0], heads, heads // k.shape[2], scale, fill, *strides_of(q, k, v), *of_bias,
        D=d, DV=dv, BOOL=coded, ROWS_SHARE=bias.shape[2] == 1, EMPTY_NAN=empty_nan and keys > 0,
        BLOCK_D=max(16, next_pow2(d)), BLOCK_DV=max(16, next_pow2(dv)), **config,
    )  # fmt: skip
    return out


def _vendor_refuse(device: Device, problem: Problem) -> str | None:
    if problem.bias_dtype not in (torch.bool, problem.dtype):
        return f"needs a bias of bool or of the operands' dtype {problem.dtype}, not {problem.bias_dtype}"
    if problem.filled:
        return "supports masks that hide keys only, not masks that give them a finite score"
    if problem.empty_nan:
        return "returns zeros for a query that sees no key, but NaN is needed"
    if problem.repeated:
        return "supports one bias for all sequences or one per sequence only"
    return None if problem.keys > 1 else "needs at least two keys"


def _vendor(config: Config, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, *_: Any) -> Tensor:
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias.expand(shape), scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    # Its kernels differ for a query that sees no key: on a GPU some of them return the mean of all values.
    seen = bias if bias.dtype == torch.bool else bias > -math.inf
    out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).contiguous()


biased_attention_op = Op(
    name="biased_attention",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=biased_attention_arguments,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True),
        Impl(name="vendor", library=True, launch=_vendor, refuse=_vendor_refuse),
    ),
    fake=lambda q, k, v, *_: _empty(q, v),
    rows_in_problem=True,
    roundings=2,  # the weights, then the result
)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float | None = None) -> Tensor:
    """`ops.attention` with `bias`; see there for the arguments and the result. Without gradients.

    Raises:
        ValueError: shapes, dtypes, devices, strides or the scale do not fit.
    """
    check_operands(q, k, v)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.dim() != 4:
        raise ValueError(f"attention: a bias needs operands [B, S, H, D]; got packed operands, q {list(q.shape)}")
    if not math.isfinite(factor):
        raise ValueError(f"attention: scale is {factor}, wanted a finite number")
    if bias.device != q.device or bias.dtype not in (*DTYPES, torch.bool):
        raise ValueError(
            f"attention: bias is {bias.dtype} on {bias.device}, wanted bool, bfloat16, float16 or float32 on {q.device}"
        )
    sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    whole = bias[(None,) * (4 - bias.dim())] if bias.dim() <= 4 else bias
    if whole.dim() != 4 or any(got not in (1, size) for got, size in zip(whole.shape, sizes, strict=True)):
        raise ValueError(f"attention: bias is {list(bias.shape)}, it must broadcast to [B, H, S, SK] {list(sizes)}")
    return biased_attention_op(q, k, v, whole, factor, -math.inf, False)
