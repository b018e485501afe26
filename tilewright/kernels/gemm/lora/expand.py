"""The second product of low-rank adapters, added to a layer's output, where each token has its own adapter or none.

    # T tokens, N outputs, S loaded adapters, R rank, C chunks, P parts of a merged layer
    y[t, n] += scales[s(t), p(n)] (sum over c of h[c, t, R columns of part p]) B[s(t)][n, :]

    y [T, N], b [S, N, R]: of the same dtype, bf16, fp16 or fp32; y is changed in place. h [C, T, P R] float32, the result of
    `lora_shrink`; scales [S, P] float32. The rows of B (columns of y) are divided into parts, which end at `first`, `second`
    and N. There is one part if both are N, and there are two if only `second` is N. A token without an adapter (0) keeps its
    bits. The scaled sum of h is rounded to b's dtype. The product is accumulated in float32, and its sum with y is rounded.

Limited by memory bandwidth: y is read and written, and B is read for the adapters in use. Rows without an adapter cost nothing.
A program has one tile of tokens, which have the same adapter, and STEPS blocks of BLOCK_N columns, for which it adds up h once.
It prefetches its rows of B, which are contiguous, into L2, four blocks ahead. So memory is busy while the program reads h.
`expand_direct.py` needs no shared memory, and comes first where it accepts the problem.

With `chained` (launch/pdl.py) the programs start while `lora_shrink` still runs, and prefetch B before they wait for it.

Not supported: gradients, more than three parts, quantised adapters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import dot
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.gemm.lora.expand_direct import DIRECT
from tilewright.kernels.gemm.lora.problem import (
    CHUNK,
    TILE,
    Problem,
    adapter_order,
    check_order,
    dot_width,
    fetch_ahead,
    some_order,
    span_at,
    spans_of,
    tile_at,
    tiles_of,
    used,
    wait,
)
from tilewright.kernels.hopper.descriptors import card_of
from tilewright.kernels.launch.pdl import launch_options, overlaps
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["arguments", "check", "lora_expand_add", "lora_expand_add_op"]

# ---- reference


def _reference(
    y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int, chained: bool
) -> None:  # fmt: skip
    rank, total = b.shape[2], h.sum(0)
    for index, tokens in used(adapters):
        for part, (begin, end) in enumerate(spans_of(y.shape[1], first, second)):
            low = (total[tokens, part * rank : (part + 1) * rank] * scales[index, part]).to(b.dtype).to(h.dtype)
            delta = low @ b[index, begin:end].to(h.dtype).mT
            y[tokens, begin:end] = (y[tokens, begin:end].to(h.dtype) + delta).to(y.dtype)


def _cost(
    y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int, chained: bool
) -> Cost:  # fmt: skip
    held = min(b.shape[0], y.shape[0])
    return Cost(flops=2 * y.numel() * b.shape[2], bytes=2 * y.nbytes + h.nbytes + held * b[:1].nbytes)


# ---- space and examples


def _default(device: Device, problem: Problem) -> Config:
    if problem.dtype == torch.float32:
        return {"BLOCK_N": 64, "STEPS": 1, "num_warps": 4}
    # With 64 adapters: 512 programs of 512 columns for N = 4096, 768 of 2048 for 24576. On 132 SMs they all run at once.
    return {"BLOCK_N": 128, "STEPS": min(16, 1 << (max(1, problem.wide // 1024).bit_length() - 1)), "num_warps": 4}


def _config_refusal(device: Device, problem: Problem, c: Config) -> str | None:
    if problem.dtype == torch.float32 and c["BLOCK_N"] > 128:
        return "without tensor cores, the block needs more registers than a thread has"
    if c["BLOCK_N"] * c["STEPS"] > 2048:
        return "a program with more than 2048 columns fetches them too early"
    if c["STEPS"] > 1 and c["BLOCK_N"] * c["STEPS"] >= 2 * problem.wide:
        return "a program has at least twice as many columns as there are"
    return None


_AHEAD = 4
"""The number of blocks of B that a program prefetches. If all programs prefetched all that they read, h and y would wait."""

SPACE = Space(
    default=_default,
    axes={"BLOCK_N": (64, 128, 256), "STEPS": (1, 2, 4, 8, 16), "num_warps": (4, 8)},
    refusal=_config_refusal,
)


def arguments(
    inputs: Inputs, *, M: int, N: int, R: int = 16, K: int = 4096, first: int = 0, second: int = 0, adapters: int = 8,
    dtype: torch.dtype = torch.bfloat16, one: bool = False, row_stride: int = 0, chained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool]:  # fmt: skip
    """M tokens. first, second: the ends of parts; 0 means N. K: the features from which h was made. one: a single adapter."""
    first, second = first or N, second or N
    parts = len(spans_of(N, first, second))
    y = inputs.randn(M, row_stride or N, dtype=dtype)[:, :N]
    h = inputs.randn(ceil_div(K, CHUNK), M, parts * R)
    b = inputs.randn(adapters, N, R, dtype=dtype, scale=R**-0.5)
    scales = inputs.randn(adapters, parts).abs() + 0.5
    order = adapter_order(inputs.tensor(some_order(M, adapters, one), torch.int64))
    return y, h, b, scales, order, first, second, chained


EXAMPLES = (
    Example("rows", lambda inputs: arguments(inputs, M=20, N=256, adapters=3)),
    Example(
        "three parts",
        lambda inputs: arguments(inputs, M=37, N=300, R=5, K=600, first=150, second=210, adapters=5, dtype=torch.float16),
    ),
    Example("two parts", lambda inputs: arguments(inputs, M=18, N=272, R=8, K=64, first=136, adapters=4)),
    Example(
        "strided",
        lambda inputs: arguments(inputs, M=5, N=40, R=80, K=64, adapters=2, dtype=torch.float32, row_stride=64),
    ),
    Example("one adapter", lambda inputs: arguments(inputs, M=33, N=136, R=16, K=1100, adapters=4, one=True)),
    Example("one", lambda inputs: arguments(inputs, M=1, N=1, R=1, K=1, adapters=1, dtype=torch.float32, one=True)),
    Example("chained", lambda inputs: arguments(inputs, M=21, N=384, K=1024, first=256, adapters=2, chained=True)),
    Example("rank of 32", lambda inputs: arguments(inputs, M=19, N=128, R=32, K=64, adapters=2, dtype=torch.float16)),
    Example("whole tiles", lambda inputs: arguments(inputs, M=25, N=192, K=512, first=128, adapters=2, one=True)),
    Example("no rows", lambda inputs: arguments(inputs, M=0, N=32)),
)

# ---- kernel


@triton.jit
def _b_block(b_ptr, column, rank, stop, R: tl.constexpr, EVEN: tl.constexpr):
    """A block of one adapter's B, transposed: [ranks, columns]. stop: the end of the columns; 0: nothing is loaded."""
    b_at = b_ptr + column[None, :] * R + rank[:, None]
    if EVEN:
        return tl.load(b_at, mask=tl.full(b_at.shape, stop, tl.int32) > 0, other=0.0)
    else:
        return tl.load(b_at, mask=(column[None, :] < stop) & (rank[:, None] < R), other=0.0)


