"""`mixed_linear` for at most 32 rows of x: codes are streamed once, straight into the tensor cores' operand registers.

A program owns BLOCK_N rows of the weight and all of K. Its warps take chunks of K alternately, and synchronise only once, at
the end. The product is transposed: the weight is the tall operand of the tensor cores, x the narrow one. int4 codes are stored
in the order of that operand (int4_layout.py), and a thread loads pairs of x. Of 8-bit codes, a thread takes the 16 neighbours
of one load, and the same columns of x: within a chunk, K may have any order that is the same in both operands. So no operand
passes through shared memory. x is read through L1, which the programs on an SM share. Loads of the codes of the next DEPTH
chunks are in flight, into registers.

Limited by reading the codes; with 16 rows and BLOCK_N 16 by x, of which a program reads four times as many bytes as of int4.

A chunk is 64 bytes of a row. The scale of a group multiplies the sum over a chunk, or over the group if that is shorter.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tilewright.hw.device import Device
from tilewright.kernels.device.dequant import minus, pairs, widen
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.kernels.gemm.quantized_operands import empty_product
from tilewright.kernels.gemm.weight_only.problem import FORMATS, MixedProblem
from tilewright.kernels.hopper.epilogue import activate
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["MIXED_SKINNY", "x_depth"]

_MAX_M = 32


def _refuse(device: Device, problem: MixedProblem) -> str | None:
    if problem.m_bucket > _MAX_M:
        return f"supports at most {_MAX_M} rows of x"
    if problem.dtype.itemsize != 2:
        return f"does not support {problem.dtype}"
    if not problem.aligned or problem.k % (8 if problem.format == "int4" else 16):
        return "needs rows of x and of the codes that start at multiples of 16 bytes and are multiples of 16 bytes long"
    if problem.format != "int4" and problem.block_cols == 32:
        return "supports 8-bit codes with groups of at least 64 columns only"
    if problem.zeros and not problem.block_cols:
        return "supports zero points per group only, not per row"
    if not problem.k:
        return "K is 0: there is nothing to load"
    return None


def _chunk(format: str) -> int:
    """Columns of a row in a chunk of 64 bytes."""
    return 128 if format == "int4" else 64


# ---- space


def _default(device: Device, problem: MixedProblem) -> Config:
    """From the timings of an H100, 4096 to 57344 rows of the weight, 4096 to 28672 columns (studies/mixed-linear-choices.json).

    With few programs, each needs more warps. With many, they share x in L1: tiles are taller where x is more bytes than codes.
    """
    rows, per_sm, long = problem.m_bucket, problem.n / device.sms, problem.k > 8192
    if problem.format != "int4":
        if rows <= 16:
            few = per_sm <= 40 and problem.k > 4 * _chunk(problem.format)
            return _config(16, 8, 2) if few else _config(32 if rows == 16 and per_sm > 128 else 16, 4, 2)
        return _config(32, 4, 1) if per_sm > 64 else _config(16, 4, 2)
    # Not timed. Four scales and zero points per chunk leave few registers.
    short = problem.block_cols == 32
    if rows <= 8:
        tall = rows > 2 and per_sm > 128 and not short
        return _config(16, 8, 2) if per_sm <= 32 and long else _config(32 if tall else 16, 4, 2)
    if rows == 16 and not short:
        if per_sm > 128:
            return _config(64, 4, 1)
        if 32 < per_sm <= 64 and problem.k >= 8192:
            return _config(64, 8, 1)  # nearly one tile per SM
        return _config(32, 8, 1) if per_sm <= 32 and long else _config(32, 4, 2)
    return _config(32 if rows == 16 or per_sm > 48 else 16, 4, 1)


def _config(block_n: int, slices: int, depth: int) -> Config:
    return {"BLOCK_N": block_n, "SLICES": slices, "DEPTH": depth}


def x_depth(format: str, rows: int, depth: int) -> int:
    """How many chunks ahead x is loaded. A chunk of 16 rows of x has as many bytes as the int4 codes of 64 weight rows."""
    return 1 if format == "int4" and rows >= 16 else min(depth, 2)


def _config_refusal(device: Device, problem: MixedProblem, c: Config) -> str | None:
    rows, int4, depth = problem.m_bucket, problem.format == "int4", c["DEPTH"]
    tiles = c["BLOCK_N"] // 16 * max(1, rows // 8)
    held = depth * c["BLOCK_N"] // 2 + x_depth(problem.format, rows, depth) * max(8, rows) * (2 if int4 else 1)
    if tiles > 8:
        return "the accumulators and operands need more registers than a thread has"
    if held + 8 * tiles >= 160:
        return "the operands in flight need more registers than a thread has"
    if problem.block_cols == 32 and rows >= 16 and depth * c["BLOCK_N"] > 32:
        return "the group scales in flight need more registers than a thread has"
    # The following configs are refused because no product timed on an H100 was faster with them by more than 1 %.
    if c["BLOCK_N"] == 64 and not (int4 and rows >= 16):
        return "BLOCK_N 64 is for int4 and at least 16 rows of x, where x has more bytes than the codes"
    if depth == 4 and (rows > 8 or (c["BLOCK_N"], c["SLICES"]) != (16, 4)):
        return "DEPTH 4 is for at most 8 rows of x, with BLOCK_N 16 and SLICES 4"
    if c["SLICES"] > 4 and (c["SLICES"] - 4) * _chunk(problem.format) >= problem.k:
        return "more warps than chunks of K"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_N": (16, 32, 64), "SLICES": (4, 8), "DEPTH": (1, 2, 4)},
    refusal=_config_refusal,
)

# ---- kernel


@constexpr_function
def _spread_layout(slices: int, rows: int, cols: int, own: int, step: int) -> gl.DistributedLinearLayout:
    """[slices, rows, cols]: a warp has one slice; a thread has every eighth row, and `own` neighbours per `step` columns."""
    registers = [[0, 0, 1 << i] for i in range(own.bit_length() - 1)]
    registers += [[0, 0, step << i] for i in range((cols // step).bit_length() - 1)]
    registers += [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 0, own], [0, 0, 2 * own], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, rows, cols])


@gluon.jit
def _operand(x, INDEX: gl.constexpr, FORMAT: gl.constexpr, ACC: gl.constexpr):
    """[S, R, C], of which a thread holds C / 4 columns, as an operand of the tensor cores.

    For 8-bit codes these columns are neighbours. This determines the order of K, which is the same in both operands.
    """
    S: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    C: gl.constexpr = x.shape[2]
    layout: gl.constexpr = gl.DotOperandLayout(INDEX, ACC, 2 if FORMAT == "int4" else 8 if C >= 64 else 4)
    if FORMAT != "int4":
        x = x.reshape([S, R, 4, 2, C // 8]).permute([0, 1, 3, 2, 4]).reshape([S, R, C])
    if INDEX == 1:
        x = x.permute([0, 2, 1])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _groups(x, COUNT: gl.constexpr):
    """[S, R, C] as a tuple of COUNT tensors of C / COUNT neighbouring columns each."""
    parts = (x,)
    for _ in gl.static_range(COUNT.bit_length() - 1):
        halves = ()
        for j in gl.static_range(len(parts)):
            y = parts[j]
            halves += y.reshape([y.shape[0], y.shape[1], 2, y.shape[2] // 2]).permute([0, 1, 3, 2]).split()
        parts = halves
    return parts


@gluon.jit
def _word_groups(words, COUNT: gl.constexpr):
    """A chunk of int4 [S, R, 16 words] as a tuple of COUNT tensors with the words of a group of columns each."""
    if COUNT > 1:
        # Word 4 t + c belongs to columns 32 c to 32 c + 31.
        words = words.reshape([words.shape[0], words.shape[1], 4, COUNT, 4 // COUNT]).permute([0, 1, 3, 2, 4])
        words = words.reshape([words.shape[0], words.shape[1], 16])
    return _groups(words, COUNT)


@gluon.jit
def _widened(words, zeros, FORMAT: gl.constexpr, x):
    """A group of codes in x's dtype, columns in order. zeros: int4's zero points [S, R]."""
    if FORMAT == "int4":
        LAYOUT: gl.constexpr = words.type.layout
        less = gl.expand_dims(gl.convert_layout(minus(zeros, x), gl.SliceLayout(2, LAYOUT), assert_trivial=True), 2)
        w = widen(words, less, FORMAT, x)
        w = w.reshape([w.shape[0], w.shape[1], 4, w.shape[2] // 4, 4, 2]).permute([0, 1, 3, 4, 2, 5])
        return w.reshape([w.shape[0], w.shape[1], 8 * words.shape[2]])
    else:
        w = widen(words, 0, FORMAT, x)
        return w.reshape([w.shape[0], w.shape[1], 4 * w.shape[2]])


@gluon.jit
def _replace(items, i: gl.constexpr, item):
    """The tuple with another item at place i."""
    made = ()
    for j in gl.static_range(len(items)):
        if j == i:
            made += (item,)
        else:
            made += (items[j],)
    return made


@gluon.jit
def _finish(
    acc, y_ptr, bias_ptr, residual_ptr, first_col, M, N, residual_stride, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Apply bias, activation and residual to a float32 tile [weight rows, rows of x], round it once and store it."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 2 if GATED else 1], [1, 32], [1, gl.num_warps()], [1, 0])
    y = gl.convert_layout(acc.permute([1, 0]), layout)
    width = N
    if bias_ptr is not None:
        cols = first_col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + _weight_rows(cols, N, GATED), mask=cols < N, other=0.0)
        y += gl.expand_dims(bias.to(gl.float32), 0)
    if GATED:
        gate, up = y.reshape([y.shape[0], BLOCK_N // 2, 2]).split()
        y = activate(gate, ACTIVATION) * up
        width = N // 2
        first_col = first_col // 2
    else:
        y = activate(y, ACTIVATION)
    rows = gl.expand_dims(gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout)), 1)
    cols = gl.expand_dims(first_col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout)), 0)
    inside = (rows < M) & (cols < width)
    if residual_ptr is not None:
        y += gl.load(residual_ptr + rows * residual_stride + cols, mask=inside, other=0.0).to(gl.float32)
    gl.store(y_ptr + rows * width + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _weight_rows(cols, N, GATED: gl.constexpr):
    """The weight rows for the columns of a tile: the same indices, or with a gate the two halves interleaved."""
    if GATED:
        return (cols % 2) * (N // 2) + cols // 2
    else:
        return cols


@gluon.jit
def _places(
    first, count, stride, ROWS: gl.constexpr, UNITS: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """(which rows exist, offsets, first columns) of a step's tile in `_spread_layout`: slice s has the s-th UNITS of a row.

    A unit is the element type of the pointer; it contains WIDTH columns.
    """
    SLICES: gl.constexpr = layout.shape[0]
    s = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    s = gl.expand_dims(gl.expand_dims(s, 1), 2)
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    rows = gl.expand_dims(gl.expand_dims(rows, 0), 2)
    units = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    units = gl.expand_dims(gl.expand_dims(units, 0), 1)
    offsets = _weight_rows(rows, count, GATED).to(gl.int64) * stride + s * UNITS + units
    if WIDTH == 8:
        return rows < count, offsets, s * (UNITS * WIDTH)  # int4 is padded to whole chunks
    else:
        # All units of 16 bytes get the same column: so the compiler sees that a single load covers them.
        return rows < count, offsets, s * (UNITS * WIDTH) + units // 4 * (4 * WIDTH)


@gluon.jit
def _block_places(
    first, N, stride, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, BLOCK_N: gl.constexpr, COLS: gl.constexpr,
    GATED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(which rows exist, offsets of the scales, first columns) of a step's chunks, in a layout without the column dimension."""
    SLICES: gl.constexpr = gl.num_warps()
    s = gl.expand_dims(gl.arange(0, SLICES, layout=gl.SliceLayout(1, layout)), 1)
    rows = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)), 0)
    blocks = _weight_rows(rows, N, GATED) // BLOCK_ROWS
    return rows < N, blocks * stride + s * COLS // BLOCK_COLS, s * COLS


