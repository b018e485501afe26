"""The host side of sm90_kernel.py: refusals, configs, and the kernels before and after; exports the Impl `sm90`.

Three kernels: one prepares two numbers per row of queries, then the Gluon kernel, and one that scales and rounds dq. In
between, dq is float32 memory that every block of keys adds to. So two runs differ in the last bits, unless `deterministic`
makes the blocks add in a fixed order.

Packed documents that attend to themselves are treated as one long sequence whose queries see no key before their document. For
every key the end of its document is known.

Refuses: dtypes other than bf16 and fp16; head dims other than 64, 128 and 256; values narrower than keys; other packed
sequences; windows without a causal mask; prefixes, soft caps and ALiBi; layouts in which the heads of a token are not adjacent
(such as [heads, tokens, D]); and rows or heads that do not start at multiples of 16 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import Device
from tilewright.kernels.attention.backward.problem import Gradients, Problem, empty_gradients, gradient_of_sinks
from tilewright.kernels.attention.backward.sm90_kernel import attention_backward_sm90_kernel
from tilewright.kernels.attention.backward.sm90_schedule import SLOT
from tilewright.kernels.attention.problem import LOG2_E, lacks
from tilewright.kernels.hopper.descriptors import SIXTEEN_BITS, card_of, descriptor
from tilewright.kernels.launch.counters import tickets
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["SM90"]

HEAD_DIMS = (64, 128, 256)
_ROWS = 64  # rows per product


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype not in SIXTEEN_BITS:
        return f"supports bf16 and fp16 only, not {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return f"supports head dims {HEAD_DIMS} only, not {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        return f"needs the same head dim for keys and values, not {problem.head_dim} and {problem.value_dim}"
    if missing := lacks(problem, window=problem.causal, sinks=True):
        return missing
    if problem.varlen and not (problem.alike and problem.causal):
        return "supports packed sequences only if they attend to themselves under a causal mask"
    if not problem.tma:
        return "needs the heads of a token next to each other in memory, and rows and heads that start at multiples of 16 bytes"
    return None


# ---- space


def _keys(head_dim: int) -> int:
    """Keys per program: 64 for each warpgroup; with 256 dims, 64 for both together."""
    return _ROWS if head_dim == 256 else 2 * _ROWS


def _default(device: Device, problem: Problem) -> Config:
    # H100, docs/log.md#attention-backward. A third stage makes no reproducible difference.
    sets = 2 if problem.head_dim == 64 else 1
    if problem.head_dim == 128:
        # Persistent programs save the beginning and end of each tile, which matters less for long tiles. Under a causal mask
        # they also leave fewer SMs idle.
        steps = problem.heads // problem.kv_heads * (problem.max_q // _ROWS)
        sets = 2 if steps <= (64 if problem.causal else 16) else 1 if problem.causal and steps <= 256 else 0
    return {
        "BLOCK_M": 64,
        "STAGES": 2,
        "AHEAD": int(problem.head_dim == 64),
        "SETS": 0 if problem.deterministic else sets,
    }


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    # The operands that stay, those that are pipelined, and the gradients of the scores, twice.
    keys, sets = _keys(problem.head_dim), max(c["SETS"], 1)
    smem = (
        sets * 2 * 2 * keys * problem.head_dim
        + c["STAGES"] * c["BLOCK_M"] * (4 * problem.head_dim + 8)
        + 4 * keys * c["BLOCK_M"]
    )
    if keys == _ROWS:
        smem += 4 * keys * c["BLOCK_M"]  # the weights as well
    if smem + 1024 > device.smem_bytes:
        return "more shared memory than the device has"
    # Registers per thread: dk, dv, scores and their gradients.
    if min(problem.head_dim, 128) + c["BLOCK_M"] > 192:
        return "the accumulators need more registers than a thread has"
    if c["AHEAD"] and (problem.head_dim != 64 or c["BLOCK_M"] == 128):
        return "AHEAD needs head dim 64 and BLOCK_M 64: otherwise the scores computed ahead do not fit in the registers"
    if c["SETS"] and problem.deterministic:
        return "SETS must be 0 for deterministic results: persistent programs add in an order that varies"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128), "STAGES": (2, 3), "AHEAD": (0, 1), "SETS": (0, 1, 2)},
    refusal=_config_refusal,
)
"""AHEAD: whether the scores of the next block are computed during the last products of this block. SETS: sets of buffers for
keys and values in persistent programs, one program per SM; 0: one program for each block of keys."""

# ---- kernels before and after


@triton.jit(do_not_specialize=["blocks", "max_q", "total_q", "H"])
def _rows_kernel(
    do_ptr, out_ptr, lse_ptr, bounds_ptr, blocks, max_q, total_q, H, per_scale,
    do_batch_stride, do_row_stride, do_head_stride, out_batch_stride, out_row_stride, out_head_stride,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """-lse / scale and -delta of every row, in padded blocks; -inf instead of -lse / scale if a row sees no key or does not
    exist."""
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(0) // blocks
    h = (head % H).to(tl.int64)
    b = (head // H).to(tl.int64)
    dims = tl.arange(0, D)[None, :]
    live = (rows < max_q)[:, None]
    far = rows[:, None].to(tl.int64)
    do = tl.load(do_ptr + b * do_batch_stride + h * do_head_stride + far * do_row_stride + dims, mask=live, other=0.0)
    out = tl.load(out_ptr + b * out_batch_stride + h * out_head_stride + far * out_row_stride + dims, mask=live, other=0.0)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    lse = tl.load(lse_ptr + h * total_q + b * max_q + rows, mask=rows < max_q, other=float("-inf"))
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(bounds_ptr + at, tl.where(lse == float("-inf"), float("-inf"), -lse * per_scale))
    tl.store(bounds_ptr + tl.num_programs(0).to(tl.int64) * BLOCK_M + at, -delta)


@triton.jit(do_not_specialize=["tokens", "documents"])
def _ends_kernel(cu_ptr, ends_ptr, tokens, documents, BLOCK: tl.constexpr):
    """Where the document of each token ends, found by binary search."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + documents
    left = documents
    while left > 0:
        middle = (low + high) // 2
        behind = tl.load(cu_ptr + 1 + middle, mask=middle < documents, other=tokens) <= at
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
        left = left // 2
    tl.store(ends_ptr + at, tl.load(cu_ptr + 1 + low, mask=low < documents, other=tokens), mask=at < tokens)