@triton.jit
def _y_block(y_rows, column, held, stop, EVEN: tl.constexpr):
    """[tokens, columns] of y. stop: as in `_b_block`."""
    if EVEN:
        return tl.load(y_rows + column[None, :], mask=held[:, None] & (stop > 0), other=0.0)
    else:
        return tl.load(y_rows + column[None, :], mask=held[:, None] & (column[None, :] < stop), other=0.0)


@triton.jit
def _low(h_ptr, scale, tokens, held, n_tokens, rank, end, C: tl.constexpr, WIDTH: tl.constexpr):
    """The scaled sum of h over the chunks, [tokens, ranks]. rank: columns of h, up to `end`."""
    mask = held[:, None] & (rank[None, :] < end)
    low = tl.zeros([tokens.shape[0], rank.shape[0]], tl.float32)
    for c in tl.static_range(C):
        rows = (c * n_tokens.to(tl.int64) + tokens)[:, None] * WIDTH
        low += tl.load(h_ptr + rows + rank[None, :], mask=mask, other=0.0)
    return low * scale


@triton.jit(do_not_specialize=["n_tokens", "y_row_stride"])
def _expand_kernel(
    y_ptr, h_ptr, b_ptr, scales_ptr, adapters_ptr, n_tokens, y_row_stride,
    N: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    SECTORS: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first, end, adapter = tile_at(adapters_ptr, tl.program_id(1), n_tokens)
    if tl.minimum(end - first, adapter) > 0:  # one condition, so that the loads do not wait for each other
        part, begin, stop = span_at(tl.program_id(0), N, FIRST, SECOND, BLOCK_N * STEPS)
        index = (adapter - 1).to(tl.int64)
        b_ptr += index * (N * R)
        SECTOR: tl.constexpr = 256 // b_ptr.dtype.element_ty.primitive_bitwidth
        sectors = begin * R + tl.arange(0, SECTORS) * SECTOR
        last = (begin + tl.minimum(BLOCK_N * STEPS, stop - begin)) * R - 1
        for step in tl.static_range(AHEAD):
            if step < STEPS:
                fetch_ahead(b_ptr + tl.minimum(sectors + step * (BLOCK_N * R), last))
        place = first + tl.arange(0, BLOCK_T)
        held = place < end
        tokens = tl.load(adapters_ptr + place, mask=held, other=0).to(tl.int64)
        scale = tl.load(scales_ptr + index * PARTS + part)
        column = begin + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        y_rows = y_ptr + row_start(tokens, y_row_stride, N)[:, None]
        if PDL:
            b = _b_block(b_ptr, column, r, stop, R, EVEN)
            wait()
            y = _y_block(y_rows, column, held, stop, EVEN)
        else:
            y = _y_block(y_rows, column, held, stop, EVEN)
            b = _b_block(b_ptr, column, r, stop, R, EVEN)
        low = _low(h_ptr, scale, tokens, held, n_tokens, part * R + r, part * R + R, CHUNKS, PARTS * R).to(b.dtype)
        for step in tl.range(0, STEPS, num_stages=1):
            column = begin + step * BLOCK_N + tl.arange(0, BLOCK_N)
            # The loads of the next step, if there is one.
            more = tl.where(step + 1 < STEPS, stop, 0)
            if STEPS > AHEAD:
                fetch_ahead(b_ptr + tl.minimum(sectors + (step + AHEAD) * (BLOCK_N * R), last))
            next_b = _b_block(b_ptr, column + BLOCK_N, r, more, R, EVEN)
            next_y = _y_block(y_rows, column + BLOCK_N, held, more, EVEN)
            acc = dot(low, b, tl.zeros([BLOCK_T, BLOCK_N], tl.float32))
            for start in tl.static_range(BLOCK_R, R, BLOCK_R):
                rank = start + r
                own = part * R + rank
                low_of = _low(h_ptr, scale, tokens, held, n_tokens, own, part * R + R, CHUNKS, PARTS * R).to(b.dtype)
                acc = dot(low_of, _b_block(b_ptr, column, rank, stop, R, EVEN), acc)
            written = held[:, None]
            if not EVEN:
                written = written & (column[None, :] < stop)
            tl.store(y_rows + column[None, :], (y.to(tl.float32) + acc).to(y.dtype), mask=written)
            b = next_b
            y = next_y
    elif PDL:
        # Otherwise a launch without adapters might end before the one that it follows.
        if tl.program_id(1) == 0:
            wait()


def _limit(config: Config, dtype: torch.dtype, width: int, even: bool) -> dict[str, int]:
    """The most registers of a thread. Without a limit, ptxas spills some to have 7 blocks per SM; with 80 there are 6."""
    if dtype.itemsize > 2 or width > 16 or config["BLOCK_N"] > 32 * config["num_warps"]:
        return {"maxnreg": 255}
    return {"maxnreg": 80 if even else 128}


def _launch(
    config: Config, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, first: int, second: int, chained: bool
) -> None:  # fmt: skip
    tokens, row_stride = rows_of(y)
    held, n, rank = b.shape
    spans = spans_of(n, first, second)
    if y.numel() and rank:
        span, width = config["BLOCK_N"] * config["STEPS"], dot_width(rank)
        even = rank % width == 0 and all((end - begin) % span == 0 for begin, end in spans)
        grid = (sum(ceil_div(end - begin, span) for begin, end in spans), tiles_of(tokens, held))
        _expand_kernel[grid](
            y, h, b, scales, adapters, tokens, row_stride, N=n, R=rank, CHUNKS=h.shape[0], PARTS=len(spans), FIRST=first,
            SECOND=second, SECTORS=next_pow2(ceil_div(config["BLOCK_N"] * rank * b.element_size(), 32)), AHEAD=_AHEAD,
            EVEN=even, BLOCK_R=width, BLOCK_T=TILE, **config, **_limit(config, y.dtype, width, even),
            **launch_options(chained and overlaps(card_of(y))),
        )  # fmt: skip


lora_expand_add_op = Op(
    name="lora_expand_add",
    reference=_reference,
    fake=lambda *_: None,
    problem=lambda y, h, b, scales, adapters, first, second, chained: Problem(
        y.dtype, y.shape[1], b.shape[2], (first, second, h.shape[0])
    ),
    cost=_cost,
    examples=EXAMPLES,
    make=arguments,
    mutates=("y",),
    roundings=2,
    impls=(DIRECT, Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True)),
)


