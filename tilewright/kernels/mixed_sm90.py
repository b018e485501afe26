"""`mixed_linear` for Hopper and many rows: the kernel of `linear` (matmul_sm90.py) and a group of warps that converts weights.

A persistent block an SM, of twenty warps in five groups that talk through barriers in shared memory:

    producer        one warp: has the copy engine (TMA) fetch tiles of x and of codes
    two converters  a warpgroup each: codes of half of the rows to x's dtype, to where the tensor cores read the weight from
    two consumers   a warpgroup each: those of `linear`; for them a stage is full when x has arrived and the weight is converted

Scales of rows multiply the product, in float32. Scales of groups multiply the weight, also in float32, which is then rounded to
x's dtype: as a weight in 16 bits would be. Codes of float8 that are no numbers: see mixed_codes.py.

Limited by shared memory, through which the converted weight passes (a 256x128 tile: 156 KB a step of K, whose products take
1024 cycles), and with low tiles by the latency of a conversion. On an H100 int8 reaches 0.84 to 0.87 of the speed of cuBLAS in
bf16 at 2048 rows, int4 0.72.
"""
# Gluon reads `name: gl.constexpr = value` as "known to the compiler"; to a type checker it is a value of another type.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewright.hw.device import CARD_OF_ARCH, Device, device_of
from tilewright.kernels.matmul_common import ACTIVATIONS
from tilewright.kernels.matmul_sm90 import joined_boxes, load_box, multiply_tiles, piece_count, piece_of, place_of
from tilewright.kernels.matmul_sm90_launch import shares
from tilewright.kernels.mixed_codes import minus, widen
from tilewright.kernels.mixed_common import FORMATS, MixedProblem, empty_result
from tilewright.kernels.workspace import tickets
from tilewright.op import Impl, scope
from tilewright.tune.space import Config, Space

__all__ = ["MIXED_SM90"]

_BLOCK_K = 64  # 128 bytes of x


def _refuse(device: Device, problem: MixedProblem) -> str | None:
    if device.arch != 90:
        return f"is written for sm_90, this is sm_{device.arch}"
    if problem.dtype.itemsize != 2:
        return f"does not take {problem.dtype}"
    if not problem.aligned:
        return "needs rows of x and of codes that start at multiples of 16 bytes"
    if not problem.k or not problem.n:
        return "the copy engine has no empty matrices: N or K is 0"
    if problem.block_cols == 32:
        return "takes groups of 64 columns and more"
    if problem.zeros and not problem.block_cols:
        return "takes zero points of groups, not of whole rows"
    return None


# ---- space

# BLOCK_M, BLOCK_N, CONSUMERS -> cycles of a step of K, of 8-bit codes and of int4: H100, M 64 to 4096, docs/log.md
_TILES = {(256, 128, "m"): (1330, 1510), (128, 128, "m"): (1000, 1500), (64, 128, "n"): (1030, 1200)}


def _epilogue_n(config: Config) -> int:
    """Columns of the result that go through shared memory at once."""
    return 32 if config["BLOCK_M"] == 256 else 64


def _rows_cols(config: Config) -> tuple[int, int]:
    """What one consumer has in its registers."""
    by_rows = config["CONSUMERS"] == "m"
    return config["BLOCK_M"] // (1 + by_rows), config["BLOCK_N"] // (2 - by_rows)


_CODE_BYTES = 64  # of a row in a stage of codes: one step of K of 8-bit codes, two of int4


