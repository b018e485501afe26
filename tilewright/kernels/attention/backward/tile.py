"""`attention_backward` on tensor cores for every GPU, head dim, layout and mask: the implementation `triton`.

Three kernels. The first computes the row sums of do * out. The second computes dk and dv: a program keeps TILE keys of one
key/value head, and loops over the queries that see them, through every query head of its group, STEP at a time. The third
computes dq: a program keeps TILE queries and loops over the keys. Scores are computed twice, which makes seven products instead
of five. In exchange no program adds to memory that another program adds to: the result is deterministic, and no float32
gradient of q goes through memory.

For dk and dv the scores are computed transposed, [keys, queries], so that weights and their gradients can be used directly as
first operands: some versions of Triton miscompile the product of a transposed accumulator on Hopper. float32 is multiplied in
IEEE precision. Refuses: float64, head dims above 256.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.backward.problem import Gradients, Problem, empty_gradients, gradient_of_sinks
from tilewright.kernels.attention.problem import DTYPES, LARGEST_HEAD_DIM, LOG2_E
from tilewright.kernels.attention.tile_masks import capped, load_rows, queries_that_see, seen_by, sequence, strides_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["TRITON"]

_LOG2_E = tl.constexpr(LOG2_E)


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in DTYPES:
        return f"supports bf16, fp16 and fp32 only, not {problem.dtype}"
    if max(problem.head_dim, problem.value_dim) > LARGEST_HEAD_DIM:
        return f"supports head dims up to {LARGEST_HEAD_DIM} only, not {problem.head_dim} and {problem.value_dim}"
    return None


# ---- space


def _width(problem: Problem) -> int:
    return max(16, next_pow2(max(problem.head_dim, problem.value_dim)))


def _default(device: Device, problem: Problem) -> Config:
    # Compiled for sm_80 and 90: on sm_80 at most 104 bytes spill in 16 bits, in the kernel of keys. On Hopper, 128 dims spill 1
    # KB per thread there, and still run at 260 to 280 TFLOP/s (docs/log.md#attention-backward).
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
    # Two operands stay, and two are pipelined; weights and their gradients may also pass through shared memory.
    if (2 * c["TILE"] + 2 * c["num_stages"] * c["STEP"]) * width * size + c["TILE"] * c["STEP"] * size > device.smem_bytes:
        return "more shared memory than the device has"
    # Registers per thread: two gradients, the scores and their gradients.
    registers = c["TILE"] * 2 * (width + c["STEP"]) // (32 * c["num_warps"])
    if not device.multiplies_by_warpgroup:
        registers += c["TILE"] * width // (32 * c["num_warps"])  # the two operands that stay
    if registers > 200:
        return "the accumulators need more registers than a thread has"
    return None


SPACE = Space(
    default=_default,
    axes={"TILE": (32, 64, 128), "STEP": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2)},
    refusal=_config_refusal,
)
"""TILE: the rows that a program keeps. STEP: the rows per iteration of its loop."""

# ---- kernels


@triton.jit
def _bounds(lse_ptr, delta_ptr, rows, end):
    """(lse times log2(e), delta) of query rows. If a row sees no key or does not exist, lse is +inf, so that its weights are
    0."""
    lse = tl.load(lse_ptr + rows, mask=rows < end, other=float("-inf"))
    delta = tl.load(delta_ptr + rows, mask=rows < end, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2_E), delta


@triton.jit(do_not_specialize=["tiles", "max_q", "total_q", "H"])
def _delta_kernel(
    do_ptr, out_ptr, delta_ptr, cu_q_ptr, tiles, max_q, total_q, H,
    do_batch_stride, do_row_stride, do_head_stride, out_batch_stride, out_row_stride, out_head_stride,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // tiles // H
    do_ptr, q_start, q_len = sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    out_ptr, _, _ = sequence(out_ptr, b, cu_q_ptr, max_q, out_batch_stride, out_row_stride)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    do = load_rows(do_ptr + h.to(tl.int64) * do_head_stride, rows, do_row_stride, DV, BLOCK_DV, True, q_len)
    out = load_rows(out_ptr + h.to(tl.int64) * out_head_stride, rows, out_row_stride, DV, BLOCK_DV, True, q_len)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + h.to(tl.int64) * total_q + q_start + rows, delta, mask=rows < q_len)


@triton.jit
def _weights(
    s, lse, distance, seen, scale_log2, pre_scale, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """(weights of the scores s, derivative of the cap: 1, or a block). lse is broadcast, and already times log2(e)."""
    bent = 1.0
    if SOFTCAP:
        s = capped(s, pre_scale)
        bent = 1.0 - s * s
    s = s * scale_log2 - lse
    if ALIBI:
        s -= slope * tl.abs(distance).to(tl.float32)
    p = tl.exp2(s)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p, bent


@triton.jit
def _keys_step(
    k, v, dk, dv, do_ptr, q_ptr, lse_ptr, delta_ptr, start, q_len, own, begin, end, scale_log2, pre_scale, slope,
    do_row_stride, q_row_stride,
    D: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LEFT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the queries start .. start + STEP of one head to (dk, dv): for each key those from its `begin` to before its `end`.

    Without LEFT, `end` is the end of the rows; from there on lse is +inf.
    """
    rows = start + tl.arange(0, STEP)
    q = load_rows(q_ptr, rows, q_row_stride, D, BLOCK_D, MASKED, q_len)
    do = load_rows(do_ptr, rows, do_row_stride, DV, BLOCK_DV, MASKED, q_len)
    lse, delta = _bounds(lse_ptr, delta_ptr, rows, q_len)
    zero = tl.zeros([k.shape[0], STEP], tl.float32)
    seen = rows[None, :] >= begin[:, None]
    if LEFT:
        seen &= rows[None, :] < end[:, None]
    p, bent = _weights(
        dot(k, tl.trans(q), zero), lse[None, :], rows[None, :] - own[:, None], seen, scale_log2, pre_scale, slope,
        SOFTCAP, ALIBI, MASKED,
    )  # fmt: skip
    dv = dot(p.to(do.dtype), do, dv)
    ds = p * (dot(v, tl.trans(do), zero) - delta[None, :]) * bent
    return dot(ds.to(q.dtype), q, dk), dv