def lora_expand_add(
    y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, parts: tuple[int, ...] | None = None, *,
    chained: bool = False,
) -> Tensor:  # fmt: skip
    """Add scale B h of each token's adapter to y [T, N], in place, and return y.

    Args:
        y: bf16, fp16 or fp32, dense along its rows.
        h: [C, T, P R] float32, the result of `lora_shrink`.
        b: [S, N, R] of y's dtype, contiguous.
        scales: [S, P] float32, contiguous.
        adapters: [4, T] int32, as `adapter_order` returns it. Numbers above S cause reads out of bounds.
        parts: the number of rows of N in each of the P parts, at most 3 parts; None: one part.
        chained: the launch before this one on the stream is `lora_shrink`. Then this launch starts before that one has ended.
            It reads b, scales and adapters early, which `lora_shrink` does not write. The results have the same bits.

    Raises:
        ValueError: shapes, dtypes or layouts do not fit.
    """
    parts = parts or (y.shape[-1],)
    check("lora_expand_add", y, h, b, scales, adapters, parts)
    ends = [sum(parts[: i + 1]) if i < len(parts) else y.shape[1] for i in range(2)]
    lora_expand_add_op(y, h, b, scales, adapters, *ends, chained)
    return y


def check(
    op: str, y: Tensor, h: Tensor, b: Tensor, scales: Tensor, adapters: Tensor, parts: tuple[int, ...]
) -> None:  # fmt: skip
    """Raise ValueError, with the name of the op, unless the arguments fit each other."""
    if y.dim() != 2 or y.stride(1) != 1 or b.dim() != 3 or b.shape[1] != y.shape[1] or b.dtype != y.dtype:
        got = f"{list(y.shape)} {y.dtype} and {list(b.shape)} {b.dtype}"
        raise ValueError(f"{op}: y must be [T, N] with dense rows, and b [S, N, R] of its dtype; got {got}")
    if len(parts) > 3 or min(parts) < 1 or sum(parts) != y.shape[1]:
        raise ValueError(f"{op}: parts are {parts}, wanted at most 3 that make up N = {y.shape[1]}")
    held, rank = b.shape[0], b.shape[2]
    for name, value, shape in (("h", h, (h.shape[0], y.shape[0], len(parts) * rank)), ("scales", scales, (held, len(parts)))):
        if value.shape != shape or value.dtype != torch.float32 or not value.is_contiguous():
            got = f"{list(value.shape)} {value.dtype}"
            raise ValueError(f"{op}: {name} must be contiguous {list(shape)} torch.float32, got {got}")
    check_order(op, adapters, y.shape[0])
