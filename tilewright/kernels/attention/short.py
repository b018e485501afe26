"""`attention` over few keys, up to 256, without a mask: the implementation `short`. For image patches and short texts.

A program keeps all keys and values of a head in shared memory, and loops over its tiles of 64 queries; PARTS programs share the
tiles of a head. There are at most two blocks of 128 keys; the last one is masked and comes first. So a tile is at most two
steps of the incremental softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) without a loop, and
only the next queries are loaded between tiles. H100, 197 keys, 12 heads of 64, speed relative to cuDNN: 1.00 at 32 images, 1.47
at one.

Refuses: causal masks and all other options that change masks or scores, log-sum-exp, packed sequences, head dims other than 32
and 64, GPUs other than sm_90 (elsewhere the operands would not stay in shared memory).
"""

# pyright: reportCallIssue=false, reportAssignmentType=false

import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.attention.problem import LOG2_E, Problem, empty_outputs, lacks
from tilewright.kernels.attention.tile_masks import strides_of
from tilewright.kernels.device.dot import dot
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["SHORT"]

_BLOCK_M = 64
_KEYS = 128
"""Keys per block."""
_QUERIES = 1 << 14
"""With at most so many queries, offsets fit 32 bits for rows of less than 131072 numbers."""
_REGISTERS = 168
"""With this limit three programs fit on an SM. H100, 32 images of 197 keys and 12 heads: 26.5 us. With 240 registers, two
programs per SM: 37.8 us."""


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"supports bf16 and fp16 only, not {problem.dtype}"
    if problem.head_dim not in (32, 64) or problem.value_dim != problem.head_dim:
        return f"supports head dims of 32 and 64 only, not {problem.head_dim} and {problem.value_dim}"
    if not problem.has_keys or problem.max_k > 2 * _KEYS:
        return f"supports 1 to {2 * _KEYS} keys only, which it keeps on the chip"
    if problem.max_q > _QUERIES:
        return f"supports up to {_QUERIES} queries only: it counts their places in 32 bits"
    if problem.varlen or problem.causal or problem.lse:
        return "does not support packed sequences, causal masks or the log-sum-exp"
    return lacks(problem)


def _default(device: Device, problem: Problem) -> Config:
    # H100, 197 keys, 12 heads of 64: one image takes 5.3 us in four parts, 14.1 in one; 32 images 26.5 in one part, 36.1 in
    # four.
    return {"PARTS": 1 if problem.batch * problem.heads >= 2 * device.sms else 4}


SPACE = Space(default=_default, axes={"PARTS": (1, 2, 4)})


@triton.jit
def _load_keys(ptr, rows, stride, dims, keys, MASKED: tl.constexpr):
    at = ptr + rows[:, None] * stride + dims[None, :]
    return tl.load(at, mask=(rows < keys)[:, None], other=0.0) if MASKED else tl.load(at)


@triton.jit(do_not_specialize=["queries", "keys", "heads", "GROUP"])
def _short_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, queries, keys, heads, GROUP, scale_log2,
    q_batch_stride, q_row_stride, q_head_stride, k_batch_stride, k_row_stride, k_head_stride,
    v_batch_stride, v_row_stride, v_head_stride,
    D: tl.constexpr, TWO: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """TWO: there are more keys than KEYS. The second block, which is masked, then begins at KEYS."""
    head = tl.program_id(0) // PARTS
    b = (head // heads).to(tl.int64)
    h = head % heads
    FIRST: tl.constexpr = KEYS if TWO else 0
    dims, rows = tl.arange(0, D), tl.arange(0, KEYS)
    k_ptr += b * k_batch_stride + (h // GROUP) * k_head_stride
    v_ptr += b * v_batch_stride + (h // GROUP) * v_head_stride
    q_ptr += b * q_batch_stride + h * q_head_stride
    last_k = _load_keys(k_ptr, FIRST + rows, k_row_stride, dims, keys, True)
    last_v = _load_keys(v_ptr, FIRST + rows, v_row_stride, dims, keys, True)
    if TWO:
        k = _load_keys(k_ptr, rows, k_row_stride, dims, keys, False)
        v = _load_keys(v_ptr, rows, v_row_stride, dims, keys, False)
    for tile in range(tl.program_id(0) % PARTS, tl.cdiv(queries, BLOCK_M), PARTS):
        at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        live = (at < queries)[:, None]
        q = tl.load(q_ptr + at[:, None] * q_row_stride + dims[None, :], mask=live, other=0.0)
        s = dot(q, tl.trans(last_k), tl.zeros([BLOCK_M, KEYS], tl.float32))
        s = tl.where((FIRST + rows)[None, :] < keys, s, float("-inf"))
        m = tl.max(s, 1)  # finite: the last block has a key
        p = tl.exp2(s * scale_log2 - (m * scale_log2)[:, None])
        total = tl.sum(p, 1)
        acc = dot(p.to(q.dtype), last_v, tl.zeros([BLOCK_M, D], tl.float32))
        if TWO:
            s = dot(q, tl.trans(k), tl.zeros([BLOCK_M, KEYS], tl.float32))
            m_new = tl.maximum(tl.max(s, 1), m)
            alpha = tl.exp2((m - m_new) * scale_log2)
            p = tl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
            total = total * alpha + tl.sum(p, 1)
            acc = dot(p.to(q.dtype), v, acc * alpha[:, None])
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((b * queries + at[:, None]) * heads + h) * D + dims[None, :], out, mask=live)


def _launch(
    config: Config, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    scale: float, causal: bool, want_lse: bool, *bends: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = empty_outputs(q, v, want_lse)
    if not out.numel():
        return out, lse
    batch, queries, heads, d = q.shape
    parts = min(config["PARTS"], ceil_div(queries, _BLOCK_M))
    _short_kernel[(batch * heads * parts,)](
        q, k, v, out, queries, max_k, heads, heads // k.shape[-2], scale * LOG2_E, *strides_of(q, k, v),
        D=d, TWO=max_k > _KEYS, KEYS=min(_KEYS, max(16, next_pow2(max_k))), BLOCK_M=_BLOCK_M, PARTS=parts,
        num_warps=4, num_stages=1, maxnreg=_REGISTERS,
    )  # fmt: skip
    return out, lse


SHORT = Impl(name="short", launch=_launch, space=SPACE, written_for=90, refuse=_refuse, interpretable=True)
