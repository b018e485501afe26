"""`linear` for up to 1024 rows of x and an unaligned weight, which TMA reads in place: the Impl `uneven_tma`.

The rows of the weight need not start at multiples of 16 bytes. Copying such a weight first, as `sm90` does, moves it three
times, which takes longer than a product of a few hundred rows. But weight rows that are `classes` apart (8 for an odd K) are a
multiple of 16 bytes apart, so they have the same alignment. A TMA descriptor whose rows are `classes` apart can therefore read
all of them in place. Each class begins at its first column that is 16-byte aligned. There are three launches, each of which
starts while the one before it ends (launch/pdl.py):

    turn     turned [K, M] = x^T, with rows at multiples of 128 bytes. K is now the outer dimension, along which a box of x may
             begin anywhere. So the same matrix serves all classes, and no mask is needed
    product  a program takes BLOCK_N rows of one class, BLOCK_M rows of x and one of PARTS shares of K, and stores a partial sum
             of y^T [N, M] in float32
    gather   adds the parts in order, applies the epilogue and writes y

The columns of one class are `classes` apart in y. If the product wrote y directly, it would need a 2-byte store per element,
each to a separate sector: a million at 256x4095, 33 MB of sectors. In the rows of y^T, stores cover whole cache lines.

The main loop uses only whole steps of BLOCK_K that lie inside a weight row. The last part loads the remaining columns
separately, before its first step, with masks. So elements of neighbouring rows, finite or not, are never multiplied. The last
tile of a class is moved back to end with the class, so that no rows beyond the weight are loaded. It does not write the rows
that it shares with the tile before it.

Measured on an H100 with the default configs, in us. The third column is the implementation that would run otherwise, the last
one the nearest aligned problem (docs/log.md):

    32x4095x4095    20.0   tiles 32x64, 2 parts       `uneven` 23.2
    64x4095x4095    20.3   64x64, 2 parts             `uneven` 31.4    15.7
    128x4095x4095   22.1   128x64, 2 parts            `sm90` 40.4
    256x4095x4095   27.1   256x64, 2 parts            `sm90` 43.0      18.7
    256x2049x2049   13.3   128x64, 2 parts            `sm90` 14.4      12.2
    127x4099x2053   16.0   128x64, 3 parts, 2 per SM  `sm90` 21.8      12.9

Tiles of 128 columns load less of x, but the best of them is 6 to 11 % slower. With so few rows, most of the time is spent on
reading the weight (33.5 MB take 10.8 us of HBM at 3.1 TB/s) and on three launches. Parts are written and read again in float32:
8.4 MB each at 256x4095, about 3 us.

Refuses: aligned operands, more than 1024 rows (there, `sm90` reads x in classes), a gate, batches, operands that are not dense
along K, 4-byte elements, cards before sm_90.
"""

# M rows of x, N rows of the weight, K the shared dimension

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hw import env
from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.gemm.pad_operands import aligned_base, class_count
from tilewright.kernels.gemm.problem import ACTIVATIONS, Problem, empty_output, finish
from tilewright.kernels.gemm.unaligned_skinny import first_whole, refuse_uneven
from tilewright.kernels.launch.pdl import launch_options, release
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["UNEVEN_TMA"]

_MOST_ROWS = 1024


def _refuse(device: Device, problem: Problem) -> str | None:
    if not problem.k or not problem.n:
        return "N or K is 0: the copy engine (TMA) cannot load empty matrices"
    return refuse_uneven(problem, _MOST_ROWS)


# ---- space

_EDGE = 16  # room for the columns at the ends of a row that are loaded one by one; there are at most 14 of them
_PARTS = (1, 2, 3, 4, 6, 8)


def _likely_classes(problem: Problem) -> int:
    """The number of classes of a weight whose rows are contiguous in memory."""
    return next(c for c in (1, 2, 4, 8) if c * problem.k % 8 == 0)


