"""The first product of low-rank adapters, where each token has its own adapter or none (Chen et al., "Punica", 2023).

    # T tokens, K features, S loaded adapters, M rows of A (the ranks of all parts of a layer), C chunks of K
    h[c, t, :] = x[t, chunk c] A[s(t)][:, chunk c]^T,     0 where token t has no adapter

    x [T, K], a [S, M, K]: of the same dtype, bf16, fp16 or fp32. h [C, T, M] float32, C = ceil(K / 512): sums over parts of K,
    which `lora_expand_add` adds in their order. adapters [2, T] int32: tokens in the order of their adapters, and the adapter
    (1 to S, 0 for none) of each in that order, as `adapter_order` returns it.

Limited by reading x, and A of the adapters in use. A program takes tokens that are neighbours in this order, and multiplies
them by one of their adapters after the other. So a tile of tokens with the same adapter costs one product. The kernel is
compiled for every K, but not for every number of tokens or adapters.

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
    NOBODY,
    Problem,
    adapter_order,
    check_order,
    dot_width,
    next_adapter,
    some_order,
    used,
)
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["adapter_order", "lora_shrink", "lora_shrink_op"]

# ---- reference


def _fake(x: Tensor, a: Tensor, adapters: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(ceil_div(x.shape[1], CHUNK), x.shape[0], a.shape[1], dtype=wide)


def _reference(x: Tensor, a: Tensor, adapters: Tensor) -> Tensor:
    h = torch.zeros_like(_fake(x, a, adapters))
    for index, tokens in used(adapters):
        for c in range(h.shape[0]):
            columns = slice(c * CHUNK, (c + 1) * CHUNK)
            h[c, tokens] = x[tokens, columns].to(h.dtype) @ a[index, :, columns].to(h.dtype).mT
    return h


def _cost(x: Tensor, a: Tensor, adapters: Tensor) -> Cost:
    held = min(a.shape[0], x.shape[0])
    return Cost(flops=2 * x.numel() * a.shape[1], bytes=x.nbytes + held * a[:1].nbytes + 4 * x.shape[0] * a.shape[1])


# ---- space and examples


def _default(device: Device, problem: Problem) -> Config:
    # In decoding, few tokens have many adapters. The smallest tile that tensor cores accept contains the fewest adapters.
    return {"BLOCK_T": 16, "BLOCK_K": 64 if problem.dtype == torch.float32 else 128, "num_warps": 4}


SPACE = Space(default=_default, axes={"BLOCK_T": (16, 32), "BLOCK_K": (64, 128), "num_warps": (4, 8)})


def _arguments(
    inputs: Inputs, *, M: int, K: int, R: int = 16, parts: int = 1, adapters: int = 8, dtype: torch.dtype = torch.bfloat16,
    one: bool = False, row_stride: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """M tokens. R: the rank of each of `parts` parts. one: all tokens have the same adapter, as in a prompt."""
    x = inputs.randn(M, row_stride or K, dtype=dtype)[:, :K]
    order = adapter_order(inputs.tensor(some_order(M, adapters, one), torch.int64))
    return x, inputs.randn(adapters, parts * R, K, dtype=dtype, scale=max(K, 1) ** -0.5), order


EXAMPLES = (
    Example("rows", lambda inputs: _arguments(inputs, M=20, K=256, adapters=3)),
    Example("ragged", lambda inputs: _arguments(inputs, M=37, K=600, R=5, parts=3, adapters=5, dtype=torch.float16)),
    Example("strided", lambda inputs: _arguments(inputs, M=5, K=64, R=80, adapters=2, dtype=torch.float32, row_stride=96)),
    Example("one adapter", lambda inputs: _arguments(inputs, M=33, K=1100, R=8, parts=2, adapters=4, one=True)),
    Example("one", lambda inputs: _arguments(inputs, M=1, K=1, R=1, adapters=1, dtype=torch.float32, one=True)),
    Example("no rows", lambda inputs: _arguments(inputs, M=0, K=32)),
)


@triton.jit(do_not_specialize=["n_tokens", "x_row_stride"])
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, h_ptr, n_tokens, x_row_stride,
    K: tl.constexpr, M: tl.constexpr, CHUNK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = place < n_tokens
    tokens = tl.load(adapters_ptr + place, mask=held, other=0).to(tl.int64)
    ids = tl.load(adapters_ptr + n_tokens + place, mask=held, other=0)
    column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(2) * CHUNK_K
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + row_start(tokens, x_row_stride, K)[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    current = next_adapter(ids, 0)
    while current < NOBODY:
        mine = (ids == current)[:, None]
        a_rows = a_ptr + (current - 1).to(tl.int64) * (M * K) + column[None, :] * K
        acc = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for step in range(0, CHUNK_K, BLOCK_K):
            k = begin + step + inner
            x = tl.load(x_rows + k[None, :], mask=mine & (k[None, :] < K), other=0.0)
            a = tl.load(a_rows + k[:, None], mask=(column[None, :] < M) & (k[:, None] < K), other=0.0)
            acc = dot(x, a, acc)
        total = tl.where(mine, acc, total)
        current = next_adapter(ids, current)
    rows = (tl.program_id(2).to(tl.int64) * n_tokens + tokens)[:, None] * M
    tl.store(h_ptr + rows + column[None, :], total, mask=held[:, None] & (column[None, :] < M))


def _launch(config: Config, x: Tensor, a: Tensor, adapters: Tensor) -> Tensor:
    h, (tokens, row_stride) = _fake(x, a, adapters), rows_of(x)
    width, chunks = dot_width(a.shape[1]), h.shape[0]
    if h.numel():
        grid = (ceil_div(tokens, config["BLOCK_T"]), ceil_div(a.shape[1], width), chunks)
        _shrink_kernel[grid](
            x, a, adapters, h, tokens, row_stride, K=x.shape[1], M=a.shape[1], CHUNK_K=CHUNK, BLOCK_M=width, **config
        )
    return h


lora_shrink_op = Op(
    name="lora_shrink",
    reference=_reference,
    fake=_fake,
    problem=lambda x, a, adapters: Problem(x.dtype, x.shape[1], a.shape[1], ()),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def lora_shrink(x: Tensor, a: Tensor, adapters: Tensor) -> Tensor:
    """x [T, K] times the transposed A of each token's adapter, in chunks of K.

    Args:
        x: bf16, fp16 or fp32.
        a: [S, M, K] of x's dtype, contiguous.
        adapters: [2, T] int32, as `adapter_order` returns it. Numbers above S cause reads out of bounds.

    Returns:
        [ceil(K / 512), T, M] float32.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    if x.dim() != 2 or a.dim() != 3 or a.shape[2] != x.shape[1] or a.dtype != x.dtype or not a.is_contiguous():
        got = f"{list(x.shape)} {x.dtype} and {list(a.shape)} {a.dtype}"
        raise ValueError(f"lora_shrink: x must be [T, K] and a contiguous [S, M, K] of its dtype, got {got}")
    check_order("lora_shrink", adapters, x.shape[0])
    return lora_shrink_op(rows_ready(x), a, adapters)
