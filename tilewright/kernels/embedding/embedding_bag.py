"""Embedding bags: the sum, mean or maximum of the table's rows for each bag of ids.

    y[b, :] = reduce over t in bag b, ids[t] != padding, of scales[t] weight[ids[t], :]

    # V rows of the table, D columns, T ids, B bags

    weight: [V, D] bf16, fp16 or fp32, contiguous; ids: [T] int64; offsets: [B] int64, ascending: the index of the first id of
    each bag. The last bag ends with the last id. scales: [T] float32, or None; padding: an id that is left out of sums, counts
    and maxima, or None. y: [B, D]. For "max" there is also chosen, int32 [B, D]: the t of the maximum, the first among equal
    values, -1 for an empty bag. An empty bag gives zeros. Accumulated in float32, always in the order of the ids. An id outside
    of the table is an error on a CPU. On a GPU nothing is read for it, and a sum or a mean becomes NaN.

Memory-bound: one row in per id, B rows out. A program computes BLOCK_D columns of a bag and reads the rows of 8 ids at once.
Not supported: scales with "mean" or "max" (torch has none either), "max" of a table that contains NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.embedding.inputs import embedding_bag_arguments
from tilewright.kernels.launch.row_space import row_problem
from tilewright.kernels.launch.shapes import ceil_div, next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["MODES", "SPACE", "bags_of", "embedding_bag", "embedding_bag_op"]

MODES = ("max", "mean", "sum")

# ---- reference


def bags_of(offsets: Tensor, ids: int) -> Tensor:
    """The bag of each of `ids` ids, int64 [ids]."""
    return torch.searchsorted(offsets, torch.arange(ids, device=offsets.device), right=True) - 1


def _reference(
    weight: Tensor, ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str, padding: int | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(weight.dtype, torch.float32)
    bags, bag = offsets.shape[0], bags_of(offsets, ids.shape[0])
    rows = weight[ids].to(wide)
    kept = (torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding)[:, None]
    index = bag[:, None].expand_as(rows)
    if mode == "max":
        low = torch.where(kept, rows, -torch.inf)
        y = torch.full((bags, weight.shape[1]), -torch.inf, dtype=wide, device=weight.device)
        y = y.scatter_reduce(0, index, low, "amax")
        place = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(rows)
        place = torch.where(kept & (rows == y[bag]), place, ids.shape[0])
        chosen = torch.full(y.shape, ids.shape[0], device=ids.device).scatter_reduce(0, index, place, "amin")
        empty = chosen == ids.shape[0]
        return y.masked_fill(empty, 0.0).to(weight.dtype), chosen.masked_fill(empty, -1).to(torch.int32)
    rows = rows if scales is None else rows * scales[:, None].to(wide)
    y = torch.zeros((bags, weight.shape[1]), dtype=wide, device=weight.device).index_add(0, bag, rows * kept)
    if mode == "mean":
        y = y / torch.zeros(bags, dtype=wide, device=ids.device).index_add(0, bag, kept[:, 0].to(wide)).clamp_min(1)[:, None]
    return y.to(weight.dtype), torch.empty((0, weight.shape[1]), dtype=torch.int32, device=ids.device)


def _fake(
    weight: Tensor, ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str, padding: int | None
) -> tuple[Tensor, Tensor]:
    shape = (offsets.shape[0], weight.shape[1])
    return weight.new_empty(shape), ids.new_empty(shape if mode == "max" else (0, shape[1]), dtype=torch.int32)


def _cost(weight: Tensor, ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str, padding: int | None) -> Cost:
    row = weight.shape[1] * weight.element_size()
    out = offsets.shape[0] * (row + (weight.shape[1] * 4 if mode == "max" else 0))
    read = ids.shape[0] * row + ids.nbytes + offsets.nbytes + (0 if scales is None else scales.nbytes)
    return Cost(flops=ids.shape[0] * weight.shape[1], bytes=read + out)


# ---- space and examples


SPACE = Space(
    default=lambda device, problem: {
        "BLOCK_D": max(32, min(512, next_pow2(problem.cols))),
        "num_warps": 4 if problem.cols > 128 else 1,
    },
    axes={"BLOCK_D": (32, 128, 512), "num_warps": (1, 4)},
    refusal=lambda device, problem, c: (
        "BLOCK_D wider than the row needs" if c["BLOCK_D"] >= 2 * problem.cols and c["BLOCK_D"] > 32 else None
    ),
)


@Example.of
def _example(
    inputs: Inputs, ids: int, cols: int, offsets: list[int], mode: str, *, dtype: torch.dtype = torch.bfloat16,
    scaled: bool = False, padding: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, str, int | None]:  # fmt: skip
    scales = inputs.randn(ids) if scaled else None
    return (
        inputs.randn(13, cols, dtype=dtype), inputs.randint(0, 13, ids), inputs.tensor(offsets, torch.int64),
        scales, mode, padding,
    )  # fmt: skip


EXAMPLES = (
    _example("sum", 11, 40, [0, 3, 3, 4], "sum"),
    _example("scaled", 12, 600, [0, 11], "sum", scaled=True, dtype=torch.float16),
    _example("mean", 21, 33, [0, 3, 20, 20], "mean", dtype=torch.float32, padding=5),
    _example("max", 21, 40, [0, 3, 20, 20], "max", padding=5),
    _example("one", 1, 1, [0], "max", dtype=torch.float32),
)

# ---- kernel

_AT_ONCE = tl.constexpr(8)


@triton.jit(do_not_specialize=["n_ids", "n_bags", "n_rows", "padding"])
def _bag_kernel(
    weight_ptr, ids_ptr, offsets_ptr, scales_ptr, y_ptr, chosen_ptr, n_ids, n_bags, n_rows, padding,
    D: tl.constexpr, MODE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    bag = (tl.program_id(0) // TILES).to(tl.int64)
    cols = (tl.program_id(0) % TILES) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = cols < D
    start = tl.load(offsets_ptr + bag)
    end = tl.load(offsets_ptr + bag + 1, mask=bag + 1 < n_bags, other=n_ids)
    acc = tl.full([BLOCK_D], float("-inf") if MODE == "max" else 0.0, tl.float32)
    chosen = tl.full([BLOCK_D], -1, tl.int32)
    count = tl.zeros([_AT_ONCE], tl.int32)
    for t in range(start, end, _AT_ONCE):
        entries = t + tl.arange(0, _AT_ONCE)
        ids = tl.load(ids_ptr + entries, mask=entries < end, other=padding)
        live = (entries < end) & (ids != padding)
        count += live.to(tl.int32)
        inside = live & (ids >= 0) & (ids < n_rows)
        rows = tl.load(weight_ptr + ids[:, None] * D + cols[None, :], mask=inside[:, None] & in_row[None, :], other=0.0).to(
            tl.float32
        )
        if MODE == "max":
            live = inside
            rows = tl.where(live[:, None], rows, float("-inf"))
            best = tl.max(rows, axis=0)
            place = tl.where((rows == best[None, :]) & live[:, None], entries.to(tl.int32)[:, None], 2147483647)
            better = (best > acc) | ((chosen < 0) & (tl.sum(live.to(tl.int32), axis=0) > 0))
            chosen = tl.where(better, tl.min(place, axis=0), chosen)
            acc = tl.where(better, best, acc)
        else:
            if scales_ptr is not None:
                rows *= tl.load(scales_ptr + entries, mask=live, other=0.0)[:, None]
            acc += tl.sum(tl.where(live[:, None] & ~inside[:, None], float("nan"), rows), axis=0)
    if MODE == "max":
        acc = tl.where(chosen < 0, 0.0, acc)
        tl.store(chosen_ptr + bag * D + cols, chosen, mask=in_row)
    if MODE == "mean":
        acc /= tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(y_ptr + bag * D + cols, acc.to(y_ptr.dtype.element_ty), mask=in_row)


def _launch(
    config: Config, weight: Tensor, ids: Tensor, offsets: Tensor, scales: Tensor | None, mode: str, padding: int | None
) -> tuple[Tensor, Tensor]:
    y, chosen = _fake(weight, ids, offsets, scales, mode, padding)
    (bags, cols), rows = y.shape, weight.shape[0]
    if y.numel():
        # No id is -1, so a padding of -1 leaves out no id.
        _bag_kernel[(bags * ceil_div(cols, config["BLOCK_D"]),)](
            weight, ids, offsets, scales, y, chosen, ids.shape[0], bags, rows, -1 if padding is None else padding,
            D=cols, MODE=mode, **config,
        )  # fmt: skip
    return y, chosen


embedding_bag_op = Op(
    name="embedding_bag",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=embedding_bag_arguments,
    fake=_fake,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def embedding_bag(
    weight: Tensor, ids: Tensor, offsets: Tensor, mode: str = "mean", scales: Tensor | None = None, padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """The sum, mean or maximum of each bag's rows, without gradients. `ops.embedding_bag` describes the arguments.

    Returns ([B, D] of weight's dtype, int32 [B, D] for "max": the entry that each maximum came from; otherwise [0, D]).
    """
    if mode not in MODES:
        raise ValueError(f"embedding_bag: mode is {mode!r}, wanted one of {', '.join(MODES)}")
    if weight.dim() != 2 or ids.dim() != 1 or offsets.dim() != 1 or ids.dtype != torch.int64 or offsets.dtype != torch.int64:
        raise ValueError(
            f"embedding_bag: wanted weight [V, D], ids [T] and offsets [B] of int64; got {list(weight.shape)}, "
            f"{ids.dtype} {list(ids.shape)}, {offsets.dtype} {list(offsets.shape)}"
        )
    if scales is not None and (scales.shape != ids.shape or mode != "sum"):
        raise ValueError(
            f"embedding_bag: scales go with mode 'sum', one for each id {list(ids.shape)}; got {mode!r}, {list(scales.shape)}"
        )
    scales = None if scales is None else scales.to(torch.promote_types(scales.dtype, torch.float32)).contiguous()
    return embedding_bag_op(weight.contiguous(), ids.contiguous(), offsets.contiguous(), scales, mode, padding)