_HEAD = ["tiles", "max_q", "max_k", "total_q", "H", "GROUP", "left", "right", "prefix"]


@triton.jit(do_not_specialize=_HEAD)
def _keys_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, prefixes_ptr, slopes_ptr,
    tiles, max_q, max_k, total_q, H, GROUP, left, right, prefix, scale, scale_log2, pre_scale,
    do_batch_stride, do_row_stride, do_head_stride, q_batch_stride, q_row_stride, q_head_stride,
    k_batch_stride, k_row_stride, k_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # Under a causal mask the first keys are seen by the most queries, so the longest tiles come first.
    tile = tl.program_id(0) % tiles
    kv_heads = H // GROUP
    g = tl.program_id(0) // tiles % kv_heads
    b = tl.program_id(0) // tiles // kv_heads
    do_ptr, q_start, q_len = sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    q_ptr, _, _ = sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, k_start, k_len = sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    if tile * TILE >= k_len:
        return
    if prefixes_ptr is not None:
        prefix = tl.load(prefixes_ptr + b)
    keys = tile * TILE + tl.arange(0, TILE)
    k = load_rows(k_ptr + g.to(tl.int64) * k_head_stride, keys, k_row_stride, D, BLOCK_D, True, k_len)
    v = load_rows(v_ptr + g.to(tl.int64) * v_head_stride, keys, v_row_stride, DV, BLOCK_DV, True, k_len)
    dk = tl.zeros([TILE, BLOCK_D], tl.float32)
    dv = tl.zeros([TILE, BLOCK_DV], tl.float32)
    own, begin, end, first, plain, tail, last = queries_that_see(
        tile * TILE, q_len, k_len, left, right, prefix, TILE, STEP, LEFT, RIGHT, PREFIX
    )  # fmt: skip
    ALIBI: tl.constexpr = slopes_ptr is not None
    for member in range(GROUP):
        h = (g * GROUP + member).to(tl.int64)
        do_h = do_ptr + h * do_head_stride
        q_h = q_ptr + h * q_head_stride
        lse_h = lse_ptr + h * total_q + q_start
        delta_h = delta_ptr + h * total_q + q_start
        slope = tl.load(slopes_ptr + h) * _LOG2_E if ALIBI else 0.0
        if RIGHT:
            for at in tl.range(first, tl.minimum(plain, last), STEP):
                dk, dv = _keys_step(
                    k, v, dk, dv, do_h, q_h, lse_h, delta_h, at, q_len, own, begin, end, scale_log2, pre_scale, slope,
                    do_row_stride, q_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
                )  # fmt: skip
        for at in tl.range(plain, tail, STEP):
            dk, dv = _keys_step(
                k, v, dk, dv, do_h, q_h, lse_h, delta_h, at, q_len, own, begin, end, scale_log2, pre_scale, slope,
                do_row_stride, q_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, False,
            )  # fmt: skip
        for at in tl.range(tail, last, STEP):
            dk, dv = _keys_step(
                k, v, dk, dv, do_h, q_h, lse_h, delta_h, at, q_len, own, begin, end, scale_log2, pre_scale, slope,
                do_row_stride, q_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
            )  # fmt: skip
    at = (k_start + keys)[:, None] * kv_heads + g
    dims = tl.arange(0, BLOCK_D)[None, :]
    tl.store(dk_ptr + at * D + dims, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(keys < k_len)[:, None] & (dims < D))
    dims = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(dv_ptr + at * DV + dims, dv.to(dv_ptr.dtype.element_ty), mask=(keys < k_len)[:, None] & (dims < DV))


