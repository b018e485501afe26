"""`lora_expand_add` where each thread loads its operands B and y of the tensor cores, and stores its results, by itself.

The tensor cores want other numbers from a thread than its wide loads bring. So `expand.py` exchanges B and the result through
shared memory, with six barriers for a block of columns. Here ranks and columns are taken in another order, in which a thread's
numbers are neighbours in memory. Sums over ranks have the same terms in any order, and columns of a product are independent.

    # a warp's block: COLUMNS = 64 columns, 8 tokens of the tile; q and i: a thread's number in its warp is 4 i + q
    rank      = q R/4 + 4 r + 2 h + e    is rank 16 r + 8 h + 2 q + e of the product: R/4 neighbours of a row of B a thread
    column    = 8 i + 2 j + h            is row 16 j + 8 h + i of the product B h^T: 8 neighbours of y a thread

So B and y need no shared memory, there is no barrier in a program of one warp, and it takes few registers: for a rank of 16 an
SM runs 24 warps at once. Several warps share the sum of h. All STEPS blocks are unrolled, and the first loads of B precede
those of the tokens. For more than 8 tokens of a tile the program repeats everything. FETCH: how many blocks ahead B is
prefetched into L2, by one instruction for each block.

Accepts bf16 and fp16, ranks of 16 and 32, and parts that consist of whole blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.gemm.lora.problem import (
    Problem,
    along,
    fetch_block,
    forwards,
    span_at,
    spans_of,
    tile_at,
    tiles_of,
    wait,
)
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import launch_options, overlaps
from tilewright.kernels.launch.shapes import rows_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["COLUMNS", "DIRECT", "offsets_b", "offsets_y", "product", "scaled_sum"]

COLUMNS = 64
"""The columns of a warp's block."""


def _widths(problem: Problem) -> list[int]:
    return [end - begin for begin, end in spans_of(problem.wide, *problem.parts[:2])]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return "only bf16 and fp16 have these products on tensor cores"
    if problem.rank not in (16, 32):
        return "the rank is neither 16 nor 32"
    if any(width % COLUMNS for width in _widths(problem)):
        return f"a part does not consist of blocks of {COLUMNS} columns"
    return None


def _default(device: Device, problem: Problem) -> Config:
    # On an H200 with 64 adapters of rank 16, two blocks of two warps were the fastest for N of 4096, 6144 and 24576, and
    # prefetching did not help (scripts/adapter_products.py).
    for steps, warps in ((2, 2), (1, 2), (2, 1)):
        if not any(width % (COLUMNS * steps * warps) for width in _widths(problem)):
            return {"STEPS": steps, "FETCH": 0, "num_warps": warps}
    return {"STEPS": 1, "FETCH": 0, "num_warps": 1}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if any(width % (COLUMNS * c["STEPS"] * c["num_warps"]) for width in _widths(problem)):
        return "a part does not consist of whole programs"
    if c["FETCH"] >= c["STEPS"]:
        return "prefetches blocks that the program does not have"
    return None


SPACE = Space(
    default=_default,
    axes={"STEPS": (1, 2, 4, 8), "FETCH": (0, 2), "num_warps": (1, 2)},
    refusal=_config_refusal,
)