def _ring(device: Device, config: Config) -> tuple[int, int]:
    """(stages of x and the weight, stages of codes), as many as fit, up to eight."""
    rows, cols = _rows_cols(config)
    room = device.smem_bytes - 2 * rows * min(cols, _epilogue_n(config)) * 2 - 1024
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * _BLOCK_K * 2
    codes = config["BLOCK_N"] * _CODE_BYTES
    stages = min(8, (room - 2 * codes) // stage)
    return stages, min(stages, (room - stages * stage) // codes)


def _default(device: Device, problem: MixedProblem) -> Config:
    """The tile with the least estimated time: waves of tiles, each as many steps of K as there are."""
    best, best_cycles = {}, float("inf")
    for (block_m, block_n, consumers), step_cycles in _TILES.items():
        config = {"BLOCK_M": block_m, "BLOCK_N": block_n, "CONSUMERS": consumers}
        if _config_refusal(device, problem, config):
            continue
        tiles = -(-problem.m_bucket // block_m) * -(-problem.n // block_n)
        whole = problem.k / _BLOCK_K * step_cycles[problem.format == "int4"]
        waves, left = divmod(tiles, device.sms)
        ways = {1: (waves + (left > 0)) * (whole + 2000)}
        if 2 * left <= device.sms and problem.k >= 2048:
            ways[0] = waves * (whole + 2000) + whole / min(4, device.sms // max(left, 1)) + 8000
        for split, cycles in ways.items():
            if cycles < best_cycles:
                best, best_cycles = {**config, "SPLIT_K": split}, cycles
    return best


def _config_refusal(device: Device, problem: MixedProblem, c: Config) -> str | None:
    if (c["BLOCK_M"], c["BLOCK_N"], c["CONSUMERS"]) not in _TILES:
        return "no such tile: converters keep up with 128 rows of the weight"
    if problem.gated and _rows_cols(c)[1] < 2 * _epilogue_n(c):
        return "gate and up halves of a consumer's tile are at least one block of the epilogue wide"
    if c["BLOCK_M"] > (128 if problem.gated else 64) and c["BLOCK_M"] >= 2 * problem.m_bucket:
        return "BLOCK_M is twice as high as x"
    return None


SPACE = Space(
    default=_default,
    axes={"BLOCK_M": (64, 128, 256), "BLOCK_N": (128,), "CONSUMERS": ("m", "n"), "SPLIT_K": (1, 0, 2, 4)},
    refusal=_config_refusal,
)
"""SPLIT_K: programs that share a tile along K; 0 shares just the tiles that are left when no more fill the card."""

# ---- kernel


@gluon.jit
def load_tiles(
    x_desc, w_desc, x_bufs, w_boxes, code_bufs, full, empty, codes_full, codes_empty,
    F, tiles_m, tiles_n, steps, waves, share, FORMAT: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    M_BOXES: gl.constexpr = x_bufs.shape[0] // STAGES
    BOX_M: gl.constexpr = BLOCK_M // M_BOXES
    N_BOXES: gl.constexpr = w_boxes.shape[0] // (STAGES * HALVES)
    BOX_N: gl.constexpr = w_boxes.shape[1]
    WORDS: gl.constexpr = code_bufs.shape[2]
    SPAN: gl.constexpr = 2 if FORMAT == "int4" else 1
    stage = 0
    phase = 1  # a new barrier counts as having completed its odd phase: the first round waits for nobody
    code_stage = 0
    code_phase = 1
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        row, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(first, end):
            # A stage of codes is for SPAN steps of K, fewer where a piece of work begins or ends within.
            if (step == first) | (step % SPAN == 0):
                mbarrier.wait(codes_empty.index(code_stage), code_phase)
                bar = codes_full.index(code_stage)
                mbarrier.expect(bar, BLOCK_N * WORDS * 4)
                for b in gl.static_range(N_BOXES):
                    for half in gl.static_range(HALVES):
                        n = (col * N_BOXES + b) * BOX_N + half * F
                        buf = code_bufs.index((code_stage * N_BOXES + b) * HALVES + half)
                        load_box(w_desc, [n, step // SPAN * WORDS], bar, buf)
                code_stage += 1
                if code_stage == CODE_STAGES:
                    code_stage = 0
                    code_phase ^= 1
            mbarrier.wait(empty.index(stage), phase)
            x_bar = full.index(stage)
            mbarrier.expect(x_bar, BLOCK_M * BLOCK_K * 2)
            for b in gl.static_range(M_BOXES):
                load_box(x_desc, [row * BLOCK_M + b * BOX_M, step * BLOCK_K], x_bar, x_bufs.index(stage * M_BOXES + b))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@constexpr_function
def _tile_layout(rows: int, across: int, format: str) -> gl.DistributedLinearLayout:
    """[rows, 64] of the weight, of which a thread has what 16 / across neighbouring words hold of a row."""
    # Bits of a column, from those of a thread's words up; the upper bits of the word go to the other threads of a row.
    bits = [1, 2, 4, 32, 8, 16] if format == "int4" else [1, 2, 4, 8, 16, 32]
    split = across.bit_length() - 1
    kept = bits[: 6 - split]
    lanes = [[0, bit] for bit in bits[6 - split :]]
    row_bits = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    inside = 5 - len(lanes)
    return gl.DistributedLinearLayout([[0, bit] for bit in kept], lanes + row_bits[:inside], row_bits[inside:], [], [rows, 64])


@gluon.jit
def _block_scales(
    scales_ptr, zeros_ptr, n, N, group, scales_stride, BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """(scales, what they add to codes less 8 for zero points) of rows n and on in a group of columns; [ROWS, 1] each."""
    rows = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offsets = rows // BLOCK_ROWS * scales_stride + group
    scales = gl.load(scales_ptr + offsets, mask=rows < N, other=0.0)
    shifts = scales * 0.0
    if zeros_ptr is not None:
        zeros = gl.load(zeros_ptr + offsets, mask=rows < N, other=8)
        shifts = scales * (8 - zeros.to(gl.int32)).to(gl.float32)
    return gl.expand_dims(scales, 1), gl.expand_dims(shifts, 1)


@gluon.jit
def _convert_tiles(
    w_boxes, code_bufs, full, empty, codes_full, codes_empty, scales_ptr, zeros_ptr,
    F, tiles_m, tiles_n, steps, waves, share, scales_stride, PART: gl.constexpr, FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BLOCK_COLS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STREAM: gl.constexpr,
):  # fmt: skip
    N_BOXES: gl.constexpr = w_boxes.shape[0] // (STAGES * HALVES)
    BOX_N: gl.constexpr = w_boxes.shape[1]
    ROWS: gl.constexpr = BOX_N // 2
    FIRST: gl.constexpr = PART * ROWS
    BLOCK_K: gl.constexpr = w_boxes.shape[2]
    SPAN: gl.constexpr = 2 if FORMAT == "int4" else 1
    # Neighbouring threads have neighbouring rows, whole ones where there are as many rows as threads.
    ACROSS: gl.constexpr = 128 // ROWS
    words_layout: gl.constexpr = gl.BlockedLayout([1, 16 // ACROSS], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    tile_layout: gl.constexpr = _tile_layout(ROWS, ACROSS, FORMAT)
    stage = 0
    phase = 1
    code_stage = 0
    code_phase = 0
    for i in range(piece_count(tiles_m * tiles_n, waves, share, steps, STREAM)):
        tile, first, end = piece_of(i, waves, share, steps, STREAM)
        _, col = place_of(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(first, end):
            scales = ()
            if BLOCK_COLS:
                for b in gl.static_range(N_BOXES * HALVES):
                    n = (col * N_BOXES + b // HALVES) * BOX_N + b % HALVES * F + FIRST
                    group = step * BLOCK_K // BLOCK_COLS
                    blocks = _block_scales(
                        scales_ptr, zeros_ptr, n, F * HALVES, group, scales_stride, BLOCK_ROWS, ROWS, tile_layout
                    )
                    scales += (blocks,)
            mbarrier.wait(codes_full.index(code_stage), code_phase)
            for b in gl.static_range(N_BOXES * HALVES):
                words = code_bufs.index(code_stage * N_BOXES * HALVES + b).slice(FIRST, ROWS, 0).load(words_layout)
                w = _widened(words, step, FORMAT, w_boxes, tile_layout)
                if BLOCK_COLS:
                    scale, shift = scales[b]
                    wide = w.to(gl.float32) * scale
                    w = (wide + shift if zeros_ptr is not None else wide).to(w.dtype)
                if b == 0:
                    mbarrier.wait(empty.index(stage), phase)
                w_boxes.index(stage * N_BOXES * HALVES + b).slice(FIRST, ROWS, 0).store(w)
            fence_async_shared()
            mbarrier.arrive(full.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            if (step == end - 1) | (step % SPAN == SPAN - 1):
                mbarrier.arrive(codes_empty.index(code_stage))
                code_stage += 1
                if code_stage == CODE_STAGES:
                    code_stage = 0
                    code_phase ^= 1


@gluon.jit
def _widened(words, step, FORMAT: gl.constexpr, x, layout: gl.constexpr):
    """The codes of a step [R, 64] in x's dtype, of int4 those of one half of the 128 columns that words hold."""
    if FORMAT == "int4":
        # Words 4 t + c, of which c = 0, 1 are the first 64 columns.
        w = words.reshape([words.shape[0], 4, 2, 2]).permute([0, 3, 1, 2])
        even, odd = w.split()
        words = gl.where(step % 2 == 0, even, odd).reshape([words.shape[0], 8])
    eights = gl.full([1, 1], 8, gl.int32, words.type.layout)
    w = widen(words, minus(eights, x), FORMAT, x).reshape([words.shape[0], 64])
    return gl.convert_layout(w, layout, assert_trivial=True)


@gluon.jit
def _barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A ring of barriers that so many arrivals complete."""
    ring = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.index(i), count=ARRIVALS)
    return ring


@gluon.jit(do_not_specialize=["M", "F", "K", "steps", "waves", "share", "PARTS"])
def mixed_sm90_kernel(
    x_desc, w_desc, y_desc, y_ptr, ones_ptr, row_scales_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr,
    parts_ptr, tickets_ptr,
    M, F, K, steps, waves, share, PARTS, scales_stride, residual_stride,
    FORMAT: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLS: gl.constexpr, CONSUMERS: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CODE_STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, EPILOGUE_N: gl.constexpr, TILE_LAYOUT: gl.constexpr, W_LAYOUT: gl.constexpr, STREAM: gl.constexpr,
    ACTIVATION: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Launch on at most as many programs as there are SMs, with num_warps=4 (the other groups bring their own)."""
    M_BOXES: gl.constexpr = 2 if CONSUMERS == "m" else 1
    N_BOXES: gl.constexpr = 2 if CONSUMERS == "n" else 1
    COLS: gl.constexpr = BLOCK_N // N_BOXES
    BOX_N: gl.constexpr = COLS // HALVES
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * M_BOXES] + x_desc.block_type.shape, x_desc.layout)
    w_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES * N_BOXES * HALVES, BOX_N, BLOCK_K], W_LAYOUT)
    w_bufs = w_boxes
    if HALVES == 2:
        w_shape: gl.constexpr = [COLS, BLOCK_K]
        w_bufs = joined_boxes(w_boxes, STAGES * N_BOXES, w_shape, W_LAYOUT)
    code_bufs = gl.allocate_shared_memory(gl.int32, [CODE_STAGES * N_BOXES * HALVES] + w_desc.block_type.shape, w_desc.layout)
    tile_bufs = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [2, BLOCK_M // M_BOXES, EPILOGUE_N], TILE_LAYOUT)
    full = _barriers(STAGES, 3)  # x from the producer, halves of the weight from the converters
    empty = _barriers(STAGES, 2)
    codes_full = _barriers(CODE_STAGES, 1)
    codes_empty = _barriers(CODE_STAGES, 2)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(F * HALVES, BLOCK_N)
    gl.warp_specialize([
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, full, empty, empty,
            y_desc, y_ptr, ones_ptr, row_scales_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, 0, 0, residual_stride,
            0, CONSUMERS, "k", "k", HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, ACTIVATION, VECTOR,
        )),
        (multiply_tiles, (
            x_bufs, w_bufs, tile_bufs, full, empty, empty,
            y_desc, y_ptr, ones_ptr, row_scales_ptr, bias_ptr, residual_ptr, parts_ptr, tickets_ptr,
            M, F, K, tiles_m, tiles_n, steps, waves, share, PARTS, 0, 0, residual_stride,
            1, CONSUMERS, "k", "k", HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, STREAM, 0, ACTIVATION, VECTOR,
        )),
        (_convert_tiles, (
            w_boxes, code_bufs, full, empty, codes_full, codes_empty, scales_ptr, zeros_ptr,
            F, tiles_m, tiles_n, steps, waves, share, scales_stride,
            0, FORMAT, BLOCK_ROWS, BLOCK_COLS, HALVES, STAGES, CODE_STAGES, GROUP_M, STREAM,
        )),
        (_convert_tiles, (
            w_boxes, code_bufs, full, empty, codes_full, codes_empty, scales_ptr, zeros_ptr,
            F, tiles_m, tiles_n, steps, waves, share, scales_stride,
            1, FORMAT, BLOCK_ROWS, BLOCK_COLS, HALVES, STAGES, CODE_STAGES, GROUP_M, STREAM,
        )),
        (load_tiles, (
            x_desc, w_desc, x_bufs, w_boxes, code_bufs, full, empty, codes_full, codes_empty,
            F, tiles_m, tiles_n, steps, waves, share,
            FORMAT, HALVES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CODE_STAGES, GROUP_M, STREAM,
        )),
    ], [4, 4, 4, 1], [184, 56, 56, 24])  # fmt: skip


# ---- launcher

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}
_ONES: dict[torch.device, Tensor] = {}


def _ones(device: torch.device, count: int) -> Tensor:
    """At least `count` ones: the scales of x's rows, for an epilogue that multiplies both operands' or neither's.

    Raises RuntimeError when they would have to be made while a CUDA graph is captured: they would be the graph's own.
    """
    if device.type == "meta":
        return torch.empty(count, dtype=torch.float32, device=device)
    held = _ONES.get(device)
    if held is None or held.numel() < count:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("mixed_linear met its first call of this size during graph capture: run it once before")
        held = _ONES[device] = torch.ones(max(count, 16384), dtype=torch.float32, device=device)
    return held


def _descriptor(t: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(
        t, list(t.shape), [t.stride(0), 1], box, gl.NVMMASharedLayout.get_default_for(box, _DTYPES[t.dtype])
    )


def _launch(
    config: Config, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, activation: str,
    residual: Tensor | None, block_rows: int, block_cols: int,
) -> Tensor:  # fmt: skip
    y = empty_result(x, codes, activation)
    if not y.numel():
        return y
    function, gated = ACTIVATIONS[activation]
    (m, k), width, format = x.shape, y.shape[1], FORMATS[codes.dtype]
    # Meta tensors: compiled for a card that is not here.
    device = scope().card or CARD_OF_ARCH[90] if x.is_meta else device_of(x.get_device())
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    rows, cols = _rows_cols(config)
    stages, code_stages = _ring(device, config)
    box_n = cols // (1 + gated)
    y_box = [rows, min(cols, _epilogue_n(config))]
    steps, tiles = (triton.cdiv(k, _BLOCK_K), triton.cdiv(m, block_m) * triton.cdiv(codes.shape[0], block_n))
    programs, waves, share, parts = shares(tiles, steps, device.sms, config["SPLIT_K"])
    stream = config["SPLIT_K"] != 1
    scratch = counters = None
    if stream:
        left = tiles - waves * programs
        scratch = torch.empty(max(1, left * (parts - 1) * block_m * block_n), dtype=torch.float32, device=x.device)
        counters = tickets(x.device, left * 2)
    mixed_sm90_kernel[(programs,)](
        _descriptor(x, [rows, _BLOCK_K]), _descriptor(codes.view(torch.int32), [box_n, _CODE_BYTES // 4]),
        _descriptor(y, y_box) if width % 8 == 0 else None, y,
        None if block_cols else _ones(x.device, m), None if block_cols else scales, scales, zeros, bias, residual,
        scratch, counters, m, width, k, steps, waves, share, parts - 1, scales.stride(0),
        0 if residual is None else residual.stride(0), FORMAT=format, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
        CONSUMERS=config["CONSUMERS"], HALVES=1 + gated, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=_BLOCK_K,
        STAGES=stages, CODE_STAGES=code_stages, GROUP_M=8, EPILOGUE_N=y_box[1],
        TILE_LAYOUT=gl.NVMMASharedLayout.get_default_for(y_box, gl.bfloat16),
        W_LAYOUT=gl.NVMMASharedLayout.get_default_for([box_n, _BLOCK_K], gl.bfloat16), STREAM=stream, ACTIVATION=function,
        VECTOR=next(v for v in (8, 4, 2, 1) if width % v == 0), num_warps=4,
    )  # fmt: skip
    return y


MIXED_SM90 = Impl(name="sm90", launch=_launch, space=SPACE, min_arch=90, refuse=_refuse, interpretable=False, extra_roundings=1)