@triton.jit(do_not_specialize=["blocks", "max_q", "H"])
def _round_kernel(
    sum_ptr, dq_ptr, blocks, max_q, H, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr
):
    """Scale and round a block of dq, and store it as a matrix. Its parts of 64 rows and N columns are in the order of the
    threads."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    sum_ptr += tl.program_id(0).to(tl.int64) * (BLOCK_M * D)
    for part in tl.static_range(PARTS):
        line = tl.load(sum_ptr + part * (64 * N) + tl.arange(0, 64 * N))
        # the inverse of `_add_to` in sm90_mainloop.py
        x = line.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, N])
        rows = block * BLOCK_M + tl.arange(0, 64)
        cols = tl.arange(0, N)
        if BLOCK_M == 128:
            rows += part * 64
        else:
            cols += part * N
        at = ((head // H * max_q + rows).to(tl.int64) * H + head % H) * D
        tl.store(dq_ptr + at[:, None] + cols[None, :], (x * scale).to(dq_ptr.dtype.element_ty), mask=(rows < max_q)[:, None])


# ---- launcher


def _descriptor(t: Tensor, rows: int) -> TensorDescriptor:
    """[B, S, H, D] as B matrices whose rows contain adjacent heads; a box is `rows` rows of one head."""
    width = (t.shape[2] - 1) * t.stride(2) + t.shape[3]
    return descriptor(t, [1, rows, t.shape[3]], [t.shape[0], t.shape[1], width], [t.stride(0), t.stride(1), 1])


def _line_descriptor(t: Tensor, box: int) -> TensorDescriptor:
    return descriptor(t, [box])


def _ends(cu: Tensor, tokens: int) -> Tensor:
    """int32 [tokens]: where the document of each token ends."""
    ends = torch.empty(tokens, dtype=torch.int32, device=cu.device)
    _ends_kernel[(-(-tokens // 1024),)](cu, ends, tokens, cu.shape[0] - 1, BLOCK=1024)
    return ends


def _section(card: Device, head_dim: int, causal: bool, key_blocks: int, heads: int, config: Config) -> int:
    """The number of key/value heads that are computed at a time, out of `heads` of all sequences."""
    # Without a causal mask all blocks take equally long, and at 128 dims fewer heads at a time are faster.
    if not causal and head_dim == 128 and config["SETS"] != 1:
        return 1
    # About one tile per SM. Sections of equal size, because a remainder would be a wave of its own: 6 % at 2 x 8192 of 32/8
    # heads.
    section = max(1, min(card.sms // key_blocks, heads))
    return -(-heads // -(-heads // section))


def _launch(
    config: Config, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, left: int | None = None,
    right: int | None = None, prefix: int = 0, prefixes: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None,
) -> Gradients:  # fmt: skip
    dq, dk, dv, dsinks = empty_gradients(q, k, v, sinks)
    if not q.numel() or not k.numel():  # TMA does not support empty matrices
        return dq.zero_(), dk.zero_(), dv.zero_(), dsinks.zero_()
    ends, results = None, (dq, dk, dv)
    if cu_q is not None:
        max_q = max_k = q.shape[0]
        ends = _ends(cu_q, max_q)
        do, q, k, v, out, dq, dk, dv = (t[None] for t in (do, q, k, v, out, *results))
    (batch, _, heads, d), groups = q.shape, k.shape[2]
    rows, keys = config["BLOCK_M"], _keys(d)
    blocks, key_blocks = -(-max_q // rows), -(-max_k // keys)
    programs = batch * heads * blocks
    bounds = torch.empty((2, programs * rows), dtype=torch.float32, device=q.device)
    card = card_of(q)
    section = _section(card, d, causal, key_blocks, batch * groups, config)
    sums = torch.zeros(programs * rows * d, dtype=torch.float32, device=q.device)
    columns = 128 if d == 256 else 64 if rows * d >= 8192 else 32  # of each part of dq
    parts = rows * d // (64 * columns)
    order = torch.zeros(parts * programs, dtype=torch.int32, device=q.device) if deterministic else None
    _rows_kernel[(programs,)](
        do, out, lse, bounds, blocks, max_q, batch * max_q, heads, 1 / scale, *do.stride()[:3], *out.stride()[:3],
        D=d, BLOCK_M=rows,
    )  # fmt: skip
    tiles, sets = key_blocks * groups * batch, config["SETS"]
    staying = min(tiles, card.sms) if sets else tiles
    counter = tickets(q.device, 1) if sets else None
    slots = torch.empty(2 * SLOT.value * staying, dtype=torch.int32, device=q.device) if sets else None
    dk_desc, dv_desc = (_descriptor(t, _ROWS) if sets == 2 else None for t in (dk, dv))
    attention_backward_sm90_kernel[(staying,)](
        _descriptor(q, rows), _descriptor(do, rows), _descriptor(k, _ROWS), _descriptor(v, _ROWS),
        _line_descriptor(bounds[0], rows), _line_descriptor(bounds[1], rows), dk_desc, dv_desc, sums, dk, dv, order,
        ends, counter, slots, tiles, key_blocks, section, groups, heads // groups,
        max_q, max_k, left or 0, q.stride(2), do.stride(2), k.stride(2), v.stride(2), scale, scale * LOG2_E,
        KEYS=keys, BLOCK_M=rows, D=d, STAGES=config["STAGES"], CAUSAL=causal, LEFT=left is not None, SETS=sets,
        AHEAD=bool(config["AHEAD"]), num_warps=4,
    )  # fmt: skip
    _round_kernel[(programs,)](sums, dq, blocks, max_q, heads, scale, D=d, BLOCK_M=rows, PARTS=parts, N=columns)
    if sinks is not None:
        of_rows = bounds.view(2, batch, heads, -1).transpose(1, 2).flatten(2)
        dsinks = gradient_of_sinks(sinks, -scale * of_rows[0], -of_rows[1])
    return *results, dsinks


SM90 = Impl(name="sm90", launch=_launch, space=SPACE, written_for=90, refuse=_refuse)