@triton.jit
def offsets_b(R: tl.constexpr, WARPS: tl.constexpr):
    """Where a block of B has the numbers of its threads: [q, i, warp, h, j, ranks]."""
    rows = along(tl.arange(0, 8) * 8, 1, 6) + along(tl.arange(0, WARPS) * 64, 2, 6) + along(tl.arange(0, 2), 3, 6)
    rows += along(tl.arange(0, 4) * 2, 4, 6)
    return rows * R + along(tl.arange(0, 4) * (R // 4), 0, 6) + along(tl.arange(0, R // 4), 5, 6)


@triton.jit
def offsets_y(WARPS: tl.constexpr):
    """Where a row of a block of y has the numbers of its threads: [q, i, warp, one of two tokens, columns]; q is not used."""
    return along(tl.arange(0, 8) * 8, 1, 5) + along(tl.arange(0, WARPS) * 64, 2, 5) + along(tl.arange(0, 8), 4, 5)


@triton.jit
def scaled_sum(h_at, stride, mine, scale, dtype: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr):
    """The scaled sum of h over the chunks, in `dtype`, as an operand of the product: [ranks, 8 tokens].

    h_at: [q, token, ranks] of the first chunk; the next one is `stride` numbers behind it. mine: the tokens that are read."""
    low = tl.load(h_at, mask=mine, other=0.0)
    for c in tl.static_range(1, CHUNKS):
        low += tl.load(h_at + c * stride, mask=mine, other=0.0)
    low = tl.reshape(forwards((low * scale).to(dtype)), [4, 8, R // 16, 2, 2])
    return tl.reshape(tl.permute(low, (2, 3, 0, 4, 1)), [R, 8])


@triton.jit
def product(b, low, R: tl.constexpr, WARPS: tl.constexpr):
    """A block of B times `low`, in the order of `offsets_y`."""
    b = tl.permute(tl.reshape(forwards(b), [4, 8, WARPS, 2, 4, R // 16, 2, 2]), (4, 2, 3, 1, 5, 6, 0, 7))
    acc = dot(tl.reshape(b, [64 * WARPS, R]), low, tl.zeros([64 * WARPS, 8], tl.float32))
    acc = tl.permute(tl.reshape(acc, [4, WARPS, 2, 8, 4, 2]), (4, 3, 1, 5, 0, 2))
    return forwards(tl.reshape(acc, [4, 8, WARPS, 2, 8]))


@triton.jit(do_not_specialize=["n_tokens", "y_row_stride"])
def _expand_direct_kernel(
    y_ptr, h_ptr, b_ptr, scales_ptr, adapters_ptr, n_tokens, y_row_stride,
    N: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    STEPS: tl.constexpr, FETCH: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = 64 * WARPS
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)
    if tl.minimum(end - first, adapter) > 0:  # one condition, so that the loads do not wait for each other
        part, begin, _ = span_at(tl.program_id(0), N, FIRST, SECOND, BLOCK_N * STEPS)
        index = (adapter - 1).to(tl.int64)
        b_ptr += index * (N * R) + begin * R
        b_at = b_ptr + offsets_b(R, WARPS)
        for step in tl.static_range(1, FETCH + 1):
            fetch_block(b_ptr + step * (BLOCK_N * R), BLOCK_N * R * 2)
        scale = tl.load(scales_ptr + index * PARTS + part)
        for start in tl.range(first, end, 8, num_stages=1):
            b = tl.load(b_at)
            place = start + along(tl.arange(0, 4) * 2, 0, 5) + along(tl.arange(0, 2), 3, 5)
            held = place < end
            tokens = tl.load(adapters_ptr + place, mask=held, other=0).to(tl.int64)
            y_at = y_ptr + row_start(tokens, y_row_stride, N) + begin + offsets_y(WARPS)
            # h: q, token, ranks
            place = start + along(tl.arange(0, 8), 1, 3)
            mine = place < end
            tokens = tl.load(adapters_ptr + place, mask=mine, other=0).to(tl.int64)
            h_at = h_ptr + tokens * (PARTS * R) + part * R
            h_at += along(tl.arange(0, 4) * (R // 4), 0, 3) + along(tl.arange(0, R // 4), 2, 3)
            if PDL:
                wait()
            low = scaled_sum(h_at, n_tokens.to(tl.int64) * (PARTS * R), mine, scale, b.dtype, R, CHUNKS)
            y = tl.load(y_at, mask=held, other=0.0)
            for step in tl.static_range(STEPS):
                next_b, next_y = b, y
                if step + 1 < STEPS:
                    next_b = tl.load(b_at + (step + 1) * (BLOCK_N * R))
                    next_y = tl.load(y_at + (step + 1) * BLOCK_N, mask=held, other=0.0)
                if step > 0 and step + FETCH < STEPS and FETCH > 0:
                    fetch_block(b_ptr + (step + FETCH) * (BLOCK_N * R), BLOCK_N * R * 2)
                total = y.to(tl.float32) + product(b, low, R, WARPS)
                tl.store(y_at + step * BLOCK_N, total.to(y.dtype), mask=held)
                b = next_b
                y = next_y
    elif PDL:
        # Otherwise a launch without adapters might end before the one that it follows.
        if tl.program_id(1) == 0:
            wait()


def _launch(
    config: Config, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int, chained: bool
) -> None:  # fmt: skip
    tokens, row_stride = rows_of(y)
    held, n, rank = b.shape
    if y.numel():
        grid = (n // (COLUMNS * config["STEPS"] * config["num_warps"]), tiles_of(tokens, held))
        _expand_direct_kernel[grid](
            y, h, b, scales, adapters, tokens, row_stride, N=n, R=rank, CHUNKS=h.shape[0],
            PARTS=len(spans_of(n, first, second)), FIRST=first, SECOND=second, WARPS=config["num_warps"], **config,
            maxnreg=80 if rank == 16 else 168, **launch_options(chained and overlaps(card_of(y))),
        )  # fmt: skip


DIRECT = Impl(name="direct", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True)
