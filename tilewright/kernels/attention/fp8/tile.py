"""Attention over 8-bit codes in portable Triton: the implementation `triton`, for int8 from sm_80 on and fp8 from sm_89 on.

attention.py has the definition, attention/attention.py the incremental softmax. A program has a tile of queries and goes
through the keys in blocks. If the values are codes, they are stored in the order of `key_order`. Then the keys are loaded in
the same order, which permutes the columns of the scores at no cost, and masks use the key of each column.
"""
# B sequences, H query heads, G key/value heads, D head dim, M queries per tile, N keys per block

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw import env
from tilewright.hw.device import Device
from tilewright.kernels.attention.fp8.layout import Problem
from tilewright.kernels.attention.problem import LOG2_E
from tilewright.kernels.device.quantize import UNFUSED, encode_tile
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON"]

_INTERPRETED = tl.constexpr(env.interpreting())

# ---- space


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.coded_values and device.arch < 89:
        return f"float8 products need sm_89, this is sm_{device.arch}; the format int8 runs here"
    return None


def _default(device: Device, problem: Problem) -> Config:
    wide = problem.head_dim > 128
    block_n = 32 if problem.coded_values and problem.head_dim > 64 else 64
    return {"BLOCK_M": 64 if wide else 128, "BLOCK_N": block_n, "num_warps": 4 if wide else 8, "num_stages": 2 if wide else 3}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width = max(16, next_pow2(problem.head_dim))
    of_value = 1 if problem.coded_values else problem.dtype.itemsize
    if c["BLOCK_M"] * width + c["num_stages"] * c["BLOCK_N"] * width * (1 + of_value) > device.smem_bytes:
        return "more shared memory than the device has"
    # Registers per thread: the weighted sum, the scores, and the weights in 16 bits.
    registers = c["BLOCK_M"] * (2 * width + 3 * c["BLOCK_N"]) // (64 * c["num_warps"])
    # If the values are codes, 112 registers spill at D = 128: reordering and transposing them also needs registers.
    if registers > (96 if problem.coded_values else 128):
        return "the accumulators need more registers than a thread has"
    if c["BLOCK_M"] // c["num_warps"] < 16:
        return "a warp needs at least 16 rows: two warps exchange the rows that they share through shared memory"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def _dot(a, b):
    """a @ b of codes, in float32. The interpreter does not support products of codes."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.int8:
        return tl.dot(a, b).to(tl.float32)
    else:
        return tl.dot(a, b)


@triton.jit
def _weigh(p, v, acc):
    """acc + p @ v, with p in v's dtype."""
    p = p.to(v.dtype)
    if _INTERPRETED:
        return tl.dot(p.to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(p, v, acc)


@triton.jit
def _step(
    q, acc, m, l, before, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, start, keys, end, factor, padded_k, v_row_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. start + BLOCK_N to (acc, m, l). before: the scale of the values in acc."""
    dims = tl.arange(0, BLOCK_D)
    place = start + tl.arange(0, BLOCK_N)
    key = place
    if v_scale_ptr is not None:
        of_16 = place % 16
        key = place - of_16 + of_16 // 4 * 2 + of_16 % 2 + of_16 % 4 // 2 * 8
    k = tl.load(k_ptr + key[:, None].to(tl.int64) * D + dims[None, :], mask=dims[None, :] < D, other=0.0)
    z = _dot(q, tl.trans(k)) * (factor * tl.load(k_scale_ptr + start // 128))[:, None]
    if MASKED:
        z = tl.where(key[None, :] < end[:, None], z, float("-inf"))
    high = tl.maximum(m, tl.ceil(tl.max(z, 1)))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    base = tl.where(high == float("-inf"), 0.0, high)
    alpha = tl.exp2(m - base)
    if v_scale_ptr is not None:
        p = tl.exp2(z - (base - 8.0)[:, None])
        scale = tl.load(v_scale_ptr + start // 128)
        v = tl.load(v_ptr + dims[:, None].to(tl.int64) * padded_k + place[None, :], mask=dims[:, None] < D, other=0.0)
        acc = _weigh(p, tl.trans(v), acc * (alpha * (before / scale))[:, None])
        before = scale
    else:
        p = tl.exp2(z - base[:, None])
        inside = (place < keys)[:, None] & (dims < D)[None, :]
        v = tl.load(v_ptr + place[:, None].to(tl.int64) * v_row_stride + dims[None, :], mask=inside, other=0.0)
        acc = _weigh(p, v, acc * alpha[:, None])
    return acc, high, l * alpha + tl.sum(p, 1), before


@triton.jit(do_not_specialize=["tiles", "queries", "keys", "H", "SHARED", "padded_k"])
def scaled_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, tiles, queries, keys, H, SHARED, padded_k, scale,
    q_batch_stride, q_row_stride, q_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    LARGEST: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """SHARED: query heads per KV head. scale: already multiplied by log2(e). v_scale_ptr None: values [B, SK, G, D] with those
    strides."""
    # The tiles of a head are neighbours, so that they share its keys in L2; under a causal mask the longest come first.
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    head = tl.program_id(0) // tiles
    b = head // H
    group = b * (H // SHARED) + head % H // SHARED
    dims = tl.arange(0, BLOCK_D)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < queries)[:, None] & (dims < D)[None, :]
    q_ptr += b.to(tl.int64) * q_batch_stride + (head % H).to(tl.int64) * q_head_stride
    raw = tl.load(q_ptr + rows[:, None].to(tl.int64) * q_row_stride + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(raw), axis=1), 9.094947017729282e-13)  # SMALLEST
    q = encode_tile(raw, tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)[:, None], k_ptr.dtype.element_ty)
    factor = scale * tl.div_rn(amax, LARGEST)
    k_ptr += group.to(tl.int64) * padded_k * D
    k_scale_ptr += group * (padded_k // 128)
    before = 1.0
    if v_scale_ptr is not None:
        v_ptr += group.to(tl.int64) * padded_k * D
        v_scale_ptr += group * (padded_k // 128)
        before = tl.load(v_scale_ptr)
    else:
        v_ptr += b.to(tl.int64) * v_batch_stride + (head % H // SHARED).to(tl.int64) * v_head_stride
    end = tl.zeros([BLOCK_M], tl.int32) + keys
    plain = keys // BLOCK_N * BLOCK_N
    last = keys
    if CAUSAL:
        own = tile * BLOCK_M + keys - queries
        end = tl.minimum(end, rows + (keys - queries + 1))
        plain = tl.minimum(plain, tl.maximum(own + 1, 0) // BLOCK_N * BLOCK_N)
        last = tl.minimum(last, tl.maximum(own + BLOCK_M, 0))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for at in tl.range(0, plain, BLOCK_N):
        acc, m, l, before = _step(
            q, acc, m, l, before, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, at, keys, end, factor, padded_k, v_row_stride,
            D, BLOCK_D, BLOCK_N, False,
        )  # fmt: skip
    for at in tl.range(plain, last, BLOCK_N):
        acc, m, l, before = _step(
            q, acc, m, l, before, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, at, keys, end, factor, padded_k, v_row_stride,
            D, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
    out = acc * (before / tl.where(l == 0.0, 1.0, l))[:, None]
    at_row = ((b.to(tl.int64) * queries + rows) * H + head % H)[:, None]
    tl.store(out_ptr + at_row * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def _launch(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    keys: int,
    scale: float,
    causal: bool,
) -> Tensor:
    batch, queries, heads, d = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if not keys:
        return out.zero_()
    tiles = ceil_div(queries, config["BLOCK_M"])
    scaled_attention_kernel[(tiles * batch * heads,)](
        q, k, v, k_scale, v_scale, out, tiles, queries, keys, heads, heads // k.shape[1], k.shape[2], scale * LOG2_E,
        *q.stride()[:3], *v.stride()[:3],
        LARGEST=127.0 if v_scale is None else 448.0, D=d, CAUSAL=causal, BLOCK_D=max(16, next_pow2(d)), **UNFUSED, **config,
    )  # fmt: skip
    return out


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
