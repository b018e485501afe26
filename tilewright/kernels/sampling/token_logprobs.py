"""The log-probability and rank of one token per row of logits, and the likeliest tokens, without [B, V] log-probabilities.

    logprob[b] = logits[b, id] - log(sum_j exp(logits[b, j])),     rank[b] = 1 + (how many logits are larger than logits[b, id])
    top_ids[b, i], top_logprobs[b, i]: the i-th largest logit of the row and its log-probability; the lower id among equals

    logits: [B, V] of bf16, fp16 or fp32, before temperature; ids: [B] int64 in [0, V) (not checked). Ties share a rank. As in
    torch, NaN or +inf in a row makes its log-probabilities NaN; which tokens are the likeliest is then unspecified.

`top_logprobs` has an argument with the number of likeliest tokens for each row; for a negative number the logits of the row are
not read. So a batch in which few rows request tokens costs only those rows, and all batches use the same launches, as a
captured graph needs.

Two launches. `_scan_kernel` has one program per tile of logits. It computes the largest logit, the mass relative to it, how
many logits are larger than the token's, and the largest logit of each group of tokens. `_finish_kernel` has one program per
row. The n likeliest tokens are in the n groups with the largest maxima (the lower group first among equals), so only those are
read again.

Limited by bytes: one read of the logits. Not supported: backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_ready
from tilewright.kernels.sampling.inputs import logprob_arguments, top_logprob_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["MOST_TOP_LOGPROBS", "token_logprobs", "token_logprobs_op", "top_logprobs", "top_logprobs_op"]

# B rows, V tokens, K likeliest tokens per row

MOST_TOP_LOGPROBS = 32
"""The largest number of likeliest tokens that a row can request; as many groups are read again."""


def _reference(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = ids[:, None]
    return torch.log_softmax(wide, 1).gather(1, ids).squeeze(1), 1 + (wide > wide.gather(1, ids)).sum(1)


def _top_reference(logits: Tensor, ids: Tensor, wanted: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprob, rank, top_ids, top = _nothing(logits, wanted, most)
    rows, count = (wanted >= 0).nonzero()[:, 0], min(most, logits.shape[1])
    if rows.numel():
        x = logits[rows].to(logprob.dtype)
        logprob[rows], rank[rows] = _reference(x, ids[rows])
        likeliest = _likeliest_ids(x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), count)
        missing = torch.arange(count, device=logits.device) >= wanted[rows, None]
        top_ids[rows, :count] = likeliest.masked_fill(missing, -1)
        top[rows, :count] = torch.log_softmax(x, 1).gather(1, likeliest).masked_fill(missing, -torch.inf)
    return logprob, rank, top_ids, top


def _likeliest_ids(x: Tensor, count: int) -> Tensor:
    """[B, count]: the ids of the largest x [B, V] in order, the lower id first among equals; topk does not specify that
    order."""
    least = x.topk(count).values[:, -1:]
    above, equal = x > least, x == least
    kept = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(-1, count)
    return ids.gather(1, x.gather(1, ids).sort(stable=True, dim=1, descending=True).indices)


def _nothing(logits: Tensor, wanted: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results for rows that request nothing; they define the shapes and dtypes of all results."""
    wide, rows = torch.promote_types(logits.dtype, torch.float32), logits.shape[0]
    logprob, rank = logits.new_zeros(rows, dtype=wide), logits.new_zeros(rows, dtype=torch.int64)
    return (
        logprob,
        rank,
        logits.new_full((rows, most), -1, dtype=torch.int64),
        logits.new_full((rows, most), -torch.inf, dtype=wide),
    )


def _cost(logits: Tensor, ids: Tensor) -> Cost:
    return Cost(flops=6 * logits.numel(), bytes=logits.nbytes + logits.shape[0] * (8 + 8 + 8))


def _top_cost(logits: Tensor, ids: Tensor, wanted: Tensor, most: int) -> Cost:
    rows = logits.shape[0]
    return Cost(flops=6 * logits.numel(), bytes=logits.nbytes + rows * (8 + 4 + 12 + 12 * most))


# ---- space and examples


