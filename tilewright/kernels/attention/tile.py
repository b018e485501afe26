"""`attention` on tensor cores for every GPU, head dim, layout and mask: the implementation `triton`.

A program processes BLOCK_M query rows of one head. It goes through the keys in ascending order, BLOCK_N at a time, in a loop
that Triton pipelines: from the block in which the window of its first row begins, to the block in which the window of its last
row ends (with a causal mask: at the diagonal). Masking is applied only to blocks that a mask or the end of the keys cuts. If a
head dim is not a power of two, the tiles are as wide as the next power of two, and masked: D = 80 costs as much as D = 128.

The bits of a row depend only on its own keys: blocks of keys start at the same positions for every tile and batch, and no
default config depends on lengths. A block that a row does not see must leave the row unchanged, to the bit. So the factor for
the earlier sums is exp2((m - m') c), which is exactly 1 if m' = m. With exp2(m c - m' c) it might not be 1, because the
compiler may fuse one of the products and round the other. The exponent is an explicit fused multiply-add, because the compiler
might otherwise fuse it in one loop and not in the other. float32 is multiplied in IEEE precision, which on NVIDIA GPUs means
without tensor cores. Refuses: float64, head dims above 256.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.problem import DTYPES, LARGEST_HEAD_DIM, LOG2_E, Problem, empty_outputs
from tilewright.kernels.attention.tile_masks import capped, load_rows, seen_by, sequence, strides_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON", "widths"]

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in DTYPES:
        return f"supports bf16, fp16 and fp32 only, not {problem.dtype}"
    if problem.head_dim > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM} only, not {problem.head_dim}"
    return None


# ---- space


def widths(problem: Any) -> tuple[int, int]:
    """(columns of a tile of queries or keys, columns of a tile of values)."""
    return max(16, next_pow2(problem.head_dim)), max(16, next_pow2(problem.value_dim))


def _default(device: Device, problem: Problem) -> Config:
    # Chosen by compiling, not by measuring: the largest tiles that do not spill (a few registers at head dim 256 on sm_90 and
    # 100).
    width, shared = max(widths(problem)), device.multiplies_by_warpgroup
    if problem.dtype.itemsize == 4:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if width > 128:
        return {"BLOCK_M": 128 if shared else 64, "BLOCK_N": 64 if shared else 32, "num_warps": 8, "num_stages": 2}
    if width <= 64:
        # On sm_80, 64 keys of 32 dims need up to 167 registers per thread, or 128 and spills; 32 keys need 114: two blocks per
        # SM.
        block_n = 64 if shared or width > 32 else 32
        return {"BLOCK_M": 128, "BLOCK_N": block_n, "num_warps": 4 if shared else 8, "num_stages": 4}
    block_n = 64 if shared or width == problem.head_dim else 32
    return {"BLOCK_M": 128, "BLOCK_N": block_n, "num_warps": 8, "num_stages": 3}


def _smem_bytes(problem: Problem, c: Config) -> int:
    width, of_values = widths(problem)
    return (c["BLOCK_M"] * width + c["num_stages"] * c["BLOCK_N"] * (width + of_values)) * problem.dtype.itemsize


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width, of_values = widths(problem)
    if _smem_bytes(problem, c) > device.smem_bytes:
        return "more shared memory than the device has"
    if c["BLOCK_M"] // c["num_warps"] < 16 and width <= 128 and problem.dtype.itemsize == 2:
        return "a warp needs at least 16 rows: two warps exchange the rows that they share through shared memory"
    # Registers per thread: the weighted sum, the scores, and the weights in 16 bits.
    registers = c["BLOCK_M"] * (2 * of_values + 3 * c["BLOCK_N"]) // (64 * c["num_warps"])
    if not device.multiplies_by_warpgroup:
        registers += c["BLOCK_M"] * width // (64 * c["num_warps"])  # the queries too
    # On sm_80 all three tiles that need 192 registers spill: by up to 120 bytes, or only with masks that are more than causal.
    if registers > (200 if device.multiplies_by_warpgroup else 184):
        return "the accumulators need more registers than a thread has"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    refusal=_config_refusal,
)

# ---- kernel


@triton.jit
def _tile_step(
    q, acc, m, l, k_ptr, v_ptr, start, k_len, own, begin, end, scale_log2, pre_scale, slope, k_row_stride, v_row_stride,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LEFT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. start + BLOCK_N to (acc, m, l): for each row those from its `begin` (if LEFT) to before its `end`.

    k_ptr and v_ptr point to the first key of the head. A score times scale_log2 is an exponent of two.
    """
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, keys, k_row_stride, D, BLOCK_D, MASKED, k_len)
    v = load_rows(v_ptr, keys, v_row_stride, DV, BLOCK_DV, MASKED, k_len)
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if SOFTCAP:
        s = capped(s, pre_scale)
    if ALIBI:
        s -= slope * tl.abs(own[:, None] - keys[None, :]).to(tl.float32)
    if MASKED:
        seen = keys[None, :] < end[:, None]
        if LEFT:
            seen &= keys[None, :] >= begin[:, None]
        s = tl.where(seen, s, float("-inf"))
    # Scores are unscaled until here. The scale is applied in the fma of the exponent, masked or not, so that both give equal
    # bits.
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has m = -inf; subtracting 0 instead keeps its weights exp2(-inf) = 0, not NaN.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, scale_log2, -(base * scale_log2)[:, None]))
    alpha = tl.exp2((m - base) * scale_log2)
    acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, tl.fma(l, alpha, tl.sum(p, 1))


