"""`attention_backward` on tensor cores for every card, head dim and layout: the implementation `triton`.

Three kernels: the rows' sums of do * out; then dk and dv, where a program keeps TILE keys of one key/value head and walks the
queries that see them, through every query head of its group, STEP at a time; then dq, where it keeps TILE queries and walks
the keys. Scores are computed twice, which makes seven products of five, and in exchange nobody adds to memory that another
program adds to: the result is deterministic, and no float32 gradient of q goes through memory.

For dk and dv the scores are computed transposed, [keys, queries], so that weights and their gradients are first operands as
they come; a product of a transposed accumulator is what some versions of Triton miscompile on Hopper. float32 is multiplied in
IEEE precision. Refuses: float64, head dims above 256.
"""

# pyright: reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention_backward_common import Gradients, Problem, empty_gradients
from tilewright.kernels.attention_common import DTYPES, LARGEST_HEAD_DIM, LOG2_E
from tilewright.kernels.reduce import dot
from tilewright.kernels.shapes import next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON"]

_LOG2_E = tl.constexpr(LOG2_E)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in DTYPES:
        return f"takes bf16, fp16 or fp32, not {problem.dtype}"
    if problem.head_dim > LARGEST_HEAD_DIM:
        return f"takes head dims up to {LARGEST_HEAD_DIM}, not {problem.head_dim}"
    return None


# ---- space


def _width(problem: Problem) -> int:
    return max(16, next_pow2(problem.head_dim))


def _default(device: Device, problem: Problem) -> Config:
    # Compiled for sm_80 and 90: nothing spills on sm_80 in 16 bits. On Hopper 128 dims spill 1 KB a thread where keys stay, and
    # run at 260 to 280 TFLOP/s nevertheless (docs/log.md#attention-backward).
    width, shared = _width(problem), device.multiplies_by_warpgroup
    if problem.dtype.itemsize == 4:
        return {"TILE": 32, "STEP": 32, "num_warps": 8 if width > 64 else 4, "num_stages": 1}
    if width > 128:
        return {"TILE": 64 if shared else 32, "STEP": 32, "num_warps": 8, "num_stages": 1}
    if width == 128 and not shared:
        return {"TILE": 64, "STEP": 32, "num_warps": 8, "num_stages": 2}
    return {"TILE": 128, "STEP": 64 if width == 128 else 32, "num_warps": 8, "num_stages": 2}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    width, size = _width(problem), problem.dtype.itemsize
    # Two operands stay, two go by; weights and their gradients may pass through as well.
    if (2 * c["TILE"] + 2 * c["num_stages"] * c["STEP"]) * width * size + c["TILE"] * c["STEP"] * size > device.smem_bytes:
        return "more shared memory than the device has"
    # Of a thread: two gradients, the scores and their gradients.
    registers = c["TILE"] * 2 * (width + c["STEP"]) // (32 * c["num_warps"])
    if not device.multiplies_by_warpgroup:
        registers += c["TILE"] * width // (32 * c["num_warps"])  # the two operands that stay
    if registers > 200:
        return "more accumulators than the registers hold"
    return None


SPACE = Space(
    default=_default,
    axes={"TILE": (32, 64, 128), "STEP": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2)},
    refusal=_config_refusal,
)
"""TILE: the rows that a program keeps; STEP: those that go by at a time."""

# ---- kernels


@triton.jit
def _sequence(ptr, b, cu_ptr, length, batch_stride, row_stride):
    """(pointer to the first row of sequence b, rows of the sequences before it, its length)."""
    if cu_ptr is None:
        return ptr + b.to(tl.int64) * batch_stride, b.to(tl.int64) * length, length
    else:
        start = tl.load(cu_ptr + b)
        return ptr + start.to(tl.int64) * row_stride, start.to(tl.int64), tl.load(cu_ptr + b + 1) - start


@triton.jit
def _rows(ptr, rows, end, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] of a head; 0 where there is nothing."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + rows[:, None].to(tl.int64) * stride + dims
    if MASKED:
        return tl.load(ptrs, mask=(rows < end)[:, None] & (dims < D), other=0.0)
    elif D == BLOCK_D:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dims < D, other=0.0)


@triton.jit
def _bounds(lse_ptr, delta_ptr, rows, end):
    """(lse in the domain of exp2, delta) of query rows. lse is +inf, and weights so 0, where a row sees no key or is none."""
    lse = tl.load(lse_ptr + rows, mask=rows < end, other=float("-inf"))
    delta = tl.load(delta_ptr + rows, mask=rows < end, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2_E), delta