@triton.jit
def _queries_step(
    do, q, dq, lse, delta, k_ptr, v_ptr, start, k_len, own, begin, end, scale_log2, pre_scale, slope,
    k_row_stride, v_row_stride,
    D: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LEFT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq after adding the keys start .. start + STEP: for each row those from its `begin` (if LEFT) to before its `end`."""
    keys = start + tl.arange(0, STEP)
    k = load_rows(k_ptr, keys, k_row_stride, D, BLOCK_D, MASKED, k_len)
    v = load_rows(v_ptr, keys, v_row_stride, DV, BLOCK_DV, MASKED, k_len)
    zero = tl.zeros([q.shape[0], STEP], tl.float32)
    seen = keys[None, :] < end[:, None]
    if LEFT:
        seen &= keys[None, :] >= begin[:, None]
    p, bent = _weights(
        dot(q, tl.trans(k), zero), lse[:, None], own[:, None] - keys[None, :], seen, scale_log2, pre_scale, slope,
        SOFTCAP, ALIBI, MASKED,
    )  # fmt: skip
    ds = p * (dot(do, tl.trans(v), zero) - delta[:, None]) * bent
    return dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=_HEAD)
def _queries_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, prefixes_ptr, slopes_ptr,
    tiles, max_q, max_k, total_q, H, GROUP, left, right, prefix, scale, scale_log2, pre_scale,
    do_batch_stride, do_row_stride, do_head_stride, q_batch_stride, q_row_stride, q_head_stride,
    k_batch_stride, k_row_stride, k_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, DV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    if RIGHT:
        tile = tiles - 1 - tile
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    b = tl.program_id(0) // tiles // H
    do_ptr, q_start, q_len = sequence(do_ptr, b, cu_q_ptr, max_q, do_batch_stride, do_row_stride)
    q_ptr, _, _ = sequence(q_ptr, b, cu_q_ptr, max_q, q_batch_stride, q_row_stride)
    k_ptr, _, k_len = sequence(k_ptr, b, cu_k_ptr, max_k, k_batch_stride, k_row_stride)
    v_ptr, _, _ = sequence(v_ptr, b, cu_k_ptr, max_k, v_batch_stride, v_row_stride)
    first = tile * TILE
    if first >= q_len:
        return
    if prefixes_ptr is not None:
        prefix = tl.load(prefixes_ptr + b)
    rows = first + tl.arange(0, TILE)
    k_ptr += h // GROUP * k_head_stride
    v_ptr += h // GROUP * v_head_stride
    q = load_rows(q_ptr + h * q_head_stride, rows, q_row_stride, D, BLOCK_D, True, q_len)
    do = load_rows(do_ptr + h * do_head_stride, rows, do_row_stride, DV, BLOCK_DV, True, q_len)
    lse, delta = _bounds(lse_ptr + h * total_q + q_start, delta_ptr + h * total_q + q_start, rows, q_len)
    own, begin, end, start, cut, plain, last = seen_by(
        first, q_len, k_len, left, right, prefix, TILE, STEP, LEFT, RIGHT, PREFIX
    )  # fmt: skip
    ALIBI: tl.constexpr = slopes_ptr is not None
    slope = tl.load(slopes_ptr + h) * _LOG2_E if ALIBI else 0.0
    dq = tl.zeros([TILE, BLOCK_D], tl.float32)
    if LEFT:
        for at in tl.range(start, cut, STEP):
            dq = _queries_step(
                do, q, dq, lse, delta, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope,
                k_row_stride, v_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
            )  # fmt: skip
    for at in tl.range(cut, plain, STEP):
        dq = _queries_step(
            do, q, dq, lse, delta, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope,
            k_row_stride, v_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, False,
        )  # fmt: skip
    for at in tl.range(plain, last, STEP):
        dq = _queries_step(
            do, q, dq, lse, delta, k_ptr, v_ptr, at, k_len, own, begin, end, scale_log2, pre_scale, slope,
            k_row_stride, v_row_stride, D, DV, STEP, BLOCK_D, BLOCK_DV, LEFT, SOFTCAP, ALIBI, True,
        )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    live = (rows < q_len)[:, None] & (dims < D)[None, :]
    to = ((q_start + rows)[:, None] * H + h) * D + dims[None, :]
    tl.store(dq_ptr + to, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live)


def _launch(
    config: Config, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Gradients:  # fmt: skip
    dq, dk, dv, dsinks = empty_gradients(q, k, v, sinks)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_()
    (heads, d), (groups, width) = q.shape[-2:], v.shape[-2:]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    total_q, behind = q.shape[:-2].numel(), 0 if causal else right
    blocks = {"BLOCK_D": max(16, next_pow2(d)), "BLOCK_DV": max(16, next_pow2(width))}
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    tiles = ceil_div(max_q, 64)
    launch(
        _delta_kernel, (tiles * batch * heads,), (do, out, delta, cu_q), (tiles, max_q, total_q, heads, *strides_of(do, out)),
        {"DV": width, "BLOCK_M": 64, "BLOCK_DV": blocks["BLOCK_DV"]},
    )  # fmt: skip
    # With a cap, a score is tanh(scale q . k / cap) in [-1, 1], and its scale is the cap.
    factor, pre = (scale, 0.0) if softcap is None else (softcap, 2 * scale / softcap * LOG2_E)
    numbers = (max_q, max_k, total_q, heads, heads // groups, left or 0, behind or 0, prefix, scale, factor * LOG2_E, pre)
    strides = strides_of(do, q, k, v)
    constants = {"D": d, "DV": width, "LEFT": left is not None, "RIGHT": behind is not None, "SOFTCAP": softcap is not None}
    constants |= {"PREFIX": prefix > 0 or prefixes is not None, **blocks, **config}
    tiles = ceil_div(max_k, config["TILE"])
    operands = (do, q, k, v, lse, delta, dk, dv, cu_q, cu_k, prefixes, slopes)
    launch(_keys_kernel, (tiles * batch * groups,), operands, (tiles, *numbers, *strides), constants)
    tiles = ceil_div(max_q, config["TILE"])
    operands = (do, q, k, v, lse, delta, dq, cu_q, cu_k, prefixes, slopes)
    launch(_queries_kernel, (tiles * batch * heads,), operands, (tiles, *numbers, *strides), constants)
    return dq, dk, dv, dsinks if sinks is None else gradient_of_sinks(sinks, lse, delta)


TRITON = Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
