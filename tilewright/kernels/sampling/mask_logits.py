"""Set the logits of forbidden tokens to -inf, in place. The mask has one bit per token, for example from a grammar.

    logits[rows[m], v] <- -inf   where bit v % 32 of bits[m, v // 32] is 0, or v >= 32 W

    logits: [R, V] of bf16, fp16 or fp32, rows may be strided; rows: [M] int64, no two the same, in [0, R) (not checked), or -1
    for a mask that is not applied, so that a captured graph has room for several numbers of masks; bits: [M, W] int32, the
    lowest bit first. Rows of logits that are not in `rows` do not change.

Limited by bytes: one bit of the mask for each token, and the elements that are forbidden. Allowed logits are neither read nor
written, so a grammar that forbids nearly all tokens costs one write of the row.
Not supported: backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.row_space import row_problem
from tilewright.kernels.sampling.edit_logits import SPACE
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["mask_logits", "mask_logits_op"]

# R rows of logits, M rows of the mask, V tokens, W words per mask


def _reference(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    token = torch.arange(logits.shape[1], device=logits.device)
    inside = token < 32 * bits.shape[1]
    words = bits[:, (token // 32).clamp_max(bits.shape[1] - 1)]
    allowed = (((words >> (token % 32)) & 1) != 0) & inside
    keep = allowed.new_ones(logits.shape[0] + 1, logits.shape[1])  # the last row takes the masks of row -1
    keep[rows] = allowed
    logits.masked_fill_(~keep[:-1], -torch.inf)


def _cost(logits: Tensor, rows: Tensor, bits: Tensor) -> Cost:
    written = rows.shape[0] * logits.shape[1] * logits.element_size()
    return Cost(flops=2 * rows.shape[0] * logits.shape[1], bytes=bits.nbytes + rows.nbytes + written)


# ---- space and examples


def mask_logits_arguments(
    inputs: Inputs, *, M: int, N: int = 151936, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, N], all rows masked, half of the tokens allowed."""
    bits = inputs.randint(-(2**31), 2**31, M, -(-N // 32)).to(torch.int32)
    return inputs.randn(M, N, dtype=dtype, scale=3.0), inputs.permutation(M), bits


@Example.of
def _example(
    inputs: Inputs, rows: int, masked: int, vocab: int, dtype: torch.dtype, *, row_stride: int = 0, words: int | None = None,
    unused: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = inputs.randn(rows, row_stride or vocab, dtype=dtype, scale=3.0)[:, :vocab]
    width = -(-vocab // 32) if words is None else words
    at = inputs.permutation(rows)[:masked]
    at[:unused] = -1
    return logits, at, inputs.randint(-(2**31), 2**31, masked, width).to(torch.int32)


EXAMPLES = (
    _example("rows", 4, 3, 1000, torch.bfloat16),
    _example("strided", 3, 3, 300, torch.float16, row_stride=320),
    _example("wide", 2, 1, 9001, torch.float32),
    _example("short mask", 2, 2, 500, torch.bfloat16, words=9),
    _example("one", 1, 1, 1, torch.float32),
    _example("none", 3, 0, 50, torch.float32),
    _example("unused", 4, 3, 1000, torch.bfloat16, unused=2),
    _example("all unused", 2, 2, 70, torch.float32, unused=2),
)


@triton.jit(do_not_specialize=["row_stride", "words"], do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def _mask_kernel(
    logits_ptr, rows_ptr, bits_ptr, row_stride, words,
    V: tl.constexpr, TILES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    item = (tl.program_id(0) // TILES).to(tl.int64)
    token = (tl.program_id(0) % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.load(rows_ptr + item)
    if row >= 0:
        bits = tl.load(bits_ptr + item * words + token // 32, mask=(token < V) & (token < 32 * words), other=0)
        forbidden = ((bits >> (token % 32)) & 1) == 0
        tl.store(logits_ptr + row * row_stride + token, float("-inf"), mask=forbidden & (token < V))


def _launch(config: Config, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    masked, vocab = rows.shape[0], logits.shape[1]
    tiles = triton.cdiv(vocab, config["BLOCK_V"])
    if masked:
        _mask_kernel[(masked * tiles,)](logits, rows, bits, logits.stride(0), bits.shape[1], V=vocab, TILES=tiles, **config)


mask_logits_op = Op(
    name="mask_logits",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=mask_logits_arguments,
    mutates=("logits",),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that `bits` does not allow to -inf, in place.

    Args:
        logits: [R, V], bf16, fp16 or fp32; the elements of a row are contiguous.
        rows: [M] int64, the row of logits for each row of the mask, no two the same; -1: this row of the mask is not used.
        bits: [M, W] int32, W > 0, one bit per token, the lowest first; tokens from 32 W on are forbidden.

    Raises:
        ValueError: a shape, a dtype or a layout does not fit.
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point() or logits.stride(1) != 1:
        got = f"{tuple(logits.shape)} {logits.dtype}, strides {logits.stride()}"
        raise ValueError(f"mask_logits: logits must be floats [R, V] with V > 0 and dense rows, got {got}")
    for name, value, shape, dtype in (
        ("rows", rows, (rows.shape[0] if rows.dim() == 1 else "M",), torch.int64),
        ("bits", bits, (rows.shape[0] if rows.dim() else "M", bits.shape[-1] or "at least 1"), torch.int32),
    ):
        if tuple(value.shape) != shape or value.dtype != dtype or not value.is_contiguous():
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"mask_logits: {name} must be contiguous {list(shape)} {dtype}, got {got}")
    mask_logits_op(logits, rows, bits)
