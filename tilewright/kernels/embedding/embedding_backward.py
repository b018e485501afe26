"""The gradient of an embedding table, for single ids and for bags. Additions are made in a fixed order.

    dweight[v, :] = sum over t with ids[t] = v of scales[t] dy[bags[t], :]

    # V rows of the table, D columns, T ids, B bags

    dy: [B, D] bf16, fp16 or fp32, contiguous; ids: [T] int64. bags: [T] int64, the row of dy that belongs to each id. None: id
    t has row t, and B = T. scales: [T] float32 (1 / size of a bag, a weight, 1 / frequency) or None. chosen: int32 [B, D] from
    the maximum of bags, or None. If it is given, an entry counts only in the columns in which it was chosen. padding: the id
    whose gradient is zero, or None.

The ids are sorted (stably, by torch), so that the entries of a row are neighbours. They are divided into windows of 64 entries.
The entries of one id in one window are added in order. An id that spans several windows leaves a float32 partial sum in each,
and a second launch adds these in order. There are no atomics and no host synchronisation, and many programs share the work even
for a token that makes up half of the batch.

Memory-bound: T rows in, V rows out (a dense gradient consists mostly of zeros).
Not supported: sparse gradients; a gradient of the scales.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.embedding.inputs import embedding_backward_arguments
from tilewright.kernels.launch.row_space import row_problem
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["embedding_backward_op"]


def _reference(
    dy: Tensor, ids: Tensor, bags: Tensor | None, scales: Tensor | None, chosen: Tensor | None, rows: int, padding: int | None
) -> Tensor:
    wide = torch.promote_types(dy.dtype, torch.float32)
    entries = dy.to(wide) if bags is None else dy.to(wide)[bags]
    if scales is not None:
        entries = entries * scales[:, None].to(wide)
    if chosen is not None:
        own = torch.arange(ids.shape[0], device=ids.device)[:, None]
        entries = entries * ((chosen if bags is None else chosen[bags]) == own)
    if padding is not None:
        entries = entries * (ids != padding)[:, None]
    return torch.zeros((rows, dy.shape[1]), dtype=wide, device=dy.device).index_add(0, ids, entries).to(dy.dtype)


def _cost(
    dy: Tensor, ids: Tensor, bags: Tensor | None, scales: Tensor | None, chosen: Tensor | None, rows: int, padding: int | None
) -> Cost:
    extra = sum(t.nbytes for t in (bags, scales, chosen) if t is not None)
    out = rows * dy.shape[1] * dy.element_size()
    return Cost(flops=ids.shape[0] * dy.shape[1], bytes=dy.nbytes + ids.nbytes + out + extra)


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {
        "BLOCK_D": 64 if problem.cols <= 64 else 128 if problem.cols <= 128 else 512,
        "num_warps": 4,
    },
    axes={"BLOCK_D": (64, 128, 512), "num_warps": (4,)},
)


@Example.of
def _example(
    inputs: Inputs, ids: int, cols: int, rows: int, *, bags: int = 0, dtype: torch.dtype = torch.bfloat16, hot: int = 0,
    scaled: bool = False, maximum: bool = False, padding: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    which = inputs.randint(0, rows, ids)
    which[ids - hot :] = 2  # an id that spans several windows
    bag = inputs.randint(0, bags, ids).sort().values if bags else None
    chosen = inputs.randint(0, ids, bags, cols, dtype=torch.int32) if maximum else None
    scales = inputs.randn(ids) if scaled else None
    return inputs.randn(bags or ids, cols, dtype=dtype), which, bag, scales, chosen, rows, padding


EXAMPLES = (
    _example("ids", 21, 40, 13),
    _example("hot", 140, 33, 7, hot=130, dtype=torch.float32),
    _example("bags", 66, 520, 5, bags=9, scaled=True, padding=4, dtype=torch.float16),
    _example("maxima", 40, 40, 5, bags=9, maximum=True),
    _example("one", 1, 1, 3, dtype=torch.float32),
)

# ---- kernels

WINDOW = 64
_WINDOW = tl.constexpr(WINDOW)
_AT_ONCE = tl.constexpr(2)
_PARTS_AT_ONCE = tl.constexpr(4)


@triton.jit(do_not_specialize=["n_ids", "n_rows", "padding"])
def _windows_kernel(
    dy_ptr, sorted_ptr, order_ptr, bags_ptr, scales_ptr, chosen_ptr, dweight_ptr, parts_ptr, n_ids, n_rows, padding,
    D: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Processes ENTRIES sorted entries in parallel. The first entry of an id in a window adds all entries of the id there."""
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    first = (tl.program_id(0) // TILES).to(tl.int64) * ENTRIES
    cols = (tl.program_id(0) % TILES) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    end = tl.minimum((first // _WINDOW + 1) * _WINDOW, n_ids)
    t = first + tl.arange(0, ENTRIES)
    own = tl.load(sorted_ptr + t, mask=t < end, other=-1)
    before = tl.load(sorted_ptr + t - 1, mask=(t > 0) & (t < end), other=-1)
    behind = t[:, None] + tl.arange(0, _WINDOW)[None, :]
    same = tl.load(sorted_ptr + behind, mask=behind < end, other=-1) == own[:, None]
    wanted = (own != padding) & (own >= 0) & (own < n_rows) & ((before != own) | (t % _WINDOW == 0))
    count = tl.where(wanted, tl.sum(same.to(tl.int32), axis=1), 0)
    acc = tl.zeros([ENTRIES, BLOCK_D], tl.float32)
    for start in range(0, tl.max(count, axis=0), _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            live = start + i < count
            entry = tl.load(order_ptr + t + start + i, mask=live, other=0)
            row = entry
            if bags_ptr is not None:
                row = tl.load(bags_ptr + entry, mask=live, other=0)
            mask = live[:, None] & (cols < D)
            dy = tl.load(dy_ptr + row[:, None] * D + cols, mask=mask, other=0.0).to(tl.float32)
            if scales_ptr is not None:
                dy *= tl.load(scales_ptr + entry, mask=live, other=0.0)[:, None]
            if chosen_ptr is not None:
                chosen = tl.load(chosen_ptr + row[:, None] * D + cols, mask=mask, other=-1)
                dy = tl.where(chosen == entry.to(tl.int32)[:, None], dy, 0.0)
            acc += dy
    after = tl.load(sorted_ptr + t + count, mask=wanted & (t + count < n_ids), other=-1)
    whole = (before != own) & (after != own)
    mask = (wanted & whole)[:, None] & (cols < D)
    tl.store(dweight_ptr + own[:, None] * D + cols, acc.to(dweight_ptr.dtype.element_ty), mask=mask)
    # Part 0 belongs to an id that began in an earlier window, part 1 to an id that begins here and continues.
    part = t // _WINDOW * 2 + (before != own).to(tl.int64)
    tl.store(parts_ptr + part[:, None] * D + cols, acc, mask=(wanted & ~whole)[:, None] & (cols < D))


@triton.jit(do_not_specialize=["n_ids", "n_rows", "padding"])
def _crossing_kernel(sorted_ptr, parts_ptr, dweight_ptr, n_ids, n_rows, padding, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add the partial sums of the id that begins in a window and continues in the next ones, if there is one."""
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    window = (tl.program_id(0) // TILES).to(tl.int64)
    last = (window + 1) * _WINDOW - 1
    own = tl.load(sorted_ptr + last, mask=last + 1 < n_ids, other=-1)
    after = tl.load(sorted_ptr + last + 1, mask=last + 1 < n_ids, other=-2)
    before = tl.load(sorted_ptr + window * _WINDOW - 1, mask=window > 0, other=-1)
    if (own == after) & (before != own) & (own != padding) & (own >= 0) & (own < n_rows):
        cols = (tl.program_id(0) % TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_row = cols < D
        acc = tl.load(parts_ptr + (2 * window + 1) * D + cols, mask=in_row, other=0.0)
        following = window + 1
        more = _PARTS_AT_ONCE + 0
        while more == _PARTS_AT_ONCE:
            few = following + tl.arange(0, _PARTS_AT_ONCE)
            heads = tl.load(sorted_ptr + few * _WINDOW, mask=few * _WINDOW < n_ids, other=-1)
            live = heads == own
            parts = tl.load(parts_ptr + 2 * few[:, None] * D + cols[None, :], mask=live[:, None] & in_row[None, :], other=0.0)
            acc += tl.sum(parts, axis=0)
            more = tl.sum(live.to(tl.int32), axis=0)
            following += _PARTS_AT_ONCE
        tl.store(dweight_ptr + own * D + cols, acc.to(dweight_ptr.dtype.element_ty), mask=in_row)


def _launch(
    config: Config, dy: Tensor, ids: Tensor, bags: Tensor | None, scales: Tensor | None, chosen: Tensor | None, rows: int,
    padding: int | None,
) -> Tensor:  # fmt: skip
    cols, count = dy.shape[1], ids.shape[0]
    dweight = torch.zeros((rows, cols), dtype=dy.dtype, device=dy.device)
    if not count or not cols:
        return dweight
    ordered, order = torch.sort(ids, stable=True)
    windows, tiles = -(-count // WINDOW), triton.cdiv(cols, config["BLOCK_D"])
    parts = torch.empty((2 * windows, cols), dtype=torch.float32, device=dy.device)
    # No id is -1, so a padding of -1 leaves out no id.
    numbers = (count, rows, -1 if padding is None else padding)
    entries = max(2, min(16, 2048 // config["BLOCK_D"]))
    _windows_kernel[(triton.cdiv(count, entries) * tiles,)](
        dy, ordered, order, bags, scales, chosen, dweight, parts, *numbers, D=cols, ENTRIES=entries, **config
    )
    if windows > 1:
        _crossing_kernel[(windows * tiles,)](ordered, parts, dweight, *numbers, D=cols, **config)
    return dweight


embedding_backward_op = Op(
    name="embedding_backward",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=embedding_backward_arguments,
    fake=lambda dy, ids, bags, scales, chosen, rows, padding: dy.new_empty((rows, dy.shape[1])),
    impls=(Impl(name="triton", launch=_launch, space=SPACE),),
)
