"""layer_norm of wide rows by programs that walk over blocks of rows: the implementation `pipelined`.

norm_split.py's programs take a part of one row each: while they wait for each other nothing of theirs is on its way, and each
reads its columns of weight and bias again. Here a program keeps the same columns from block of rows to block of rows:

- Weight and bias are read once, and stay in registers as they were loaded.
- x comes by cp.async into a ring of STAGES blocks in shared memory. A block's sums are published while the block before it is
  finished: whoever waits for sums waits for those that the others wrote a block ago, and STAGES - 2 blocks are on their way.
- A thread has the mean of what it holds of a row and the squares about it; those change places through shared memory, one warp
  joins a row's by Chan's formula (Chan, Golub and LeVeque, 1983), and the parts' likewise. Nothing is a difference of large
  sums, and a block takes one round of barriers for each.

Places are by ticket, as row_parts.py explains; a group waits for nobody but its own members, block after block.
x whose rows do not start at 16 bytes is copied first.
Refused: what norm_split.py refuses, and cards without 128 KB of shared memory an SM for the rings.
"""

# Pyright does not see what a jitted function returns; Gluon's constexprs are values to it.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilewright.hw.device import Device, device_of
from tilewright.kernels.hopper import block_barrier
from tilewright.kernels.norm_backward_split import aligned_rows, wait_for
from tilewright.kernels.row_parts import PART_BYTES
from tilewright.kernels.shapes import next_pow2, rows_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["LAYER_PIPELINED", "LAYER_STATS_PIPELINED", "PIPELINED_SPACE"]


@gluon.jit
def _places(EACH: gl.constexpr, THREADS: gl.constexpr, VECTOR: gl.constexpr, TILE: gl.constexpr):
    """(first column of each vector, [1, EACH, THREADS, 1]; columns within one, [1, 1, 1, VECTOR])."""
    of_vectors: gl.constexpr = gl.SliceLayout(3, TILE)
    each = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(2, of_vectors)))
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_vectors)))
    vector = gl.expand_dims(gl.expand_dims(each, 0), 2) * THREADS + gl.expand_dims(gl.expand_dims(thread, 0), 1)
    within = gl.arange(0, VECTOR, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, TILE))))
    return gl.expand_dims(vector, 3) * VECTOR, gl.expand_dims(gl.expand_dims(gl.expand_dims(within, 0), 1), 2)


@gluon.jit
def _fetch(bufs, stage, x_ptr, x_row_step, rows, n_rows, cols, inside):
    """Start the copy of a block's columns of x. rows: [BLOCK_T, 1, 1, 1]."""
    at = x_ptr + rows.to(gl.int64) * (x_row_step * 8) + cols
    async_copy.async_copy_global_to_shared(bufs.index(stage), at, mask=(rows < n_rows) & inside)
    async_copy.commit_group()


@gluon.jit
def _unpacked(vector):
    """A vector in float32, as the compiler has not seen it, or it would keep float32 copies: twice the registers."""
    if vector.dtype.primitive_bitwidth == 16:
        vector = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [vector], dtype=vector.dtype, is_pure=False, pack=2)
    return vector.to(gl.float32)