def _tiles(problem: Problem, block_m: int, block_n: int) -> int:
    classes = _likely_classes(problem)
    columns = sum(ceil_div(problem.n - kind, classes * block_n) for kind in range(min(classes, problem.n)))
    return ceil_div(problem.m_bucket, block_m) * columns


def _smem_bytes(c: Config) -> int:
    """The shared memory of the pipeline stages with their barriers, and of the edge columns."""
    return (c["BLOCK_M"] + c["BLOCK_N"]) * (c["BLOCK_K"] * c["num_stages"] + _EDGE) * 2 + 8 * c["num_stages"]


_ROW_BYTES_PER_US = 2.9e6
"""The rate at which parts of y are written and read again. This and the time of a step are fitted to six shapes on an H100. The
estimate orders configs of 64 columns and 4 warps as measured, except for times within 3 % of each other, and for configs that
differ in BLOCK_K or num_stages."""


def _step_us(block_m: int) -> float:
    """The time of 64 columns of K in a program of BLOCK_N 64, which waits for the weight, and with 256 rows also for x."""
    return 0.24 + 0.06 * block_m / 128


def _estimate_us(device: Device, problem: Problem, c: Config) -> float:
    """The part of the time that depends on BLOCK_M, PARTS and the programs per SM: steps of K, writing and reading parts."""
    programs = _tiles(problem, c["BLOCK_M"], c["BLOCK_N"]) * c["PARTS"]
    in_turn: float = ceil_div(programs, device.sms)
    if programs > device.sms and 2 * _smem_bytes(c) <= device.smem_bytes:
        # With two programs per SM, a program becomes faster once the other has ended. So take the middle between the load of
        # the busiest SM and the mean load.
        in_turn = (in_turn + programs / device.sms) / 2
    steps = in_turn * problem.k / (64 * c["PARTS"]) * _step_us(c["BLOCK_M"])
    return steps + c["PARTS"] * problem.m_bucket * problem.n * 8 / _ROW_BYTES_PER_US


