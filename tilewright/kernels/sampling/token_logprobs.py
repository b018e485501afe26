"""The log-probability of one token a row of logits, and its rank, without a [B, V] tensor of log-probabilities.

    logprob[b] = logits[b, id] - log(sum_j exp(logits[b, j])),     rank[b] = 1 + (how many logits are larger than logits[b, id])

    logits: [B, V] of bf16, fp16 or fp32, before temperature; ids: [B] int64 in [0, V) (not checked). One pass: each lane keeps
    a running maximum and a sum relative to it, in float32. Ties share a rank. As in torch, NaN or +inf in a row gives NaN.

Limited by bytes: one read of the logits. A program a row, so a few rows do not fill a large card.
Not supported: backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import next_pow2, rows_of, rows_ready
from tilewright.kernels.sampling.inputs import logprob_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["token_logprobs", "token_logprobs_op"]

# ---- reference


def _reference(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = ids[:, None]
    return torch.log_softmax(wide, 1).gather(1, ids).squeeze(1), 1 + (wide > wide.gather(1, ids)).sum(1)


# ---- cost


def _cost(logits: Tensor, ids: Tensor) -> Cost:
    return Cost(flops=6 * logits.numel(), bytes=logits.nbytes + logits.shape[0] * (8 + 8 + 8))


# ---- space and examples


class Problem(NamedTuple):
    """What a model fixes; not the number of rows."""

    dtype: torch.dtype
    vocab: int


def _problem(logits: Tensor, ids: Tensor) -> Problem:
    return Problem(logits.dtype, logits.shape[1])


def _default(device: Device, problem: Problem) -> Config:
    # 16 elements a thread: at 32 the running maxima and sums spill (sm_90).
    block_v = min(8192, max(256, next_pow2(problem.vocab)))
    return {"BLOCK_V": block_v, "num_warps": max(4, block_v // 512)}


SPACE = Space(
    default=_default,
    axes={"BLOCK_V": (256, 1024, 4096, 8192, 16384), "num_warps": (4, 8, 16, 32)},
    refusal=lambda device, problem, c: "over 16 elements a thread" if c["BLOCK_V"] > 512 * c["num_warps"] else None,
)


def _example(label: str, rows: int, vocab: int, dtype: torch.dtype, row_stride: int = 0) -> Example:
    def make(inputs: Inputs) -> tuple[Tensor, Tensor]:
        logits = inputs.randn(rows, row_stride or vocab, dtype=dtype, scale=4.0)[:, :vocab]
        return logits, inputs.randint(0, vocab, rows)

    return Example(label, make)


EXAMPLES = (
    _example("rows", 4, 1000, torch.bfloat16),
    _example("strided", 3, 300, torch.float16, row_stride=320),
    _example("wide", 2, 17001, torch.float32),
    _example("one", 1, 1, torch.float32),
)

# ---- kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["ids_ptr"])
def _token_logprobs_kernel(
    logits_ptr, ids_ptr, logprob_ptr, rank_ptr, row_stride, V: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row_start(row, row_stride, V)
    chosen = tl.load(logits_ptr + tl.load(ids_ptr + row)).to(tl.float32)
    # A lane that has only met -inf must not subtract it from itself: its maximum starts at the lowest finite float.
    top = tl.full([BLOCK_V], -3.4028234663852886e38, tl.float32)
    mass, larger = tl.zeros([BLOCK_V], tl.float32), tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, V, BLOCK_V):
        token = start + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        larger += (x > chosen).to(tl.int32)
        higher = tl.maximum(top, x)
        mass = mass * tl.exp2((top - higher) * _LOG2E) + tl.exp2((x - higher) * _LOG2E)
        top = higher
    row_top = tl.max(top, axis=0)
    log_mass = tl.log(tl.sum(mass * tl.exp2((top - row_top) * _LOG2E), axis=0))
    tl.store(logprob_ptr + row, chosen - row_top - log_mass)
    tl.store(rank_ptr + row, 1 + tl.sum(larger, axis=0).to(tl.int64))


# ---- launcher and op


def _launch(config: Config, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _token_logprobs_kernel[(rows,)](logits, ids, logprob, rank, rows_of(logits)[1], V=vocab, **config)
    return logprob, rank


token_logprobs_op = Op(
    name="token_logprobs",
    reference=_reference,
    problem=_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=logprob_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


# ---- public function


def token_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and rank of one token a row.

    Args:
        logits: [B, V], bf16, fp16 or fp32; rows may be strided.
        ids: [B] int64, each in [0, V).

    Returns:
        (logprob [B] float32, rank [B] int64; 1 is the most likely, ties share the best).

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"token_logprobs: logits must be floats [B, V], got {tuple(logits.shape)} {logits.dtype}")
    if ids.shape != logits.shape[:1] or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(
            f"token_logprobs: ids must be contiguous [{logits.shape[0]}] torch.int64, got {tuple(ids.shape)} {ids.dtype}"
        )
    return token_logprobs_op(rows_ready(logits), ids)
