"""The second product of low-rank adapters, added to a layer's output, where each token has its own adapter or none.

    # T tokens, N outputs, S loaded adapters, R rank, C chunks, P parts of a merged layer
    y[t, n] += scales[s(t), p(n)] (sum over c of h[c, t, R columns of part p]) B[s(t)][n, :]

    y [T, N], b [S, N, R]: of the same dtype, bf16, fp16 or fp32; y is changed in place. h [C, T, P R] float32, the result of
    `lora_shrink`; scales [S, P] float32. The rows of B (columns of y) are divided into parts, which end at `first`, `second`
    and N. There is one part if both are N, and there are two if only `second` is N. A token without an adapter (0) keeps its
    bits. The scaled sum of h is rounded to b's dtype, the product is float32, and its sum with y is rounded once.

Limited by memory bandwidth: y is read and written, and B is read for the adapters in use. Rows without an adapter cost nothing.
Not supported: gradients, more than three parts, quantised adapters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from tilewright.kernels.launch.shapes import ceil_div, rows_of
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["lora_expand_add", "lora_expand_add_op"]

# ---- reference


def _spans(n: int, first: int, second: int) -> list[tuple[int, int]]:
    """(begin, end) of the rows of each part. Empty parts are left out."""
    return [(begin, end) for begin, end in ((0, first), (first, second), (second, n)) if end > begin]


def _reference(y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int) -> None:
    rank, total = b.shape[2], h.sum(0)
    for index, tokens in used(adapters):
        for part, (begin, end) in enumerate(_spans(y.shape[1], first, second)):
            low = (total[tokens, part * rank : (part + 1) * rank] * scales[index, part]).to(b.dtype).to(h.dtype)
            delta = low @ b[index, begin:end].to(h.dtype).mT
            y[tokens, begin:end] = (y[tokens, begin:end].to(h.dtype) + delta).to(y.dtype)


def _cost(y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int) -> Cost:
    held = min(b.shape[0], y.shape[0])
    return Cost(flops=2 * y.numel() * b.shape[2], bytes=2 * y.nbytes + h.nbytes + held * b[:1].nbytes)


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {"BLOCK_T": 16, "BLOCK_N": 128, "num_warps": 4},
    axes={"BLOCK_T": (16, 32), "BLOCK_N": (64, 128), "num_warps": (4, 8)},
)


def _arguments(
    inputs: Inputs, *, M: int, N: int, R: int = 16, K: int = 4096, first: int = 0, second: int = 0, adapters: int = 8,
    dtype: torch.dtype = torch.bfloat16, one: bool = False, row_stride: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:  # fmt: skip
    """M tokens. first, second: the ends of parts; 0 means N. K: the features from which h was made. one: a single adapter."""
    first, second = first or N, second or N
    parts = len(_spans(N, first, second))
    y = inputs.randn(M, row_stride or N, dtype=dtype)[:, :N]
    h = inputs.randn(ceil_div(K, CHUNK), M, parts * R)
    b = inputs.randn(adapters, N, R, dtype=dtype, scale=R**-0.5)
    scales = inputs.randn(adapters, parts).abs() + 0.5
    order = adapter_order(inputs.tensor(some_order(M, adapters, one), torch.int64))
    return y, h, b, scales, order, first, second


EXAMPLES = (
    Example("rows", lambda inputs: _arguments(inputs, M=20, N=256, adapters=3)),
    Example(
        "three parts",
        lambda inputs: _arguments(inputs, M=37, N=300, R=5, K=600, first=150, second=210, adapters=5, dtype=torch.float16),
    ),
    Example("two parts", lambda inputs: _arguments(inputs, M=18, N=272, R=8, K=64, first=136, adapters=4)),
    Example(
        "strided",
        lambda inputs: _arguments(inputs, M=5, N=40, R=80, K=64, adapters=2, dtype=torch.float32, row_stride=64),
    ),
    Example("one adapter", lambda inputs: _arguments(inputs, M=33, N=136, R=16, K=1100, adapters=4, one=True)),
    Example("one", lambda inputs: _arguments(inputs, M=1, N=1, R=1, K=1, adapters=1, dtype=torch.float32, one=True)),
    Example("no rows", lambda inputs: _arguments(inputs, M=0, N=32)),
)

# ---- kernel


@triton.jit
def _tile(pid, N: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr):
    """(part, first column, end of the part) of tile `pid`. No tile contains columns of two parts."""
    BEFORE_1: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
    BEFORE_2: tl.constexpr = BEFORE_1 + (SECOND - FIRST + BLOCK_N - 1) // BLOCK_N
    part = (pid >= BEFORE_1).to(tl.int32) + (pid >= BEFORE_2).to(tl.int32)
    begin = tl.where(
        part == 0, pid * BLOCK_N, tl.where(part == 1, FIRST + (pid - BEFORE_1) * BLOCK_N, SECOND + (pid - BEFORE_2) * BLOCK_N)
    )
    return part, begin, tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, N))


@triton.jit(do_not_specialize=["n_tokens", "y_row_stride"])
def _expand_kernel(
    y_ptr, h_ptr, b_ptr, scales_ptr, adapters_ptr, n_tokens, y_row_stride,
    N: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    held = place < n_tokens
    tokens = tl.load(adapters_ptr + place, mask=held, other=0).to(tl.int64)
    ids = tl.load(adapters_ptr + n_tokens + place, mask=held, other=0)
    current = next_adapter(ids, 0)
    if current < NOBODY:
        part, begin, end = _tile(tl.program_id(1), N, FIRST, SECOND, BLOCK_N)
        column = begin + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        while current < NOBODY:
            mine = (ids == current)[:, None]
            index = (current - 1).to(tl.int64)
            scale = tl.load(scales_ptr + index * PARTS + part)
            acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for start in range(0, R, BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                low = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for c in range(CHUNKS):
                    rows = (c * n_tokens.to(tl.int64) + tokens)[:, None] * (PARTS * R)
                    low += tl.load(h_ptr + rows + part * R + r[None, :], mask=mine & (r[None, :] < R), other=0.0)
                b_at = index * (N * R) + column[None, :].to(tl.int64) * R + r[:, None]
                b = tl.load(b_ptr + b_at, mask=(column[None, :] < end) & (r[:, None] < R), other=0.0)
                acc = dot((low * scale).to(b.dtype), b, acc)
            total = tl.where(mine, acc, total)
            current = next_adapter(ids, current)
        y_at = y_ptr + row_start(tokens, y_row_stride, N)[:, None] + column[None, :]
        written = (ids > 0)[:, None] & (column[None, :] < end)
        y = tl.load(y_at, mask=written, other=0.0).to(tl.float32)
        tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), mask=written)


def _launch(
    config: Config, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int
) -> None:  # fmt: skip
    (tokens, row_stride), n, rank = rows_of(y), y.shape[1], b.shape[2]
    spans = _spans(n, first, second)
    if y.numel() and rank:
        tiles = sum(ceil_div(end - begin, config["BLOCK_N"]) for begin, end in spans)
        _expand_kernel[(ceil_div(tokens, config["BLOCK_T"]), tiles)](
            y, h, b, scales, adapters, tokens, row_stride, N=n, R=rank, CHUNKS=h.shape[0], PARTS=len(spans), FIRST=first,
            SECOND=second, BLOCK_R=dot_width(rank), **config,
        )  # fmt: skip


lora_expand_add_op = Op(
    name="lora_expand_add",
    reference=_reference,
    fake=lambda *_: None,
    problem=lambda y, h, b, scales, adapters, first, second: Problem(
        y.dtype, y.shape[1], b.shape[2], (first, second, h.shape[0])
    ),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    mutates=("y",),
    roundings=2,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def lora_expand_add(
    y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, parts: tuple[int, ...] | None = None
) -> Tensor:  # fmt: skip
    """Add scale B h of each token's adapter to y [T, N], in place, and return y.

    Args:
        y: bf16, fp16 or fp32, dense along its rows.
        h: [C, T, P R] float32, the result of `lora_shrink`.
        b: [S, N, R] of y's dtype, contiguous.
        scales: [S, P] float32, contiguous.
        adapters: [2, T] int32, as `adapter_order` returns it. Numbers above S cause reads out of bounds.
        parts: the number of rows of N in each of the P parts, at most 3 parts; None: one part.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    parts = parts or (y.shape[-1],)
    if y.dim() != 2 or y.stride(1) != 1 or b.dim() != 3 or b.shape[1] != y.shape[1] or b.dtype != y.dtype:
        got = f"{list(y.shape)} {y.dtype} and {list(b.shape)} {b.dtype}"
        raise ValueError(f"lora_expand_add: y must be [T, N] with dense rows, and b [S, N, R] of its dtype; got {got}")
    if len(parts) > 3 or min(parts) < 1 or sum(parts) != y.shape[1]:
        raise ValueError(f"lora_expand_add: parts are {parts}, wanted at most 3 that make up N = {y.shape[1]}")
    held, rank = b.shape[0], b.shape[2]
    for name, value, shape in (("h", h, (h.shape[0], y.shape[0], len(parts) * rank)), ("scales", scales, (held, len(parts)))):
        if value.shape != shape or value.dtype != torch.float32 or not value.is_contiguous():
            got = f"{list(value.shape)} {value.dtype}"
            raise ValueError(f"lora_expand_add: {name} must be contiguous {list(shape)} torch.float32, got {got}")
    check_order("lora_expand_add", adapters, y.shape[0])
    ends = [sum(parts[: i + 1]) if i < len(parts) else y.shape[1] for i in range(2)]
    lora_expand_add_op(y, h, b, scales, adapters, *ends)
    return y