@gluon.jit
def _fetch(ptr, place, step, APART: gl.constexpr, STEP: gl.constexpr, end, EVEN: gl.constexpr, CACHE: gl.constexpr):
    """Load an operand's elements of a step. place: (which rows exist, offsets, columns). Steps are APART units apart."""
    live, offsets, cols = place
    inside = live & (step * STEP < end) if EVEN else live & (cols < end - step * STEP)
    return gl.load(ptr + step * APART + offsets, mask=inside, other=0, cache_modifier=CACHE)


@gluon.jit
def _sum_chunks(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, x_place, w_place, s_place, z_place, K, acc, ZERO: gl.constexpr, DTYPE: gl.constexpr,
    FORMAT: gl.constexpr, BLOCK_COLS: gl.constexpr, COLS: gl.constexpr, EVEN: gl.constexpr, DEPTH: gl.constexpr,
    X_DEPTH: gl.constexpr,
):  # fmt: skip
    """acc + codes @ x^T over all of K, separately per slice. If there are groups, their scales are applied."""
    ACC: gl.constexpr = acc.type.layout
    STEP: gl.constexpr = acc.shape[0] * COLS
    WORDS: gl.constexpr = acc.shape[0] * 16
    COUNT: gl.constexpr = COLS // BLOCK_COLS if BLOCK_COLS and BLOCK_COLS < COLS else 1  # groups of a chunk
    GROUPS: gl.constexpr = STEP // BLOCK_COLS if BLOCK_COLS else 0
    weights = ()
    scales = ()
    zeros = ()
    xs = ()
    eights = gl.full([acc.shape[0], acc.shape[1]], 8, gl.int32, ZERO)
    x_like = gl.zeros([1], DTYPE, gl.SliceLayout(0, gl.SliceLayout(0, ACC)))
    for i in gl.static_range(DEPTH):
        weights += (_fetch(w_ptr, w_place, i, WORDS, STEP, K, EVEN, ".cg"),)
        for j in gl.static_range(COUNT if BLOCK_COLS else 0):
            scales += (_fetch(scales_ptr + j, s_place, i, GROUPS, STEP, K - j * BLOCK_COLS, EVEN, ""),)
            if zeros_ptr is not None:
                zeros += (_fetch(zeros_ptr + j, z_place, i, GROUPS, STEP, K - j * BLOCK_COLS, EVEN, ""),)
    for i in gl.static_range(X_DEPTH):
        xs += (_fetch(x_ptr, x_place, i, STEP // 2, STEP, K, EVEN, ""),)
    for step in range(0, gl.cdiv(K, STEP), DEPTH):
        for i in gl.static_range(DEPTH):
            # The contents of a slot are used, then the slot is loaded again. So no load is waited for before it is needed.
            parts = _word_groups(weights[i], COUNT)
            x_parts = _groups(pairs(xs[i % X_DEPTH], x_like), COUNT)
            ahead = step + (i + DEPTH)
            for j in gl.static_range(COUNT):
                if zeros_ptr is not None:
                    w = _widened(parts[j], zeros[i * COUNT + j], FORMAT, x_like)
                    filled = _fetch(zeros_ptr + j, z_place, ahead, GROUPS, STEP, K - j * BLOCK_COLS, EVEN, "")
                    zeros = _replace(zeros, i * COUNT + j, filled)
                else:
                    w = _widened(parts[j], eights, FORMAT, x_like)
                a = _operand(w, 0, FORMAT, ACC)
                b = _operand(x_parts[j], 1, FORMAT, ACC)
                if BLOCK_COLS:
                    part = mma_v2(a, b, gl.zeros(acc.shape, gl.float32, ACC))
                    acc += part * gl.expand_dims(scales[i * COUNT + j], 2)
                    filled = _fetch(scales_ptr + j, s_place, ahead, GROUPS, STEP, K - j * BLOCK_COLS, EVEN, "")
                    scales = _replace(scales, i * COUNT + j, filled)
                else:
                    acc = mma_v2(a, b, acc)
            weights = _replace(weights, i, _fetch(w_ptr, w_place, ahead, WORDS, STEP, K, EVEN, ".cg"))
            ahead = step + (i + X_DEPTH)
            xs = _replace(xs, i % X_DEPTH, _fetch(x_ptr, x_place, ahead, STEP // 2, STEP, K, EVEN, ""))
    return acc


@gluon.jit(do_not_specialize=["M"])
def mixed_skinny_kernel(
    x_ptr, w_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, scales_stride,
    residual_stride, FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, ACTIVATION: gl.constexpr,
    GATED: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr,
    X_DEPTH: gl.constexpr,
):  # fmt: skip
    """x and w are 32-bit words and strides count 16 bytes, so the compiler knows the alignment. EVEN: whole steps and tiles."""
    SLICES: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = 128 if FORMAT == "int4" else 64
    WORDS: gl.constexpr = _spread_layout(SLICES, BLOCK_N, 16, 4, 16)
    OWN: gl.constexpr = 1 if FORMAT == "int4" else 8
    X: gl.constexpr = _spread_layout(SLICES, BLOCK_M, COLS // 2, OWN, 4 * OWN)
    DTYPE: gl.constexpr = y_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    SCALE: gl.constexpr = gl.SliceLayout(2, ACC)
    ZERO: gl.constexpr = gl.SliceLayout(2, WORDS)
    GROUP: gl.constexpr = BLOCK_COLS if BLOCK_COLS else COLS
    first_col = gl.program_id(0) * BLOCK_N
    x_place = _places(0, M, x_stride * 4, BLOCK_M, COLS // 2, 2, False, X)
    w_place = _places(first_col, N, w_stride * 4, BLOCK_N, 16, COLS // 16, GATED, WORDS)
    s_place = _block_places(first_col, N, scales_stride, BLOCK_ROWS, GROUP, BLOCK_N, COLS, GATED, SCALE)
    z_place = _block_places(first_col, N, scales_stride, BLOCK_ROWS, GROUP, BLOCK_N, COLS, GATED, ZERO)
    acc = _sum_chunks(
        x_ptr, w_ptr, scales_ptr, zeros_ptr, x_place, w_place, s_place, z_place, K,
        gl.zeros([SLICES, BLOCK_N, BLOCK_M], gl.float32, ACC), ZERO, DTYPE, FORMAT, BLOCK_COLS, COLS, EVEN, DEPTH, X_DEPTH,
    )  # fmt: skip
    tile = gl.sum(acc, 0)
    if not BLOCK_COLS:
        rows = first_col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, tile.type.layout))
        row_scales = gl.load(scales_ptr + _weight_rows(rows, N, GATED), mask=rows < N, other=0.0)
        tile *= gl.expand_dims(row_scales, 1)
    _finish(tile, y_ptr, bias_ptr, residual_ptr, first_col, M, N, residual_stride, ACTIVATION, GATED)


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    function, gated = ACTIVATIONS[activation]
    y = empty_product(x, codes, activation, x.dtype)
    if y.numel():
        (m, k), n, format = x.shape, codes.shape[0], FORMATS[codes.dtype]
        block_m = max(8, next_pow2(m))
        mixed_skinny_kernel[(ceil_div(n, config["BLOCK_N"]),)](
            x.view(torch.int32), codes.view(torch.int32), scales, zeros, bias, residual, y, m, n, k,
            x.stride(0) // 8, codes.stride(0) // 16, scales.stride(0),
            0 if residual is None else residual.stride(0), FORMAT=format, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
            ACTIVATION=function, GATED=gated, EVEN=k % (config["SLICES"] * _chunk(format)) == 0 and n % config["BLOCK_N"] == 0,
            BLOCK_M=block_m, BLOCK_N=config["BLOCK_N"], DEPTH=config["DEPTH"],
            X_DEPTH=x_depth(format, block_m, config["DEPTH"]), num_warps=config["SLICES"],
        )  # fmt: skip
    return y


MIXED_SKINNY = Impl(name="skinny", launch=_launch, space=SPACE, refuse=_refuse, interpretable=False)
