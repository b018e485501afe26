"""`linear` for at most 64 rows of x and a weight whose rows do not start at multiples of 16 bytes: the Impl `uneven`.

With few rows, reading the weight sets the time. Copying it first, as `sm90` does, moves its bytes three times. Reading it in
place with 2-byte loads keeps too few bytes in flight. But weight rows that are `classes` apart (8 for an odd K) are a multiple
of 16 bytes apart, so they have the same alignment. A program takes BLOCK_N rows of one class. From the first 16-byte boundary
on, all of their loads are 16 bytes wide. x must begin at the same column: a first launch makes one copy of x per class, which
starts at the class's first aligned column. The columns before it, and the end of K, are read from the operands themselves, one
element at a time.

Limited by reading the weight; each program reads x once from L2. The columns of y that a program writes are `classes` apart,
too.

Refuses: aligned operands, more than 64 rows, a gate, batches, operands that are not dense along K, 4-byte elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.pad_operands import aligned_base, class_count
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish
from tilewright.kernels.launch.pdl import launch_options, overlaps, release
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["MOST_ROWS", "UNEVEN", "first_whole", "refuse_uneven"]

MOST_ROWS = 64


def refuse_uneven(problem: Problem, most_rows: int) -> str | None:
    """Why a kernel for unaligned rows, of one weight and 16-bit elements, refuses the problem; None if it accepts it."""
    if problem.aligned:
        return "is only for rows that do not start at multiples of 16 bytes"
    if problem.m_bucket > most_rows:
        return f"supports at most {most_rows} rows of x"
    if problem.batched or problem.gated:
        return "supports a single weight only, without a gate"
    if problem.x_major != "k" or problem.w_major != "k":
        return "needs x and the weight contiguous along K"
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if not problem.k:
        return "K is 0: there is nothing to load"
    return None


# ---- space


def _default(device: Device, problem: Problem) -> Config:
    block_n = 16 if problem.m_bucket <= 16 else 32
    return {"BLOCK_N": block_n, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4, "PDL": overlaps(device)}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    rows = max(16, problem.m_bucket)
    if (rows + c["BLOCK_N"]) * c["BLOCK_K"] * 2 * (c["num_stages"] - 1) > device.smem_bytes:
        return "more shared memory than the device has"
    if c["PDL"] != overlaps(device):
        return "PDL must be on exactly where the card supports it"
    if c["BLOCK_K"] == 256 and rows > 16:
        return "BLOCK_K 256 is for at most 16 rows of x, where few other loads are in flight"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_N": (16, 32, 64), "BLOCK_K": (128, 256), "num_warps": (4,), "num_stages": (4,), "PDL": (False, True)},
    refusal=_config_refusal,
)

# ---- kernels


@triton.jit
def first_whole(lead, w_stride, kind):
    """The first column at which the rows of class `kind` are 16-byte aligned."""
    return ((8 - (lead + kind * w_stride) % 8) % 8).to(tl.int32)


@triton.jit(do_not_specialize=["M", "K", "lead", "w_stride", "width"])
def _shift_kernel(x_ptr, moved_ptr, M, K, lead, x_stride, w_stride, width, BLOCK: tl.constexpr):
    """moved [classes, M, width * 8]: for each class, x from the class's first aligned column on."""
    release()
    kind = tl.program_id(2)
    begin = first_whole(lead, w_stride, kind)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + begin + cols, mask=begin + cols < K, other=0.0)
    tl.store(moved_ptr + (kind * M + row).to(tl.int64) * (width * 8) + cols, x, mask=cols < width * 8)


@triton.jit(do_not_specialize=["M", "K", "lead", "width"])
def _uneven_kernel(
    x_ptr, moved_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, lead, x_stride, w_stride, width, residual_stride,
    ACTIVATION: tl.constexpr, CLASSES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """w_ptr is 16-byte aligned, `lead` elements before the weight."""
    if PDL:
        gdc_wait()
    kind = tl.program_id(0) % CLASSES
    first_col = kind + tl.program_id(0) // CLASSES * (BLOCK_N * CLASSES)
    begin = first_whole(lead, w_stride, kind)
    cols = (first_col + tl.arange(0, BLOCK_N) * CLASSES)[:, None]
    rows = tl.arange(0, BLOCK_M)[:, None]
    ks = tl.arange(0, BLOCK_K)[None, :]
    starts = lead + cols.to(tl.int64) * w_stride
    # The sum is already a multiple of 8; writing it this way tells the compiler, which then emits 16-byte loads.
    w_ptrs = w_ptr + (starts + begin) // 8 * 8 + ks
    moved_ptrs = moved_ptr + (kind * M + rows).to(tl.int64) * (width * 8) + ks
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    whole = tl.maximum(K - begin, 0) // 8 * 8
    for first in range(0, whole, BLOCK_K):
        # The mask is constant over groups of 8 columns, so that loads keep their full width.
        inside = (first + ks) // 8 * 8 < whole
        w = tl.load(w_ptrs, mask=(cols < N) & inside, other=0.0)
        x = tl.load(moved_ptrs, mask=(rows < M) & inside, other=0.0)
        acc = dot(w, tl.trans(x), acc)
        w_ptrs += BLOCK_K
        moved_ptrs += BLOCK_K
    # The remaining columns: at most 7 before the aligned part and 7 after it.
    at = tl.arange(0, 16)[None, :]
    k = tl.where(at < begin, at, at + whole)
    w = tl.load(w_ptr + starts + k, mask=(cols < N) & (k < K), other=0.0)
    x = tl.load(x_ptr + rows * x_stride + k, mask=(rows < M) & (k < K), other=0.0)
    acc = dot(w, tl.trans(x), acc)
    finish(
        tl.trans(acc), y_ptr, bias_ptr, residual_ptr, 0, first_col, M, N, residual_stride, ACTIVATION, False,
        COL_STEP=CLASSES,
    )  # fmt: skip


# ---- launcher

_COPIED = 1024  # elements per program of the first launch


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if not y.numel():
        return y
    (m, k), n = x.shape, weight.shape[0]
    w_stride, classes, (base, lead) = weight.stride(0), class_count(weight), aligned_base(weight)
    width = -(-max(k, 1) // 8)
    moved = torch.empty([classes, m, width * 8], dtype=x.dtype, device=x.device)
    _shift_kernel[(triton.cdiv(width * 8, _COPIED), m, classes)](
        x, moved, m, k, lead, x.stride(0), w_stride, width, BLOCK=_COPIED
    )
    block_n = config["BLOCK_N"]
    _uneven_kernel[(classes * triton.cdiv(triton.cdiv(n, classes), block_n),)](
        x, moved, base, bias, residual, y, m, n, k, lead, x.stride(0), w_stride, width,
        0 if residual is None else residual.stride(0),
        ACTIVATION=function, CLASSES=classes, BLOCK_M=max(16, triton.next_power_of_2(m)),
        **{name: value for name, value in config.items() if name != "PDL"}, **launch_options(config["PDL"]),
    )  # fmt: skip
    return y


UNEVEN = Impl(name="uneven", launch=_launch, space=SPACE, refuse=lambda device, problem: refuse_uneven(problem, MOST_ROWS))