def _default(device: Device, problem: Problem) -> Config:
    """The least estimated time among tiles of 64 columns and 4 warps, which were best for every shape measured.

    Ties are resolved in favour of a long step (BLOCK_K), then a deep pipeline (num_stages).
    """
    made = (
        {"BLOCK_M": m, "BLOCK_N": 64, "BLOCK_K": k, "PARTS": parts, "num_warps": 4, "num_stages": stages}
        for k, stages, m, parts in product((128, 64), (5, 4, 3), (32, 64, 128, 256), _PARTS)
    )
    fitting = [config for config in made if _config_refusal(device, problem, config) is None]
    return min(fitting, key=lambda config: _estimate_us(device, problem, config))


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    block_m, block_n, parts = c["BLOCK_M"], c["BLOCK_N"], c["PARTS"]
    if _smem_bytes(c) > device.smem_bytes:
        return "more shared memory than the device has"
    accumulators = block_m * block_n // (32 * c["num_warps"])
    if accumulators > 128:
        return "the accumulators need more registers than a thread has"
    if accumulators < (16 if c["num_warps"] == 4 else 32):
        return "too many warps for so small a tile"
    if block_m > 32 and block_m >= 2 * problem.m_bucket:
        return "BLOCK_M is at least twice the number of rows of x"
    if block_n > 64 and block_n * _likely_classes(problem) >= 2 * problem.n:
        return "BLOCK_N is at least twice the number of weight rows that share an alignment"
    if c["BLOCK_K"] == 128 and block_m > 64:
        return "BLOCK_K 128 is for BLOCK_M up to 64, where a shorter step ends before the next load is issued"
    deeper = {**c, "num_stages": c["num_stages"] + 1}
    if c["num_stages"] < 5 and device.smem_bytes // _smem_bytes(c) == device.smem_bytes // _smem_bytes(deeper):
        return "one more pipeline stage leaves room for as many programs per SM"
    if parts > 1 and ceil_div(problem.k, c["BLOCK_K"]) < 4 * parts:
        return "fewer than four steps along K per program"
    if parts > 1 and _tiles(problem, block_m, block_n) * parts > 2 * device.sms:
        return "fewer PARTS are enough to occupy all SMs"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (32, 64, 128, 256),
        "BLOCK_N": (64, 128),
        "BLOCK_K": (64, 128),
        "PARTS": _PARTS,
        "num_warps": (4, 8),
        "num_stages": (3, 4, 5),
    },
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["M", "K", "width"])
def _turn_kernel(x_ptr, turned_ptr, M, K, x_stride, width, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """turned [K, width * 64]: x transposed, with its rows padded with zeros."""
    release()
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + ks[None, :]
    x = tl.load(x_ptrs, mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0)
    tl.store(turned_ptr + ks.to(tl.int64)[:, None] * (width * 64) + rows[None, :], tl.trans(x), mask=(ks < K)[:, None])


@triton.jit
def _outside_steps(
    w_ptr, turned_ptr, starts, live, mine, begin, steps, first_row, K, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait for `turned`, then return the product of the columns before and after `steps` whole steps; zero unless `mine`.

    This is not under a condition: inside one, ptxas (12.8) assumes that the accumulator is also written elsewhere, and makes
    the tensor cores of the main loop wait after each instruction.
    """
    whole = tl.maximum(K - begin, 0) // 8 * 8
    # The remaining columns: at most 7 before the aligned part and 7 after it.
    at = tl.arange(0, EDGE)
    edge = tl.where(at < begin, at, at + whole)
    on_edge = mine & (edge < K)
    # The mask is constant over groups of 8 columns, so that loads keep their full width.
    ks = steps * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = mine & (ks // 8 * 8 < whole)
    # Loading the weight before the wait is safe: the preceding launch (turn) does not write it, and that launch itself started
    # only after all earlier launches had ended.
    w_edge = tl.load(w_ptr + starts + edge[None, :], mask=live & on_edge[None, :], other=0.0)
    # The sum is already a multiple of 8; writing it this way tells the compiler, which then emits 16-byte loads.
    w = tl.load(w_ptr + (starts + begin) // 8 * 8 + ks[None, :], mask=live & inside[None, :], other=0.0)
    if PDL:
        gdc_wait()
    x_ptrs = turned_ptr + first_row + tl.arange(0, BLOCK_M)[None, :]
    x_edge = tl.load(x_ptrs + edge.to(tl.int64)[:, None] * (width * 64), mask=on_edge[:, None], other=0.0)
    x = tl.load(x_ptrs + (begin + ks).to(tl.int64)[:, None] * (width * 64), mask=inside[:, None], other=0.0)
    return dot(w_edge, x_edge, dot(w, x, tl.zeros([BLOCK_N, BLOCK_M], tl.float32)))


@triton.jit(do_not_specialize=["N", "K", "lead", "w_stride", "width"])
def _product_kernel(
    x_desc, w_desc, w_ptr, turned_ptr, parts_ptr, N, K, lead, w_stride, width,
    CLASSES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fill parts [PARTS, N, width * 64]. w_ptr is 16-byte aligned, `lead` elements before the weight."""
    kind = tl.program_id(0) % CLASSES
    first = tl.program_id(0) // CLASSES * BLOCK_N
    first_row = tl.program_id(1) * BLOCK_M
    part = tl.program_id(2)
    count = (N - kind + CLASSES - 1) // CLASSES
    if first < count:
        top = tl.minimum(first, count - BLOCK_N)
        j = top + tl.arange(0, BLOCK_N)
        cols, live = (kind + j * CLASSES)[:, None], (j >= first)[:, None]
        begin = first_whole(lead, w_stride, kind)
        steps = tl.maximum(K - begin, 0) // BLOCK_K
        # For the last part, the columns outside of whole steps take about as long as two steps.
        share = tl.cdiv(steps + 2, PARTS)
        acc = _outside_steps(
            w_ptr, turned_ptr, lead + cols.to(tl.int64) * w_stride, live, part == PARTS - 1, begin, steps, first_row, K, width,
            BLOCK_M, BLOCK_N, BLOCK_K, EDGE, PDL,
        )  # fmt: skip
        column = lead + kind * w_stride + begin
        for step in range(part * share, tl.minimum(part * share + share, steps)):
            w = w_desc.load([top, column + step * BLOCK_K])
            x = x_desc.load([begin + step * BLOCK_K, first_row])
            acc = dot(w, x, acc)
        release()
        rows = first_row + tl.arange(0, BLOCK_M)[None, :]
        tl.store(parts_ptr + (part * N + cols).to(tl.int64) * (width * 64) + rows, acc, mask=live)


@triton.jit(do_not_specialize=["M", "width"])
def _gather_kernel(
    parts_ptr, bias_ptr, residual_ptr, y_ptr, M, N, width, residual_stride,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    first_col, first_row = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    cols = first_col + tl.arange(0, BLOCK_N)[:, None]
    part_ptrs = parts_ptr + first_row + tl.arange(0, BLOCK_M)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for part in tl.static_range(PARTS):
        places = (part * N + cols).to(tl.int64) * (width * 64)
        total += tl.load(part_ptrs + places, mask=cols < N, other=0.0, cache_modifier=".cg")
    finish(tl.trans(total), y_ptr, bias_ptr, residual_ptr, first_row, first_col, M, N, residual_stride, ACTIVATION, False)


# ---- launcher

_TURNED = (64, 32)  # rows and columns of x per program of the first launch
_GATHERED = (32, 64)  # rows and columns of y per program of the last launch


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    function, gated = ACTIVATIONS[activation]
    y = empty_output(x, weight, gated)
    if not y.numel():
        return y
    if not weight.stride(0):
        weight = weight.contiguous()  # a single row, repeated: TMA does not support a stride of 0
    (m, k), n = x.shape, weight.shape[0]
    block_m, block_n, block_k, parts = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "PARTS"))
    waits = launch_options(not env.interpreting())  # every card with TMA also supports dependent launches
    w_stride, classes, (base, lead) = weight.stride(0), class_count(weight), aligned_base(weight)
    rows = ceil_div(m, max(64, block_m)) * max(64, block_m)
    width = rows // 64
    turned = torch.empty([k, rows], dtype=x.dtype, device=x.device)
    sums = torch.empty([parts, n, rows], dtype=torch.float32, device=x.device)
    _turn_kernel[(ceil_div(k, _TURNED[1]), ceil_div(rows, _TURNED[0]))](
        x, turned, m, k, x.stride(0), width, BLOCK_M=_TURNED[0], BLOCK_K=_TURNED[1]
    )
    tallest = ceil_div(n, classes)
    inner = lead + (classes - 1) * w_stride + k
    _product_kernel[(classes * ceil_div(tallest, block_n), ceil_div(m, block_m), parts)](
        TensorDescriptor(turned, [k, rows], [rows, 1], [block_k, block_m]),
        TensorDescriptor(base, [tallest, inner], [classes * w_stride, 1], [block_n, block_k]),
        base, turned, sums, n, k, lead, w_stride, width,
        CLASSES=classes, EDGE=_EDGE, **config, **waits,
    )  # fmt: skip
    _gather_kernel[(ceil_div(n, _GATHERED[1]), ceil_div(m, _GATHERED[0]))](
        sums, bias, residual, y, m, n, width, 0 if residual is None else residual.stride(0),
        ACTIVATION=function, PARTS=parts, BLOCK_M=_GATHERED[0], BLOCK_N=_GATHERED[1], **waits,
    )  # fmt: skip
    return y


UNEVEN_TMA = Impl(name="uneven_tma", launch=_launch, space=SPACE, min_arch=90, refuse=_refuse)