@triton.jit
def _finish(acc, m, l, out_ptr, lse_ptr, rows, q_start, q_len, total_q, h, H, scale_log2, DV: tl.constexpr):
    """Divide, round, and store those of the tile's rows that exist."""
    dims = tl.arange(0, acc.shape[1])
    total = tl.where(l == 0.0, 1.0, l)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    live = (rows < q_len)[:, None] & (dims < DV)[None, :]
    tl.store(out_ptr + ((q_start + rows)[:, None] * H + h) * DV + dims[None, :], out, mask=live)
    if lse_ptr is not None:
        lse = (m * scale_log2 + tl.log2(total)) * _LN_2  # where l is 0, m is -inf
        tl.store(lse_ptr + h.to(tl.int64) * total_q + q_start + rows, lse, mask=rows < q_len)


@triton.jit(do_not_specialize=["tiles", "max_q", "max_k", "total_q", "H", "GROUP", "left", "right", "prefix"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, prefixes_ptr, sinks_ptr, slopes_ptr,
    tiles, max_q, max_k, total_q, H, GROUP, left, right, prefix, scale_log2, pre_scale,
    q_batch_stride, q_row_stride, q_head_stride, k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # The tiles of a head are neighbours, so that they share its keys in L2. With a right bound the longest tiles come first.
    tile = tl.program_id(0) % tiles
    if RIGHT:
        tile = tiles - 1 - tile
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // tiles // H
    q_ptr, q_start, q_len = sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, _, k_len = sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    first = tile * BLOCK_M
    if first >= q_len:
        return
    k_ptr += (h // GROUP).to(tl.int64) * k_head_stride
    v_ptr += (h // GROUP).to(tl.int64) * v_head_stride
    rows = first + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + h.to(tl.int64) * q_head_stride, rows, q_row_stride, D, BLOCK_D, True, q_len)
    if prefixes_ptr is not None:
        prefix = tl.load(prefixes_ptr + b)
    own, begin, end, start, cut, plain, last = seen_by(
        first, q_len, k_len, left, right, prefix, BLOCK_M, BLOCK_N, LEFT, RIGHT, PREFIX
    )  # fmt: skip
    ALIBI: tl.constexpr = slopes_ptr is not None
    slope = tl.load(slopes_ptr + h) * _LOG2_E / scale_log2 if ALIBI else 0.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # starts as after a key with this score and the value zero
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * _LOG2_E / scale_log2
        l += 1.0
    if LEFT:
        for at in tl.range(start, cut, BLOCK_N):
            acc, m, l = _tile_step(
                q, acc, m, l, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope, k_row_stride,
                v_row_stride, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
            )  # fmt: skip
    for at in tl.range(cut, plain, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope, k_row_stride,
            v_row_stride, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, False,
        )  # fmt: skip
    for at in tl.range(plain, last, BLOCK_N):
        acc, m, l = _tile_step(
            q, acc, m, l, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope, k_row_stride,
            v_row_stride, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    _finish(acc, m, l, out_ptr, lse_ptr, rows, q_start, q_len, total_q, h, H, scale_log2, DV)


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, want_lse: bool, left: int | None = None, right: int | None = None, prefix: int = 0,
    prefixes: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = empty_outputs(q, v, want_lse)
    if not out.numel():
        return out, lse
    heads, d = q.shape[-2:]
    dv = v.shape[-1]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    tiles = ceil_div(max_q, config["BLOCK_M"])
    behind = 0 if causal else right
    # With a cap, a score is tanh(scale q . k / cap) in [-1, 1], and its scale is the cap.
    factor, pre = (scale, 0.0) if softcap is None else (softcap, 2 * scale / softcap * LOG2_E)
    _attention_kernel[(tiles * batch * heads,)](
        q, k, v, out, lse if want_lse else None, cu_q, cu_k, prefixes, sinks, slopes,
        tiles, max_q, max_k, q.shape[:-2].numel(), heads, heads // k.shape[-2], left or 0, behind or 0, prefix,
        factor * LOG2_E, pre, *strides_of(q, k, v),
        D=d, DV=dv, LEFT=left is not None, RIGHT=behind is not None, PREFIX=prefix > 0 or prefixes is not None,
        SOFTCAP=softcap is not None, BLOCK_D=max(16, next_pow2(d)), BLOCK_DV=max(16, next_pow2(dv)), **config,
    )  # fmt: skip
    return out, lse


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
