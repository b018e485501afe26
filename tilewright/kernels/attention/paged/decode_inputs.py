"""Prepare the inputs of a decode step with one token per sequence from the state of the sequences' slots, and advance that
state.

    s = slots[r],  p = lines[s, 0],  page = table[s, p // S]                   # R rows, W pages in a table, S tokens per page
    token_ids[r] = last[s]     positions[r] = p        places[r] = page * S + p % S
    kv_lens[r] = p + 1         sampled_at[r] = p + 1   block_table[r, :] = table[s, :]   for the pages of p + 1 tokens
    seed[r], temperature[r], top_k[r], top_p[r], min_p[r], alternatives[r] = the rest of lines[s]
    lines[s, 0] = p + 1

    lines: [N, 5] int64, one line per slot: computed tokens | seed | temperature, top_k | top_p, min_p | alternatives, -
    If two names share a word, the first is its low half; the floats are float32, the others int32.

The last line is for padding rows: they write nowhere (place -1), see no keys (kv_lens 0), and their line does not change. So a
host that decodes sends only new data to the device. No slot except the last may occur twice (not checked).

One launch, one program per row. Limited by latency. Not supported: several tokens per row, backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["decode_inputs", "decode_inputs_op"]

LINE_WORDS = 5
"""int64 words per line."""


def _reference(
    slots: Tensor, lines: Tensor, last: Tensor, table: Tensor, page_size: int, token_ids: Tensor, positions: Tensor,
    places: Tensor, kv_lens: Tensor, block_table: Tensor, sampled_at: Tensor, seed: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, alternatives: Tensor,
) -> None:  # fmt: skip
    line, live = lines[slots], slots < lines.shape[0] - 1
    at, width = line[:, 0], table.shape[1]
    pages = table[slots].long()
    page = pages.gather(1, (at // page_size).clamp_max(width - 1)[:, None])[:, 0]
    token_ids.copy_(last[slots])
    positions.copy_(at)
    places.copy_(torch.where(live, page * page_size + at % page_size, -1))
    kv_lens.copy_(torch.where(live, at + 1, 0))
    sampled_at.copy_(at + 1)
    used = torch.arange(width, device=slots.device)[None, :] <= (at // page_size)[:, None]
    block_table.copy_(torch.where(used & live[:, None], pages, block_table.long()))
    seed.copy_(line[:, 1])
    halves = line.view(torch.int32)
    floats = halves.view(torch.float32)
    temperature.copy_(floats[:, 4])
    top_k.copy_(halves[:, 5])
    top_p.copy_(floats[:, 6])
    min_p.copy_(floats[:, 7])
    alternatives.copy_(halves[:, 8])
    lines[slots, 0] = torch.where(live, at + 1, at)


def _cost(slots: Tensor, lines: Tensor, last: Tensor, table: Tensor, page_size: int, *out: Tensor) -> Cost:
    read = slots.shape[0] * (8 * LINE_WORDS + 16 + 4 * table.shape[1])
    return Cost(flops=0, bytes=read + sum(part.nbytes for part in out))


# ---- space and examples


class Problem(NamedTuple):
    """The properties that an engine fixes; not the number of rows."""

    pages: int


SPACE = Space(
    default=lambda device, problem: {"BLOCK_W": 128, "num_warps": 1}, axes={"BLOCK_W": (32, 128, 512), "num_warps": (1, 4)}
)


def decode_inputs_arguments(
    inputs: Inputs, *, M: int, N: int = 256, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor | int, ...]:
    """M rows in the slots of M sequences, whose tables have N pages of 16 tokens; plus two slots, one of them for padding."""
    return _arguments(inputs, rows=M, pages=N, page_size=16)


def _arguments(inputs: Inputs, *, rows: int, pages: int, page_size: int, padding: int = 0) -> tuple[Tensor | int, ...]:
    slots = torch.cat([inputs.permutation(rows + 1)[: rows - padding], inputs.randint(rows + 1, rows + 2, padding)])
    lines = inputs.randint(-(2**62), 2**62, rows + 2, LINE_WORDS)
    lines[:, 0] = inputs.randint(0, pages * page_size, rows + 2)
    lines[-1, 0] = 0
    halves = lines.view(torch.int32).view(torch.float32)
    for place in (4, 6, 7):  # arbitrary bits would sometimes be NaN
        halves[:, place] = inputs.randn(rows + 2)
    last, table = inputs.randint(0, 1000, rows + 2), inputs.randint(0, 4096, rows + 2, pages).to(torch.int32)

    def out(dtype: torch.dtype, *more: int) -> Tensor:
        return inputs.randint(0, 9, rows, *more).to(dtype)

    wide, short, number = torch.int64, torch.int32, torch.float32
    return (
        slots, lines, last, table, page_size, out(wide), out(wide), out(wide), out(short), out(short, pages), out(wide),
        out(wide), out(number), out(short), out(number), out(number), out(short),
    )  # fmt: skip


_example = Example.sized(_arguments)
EXAMPLES = (
    _example("rows", 5, 40, 16),
    _example("padding", 4, 200, 4, padding=2),
    _example("one", 1, 1, 1),
    _example("only padding", 2, 3, 16, padding=2),
)


@triton.jit(do_not_specialize=["room"], do_not_specialize_on_alignment=["slots_ptr"])
def _kernel(
    slots_ptr, lines_ptr, last_ptr, table_ptr, token_ids_ptr, positions_ptr, places_ptr, kv_lens_ptr, block_table_ptr,
    sampled_at_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, alternatives_ptr, room,
    S: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    live = slot < room
    lines_ptr += slot * WORDS
    table_ptr += slot * W
    at = tl.load(lines_ptr)
    tl.store(token_ids_ptr + row, tl.load(last_ptr + slot))
    tl.store(positions_ptr + row, at)
    page = tl.load(table_ptr + tl.minimum(at // S, W - 1)).to(tl.int64)
    tl.store(places_ptr + row, tl.where(live, page * S + at % S, -1))
    tl.store(kv_lens_ptr + row, tl.where(live, at + 1, 0).to(tl.int32))
    tl.store(sampled_at_ptr + row, at + 1)
    tl.store(seed_ptr + row, tl.load(lines_ptr + 1))
    first, second, third = tl.load(lines_ptr + 2), tl.load(lines_ptr + 3), tl.load(lines_ptr + 4)
    tl.store(temperature_ptr + row, first.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(top_k_ptr + row, (first >> 32).to(tl.int32))
    tl.store(top_p_ptr + row, second.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(min_p_ptr + row, (second >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(alternatives_ptr + row, third.to(tl.int32))
    if live:
        used = tl.minimum(at // S + 1, W).to(tl.int32)
        for begin in range(0, used, BLOCK_W):
            column = begin + tl.arange(0, BLOCK_W)
            pages = tl.load(table_ptr + column, mask=column < used, other=0)
            tl.store(block_table_ptr + row * W + column, pages, mask=column < used)
        tl.store(lines_ptr, at + 1)


def _launch(config: Config, slots: Tensor, lines: Tensor, last: Tensor, table: Tensor, page_size: int, *out: Tensor) -> None:
    if slots.shape[0]:
        _kernel[(slots.shape[0],)](
            slots, lines, last, table, *out, room=lines.shape[0] - 1, S=page_size, W=table.shape[1], WORDS=LINE_WORDS,
            **config,
        )  # fmt: skip


_OUT = ("token_ids", "positions", "places", "kv_lens", "block_table", "sampled_at", "seed", "temperature", "top_k", "top_p")
_OUT += ("min_p", "alternatives")

decode_inputs_op = Op(
    name="decode_inputs",
    reference=_reference,
    fake=lambda *args: None,
    mutates=("lines", *_OUT),
    problem=lambda slots, lines, last, table, *_: Problem(table.shape[1]),
    cost=_cost,
    examples=EXAMPLES,
    make=decode_inputs_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def decode_inputs(
    slots: Tensor, lines: Tensor, last: Tensor, table: Tensor, page_size: int, *, token_ids: Tensor, positions: Tensor,
    places: Tensor, kv_lens: Tensor, block_table: Tensor, sampled_at: Tensor, seed: Tensor, temperature: Tensor, top_k: Tensor,
    top_p: Tensor, min_p: Tensor, alternatives: Tensor,
) -> None:  # fmt: skip
    """Write the inputs of a decode step, and count its tokens in the state of the slots; see the top of this file.

    Args:
        slots: [R] int64, in [0, N) (not checked); N - 1 is for padding.
        lines: [N, 5] int64, written.
        last: [N] int64, the newest token of each slot.
        table: [N, W] int32, the pages of each slot.
        page_size: tokens per page.
        token_ids, positions, places, sampled_at, seed: [R] int64, written.
        kv_lens, top_k, alternatives: [R] int32, written.
        temperature, top_p, min_p: [R] float32, written.
        block_table: [R, W] int32, written only for the pages that a row's tokens use.

    Raises:
        ValueError: a shape, a dtype or a layout does not fit.
    """
    rows, count = slots.shape[:1], lines.shape[:1]
    wide, short, number = torch.int64, torch.int32, torch.float32
    wanted = {
        "slots": (slots, rows, wide), "lines": (lines, (*count, LINE_WORDS), wide), "last": (last, count, wide),
        "table": (table, (*count, max(1, table.shape[-1])), short), "token_ids": (token_ids, rows, wide),
        "positions": (positions, rows, wide), "places": (places, rows, wide), "kv_lens": (kv_lens, rows, short),
        "block_table": (block_table, (*rows, table.shape[-1]), short), "sampled_at": (sampled_at, rows, wide),
        "seed": (seed, rows, wide), "temperature": (temperature, rows, number), "top_k": (top_k, rows, short),
        "top_p": (top_p, rows, number), "min_p": (min_p, rows, number), "alternatives": (alternatives, rows, short),
    }  # fmt: skip
    for name, (value, shape, dtype) in wanted.items():
        if tuple(value.shape) != tuple(shape) or value.dtype != dtype or not value.is_contiguous():
            got = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"decode_inputs: {name} must be contiguous {list(shape)} {dtype}, got {got}")
    if page_size < 1:
        raise ValueError(f"decode_inputs: page_size is {page_size}, wanted 1 or more")
    decode_inputs_op(
        slots, lines, last, table, page_size, token_ids, positions, places, kv_lens, block_table, sampled_at, seed,
        temperature, top_k, top_p, min_p, alternatives,
    )  # fmt: skip
