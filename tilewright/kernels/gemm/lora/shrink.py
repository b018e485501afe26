"""The first product of low-rank adapters, where each token has its own adapter or none (Chen et al., "Punica", 2023).

    # T tokens, K features, S loaded adapters, M rows of A (the ranks of all parts of a layer), C chunks of K
    h[c, t, :] = x[t, chunk c] A[s(t)][:, chunk c]^T,     0 where token t has no adapter

    x [T, K], a [S, M, K]: of the same dtype, bf16, fp16 or fp32. h [C, T, M] float32, C = ceil(K / 512): sums over parts of K,
    which `lora_expand_add` adds in their order. adapters [4, T] int32: tokens in the order of their adapters (1 to S, 0 for
    none), cut into tiles of at most 16 tokens with the same adapter, as `adapter_order` returns it.

Limited by reading x, and A of the adapters in use. A program multiplies a tile of tokens by 512 columns of BLOCK_M rows of A.
It first prefetches these into L2 (FETCH), 16 KB for a rank of 16 and 16-bit numbers, before it knows its tokens, and then loads
all steps of K at once if there are fewer of them than `num_stages`. So hundreds of programs keep megabytes in flight. (When one
program multiplied 16 tokens by one of their adapters after the other, it waited for memory once for each adapter.) The warps
share the sum over K: each has its own slice of every step, and the slices are added at the end. With fewer steps in flight, and
so less shared memory, an SM runs more programs at once. `shrink_direct.py` needs no shared memory, and comes first where it
accepts the problem.

With `chained` (launch/pdl.py) the programs start while the preceding launch still runs, and prefetch A before they wait for it.

The number of tiles is known on the device alone. So the grid has as many as there can be, and the programs without a tile end
at once. The kernel is compiled for every K, but not for every number of tokens or adapters.

Not supported: gradients, quantised adapters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import dot
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.gemm.lora.problem import (
    CHUNK,
    TILE,
    Problem,
    adapter_order,
    check_order,
    fetch_ahead,
    result,
    some_order,
    tile_at,
    tiles_of,
    used,
    wait,
)
from tilewright.kernels.gemm.lora.shrink_direct import DIRECT
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import launch_options, overlaps, release
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["adapter_order", "lora_shrink", "lora_shrink_op"]

# ---- reference


def _reference(x: Tensor, a: Tensor, adapters: Tensor, chained: bool) -> Tensor:
    h = torch.zeros_like(result(x, a))
    for index, tokens in used(adapters):
        for c in range(h.shape[0]):
            columns = slice(c * CHUNK, (c + 1) * CHUNK)
            h[c, tokens] = x[tokens, columns].to(h.dtype) @ a[index, :, columns].to(h.dtype).mT
    return h


def _cost(x: Tensor, a: Tensor, adapters: Tensor, chained: bool) -> Cost:
    held = min(a.shape[0], x.shape[0])
    return Cost(flops=2 * x.numel() * a.shape[1], bytes=x.nbytes + held * a[:1].nbytes + 4 * x.shape[0] * a.shape[1])


# ---- space and examples


def _default(device: Device, problem: Problem) -> Config:
    if problem.dtype == torch.float32:  # without tensor cores, warps share the rows of A
        return {"BLOCK_M": 16, "SLICES": 1, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4, "FETCH": 1}
    return {"BLOCK_M": 16, "SLICES": 4, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4, "FETCH": 1}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    wide = problem.dtype == torch.float32
    if c["BLOCK_M"] >= 2 * problem.rank and c["BLOCK_M"] > 16:
        return "BLOCK_M is at least twice the number of rows of A"
    if (c["SLICES"] == 1) != wide:
        return "float32 has one slice, other dtypes have several"
    if c["SLICES"] != c["num_warps"] and not wide:
        return "each warp needs a slice of its own"
    if wide:
        return None if c["num_stages"] == 3 else "float32 is not limited by the loads in flight"
    ahead = (c["num_stages"] - 1) * c["SLICES"] * c["BLOCK_K"]
    if ahead != CHUNK and not (ahead == CHUNK // 2 and c["BLOCK_M"] == 16):
        return "the loads of all steps of K must be in flight at once, or of half of them for 16 rows of A"
    return None


SPACE = Space(
    default=_default,
    axes={
        "BLOCK_M": (16, 32), "SLICES": (1, 2, 4, 8), "BLOCK_K": (32, 64, 128), "num_stages": (2, 3, 5), "num_warps": (2, 4, 8),
        "FETCH": (1,),  # scripts/adapter_products.py also times 0: no prefetch
    },
    refusal=_config_refusal,
)  # fmt: skip


def _arguments(
    inputs: Inputs, *, M: int, K: int, R: int = 16, parts: int = 1, adapters: int = 8, dtype: torch.dtype = torch.bfloat16,
    one: bool = False, row_stride: int = 0, chained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, bool]:  # fmt: skip
    """M tokens. R: the rank of each of `parts` parts. one: all tokens have the same adapter, as in a prompt."""
    x = inputs.randn(M, row_stride or K, dtype=dtype)[:, :K]
    order = adapter_order(inputs.tensor(some_order(M, adapters, one), torch.int64))
    return x, inputs.randn(adapters, parts * R, K, dtype=dtype, scale=max(K, 1) ** -0.5), order, chained


EXAMPLES = (
    Example("rows", lambda inputs: _arguments(inputs, M=20, K=256, adapters=3)),
    Example("ragged", lambda inputs: _arguments(inputs, M=37, K=600, R=5, parts=3, adapters=5, dtype=torch.float16)),
    Example("strided", lambda inputs: _arguments(inputs, M=5, K=64, R=80, adapters=2, dtype=torch.float32, row_stride=96)),
    Example("one adapter", lambda inputs: _arguments(inputs, M=33, K=1100, R=8, parts=2, adapters=4, one=True)),
    Example("one", lambda inputs: _arguments(inputs, M=1, K=1, R=1, adapters=1, dtype=torch.float32, one=True)),
    Example("chained", lambda inputs: _arguments(inputs, M=21, K=1024, parts=2, adapters=3, chained=True)),
    Example("fp16", lambda inputs: _arguments(inputs, M=18, K=512, R=48, adapters=2, dtype=torch.float16)),
    Example("whole tiles", lambda inputs: _arguments(inputs, M=25, K=512, adapters=2, one=True)),
    Example("no rows", lambda inputs: _arguments(inputs, M=0, K=32)),
)


@triton.jit(do_not_specialize=["n_tokens", "x_row_stride"])
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, h_ptr, n_tokens, x_row_stride,
    K: tl.constexpr, M: tl.constexpr, CHUNK_K: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release()
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)
    if tl.minimum(end - first, adapter + 1) > 0:  # one condition, so that the loads do not wait for each other
        place = first + tl.arange(0, BLOCK_T)
        column = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        total = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        if adapter > 0:
            SECTOR: tl.constexpr = 256 // a_ptr.dtype.element_ty.primitive_bitwidth
            sectors = tl.minimum(tl.program_id(0) * CHUNK_K + tl.arange(0, CHUNK_K // SECTOR) * SECTOR, K - 1)
            a_ptr += (adapter - 1).to(tl.int64) * (M * K)
            if FETCH:
                fetch_ahead(a_ptr + tl.minimum(column, M - 1)[:, None] * K + sectors[None, :])
            tokens = tl.load(adapters_ptr + place, mask=place < end, other=0).to(tl.int64)
            ks = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
            ks += tl.program_id(0) * CHUNK_K
            a_rows = a_ptr + column[None, :, None] * K
            x_rows = x_ptr + row_start(tokens, x_row_stride, K)[None, :, None]
            mine = (place < end)[None, :, None]
            acc = tl.zeros([SLICES, BLOCK_M, BLOCK_T], tl.float32)
            if PDL:
                wait()
            for step in tl.range(0, CHUNK_K, SLICES * BLOCK_K):
                k = ks + step
                if EVEN:
                    a = tl.load(a_rows + k)
                    x = tl.load(x_rows + k, mask=mine, other=0.0)
                else:
                    a = tl.load(a_rows + k, mask=(column[None, :, None] < M) & (k < K), other=0.0)
                    x = tl.load(x_rows + k, mask=mine & (k < K), other=0.0)
                if SLICES == 1:
                    a = tl.reshape(a, [BLOCK_M, BLOCK_K])
                    x = tl.reshape(x, [BLOCK_T, BLOCK_K])
                    total = dot(a, tl.trans(x), total)
                else:
                    acc = dot(a, tl.permute(x, (0, 2, 1)), acc)
            if SLICES > 1:
                total = tl.sum(acc, axis=0)
        elif PDL:
            wait()
        tokens = tl.load(adapters_ptr + place, mask=place < end, other=0).to(tl.int64)
        rows = (tl.program_id(0).to(tl.int64) * n_tokens + tokens)[None, :] * M
        tl.store(h_ptr + rows + column[:, None], total, mask=(place < end)[None, :] & (column[:, None] < M))
    elif PDL:
        # Otherwise a launch without tokens might end before the one that it follows.
        if tl.program_id(1) == 0:
            wait()


def _launch(config: Config, x: Tensor, a: Tensor, adapters: Tensor, chained: bool) -> Tensor:
    h, (tokens, row_stride) = result(x, a), rows_of(x)
    held, rank, k = a.shape
    if h.numel():
        grid = (h.shape[0], tiles_of(tokens, held), ceil_div(rank, config["BLOCK_M"]))
        _shrink_kernel[grid](
            x, a, adapters, h, tokens, row_stride, K=k, M=rank, CHUNK_K=CHUNK,
            EVEN=k % CHUNK == 0 and rank % config["BLOCK_M"] == 0, BLOCK_T=TILE, **config,
            **launch_options(chained and overlaps(card_of(x))),
        )  # fmt: skip
    return h


lora_shrink_op = Op(
    name="lora_shrink",
    reference=_reference,
    fake=lambda x, a, adapters, chained: result(x, a),
    problem=lambda x, a, adapters, chained: Problem(x.dtype, x.shape[1], a.shape[1], ()),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    impls=(DIRECT, Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, releases=True)),
)


def lora_shrink(x: Tensor, a: Tensor, adapters: Tensor, *, chained: bool = False) -> Tensor:
    """x [T, K] times the transposed A of each token's adapter, in chunks of K.

    Args:
        x: bf16, fp16 or fp32.
        a: [S, M, K] of x's dtype, contiguous.
        adapters: [4, T] int32, as `adapter_order` returns it. Numbers above S cause reads out of bounds.
        chained: this launch starts before the preceding one on the stream has ended. It prefetches a and reads adapters early,
            which that one must not write. It waits for it before it reads x. The results have the same bits.

    Returns:
        [ceil(K / 512), T, M] float32.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    if x.dim() != 2 or a.dim() != 3 or a.shape[2] != x.shape[1] or a.dtype != x.dtype or not a.is_contiguous():
        got = f"{list(x.shape)} {x.dtype} and {list(a.shape)} {a.dtype}"
        raise ValueError(f"lora_shrink: x must be [T, K] and a contiguous [S, M, K] of its dtype, got {got}")
    check_order("lora_shrink", adapters, x.shape[0])
    return lora_shrink_op(rows_ready(x), a, adapters, chained)