@triton.jit(do_not_specialize=["tiles", "max_q", "total_q", "H"])
def _delta_kernel(
    do_ptr, out_ptr, delta_ptr, cu_q_ptr, tiles, max_q, total_q, H,
    do_batch_stride, do_row_stride, do_head_stride, out_batch_stride, out_row_stride, out_head_stride,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // tiles // H
    do_ptr, q_start, q_len = _sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    out_ptr, _, _ = _sequence(out_ptr, b, cu_q_ptr, max_q, out_batch_stride, out_row_stride)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    do = _rows(do_ptr + h.to(tl.int64) * do_head_stride, rows, q_len, do_row_stride, D, BLOCK_D, True)
    out = _rows(out_ptr + h.to(tl.int64) * out_head_stride, rows, q_len, out_row_stride, D, BLOCK_D, True)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + h.to(tl.int64) * total_q + q_start + rows, delta, mask=rows < q_len)


@triton.jit
def _keys_step(
    k, v, dk, dv, do_ptr, q_ptr, lse_ptr, delta_ptr, start, q_len, last, scale_log2, do_row_stride, q_row_stride,
    D: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the queries start .. start + STEP of one head into (dk, dv). last: of each key, the first query that sees it."""
    rows = start + tl.arange(0, STEP)
    q = _rows(q_ptr, rows, q_len, q_row_stride, D, BLOCK_D, MASKED)
    do = _rows(do_ptr, rows, q_len, do_row_stride, D, BLOCK_D, MASKED)
    lse, delta = _bounds(lse_ptr, delta_ptr, rows, q_len)
    zero = tl.zeros([k.shape[0], STEP], tl.float32)
    p = tl.exp2(dot(k, tl.trans(q), zero) * scale_log2 - lse[None, :])
    if MASKED:
        if CAUSAL:
            p = tl.where(rows[None, :] >= last[:, None], p, 0.0)
    dv = dot(p.to(do.dtype), do, dv)
    ds = p * (dot(v, tl.trans(do), zero) - delta[None, :])
    return dot(ds.to(q.dtype), q, dk), dv


@triton.jit(do_not_specialize=["tiles", "max_q", "max_k", "total_q", "H", "GROUP"])
def _keys_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    tiles, max_q, max_k, total_q, H, GROUP, scale, scale_log2,
    do_batch_stride, do_row_stride, do_head_stride, q_batch_stride, q_row_stride, q_head_stride,
    k_batch_stride, k_row_stride, k_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Under a diagonal the first keys are seen by most queries: the longest tiles come first.
    tile = tl.program_id(0) % tiles
    kv_heads = H // GROUP
    g = tl.program_id(0) // tiles % kv_heads
    b = tl.program_id(0) // tiles // kv_heads
    do_ptr, q_start, q_len = _sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    q_ptr, _, _ = _sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, k_start, k_len = _sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = _sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    if tile * TILE >= k_len:
        return
    keys = tile * TILE + tl.arange(0, TILE)
    k = _rows(k_ptr + g.to(tl.int64) * k_head_stride, keys, k_len, k_row_stride, D, BLOCK_D, True)
    v = _rows(v_ptr + g.to(tl.int64) * v_head_stride, keys, k_len, v_row_stride, D, BLOCK_D, True)
    dk = tl.zeros([TILE, BLOCK_D], tl.float32)
    dv = tl.zeros([TILE, BLOCK_D], tl.float32)
    last = keys - (k_len - q_len)
    begin = 0
    plain = 0
    if CAUSAL:
        begin = tl.maximum(tile * TILE - (k_len - q_len), 0) // STEP * STEP
        plain = tl.cdiv(tl.maximum(tile * TILE + TILE - 1 - (k_len - q_len), 0), STEP) * STEP
    tail = tl.maximum(plain, q_len // STEP * STEP)
    for member in range(GROUP):
        h = (g * GROUP + member).to(tl.int64)
        do_h = do_ptr + h * do_head_stride
        q_h = q_ptr + h * q_head_stride
        lse_h = lse_ptr + h * total_q + q_start
        delta_h = delta_ptr + h * total_q + q_start
        for start in tl.range(begin, tl.minimum(plain, q_len), STEP):
            dk, dv = _keys_step(
                k, v, dk, dv, do_h, q_h, lse_h, delta_h, start, q_len, last, scale_log2, do_row_stride, q_row_stride,
                D, STEP, BLOCK_D, CAUSAL, True,
            )  # fmt: skip
        for start in tl.range(plain, tail, STEP):
            dk, dv = _keys_step(
                k, v, dk, dv, do_h, q_h, lse_h, delta_h, start, q_len, last, scale_log2, do_row_stride, q_row_stride,
                D, STEP, BLOCK_D, CAUSAL, False,
            )  # fmt: skip
        for start in tl.range(tail, q_len, STEP):
            dk, dv = _keys_step(
                k, v, dk, dv, do_h, q_h, lse_h, delta_h, start, q_len, last, scale_log2, do_row_stride, q_row_stride,
                D, STEP, BLOCK_D, CAUSAL, True,
            )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    live = (keys < k_len)[:, None] & (dims < D)[None, :]
    at = ((k_start + keys)[:, None] * kv_heads + g) * D + dims[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=live)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=live)


@triton.jit
def _queries_step(
    do, q, dq, lse, delta, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
    D: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq with the keys start .. start + STEP taken in. at: the last key that each row sees under a causal mask."""
    keys = start + tl.arange(0, STEP)
    k = _rows(k_ptr, keys, k_len, k_row_stride, D, BLOCK_D, MASKED)
    v = _rows(v_ptr, keys, k_len, v_row_stride, D, BLOCK_D, MASKED)
    zero = tl.zeros([q.shape[0], STEP], tl.float32)
    p = tl.exp2(dot(q, tl.trans(k), zero) * scale_log2 - lse[:, None])
    if MASKED:
        seen = keys[None, :] < k_len
        if CAUSAL:
            seen &= keys[None, :] <= at[:, None]
        p = tl.where(seen, p, 0.0)
    ds = p * (dot(do, tl.trans(v), zero) - delta[:, None])
    return dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["tiles", "max_q", "max_k", "total_q", "H", "GROUP"])