@gluon.jit
def _count(thread, width, THREADS: gl.constexpr, VECTOR: gl.constexpr):
    """How many columns of a part a thread has: a vector in every THREADS of them, whole or not at all."""
    rest = width % (THREADS * VECTOR)
    return ((width - rest) // THREADS + gl.where(thread * VECTOR < rest, VECTOR, 0)).to(gl.float32)


@gluon.jit
def _publish(
    bufs, stage, own, inside, width, parts_ptr, sums, counters_ptr, start, n_rows, part,
    PARTS: gl.constexpr, BLOCK_T: gl.constexpr, VECTOR: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Write the mean of this part of a block's rows and the squares about it, and say so.

    own: shared memory, [2, BLOCK_T, threads] of float32.
    """
    THREADS: gl.constexpr = 32 * gl.num_warps()
    of_threads: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, TILE))
    # Where there are no columns shared memory has zeros.
    x = bufs.index(stage).load(TILE).to(gl.float32)
    thread = gl.expand_dims(gl.arange(0, THREADS, layout=gl.SliceLayout(0, of_threads)), 0)
    mean = gl.sum(gl.sum(x, axis=3), axis=1) * (1.0 / gl.maximum(_count(thread, width, THREADS, VECTOR), 1))
    own.index(0).store(mean)
    gap = x - gl.where(inside, gl.expand_dims(gl.expand_dims(mean, 1), 3), 0.0)
    own.index(1).store(gl.sum(gl.sum(gap * gap, axis=3), axis=1))
    # A warp has a row.
    warp_a_row: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    mean, squares = own.index(0).load(warp_a_row), own.index(1).load(warp_a_row)
    thread = gl.expand_dims(gl.arange(0, THREADS, layout=gl.SliceLayout(0, warp_a_row)), 0)
    count = _count(thread, width, THREADS, VECTOR)
    mean_of_part = gl.sum(mean * count, axis=1) / width
    away = mean - gl.expand_dims(mean_of_part, 1)
    squares = gl.sum(squares + away * away * count, axis=1)
    rows = start + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, warp_a_row))
    at = parts_ptr + rows.to(gl.int64) * PARTS + part
    gl.store(at, mean_of_part, mask=rows < n_rows)
    gl.store(at + sums, squares, mask=rows < n_rows)
    block_barrier()  # the release below is one thread's: the others' writes come before it
    gl.atomic_add(counters_ptr + 1 + start // BLOCK_T, 1, sem="release")


@gluon.jit
def _joined(
    both, parts_ptr, sums, stats_ptr, start, n_rows, part, eps,
    D: gl.constexpr, WIDTH: gl.constexpr, PARTS: gl.constexpr, PARTS_2: gl.constexpr, BLOCK_T: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """(mean, 1 / deviation) of each row, [BLOCK_T], from all parts. both: shared memory, [2, BLOCK_T] of float32."""
    layout: gl.constexpr = gl.BlockedLayout([1, max(1, PARTS_2 // 32)], [1, 32], [gl.num_warps(), 1], [1, 0])
    below = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, layout))
    others = gl.expand_dims(gl.arange(0, PARTS_2, layout=gl.SliceLayout(0, layout)), 0)
    rows = gl.expand_dims(start + below, 1)
    at = parts_ptr + rows.to(gl.int64) * PARTS + others
    there = (rows < n_rows) & (others < PARTS)
    means = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    squares = gl.load(at + sums, mask=there, other=0.0, cache_modifier=".cg")
    count = gl.where(others < PARTS, gl.minimum(D - others * WIDTH, WIDTH), 0).to(gl.float32)
    mean = gl.sum(means * count, axis=1) / D
    away = means - gl.expand_dims(mean, 1)
    scale = gl.rsqrt(gl.sum(squares + away * away * count, axis=1) / D + eps)
    if stats_ptr is not None:
        mine = (start + below < n_rows) & (part == 0)
        gl.store(stats_ptr + start + below, mean, mask=mine)
        gl.store(stats_ptr + n_rows + start + below, scale, mask=mine)
    both.index(0).store(mean)
    both.index(1).store(scale)
    return both.index(0).load(OUT), both.index(1).load(OUT)


@gluon.jit(do_not_specialize=["n_rows"])
def _pipelined_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, parts_ptr, counters_ptr, stats_ptr, n_rows, x_row_step, eps,
    D: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr, PARTS_2: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """x_row_step: the rows' stride in units of 8 columns. A tile: [BLOCK_T, vectors a thread, threads, columns a vector]."""
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    THREADS: gl.constexpr = 32 * gl.num_warps()
    EACH: gl.constexpr = BLOCK_D // (VECTOR * THREADS)
    tile: gl.constexpr = gl.BlockedLayout([1, 1, 1, VECTOR], [1, 1, 32, 1], [1, 1, gl.num_warps(), 1], [3, 2, 1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tile)))
    bufs = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [STAGES, BLOCK_T, EACH, THREADS, VECTOR], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    own = gl.allocate_shared_memory(gl.float32, [2, BLOCK_T, THREADS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    both = gl.allocate_shared_memory(gl.float32, [2, BLOCK_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place = gl.atomic_add(counters_ptr, 1, sem="relaxed")
    group, part = place // PARTS, place % PARTS
    step = gl.num_programs(0) // PARTS * BLOCK_T
    lane, within = _places(EACH, THREADS, VECTOR, tile)
    below = gl.arange(0, BLOCK_T, layout=of_rows)
    rows = gl.expand_dims(gl.expand_dims(gl.expand_dims(below, 1), 2), 3)
    width = gl.multiple_of(gl.minimum(D - part * WIDTH, WIDTH), 8)
    inside = lane < width
    cols = part * WIDTH + lane + within
    weight = gl.load(weight_ptr + cols, mask=inside, other=0.0)
    bias = gl.load(bias_ptr + cols, mask=inside, other=0.0) if HAS_BIAS else weight
    sums = n_rows.to(gl.int64) * PARTS
    first = group * BLOCK_T
    for ahead in gl.static_range(STAGES - 1):
        _fetch(bufs, ahead, x_ptr, x_row_step, first + ahead * step + rows, n_rows, cols, inside)
    async_copy.wait_group(STAGES - 2)
    _publish(
        bufs, 0, own, inside, width, parts_ptr, sums, counters_ptr, first, n_rows, part, PARTS, BLOCK_T, VECTOR, tile
    )  # fmt: skip
    stage = 0
    for start in range(first, n_rows, step):
        after = (stage + 1) % STAGES
        # Thread by thread the memory that it overwrites has been read.
        far = start + (STAGES - 1) * step + rows
        _fetch(bufs, (stage + STAGES - 1) % STAGES, x_ptr, x_row_step, far, n_rows, cols, inside)
        async_copy.wait_group(STAGES - 2)
        _publish(
            bufs, after, own, inside, width, parts_ptr, sums, counters_ptr, start + step, n_rows, part,
            PARTS, BLOCK_T, VECTOR, tile,
        )  # fmt: skip
        wait_for(counters_ptr + 1 + start // BLOCK_T, PARTS)
        mean, scale = _joined(
            both, parts_ptr, sums, stats_ptr, start, n_rows, part, eps, D, WIDTH, PARTS, PARTS_2, BLOCK_T, of_rows
        )  # fmt: skip
        mean = gl.expand_dims(gl.expand_dims(gl.expand_dims(mean, 1), 2), 3)
        scale = gl.expand_dims(gl.expand_dims(gl.expand_dims(scale, 1), 2), 3)
        y = (bufs.index(stage).load(tile).to(gl.float32) - mean) * scale * _unpacked(weight)
        if HAS_BIAS:
            y += _unpacked(bias)
        at = y_ptr + (start + rows).to(gl.int64) * D + cols
        gl.store(at, y.to(y_ptr.dtype.element_ty), mask=(start + rows < n_rows) & inside, cache_modifier=".cs")
        stage = after
    async_copy.wait_group(0)


# ---- launchers


def _ring_bytes(config: Config, problem: Any) -> int:
    return config["STAGES"] * config["BLOCK_T"] * config["BLOCK_D"] * problem.dtype.itemsize


def _shared_bytes(config: Config, problem: Any) -> int:
    """The ring, where the threads' means and squares of a block's rows change places, 128 for the rows' own, 4 for counters."""
    return _ring_bytes(config, problem) + 2 * 4 * config["BLOCK_T"] * 32 * config["num_warps"] + 132


def _default(device: Device, problem: Any) -> Config:
    return {"BLOCK_T": 4 // problem.dtype.itemsize, "BLOCK_D": 4096, "STAGES": 4, "PER_SM": 2, "num_warps": 8}


def _config_refusal(device: Device, problem: Any, config: Config) -> str | None:
    shared, per_sm, threads = _shared_bytes(config, problem), config["PER_SM"], 32 * config["num_warps"]
    if per_sm * threads != 512:
        return "not 512 threads an SM: they have 128 registers each"
    if config["BLOCK_D"] * problem.dtype.itemsize < 16 * threads:
        return "less than 16 bytes a thread"
    if config["BLOCK_T"] * config["BLOCK_D"] * problem.dtype.itemsize > 128 * threads:
        return "more than 128 bytes a thread"
    if per_sm * _ring_bytes(config, problem) < 128 * 1024:
        return "a ring that keeps too little on its way"
    # Of each program the card keeps 1 KB more: an SM has that much more than one program can ask for.
    if per_sm * (shared + 1024) > device.smem_bytes + 1024:
        return "more shared memory than the device has"
    # Half of what a card holds at once: two such kernels may run beside each other.
    if 2 * triton.cdiv(problem.cols, config["BLOCK_D"]) > per_sm * device.sms:
        return "more parts than a card holds twice at once"
    return None


PIPELINED_SPACE = Space(
    default=_default,
    axes={
        "BLOCK_T": (1, 2, 4),
        "BLOCK_D": (2048, 4096, 8192),
        "STAGES": (3, 4, 6),
        "PER_SM": (1, 2),
        "num_warps": (8, 16),
    },
    refusal=_config_refusal,
)


def _refuse(device: Device, problem: Any) -> str | None:
    if problem.cols % 8:
        return "rows that start anywhere"
    if 2 * problem.cols * problem.dtype.itemsize <= PART_BYTES:
        return "a row that one program holds with fewer threads"
    return _config_refusal(device, problem, _default(device, problem))


def _layer(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, stats: Tensor | None = None) -> Tensor:
    """The norm; into stats, float32 [2, rows], the rows' means and 1 / deviations."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    x = aligned_rows(x)
    (rows, row_stride), cols, block_t = rows_of(x), x.shape[-1], config["BLOCK_T"]
    parts, blocks = triton.cdiv(cols, config["BLOCK_D"]), triton.cdiv(rows, block_t)
    groups = max(1, min(blocks, config["PER_SM"] * device_of(x.get_device()).sms // parts))
    memory = torch.empty(2, rows, parts, dtype=torch.float32, device=x.device)
    # Each group says, too, that it has nothing of the block after its last one.
    counters = torch.zeros(1 + blocks + groups, dtype=torch.int32, device=x.device)
    _pipelined_kernel[(groups * parts,)](
        x, weight, weight if bias is None else bias, y, memory, counters, stats, rows, row_stride // 8, eps,
        D=cols, HAS_BIAS=bias is not None, PARTS=parts, PARTS_2=next_pow2(parts), WIDTH=triton.cdiv(cols, 8 * parts) * 8,
        BLOCK_T=block_t, BLOCK_D=config["BLOCK_D"], STAGES=config["STAGES"], num_warps=config["num_warps"], maxnreg=128,
    )  # fmt: skip
    return y


def _layer_stats(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(2, rows_of(x)[0], dtype=torch.float32, device=x.device)
    return _layer(config, x, weight, bias, eps, stats), stats


def _pipelined(launch: Callable[..., Any]) -> Impl:
    return Impl(
        name="pipelined", launch=launch, space=PIPELINED_SPACE, refuse=_refuse, batch_invariant=True, interpretable=False
    )  # fmt: skip


LAYER_PIPELINED = _pipelined(_layer)
LAYER_STATS_PIPELINED = _pipelined(_layer_stats)
