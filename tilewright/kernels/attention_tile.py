"""`attention` on tensor cores for every card, head dim and layout: the implementation `triton`.

A program takes BLOCK_M query rows of one head and walks the keys from the first, BLOCK_N at a time, in steps that Triton
pipelines; it ends at the diagonal under a causal mask. Only blocks that the diagonal or the end of the keys cuts are masked.
Where D is no power of two the tiles are as wide as the next one, and masked: D = 80 costs what 128 costs.

A row's bits depend on its own keys alone: blocks of keys start at the same places whatever tile or batch the row is in, a
block that it does not see changes nothing, and no default depends on lengths. float32 is multiplied in IEEE precision, which on
NVIDIA cards means without tensor cores. Refuses: float64, head dims above 256.
"""

# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention_common import DTYPES, LARGEST_HEAD_DIM, LOG2_E, Problem, empty_outputs
from tilewright.kernels.reduce import dot
from tilewright.kernels.shapes import next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON"]

_LN_2 = tl.constexpr(0.6931471805599453)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in DTYPES:
        return f"takes bf16, fp16 or fp32, not {problem.dtype}"
    if problem.head_dim > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {problem.head_dim}"
    return None


# ---- space


def _by_warpgroup(device: Device) -> bool:
    """Whether the tensor cores read operands from shared memory, so that the registers are the accumulators'."""
    return device.arch in (90, 100, 103)


def _default(device: Device, problem: Problem) -> Config:
    # Compiled, not measured: the largest tiles that do not spill (a few registers at head dim 256 on sm_90 and 100).
    width, shared = max(16, next_pow2(problem.head_dim)), _by_warpgroup(device)
    if problem.dtype.itemsize == 4:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if width > 128:
        return {"BLOCK_M": 128 if shared else 64, "BLOCK_N": 64 if shared else 32, "num_warps": 8, "num_stages": 2}
    if width <= 64:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4}
    block_n = 64 if shared or width == problem.head_dim else 32
    return {"BLOCK_M": 128, "BLOCK_N": block_n, "num_warps": 8, "num_stages": 3}


def _smem_bytes(problem: Problem, c: Config) -> int:
    width = max(16, next_pow2(problem.head_dim))
    return (c["BLOCK_M"] + 2 * c["num_stages"] * c["BLOCK_N"]) * width * problem.dtype.itemsize


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width = max(16, next_pow2(problem.head_dim))
    if _smem_bytes(problem, c) > device.smem_bytes:
        return "more shared memory than the device has"
    if c["BLOCK_M"] // c["num_warps"] < 16 and width <= 128 and problem.dtype.itemsize == 2:
        return "a warp has at least 16 rows: a row that two warps share costs a trip through shared memory"
    # Of a thread: the average, the scores, and the weights in 16 bits.
    registers = c["BLOCK_M"] * (2 * width + 3 * c["BLOCK_N"]) // (64 * c["num_warps"])
    if not _by_warpgroup(device):
        registers += c["BLOCK_M"] * width // (64 * c["num_warps"])  # the queries too
    if registers > 200:
        return "more accumulators than the registers hold"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def _tile_step(
    q, acc, m, l, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys start .. start + BLOCK_N into (acc, m, l). k_ptr and v_ptr point at the first key of the head."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    keys = start + tl.arange(0, BLOCK_N)
    rows = keys[:, None].to(tl.int64)
    if MASKED:
        inside = (keys < k_len)[:, None] & (dims < D)
        k = tl.load(k_ptr + rows * k_row_stride + dims, mask=inside, other=0.0)
        v = tl.load(v_ptr + rows * v_row_stride + dims, mask=inside, other=0.0)
    elif D == BLOCK_D:
        k = tl.load(k_ptr + rows * k_row_stride + dims)
        v = tl.load(v_ptr + rows * v_row_stride + dims)
    else:
        k = tl.load(k_ptr + rows * k_row_stride + dims, mask=dims < D, other=0.0)
        v = tl.load(v_ptr + rows * v_row_stride + dims, mask=dims < D, other=0.0)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if MASKED:
        seen = keys[None, :] < k_len
        if CAUSAL:
            seen &= keys[None, :] <= at[:, None]
        s = tl.where(seen, s, float("-inf"))
    # Unscaled until here: the scale is a factor of the exponent's multiply-add, masked or not, so that both give the same bits.
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new * scale_log2)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    alpha = tl.exp2(m * scale_log2 - shift)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _sequence(ptr, b, cu_ptr, length, batch_stride, row_stride):
    """(pointer to the first row of sequence b, rows of the sequences before it, its length)."""
    if cu_ptr is None:
        return ptr + b.to(tl.int64) * batch_stride, b.to(tl.int64) * length, length
    else:
        start = tl.load(cu_ptr + b)
        return ptr + start.to(tl.int64) * row_stride, start.to(tl.int64), tl.load(cu_ptr + b + 1) - start


@triton.jit(do_not_specialize=["tiles", "max_q", "max_k", "total_q", "H", "GROUP"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, tiles, max_q, max_k, total_q, H, GROUP, scale_log2,
    q_batch_stride, q_row_stride, q_head_stride, k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Tiles of a head are neighbours, so that they share its keys in L2; under a diagonal the longest come first.
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // tiles // H
    q_ptr, q_start, q_len = _sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, _, k_len = _sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = _sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    first = tile * BLOCK_M
    if first >= q_len:
        return
    k_ptr += (h // GROUP).to(tl.int64) * k_head_stride
    v_ptr += (h // GROUP).to(tl.int64) * v_head_stride
    rows = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    live = (rows < q_len)[:, None] & (dims < D)[None, :]
    q_ptrs = q_ptr + h.to(tl.int64) * q_head_stride + rows[:, None].to(tl.int64) * q_row_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=live, other=0.0)
    at = rows + (k_len - q_len)  # the last key that a row sees under a causal mask
    last = k_len
    plain = k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        last = tl.minimum(k_len, first + BLOCK_M + k_len - q_len)
        plain = tl.maximum(0, tl.minimum(k_len, first + 1 + k_len - q_len)) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, plain, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
            D, BLOCK_N, BLOCK_D, CAUSAL, False,
        )  # fmt: skip
    for start in tl.range(plain, last, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
            D, BLOCK_N, BLOCK_D, CAUSAL, True,
        )  # fmt: skip
    out = (acc / tl.where(l == 0.0, 1.0, l)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((q_start + rows)[:, None] * H + h) * D + dims[None, :], out, mask=live)
    if lse_ptr is not None:
        lse = (m * scale_log2 + tl.log2(tl.where(l == 0.0, 1.0, l))) * _LN_2  # where l is 0, m is -inf
        tl.store(lse_ptr + h.to(tl.int64) * total_q + q_start + rows, lse, mask=rows < q_len)


# ---- launcher


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, want_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = empty_outputs(q, want_lse)
    if not q.numel():
        return out, lse
    heads, d = q.shape[-2:]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    tiles = triton.cdiv(max_q, config["BLOCK_M"])
    strides = [stride for t in (q, k, v) for stride in ((0, *t.stride()) if t.dim() == 3 else t.stride())[:3]]
    _attention_kernel[(tiles * batch * heads,)](
        q, k, v, out, lse if want_lse else None, cu_q, cu_k, tiles, max_q, max_k, q.shape[:-2].numel(),
        heads, heads // k.shape[-2], scale * LOG2_E, *strides,
        D=d, CAUSAL=causal, BLOCK_D=max(16, next_pow2(d)), **config,
    )  # fmt: skip
    return out, lse


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
