"""Edits of logits before a token is drawn, as requested per slot: penalties, biases, bans, and sets of allowed tokens.

    x = logits[r, t],  c = counts[s, t],  s = slots[r]          c & 1: t is in the prompt; n = c >> 1: times it was generated
    repetition   x / p if x > 0 else x * p    where c > 0       p = penalties[s, 0]; 1 is off
    presence     x - penalties[s, 1]          where n > 0       0 is off
    frequency    x - n * penalties[s, 2]                        0 is off
    allowed      -inf where bit t of allowed[s] is 0
    entries      x[ids[s, i]] += before[s, i] if positions[r] < until[s] else after[s, i]        ids[s, i] < 0: no entry

in this order. A ban is an entry of -inf. A ban that ends, such as that of the end-of-text token before `min_tokens`, has
another number for the positions after it. The tables have a row for each slot and stay on the device; a step passes only slots
and positions.

    logits: [R, V] of bf16, fp16 or fp32, rows may be strided. Result: a new [R, V] of float32.

Two launches: one over tiles of the logits, which reads counts only for rows that have a penalty, and one with a program per row
for the entries. Limited by bytes. The ids of one slot must differ, and slots must be in range (neither is checked). Not
supported: backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.row_space import Rows, row_problem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_ready
from tilewright.kernels.sampling.inputs import edit_logits_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["SPACE", "edit_logits", "edit_logits_op"]

# R rows, V tokens, S slots, W entries per slot


def _reference(
    logits: Tensor, slots: Tensor, positions: Tensor, counts: Tensor, penalties: Tensor, ids: Tensor, before: Tensor,
    after: Tensor, until: Tensor, allowed: Tensor,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(logits.dtype, torch.float32)
    out = logits.to(wide, copy=True)
    factors = penalties[slots].to(wide)
    rows = (factors != factors.new_tensor([1.0, 0.0, 0.0])).any(1).nonzero()[:, 0]
    if rows.numel():
        x, count, factor = out[rows], counts[slots[rows]].int(), factors[rows]
        repetition, presence, frequency = factor[:, 0:1], factor[:, 1:2], factor[:, 2:3]
        x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        times = count >> 1
        out[rows] = x - (times * frequency + (times > 0) * presence)
    rows = (allowed[slots] != -1).any(1).nonzero()[:, 0]
    if rows.numel():
        token = torch.arange(logits.shape[1], device=logits.device)
        kept = (allowed[slots[rows]][:, token // 32] >> (token % 32)) & 1
        out[rows] = out[rows].masked_fill(kept == 0, -torch.inf)
    entry = ids[slots]
    row, at = (entry >= 0).nonzero(as_tuple=True)
    if row.numel():
        slot = slots[row]
        add = torch.where(positions[row] < until[slot], before[slot, at], after[slot, at])
        out[row, entry[row, at].long()] += add.to(wide)
    return out


def _cost(
    logits: Tensor, slots: Tensor, positions: Tensor, counts: Tensor, penalties: Tensor, ids: Tensor, before: Tensor,
    after: Tensor, until: Tensor, allowed: Tensor,
) -> Cost:  # fmt: skip
    rows, vocab = logits.shape
    read = logits.nbytes + rows * (2 * vocab + 4 * allowed.shape[1] + 12 * ids.shape[1])
    return Cost(flops=8 * logits.numel(), bytes=read + 4 * logits.numel())


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    # 8 elements per thread: one 16-byte load of bf16 logits, one of counts, and the stores of the results.
    block_v = min(2048, max(128, next_pow2(problem.cols)))
    return {"BLOCK_V": block_v, "num_warps": max(1, block_v // 256)}


SPACE = Space(
    default=_default,
    axes={"BLOCK_V": (128, 1024, 2048, 4096), "num_warps": (1, 4, 8, 16)},
    refusal=lambda device, problem, c: "over 16 elements per thread" if c["BLOCK_V"] > 512 * c["num_warps"] else None,
)


@Example.of
def _example(
    inputs: Inputs, rows: int, vocab: int, dtype: torch.dtype, *, entries: int = 4, row_stride: int = 0
) -> tuple[Tensor, ...]:
    _, *tables, allowed = edit_logits_arguments(inputs, M=rows, N=vocab, entries=entries, dtype=dtype)
    tables[4] = torch.where(inputs.randint(0, 4, *tables[4].shape) == 0, -1, tables[4])  # fewer entries
    tables[5] = torch.where(inputs.randint(0, 4, *tables[5].shape) == 0, -torch.inf, tables[5])  # bans that end
    allowed = torch.where(tables[0][:, None] % 2 == 0, inputs.randint(-(2**31), 2**31, *allowed.shape), -1).to(torch.int32)
    logits = inputs.randn(rows, row_stride or vocab, dtype=dtype, scale=3.0)[:, :vocab]
    return (logits, *tables, allowed)


EXAMPLES = (
    _example("rows", 4, 1000, torch.bfloat16),
    _example("strided", 3, 300, torch.float16, entries=9, row_stride=320),
    _example("wide", 2, 9001, torch.float32, entries=64),
    _example("one", 1, 1, torch.float32, entries=1),
)

# ---- kernels

_POINTERS = ["slots_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=["row_stride"], do_not_specialize_on_alignment=_POINTERS)
def _tiles_kernel(
    logits_ptr, slots_ptr, counts_ptr, penalties_ptr, allowed_ptr, out_ptr, row_stride,
    V: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // TILES).to(tl.int64)
    token = (tl.program_id(0) % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    live = token < V
    slot = tl.load(slots_ptr + row)
    repetition = tl.load(penalties_ptr + 3 * slot)
    presence = tl.load(penalties_ptr + 3 * slot + 1)
    frequency = tl.load(penalties_ptr + 3 * slot + 2)
    x = tl.load(logits_ptr + row * row_stride + token, mask=live, other=0.0).to(tl.float32)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    if penalised:
        count = tl.load(counts_ptr + slot * V + token, mask=live, other=0).to(tl.int32)
        repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(count > 0, repeated, x)
        times = count >> 1
        x -= times.to(tl.float32) * frequency + tl.where(times > 0, presence, 0.0)
    bits = tl.load(allowed_ptr + slot * WORDS + token // 32, mask=live, other=0)
    x = tl.where(((bits >> (token % 32)) & 1) != 0, x, float("-inf"))
    tl.store(out_ptr + row * V + token, x, mask=live)


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _entries_kernel(
    out_ptr, slots_ptr, positions_ptr, ids_ptr, before_ptr, after_ptr, until_ptr,
    V: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    entry = tl.arange(0, BLOCK_W)
    token = tl.load(ids_ptr + slot * W + entry, mask=entry < W, other=-1)
    live = token >= 0
    if tl.load(positions_ptr + row) < tl.load(until_ptr + slot):
        add = tl.load(before_ptr + slot * W + entry, mask=live, other=0.0)
    else:
        add = tl.load(after_ptr + slot * W + entry, mask=live, other=0.0)
    at = out_ptr + row * V + token
    tl.store(at, tl.load(at, mask=live, other=0.0) + add, mask=live)


def _launch(
    config: Config, logits: Tensor, slots: Tensor, positions: Tensor, counts: Tensor, penalties: Tensor, ids: Tensor,
    before: Tensor, after: Tensor, until: Tensor, allowed: Tensor,
) -> Tensor:  # fmt: skip
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    tiles, width = ceil_div(vocab, config["BLOCK_V"]), ids.shape[1]
    if rows:
        _tiles_kernel[(rows * tiles,)](
            logits, slots, counts, penalties, allowed, out, logits.stride(0), V=vocab, WORDS=allowed.shape[1], TILES=tiles,
            **config,
        )  # fmt: skip
        _entries_kernel[(rows,)](
            out, slots, positions, ids, before, after, until, V=vocab, W=width, BLOCK_W=next_pow2(width), num_warps=4
        )
    return out


edit_logits_op = Op(
    name="edit_logits",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=edit_logits_arguments,
    fake=lambda logits, *_: torch.empty(
        logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device
    ),
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def edit_logits(
    logits: Tensor, slots: Tensor, positions: Tensor, *, counts: Tensor, penalties: Tensor, ids: Tensor, before: Tensor,
    after: Tensor, until: Tensor, allowed: Tensor,
) -> Tensor:  # fmt: skip
    """Logits after penalties, allowed tokens, biases and bans; see the top of this file for the order.

    Args:
        logits: [R, V], bf16, fp16 or fp32; rows may be strided.
        slots: [R] int64, the row of the tables for each row of logits.
        positions: [R] int64, the position of the token to be drawn.
        counts: [S, V] int16: 1 if the token is in the prompt, plus 2 for each time it was generated.
        penalties: [S, 3] float32: repetition (1 is off), presence and frequency (0 is off).
        ids: [S, W] int32 token ids, no two the same in a row; negative: no entry.
        before, after: [S, W] float32, added to the logits of `ids`: `before` at positions below `until`, `after` from there on.
        until: [S] int64.
        allowed: [S, ceil(V / 32)] int32, one bit per token, the lowest first; all ones (-1) allow everything.

    Returns:
        [R, V] float32.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"edit_logits: logits must be floats [R, V] with V > 0, got {tuple(logits.shape)} {logits.dtype}")
    (rows, vocab), table = logits.shape, counts.shape[:1]
    width = ids.shape[-1]
    wanted = {
        "slots": (slots, (rows,), torch.int64),
        "positions": (positions, (rows,), torch.int64),
        "counts": (counts, (*table, vocab), torch.int16),
        "penalties": (penalties, (*table, 3), torch.float32),
        "ids": (ids, (*table, width), torch.int32),
        "before": (before, (*table, width), torch.float32),
        "after": (after, (*table, width), torch.float32),
        "until": (until, tuple(table), torch.int64),
        "allowed": (allowed, (*table, -(-vocab // 32)), torch.int32),
    }
    for name, (value, shape, dtype) in wanted.items():
        if tuple(value.shape) != shape or value.dtype != dtype or not value.is_contiguous():
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"edit_logits: {name} must be contiguous {list(shape)} {dtype}, got {got}")
    return edit_logits_op(rows_ready(logits), slots, positions, counts, penalties, ids, before, after, until, allowed)