class Problem(NamedTuple):
    """The properties that a model fixes; not the number of rows."""

    dtype: torch.dtype
    vocab: int
    most: int


def _default(device: Device, problem: Problem) -> Config:
    # 16 elements per thread.
    block_v = min(4096, max(256, next_pow2(problem.vocab)))
    return {"BLOCK_V": block_v, "SCAN_WARPS": max(1, block_v // 512), "FINISH_WARPS": 8}


SPACE = Space(
    default=_default,
    axes={"BLOCK_V": (256, 1024, 2048, 4096), "SCAN_WARPS": (1, 2, 4, 8), "FINISH_WARPS": (4, 8)},
    refusal=lambda device, problem, c: "over 16 elements per thread" if c["BLOCK_V"] > 512 * c["SCAN_WARPS"] else None,
)


@Example.of
def _example(inputs: Inputs, rows: int, vocab: int, dtype: torch.dtype, row_stride: int = 0) -> tuple[Tensor, Tensor]:
    logits = inputs.randn(rows, row_stride or vocab, dtype=dtype, scale=4.0)[:, :vocab]
    return logits, inputs.randint(0, vocab, rows)


@Example.of
def _top_example(
    inputs: Inputs, wanted: tuple[int, ...], most: int, example: Example, *, coarse: bool = False
) -> tuple[Tensor, Tensor, Tensor, int]:
    logits, ids = example.make(inputs)
    return logits.round() if coarse else logits, ids, inputs.tensor(wanted, torch.int32), most


EXAMPLES = (
    _example("rows", 4, 1000, torch.bfloat16),
    _example("strided", 3, 300, torch.float16, row_stride=320),
    _example("wide", 2, 17001, torch.float32),
    _example("one", 1, 1, torch.float32),
)
TOP_EXAMPLES = (
    _top_example("rows", (-1, 0, 5, 20), 20, EXAMPLES[0]),
    _top_example("strided", (3, 20, -1), 20, EXAMPLES[1]),
    _top_example("ties", (32, 1), 32, EXAMPLES[2], coarse=True),
    _top_example("one", (4,), 5, EXAMPLES[3]),
)

# ---- kernels

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_MISSING = tl.constexpr(-(2**31) + 1)  # the key of an element that does not exist
_TAKEN = tl.constexpr(-(2**31))
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _key(x):
    """An int32 that has the same order as the floats x: -0.0 is 0.0, NaN is +inf. It is never _TAKEN or _MISSING."""
    bits = tl.where(x == x, tl.where(x == 0.0, 0.0, x), float("inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["ids_ptr", "wanted_ptr"])
def _scan_kernel(
    logits_ptr, ids_ptr, wanted_ptr, work_ptr, row_stride,
    V: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    PER_TILE: tl.constexpr = BLOCK_V // GROUP
    asked = True
    if wanted_ptr is not None:
        asked = tl.load(wanted_ptr + row) >= 0
    if asked:
        logits_ptr += row_start(row, row_stride, V)
        work_ptr += row * (TILES * (3 + PER_TILE))
        chosen = tl.load(logits_ptr + tl.load(ids_ptr + row)).to(tl.float32)
        token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        if wanted_ptr is not None:
            group = 3 * TILES + tile * PER_TILE + tl.arange(0, PER_TILE)
            known = tl.where(x == x, x, float("inf"))
            tl.store(work_ptr + group, tl.max(tl.reshape(known, [PER_TILE, GROUP]), axis=1))
        # If a tile contains only -inf, it must not subtract -inf from -inf.
        top = tl.maximum(tl.max(x, axis=0), _LOWEST)
        tl.store(work_ptr + tile, top)
        tl.store(work_ptr + TILES + tile, tl.sum(tl.exp2((x - top) * _LOG2E), axis=0))
        tl.store(work_ptr + 2 * TILES + tile, tl.sum((x > chosen).to(tl.int32), axis=0).to(tl.float32, bitcast=True))


@triton.jit
def _largest(keys, index, wanted, K: tl.constexpr):
    """(indices, keys) [K] of the `wanted` largest keys, the lower index first among equals; the others are 0 and _TAKEN."""
    column = tl.arange(0, K)
    found, found_keys = tl.zeros([K], tl.int32), tl.full([K], _TAKEN, tl.int32)
    for i in range(wanted):
        top = tl.max(keys, axis=0)
        at = tl.min(tl.where(keys == top, index, _LAST), axis=0)
        keys = tl.where(index == at, _TAKEN, keys)
        found, found_keys = tl.where(column == i, at, found), tl.where(column == i, top, found_keys)
    return found, found_keys


@triton.jit
def _likeliest(logits_ptr, group_ptr, wanted, V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr):
    """(ids, logits) of the `wanted` likeliest tokens of a row, in order, followed by -1 and -inf."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = tl.arange(0, BLOCK_G)
    maxima = _key(tl.load(group_ptr + group, mask=group < GROUPS, other=0.0))
    groups, group_keys = _largest(tl.where(group < GROUPS, maxima, _MISSING), group, wanted, K)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = (token < V) & (group_keys > _MISSING)[:, None]
    keys = tl.where(live, _key(tl.load(logits_ptr + token, mask=live, other=0.0).to(tl.float32)), _MISSING)
    ids, keys = _largest(tl.reshape(keys, [K * GROUP]), tl.reshape(token, [K * GROUP]), wanted, K)
    there = keys > _MISSING
    x = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(there, ids, -1), tl.where(there, x, float("-inf"))


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=["ids_ptr", "wanted_ptr"])
def _finish_kernel(
    logits_ptr, ids_ptr, wanted_ptr, work_ptr, logprob_ptr, rank_ptr, top_ids_ptr, top_ptr, row_stride,
    V: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_TILES: tl.constexpr,
    MOST: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wanted = 0
    if wanted_ptr is not None:
        wanted = tl.load(wanted_ptr + row)
    column = tl.arange(0, K)
    if wanted >= 0:
        logits_ptr += row_start(row, row_stride, V)
        work_ptr += row * (TILES * (3 + PER_TILE))
        tile = tl.arange(0, BLOCK_TILES)
        live = tile < TILES
        top = tl.load(work_ptr + tile, mask=live, other=float("-inf"))
        mass = tl.load(work_ptr + TILES + tile, mask=live, other=0.0)
        larger = tl.load(work_ptr + 2 * TILES + tile, mask=live, other=0.0).to(tl.int32, bitcast=True)
        row_top = tl.max(top, axis=0)
        log_mass = tl.log(tl.sum(mass * tl.exp2((top - row_top) * _LOG2E), axis=0))
        chosen = tl.load(logits_ptr + tl.load(ids_ptr + row)).to(tl.float32)
        tl.store(logprob_ptr + row, chosen - row_top - log_mass)
        tl.store(rank_ptr + row, 1 + tl.sum(larger, axis=0).to(tl.int64))
        if MOST > 0:
            ids, x = _likeliest(logits_ptr, work_ptr + 3 * TILES, wanted, V, TILES * PER_TILE, GROUP, K)
            tl.store(top_ids_ptr + row * MOST + column, ids.to(tl.int64), mask=column < MOST)
            tl.store(top_ptr + row * MOST + column, x - row_top - log_mass, mask=column < MOST)
    else:
        tl.store(logprob_ptr + row, 0.0)
        tl.store(rank_ptr + row, tl.full((), 0, tl.int64))
        if MOST > 0:
            tl.store(top_ids_ptr + row * MOST + column, tl.full([K], -1, tl.int64), mask=column < MOST)
            tl.store(top_ptr + row * MOST + column, tl.full([K], float("-inf"), tl.float32), mask=column < MOST)


# ---- launchers and ops


def _refuse(device: Device, problem: Problem) -> str | None:
    return "supports a vocabulary of up to 2^20 only" if problem.vocab > 1 << 20 else None


def _launch_top(
    config: Config, logits: Tensor, ids: Tensor, wanted: Tensor | None, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, vocab = logits.shape
    tiles = ceil_div(vocab, config["BLOCK_V"])
    # At most 4096 groups, which fit one program's registers; up to a vocabulary of 262144 a group has 64 tokens.
    group = min(config["BLOCK_V"], max(64, next_pow2(ceil_div(tiles * config["BLOCK_V"], 4096))))
    per_tile = config["BLOCK_V"] // group
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top_ids = torch.empty(rows, most, dtype=torch.int64, device=logits.device)
    top = torch.empty(rows, most, dtype=torch.float32, device=logits.device)
    # Per row: largest logit, mass and number of larger logits of each tile, then the largest logit of each group.
    work = torch.empty(rows, tiles * (3 + per_tile), dtype=torch.float32, device=logits.device)
    if rows:
        stride = rows_of(logits)[1]
        constants = {"V": vocab, "TILES": tiles, "GROUP": group}
        _scan_kernel[(rows * tiles,)](
            logits, ids, wanted, work, stride, **constants, BLOCK_V=config["BLOCK_V"], num_warps=config["SCAN_WARPS"]
        )
        _finish_kernel[(rows,)](
            logits, ids, wanted, work, logprob, rank, top_ids, top, stride, **constants, PER_TILE=per_tile,
            BLOCK_TILES=next_pow2(tiles), MOST=most, K=MOST_TOP_LOGPROBS, num_warps=config["FINISH_WARPS"],
        )  # fmt: skip
    return logprob, rank, top_ids, top


def _launch(config: Config, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logprob, rank, _, _ = _launch_top(config, logits, ids, None, 0)
    return logprob, rank


token_logprobs_op = Op(
    name="token_logprobs",
    reference=_reference,
    problem=lambda logits, ids: Problem(logits.dtype, logits.shape[1], 0),
    cost=_cost,
    examples=EXAMPLES,
    make=logprob_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, refuse=_refuse),),
)

top_logprobs_op = Op(
    name="top_logprobs",
    reference=_top_reference,
    problem=lambda logits, ids, wanted, most: Problem(logits.dtype, logits.shape[1], most),
    cost=_top_cost,
    examples=TOP_EXAMPLES,
    make=top_logprob_arguments,
    fake=lambda logits, ids, wanted, most: _nothing(logits, wanted, most),
    impls=(Impl(name="triton", launch=_launch_top, space=SPACE, batch_invariant=True, refuse=_refuse),),
)


# ---- public functions


def token_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and rank of one token per row.

    Args:
        logits: [B, V], bf16, fp16 or fp32; rows may be strided.
        ids: [B] int64, each in [0, V).

    Returns:
        (logprob [B] float32, rank [B] int64; 1 is the most likely, ties share the best).

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check("token_logprobs", logits, ids=(ids, torch.int64))
    return token_logprobs_op(rows_ready(logits), ids)


def top_logprobs(logits: Tensor, ids: Tensor, wanted: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of one token per row, and the likeliest tokens of each row.

    Args:
        logits: [B, V], bf16, fp16 or fp32; rows may be strided.
        ids: [B] int64, each in [0, V).
        wanted: [B] int32, the number of likeliest tokens, at most `most`; if negative, the row is not read and has no results.
        most: K, columns of the result, 1 to 32.

    Returns:
        (logprob [B] float32, rank [B] int64, top_ids [B, K] int64, top_logprobs [B, K] float32), likeliest first. Results that
        a row does not request, or that exceed V, are 0, 0, -1 and -inf.

    Raises:
        ValueError: a shape, dtype or `most` does not fit.
    """
    _check("top_logprobs", logits, ids=(ids, torch.int64), wanted=(wanted, torch.int32))
    if not 1 <= most <= MOST_TOP_LOGPROBS:
        raise ValueError(f"top_logprobs: most is {most}, wanted 1 to {MOST_TOP_LOGPROBS}")
    return top_logprobs_op(rows_ready(logits), ids, wanted, most)


def _check(name: str, logits: Tensor, **rows: tuple[Tensor, torch.dtype]) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"{name}: logits must be floats [B, V], got {tuple(logits.shape)} {logits.dtype}")
    for argument, (value, dtype) in rows.items():
        if value.shape != logits.shape[:1] or value.dtype != dtype or not value.is_contiguous():
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"{name}: {argument} must be contiguous [{logits.shape[0]}] {dtype}, got {got}")