def _queries_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    tiles, max_q, max_k, total_q, H, GROUP, scale, scale_log2,
    do_batch_stride, do_row_stride, do_head_stride, q_batch_stride, q_row_stride, q_head_stride,
    k_batch_stride, k_row_stride, k_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    b = tl.program_id(0) // tiles // H
    do_ptr, q_start, q_len = _sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    q_ptr, _, _ = _sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, _, k_len = _sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = _sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    first = tile * TILE
    if first >= q_len:
        return
    rows = first + tl.arange(0, TILE)
    k_ptr += h // GROUP * k_head_stride
    v_ptr += h // GROUP * v_head_stride
    q = _rows(q_ptr + h * q_head_stride, rows, q_len, q_row_stride, D, BLOCK_D, True)
    do = _rows(do_ptr + h * do_head_stride, rows, q_len, do_row_stride, D, BLOCK_D, True)
    lse, delta = _bounds(lse_ptr + h * total_q + q_start, delta_ptr + h * total_q + q_start, rows, q_len)
    at = rows + (k_len - q_len)
    last = k_len
    plain = k_len // STEP * STEP
    if CAUSAL:
        last = tl.minimum(k_len, first + TILE + k_len - q_len)
        plain = tl.maximum(0, tl.minimum(k_len, first + 1 + k_len - q_len)) // STEP * STEP
    dq = tl.zeros([TILE, BLOCK_D], tl.float32)
    for start in tl.range(0, plain, STEP):
        dq = _queries_step(
            do, q, dq, lse, delta, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
            D, STEP, BLOCK_D, CAUSAL, False,
        )  # fmt: skip
    for start in tl.range(plain, last, STEP):
        dq = _queries_step(
            do, q, dq, lse, delta, k_ptr, v_ptr, start, k_len, at, scale_log2, k_row_stride, v_row_stride,
            D, STEP, BLOCK_D, CAUSAL, True,
        )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    live = (rows < q_len)[:, None] & (dims < D)[None, :]
    to = ((q_start + rows)[:, None] * H + h) * D + dims[None, :]
    tl.store(dq_ptr + to, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live)


# ---- launcher


def _strides(*tensors: Tensor) -> list[int]:
    """(sequence, row, head) strides of each, one after the other; packed tensors have no sequence's."""
    return [stride for t in tensors for stride in ((0, *t.stride()) if t.dim() == 3 else t.stride())[:3]]


def _launch(
    config: Config, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    dq, dk, dv = empty_gradients(q, k, v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    (heads, d), groups = q.shape[-2:], k.shape[-2]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    total_q, width = q.shape[:-2].numel(), max(16, next_pow2(d))
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(max_q, 64)
    _delta_kernel[(tiles * batch * heads,)](
        do, out, delta, cu_q, tiles, max_q, total_q, heads, *_strides(do, out), D=d, BLOCK_M=64, BLOCK_D=width
    )
    numbers = (max_q, max_k, total_q, heads, heads // groups, scale, scale * LOG2_E, *_strides(do, q, k, v))
    tiles = triton.cdiv(max_k, config["TILE"])
    _keys_kernel[(tiles * batch * groups,)](
        do, q, k, v, lse, delta, dk, dv, cu_q, cu_k, tiles, *numbers, D=d, CAUSAL=causal, BLOCK_D=width, **config
    )
    tiles = triton.cdiv(max_q, config["TILE"])
    _queries_kernel[(tiles * batch * heads,)](
        do, q, k, v, lse, delta, dq, cu_q, cu_k, tiles, *numbers, D=d, CAUSAL=causal, BLOCK_D=width, **config
    )
    return dq, dk, dv


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
