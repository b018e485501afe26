"""`lora_shrink` where each thread loads its operands of the tensor cores, without shared memory.

As in `expand_direct.py`, the features of x and A are taken in an order in which a thread's numbers are neighbours in memory:

    # q: a thread's number in its warp, modulo 4
    feature = 32 b + 8 q + 4 g + 2 h + e    is feature 32 b + 16 g + 8 h + 2 q + e of the product: 8 neighbours a thread

A warp multiplies up to 8 tokens of a tile by one chunk of 16 rows of A, and sums the whole chunk itself. For the other tokens
of a tile it repeats that. So warps wait for nobody, and there is no sum over warps. A program has num_warps chunks. All loads
are unrolled; `maxnreg` limits how many of them precede the first product. The first loads of A precede those of the tokens.

FETCH: 1: the chunk of A is also prefetched into L2, by one instruction for each row.

Accepts bf16 and fp16, K in whole chunks, and 16 rows of A or a multiple.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.kernels.device.dot import dot
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.gemm.lora.problem import CHUNK, Problem, along, fetch_rows, forwards, result, tile_at, tiles_of, wait
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import launch_options, overlaps, release
from tilewright.kernels.launch.shapes import rows_of
from tilewright.op import Impl
from tilewright.tune.space import Config, Space

__all__ = ["DIRECT"]


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.dtype.itemsize != 2:
        return "only bf16 and fp16 have these products on tensor cores"
    if problem.wide % CHUNK:
        return f"K does not consist of chunks of {CHUNK}"
    if problem.rank % 16:
        return "the rows of A are not a multiple of 16"
    return None


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if problem.wide // CHUNK % c["num_warps"]:
        return "the chunks of K do not make up whole programs"
    return None


SPACE = Space(
    # On an H200 with 64 adapters of rank 16 this was the fastest in a layer for K = 4096. For K = 12288 programs of four warps
    # were 1 % faster (scripts/adapter_products.py).
    default=lambda device, problem: {"FETCH": 0, "num_warps": 1, "maxnreg": 128},
    axes={"FETCH": (0, 1), "num_warps": (1, 4), "maxnreg": (80, 128)},
    refusal=_config_refusal,
)


@triton.jit(do_not_specialize=["n_tokens", "x_row_stride"])
def _shrink_direct_kernel(
    x_ptr, a_ptr, adapters_ptr, h_ptr, n_tokens, x_row_stride,
    K: tl.constexpr, M: tl.constexpr, CHUNK_K: tl.constexpr, WARPS: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release()
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)
    if tl.minimum(end - first, adapter + 1) > 0:  # one condition, so that the loads do not wait for each other
        BLOCK_K: tl.constexpr = 128
        chunk = tl.program_id(0) * WARPS
        # a: q, row, warp, row half, block of 32, features
        a_ptr += (tl.maximum(adapter, 1) - 1).to(tl.int64) * (M * K) + tl.program_id(2) * (16 * K)
        a_at = a_ptr + along(tl.arange(0, 8) * K, 1, 6) + along(tl.arange(0, 2) * (8 * K), 3, 6)
        a_at += along(tl.arange(0, 4) * 8, 0, 6) + along((chunk + tl.arange(0, WARPS)) * CHUNK_K, 2, 6)
        a_at += along(tl.arange(0, BLOCK_K // 32) * 32, 4, 6) + along(tl.arange(0, 8), 5, 6)
        # x: q, token, warp, block of 32, features
        k = along(tl.arange(0, 4) * 8, 0, 5) + along((chunk + tl.arange(0, WARPS)) * CHUNK_K, 2, 5)
        k += along(tl.arange(0, BLOCK_K // 32) * 32, 3, 5) + along(tl.arange(0, 8), 4, 5)
        for begin in tl.range(first, end, 8, num_stages=1):
            place = begin + tl.arange(0, 8)
            acc = tl.zeros([WARPS, 16, 8], tl.float32)
            if adapter > 0:
                a = tl.load(a_at)
                if FETCH:
                    thread = tl.arange(0, 32 * WARPS)
                    fetch_rows(a_ptr + thread % 16 * K + (chunk + thread // 32) * CHUNK_K, 2 * CHUNK_K)
                row = begin + along(tl.arange(0, 8), 1, 5)
                mine = row < end
                tokens = tl.load(adapters_ptr + row, mask=mine, other=0).to(tl.int64)
                x_at = x_ptr + row_start(tokens, x_row_stride, K) + k
                if PDL:
                    wait()
                x = tl.load(x_at, mask=mine, other=0.0)
                for step in tl.static_range(0, CHUNK_K, BLOCK_K):
                    next_a, next_x = a, x
                    if step + BLOCK_K < CHUNK_K:
                        next_a = tl.load(a_at + (step + BLOCK_K))
                        next_x = tl.load(x_at + (step + BLOCK_K), mask=mine, other=0.0)
                    a = tl.permute(tl.reshape(forwards(a), [4, 8, WARPS, 2, BLOCK_K // 32, 2, 2, 2]), (2, 3, 1, 4, 5, 6, 0, 7))
                    x = tl.permute(tl.reshape(forwards(x), [4, 8, WARPS, BLOCK_K // 32, 2, 2, 2]), (2, 3, 4, 5, 0, 6, 1))
                    acc = dot(tl.reshape(a, [WARPS, 16, BLOCK_K]), tl.reshape(x, [WARPS, BLOCK_K, 8]), acc)
                    a = next_a
                    x = next_x
            elif PDL:
                wait()
            tokens = tl.load(adapters_ptr + place, mask=place < end, other=0).to(tl.int64)
            rows = (chunk + tl.arange(0, WARPS)).to(tl.int64)[:, None, None] * n_tokens + tokens[None, None, :]
            column = tl.program_id(2) * 16 + tl.arange(0, 16)
            tl.store(h_ptr + rows * M + column[None, :, None], acc, mask=(place < end)[None, None, :])
    elif PDL:
        # Otherwise a launch without tokens might end before the one that it follows.
        if tl.program_id(1) == 0:
            wait()


def _launch(config: Config, x: Tensor, a: Tensor, adapters: Tensor, chained: bool) -> Tensor:
    h, (tokens, row_stride) = result(x, a), rows_of(x)
    held, rank, k = a.shape
    if h.numel():
        grid = (h.shape[0] // config["num_warps"], tiles_of(tokens, held), rank // 16)
        _shrink_direct_kernel[grid](
            x, a, adapters, h, tokens, row_stride, K=k, M=rank, CHUNK_K=CHUNK, WARPS=config["num_warps"], **config,
            **launch_options(chained and overlaps(card_of(x))),
        )  # fmt: skip
    return h


DIRECT = Impl(name="direct", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True, releases=True)
