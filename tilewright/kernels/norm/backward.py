"""The gradients of layer_norm and rms_norm over the last dimension.

    h[t, :]  = (x[t, :] - mean) * scale,   scale = 1 / sqrt(variance + eps)    (rms_norm: mean 0, variance the mean square)
    g[t, :]  = weight * dy[t, :]
    dx[t, :] = scale (g - mean(g) - h mean(g h)) + dmore[t, :]                 (rms_norm: without mean(g))
    dweight  = sum_t dy[t, :] h[t, :],   dbias = sum_t dy[t, :]

    x, dy, dmore, dx: [..., D] of bf16, fp16 or fp32; weight, dweight, dbias: [D]. All arithmetic is float32. dmore is a second
    gradient that reaches x, and may be missing. add_rms_norm has one: its sum is used by later layers as well as by the norm.

**Saved by the forward pass**: x. For layer_norm it may also save stats, the mean and scale of each row, float32 [2, T], as
layer_norm.py returns them. With stats, dx of a row needs one round of two sums. Without stats, a first round computes mean and
variance. This reads no more memory, since the row is loaded anyway. eps is ignored where stats are given.

**dweight is a sum over all rows.** A fixed number of programs loop over the rows. Each keeps its own sum in registers, and a
second kernel adds these sums (device/partial_sums.py). There are no atomics, and a card returns the same bits every time. The
loads of the next rows are in flight during the computation. Rows over 8192 columns leave little or no room for the sums in
registers. Several programs then share a row (backward_cooperative.py, or backward_saved_stats.py with stats). Where rows do not
start at multiples of 16 bytes, backward_multi_pass.py reads them once more instead.

Memory-bound: two elements in, one out.
Not supported: second derivatives, gradients of eps.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device, device_of
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.dot import two_sums
from tilewright.kernels.device.partial_sums import column_sums
from tilewright.kernels.device.row_start import head_start, row_start
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import row_space
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of, rows_of_heads
from tilewright.kernels.norm.backward_cooperative import SPLIT_SPACE, refuse_split, split_gradients
from tilewright.kernels.norm.backward_multi_pass import wide_gradients
from tilewright.kernels.norm.backward_saved_stats import KEPT_SPACE, kept_gradients, refuse_kept
from tilewright.kernels.norm.inputs import layer_norm_backward_arguments, rms_norm_backward_arguments, row_statistics
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["layer_norm_backward_op", "rms_norm_backward_op"]

# ---- reference


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, dmore: Tensor | None, eps: float, centered: bool, stats: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) in x's and the weight's dtypes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    given, h = dy.to(wide), x.to(wide)
    if stats is not None:
        mean, scale = stats.to(wide).view(2, *x.shape[:-1], 1)
        h = h - mean
    else:
        h = h - h.mean(-1, keepdim=True) if centered else h
        scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h, g = h * scale, given * weight.to(wide)
    dx = g - h * (g * h).mean(-1, keepdim=True)
    if centered:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * scale if dmore is None else dx * scale + dmore.to(wide)
    rows = tuple(range(x.dim() - 1))
    dweight, dbias = ((given * h).sum(rows), given.sum(rows)) if rows else (given * h, given.clone())
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _layer_reference(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, stats: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(dy, x, weight, None, eps, True, stats)


def _rms_reference(dy: Tensor, x: Tensor, weight: Tensor, dmore: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _gradients(dy, x, weight, dmore, eps, False)[:2]


def _layer_cost(dy: Tensor, x: Tensor, weight: Tensor, eps: float, stats: Tensor | None = None) -> Cost:
    flops, kept = (14, 0) if stats is None else (11, stats.nbytes)
    return Cost(flops=flops * x.numel(), bytes=3 * x.nbytes + 3 * weight.nbytes + kept)


def _rms_cost(dy: Tensor, x: Tensor, weight: Tensor, dmore: Tensor | None, eps: float) -> Cost:
    return Cost(flops=10 * x.numel(), bytes=(3 + (dmore is not None)) * x.nbytes + 2 * weight.nbytes)


# ---- space and examples


class Problem(NamedTuple):
    """Everything that a config may depend on. The number of rows is not part of it."""

    dtype: torch.dtype
    cols: int
    centered: bool
    kept: bool = False
    """Whether saved statistics of the rows are given."""


def _default(device: Device, problem: Problem) -> Config:
    # The two sums of layer_norm spill at 16384 columns. H100, 8192 x 16384 bf16: 727 us, or 517 us when treated as wide rows.
    # rms_norm has one sum: 392 us.
    if problem.cols > (8192 if problem.centered else 16384):
        odd = problem.cols * problem.dtype.itemsize % 16
        widest = 2048 if odd else 8192 if problem.cols <= 16384 else 32768 // problem.dtype.itemsize
        return {"BLOCK_T": 1, "BLOCK_D": widest, "HELD": 1, "PER_SM": 1, "STAGES": 3, "num_warps": 16 if widest == 8192 else 32}
    block_d = max(32, next_pow2(problem.cols))
    warps = max(4, min(16, block_d // 512))
    return {
        "BLOCK_T": max(1, 2048 // block_d),
        "BLOCK_D": block_d,
        "HELD": 1,
        "PER_SM": 16 // warps,
        "STAGES": 3,
        "num_warps": warps,
    }


SPACE = row_space(
    _default,
    BLOCK_T=(1, 2, 4, 8, 16, 32, 64),
    BLOCK_D=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    HELD=(1,),
    PER_SM=(1, 2, 4),
    STAGES=(3,),
    num_warps=(4, 8, 16, 32),
)


def _inputs(
    inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, row_stride: int, mean: float
) -> tuple[Tensor, Tensor, Tensor]:
    dy = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
    x = inputs.randn(*shape, dtype=dtype)
    return dy, x + mean if mean else x, inputs.randn(shape[-1], dtype=dtype)


@Example.of
def _layer_example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0, mean: float = 0.0, kept: bool = False
) -> tuple[Tensor, Tensor, Tensor, float, Tensor | None]:  # fmt: skip
    dy, x, weight = _inputs(inputs, shape, dtype, row_stride, mean)
    return dy, x, weight, 1e-5, row_statistics(x, 1e-5) if kept else None


@Example.of
def _rms_example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0, more: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float]:  # fmt: skip
    return *_inputs(inputs, shape, dtype, row_stride, 0.0), inputs.randn(*shape, dtype=dtype) if more else None, 1e-6


LAYER_EXAMPLES = (
    _layer_example("rows", 40, 256),
    _layer_example("ragged", 3, 5, 100, dtype=torch.float32),
    _layer_example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _layer_example("one", 1, 1, dtype=torch.float32),
    _layer_example("wide", 2, 16500),
    _layer_example("far from zero", 2, 17001, mean=30.0, dtype=torch.float16),
    _layer_example("no rows", 0, 8),
    _layer_example("kept", 40, 256, kept=True),
    _layer_example("kept, ragged", 3, 5, 100, dtype=torch.float32, kept=True),
    _layer_example("kept, strided", 5, 128, row_stride=192, dtype=torch.float16, kept=True),
    _layer_example("kept, one", 1, 1, dtype=torch.float32, kept=True),
    _layer_example("kept, wide", 3, 16504, row_stride=16512, kept=True),
    _layer_example("kept, far from zero", 2, 17001, mean=30.0, dtype=torch.float16, kept=True),
    _layer_example("kept, no rows", 0, 8, kept=True),
)
RMS_EXAMPLES = (
    _rms_example("rows", 40, 256, more=True),
    _rms_example("ragged", 3, 5, 100, dtype=torch.float32),
    _rms_example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _rms_example("few", 1, 3, dtype=torch.float32),
    _rms_example("wide", 2, 16500, more=True),
    _rms_example("many blocks", 2, 17001, dtype=torch.float32),
    _rms_example("no rows", 0, 8),
)

# ---- kernel


@triton.jit
def _statistics(stats_ptr, rows, n_rows):
    """(mean, 1 / deviation) of rows, [BLOCK_T, 1]. Both are 0 for rows that do not exist, so these add 0 to the sums."""
    there = rows < n_rows
    return tl.load(stats_ptr + rows, mask=there, other=0.0), tl.load(stats_ptr + n_rows + rows, mask=there, other=0.0)


@triton.jit(do_not_specialize=["n_rows", "dy_row_stride", "x_row_stride", "more_row_stride"])
def _norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, more_ptr, dx_ptr, of_weight_ptr, of_bias_ptr, stats_ptr,
    n_rows, dy_row_stride, x_row_stride, more_row_stride, eps,
    D: tl.constexpr, HEADS: tl.constexpr, CENTERED: tl.constexpr, HAS_MORE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """stats_ptr: [2, n_rows], the mean and 1 / deviation of each row (CENTERED only); None (at compile time) if not given."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0)
    of_weight = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    of_bias = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if stats_ptr is not None:
        first = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mean, scale = _statistics(stats_ptr, first, n_rows)
    for start in tl.range(tl.program_id(0) * BLOCK_T, n_rows, tl.num_programs(0) * BLOCK_T, num_stages=STAGES):
        rows = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < D)
        x = tl.load(x_ptr + head_start(rows, x_row_stride, D, HEADS) + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row_start(rows, dy_row_stride, D) + cols, mask=mask, other=0.0).to(tl.float32)
        given = weight.to(tl.float32) * dy
        if stats_ptr is not None:
            # Prefetch the statistics of the next block into registers. They are too few to need shared memory.
            mean_after, scale_after = _statistics(stats_ptr, rows + tl.num_programs(0) * BLOCK_T, n_rows)
            # h beyond the end of a row enters no sum, because the weight is 0 there.
            h = (x - mean) * scale
            c1, c2 = two_sums(given, given * h)
            given = given - c1 / D if D > 1 else tl.zeros_like(given)
            of_bias += dy
            of_weight += dy * h
            dx = scale * (given - h * (c2 / D))
            mean, scale = mean_after, scale_after
        else:
            if CENTERED:
                mean, c1 = two_sums(x, given)
                x = tl.where(mask, x - mean / D, 0.0)
                # With one column the result is exactly 0, as in the definition. A fused w * dy - c1 would leave the rounding
                # error of c1.
                given = given - c1 / D if D > 1 else tl.zeros_like(given)
                of_bias += dy
            squares, crossed = two_sums(x * x, given * x)
            # For a row that does not exist the scale is 0, whatever eps is, so that the row adds 0 to the sums.
            scale = tl.where(rows < n_rows, tl.rsqrt(squares / D + eps), 0.0)
            of_weight += dy * (x * scale)
            dx = scale * (given - x * (crossed * scale * scale / D))
        if HAS_MORE:
            dx += tl.load(more_ptr + row_start(rows, more_row_stride, D) + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    at = tl.program_id(0).to(tl.int64) * D + cols
    tl.store(of_weight_ptr + at, tl.sum(of_weight, axis=0, keep_dims=True), mask=cols < D)
    if CENTERED:
        tl.store(of_bias_ptr + at, tl.sum(of_bias, axis=0, keep_dims=True), mask=cols < D)


# ---- launchers and ops


def _no_rows(x: Tensor, weight: Tensor, centered: bool) -> tuple[Tensor, ...]:
    sums = (torch.zeros(x.shape[-1], dtype=weight.dtype, device=x.device) for _ in range(1 + centered))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), *sums


def _run(
    config: Config, dy: Tensor, x: Tensor, weight: Tensor, dmore: Tensor | None, eps: float, centered: bool,
    stats: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dx, dweight, dbias), without dbias unless `centered`."""
    rows, x_row_stride, heads = rows_of_heads(x)
    cols, block_t = x.shape[-1], config["BLOCK_T"]
    if not rows:
        return _no_rows(x, weight, centered)
    if cols > config["BLOCK_D"]:
        return wide_gradients(config, dy, x, weight, dmore, eps, centered, stats)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = min(ceil_div(rows, block_t), config["PER_SM"] * device_of(x.get_device()).sms)
    parts = [torch.empty(programs, cols, dtype=torch.float32, device=x.device) for _ in range(1 + centered)]
    operands = (dy, x, weight, x if dmore is None else dmore, dx, parts[0], parts[-1], stats)
    numbers = (rows, rows_of(dy)[1], x_row_stride, 0 if dmore is None else rows_of(dmore)[1], eps)
    constants = {
        "D": cols, "HEADS": heads, "CENTERED": centered, "HAS_MORE": dmore is not None, "BLOCK_T": block_t,
        "BLOCK_D": config["BLOCK_D"],
        "STAGES": config["STAGES"], "num_warps": config["num_warps"],
    }  # fmt: skip
    launch(_norm_backward_kernel, (programs,), operands, numbers, constants)
    return dx, *column_sums(weight.dtype, *parts)


def _layer_kept(config: Config, dy: Tensor, x: Tensor, weight: Tensor, eps: float, stats: Tensor) -> tuple[Tensor, ...]:
    return kept_gradients(config, dy, x, weight, stats) if x.numel() else _no_rows(x, weight, True)


def _split(centered: bool) -> Impl:
    def launch(config: Config, dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        dmore, eps = (None, rest[0]) if centered else rest
        return split_gradients(config, dy, x, weight, dmore, eps, centered) if x.numel() else _no_rows(x, weight, centered)

    return Impl(name="split", launch=launch, space=SPLIT_SPACE, refuse=refuse_split, interpretable=False)


layer_norm_backward_op = Op(
    name="layer_norm_backward",
    reference=_layer_reference,
    problem=lambda dy, x, weight, eps, stats=None: Problem(x.dtype, x.shape[-1], True, stats is not None),
    cost=_layer_cost,
    examples=LAYER_EXAMPLES,
    make=layer_norm_backward_arguments,
    impls=(
        _split(True),
        Impl(name="kept", launch=_layer_kept, space=KEPT_SPACE, refuse=refuse_kept, interpretable=False),
        Impl(
            name="triton", space=SPACE,
            launch=lambda config, dy, x, weight, eps, stats=None: _run(config, dy, x, weight, None, eps, True, stats),
        ),
    ),
)  # fmt: skip

rms_norm_backward_op = Op(
    name="rms_norm_backward",
    reference=_rms_reference,
    problem=lambda dy, x, *_: Problem(x.dtype, x.shape[-1], False),
    cost=_rms_cost,
    examples=RMS_EXAMPLES,
    make=rms_norm_backward_arguments,
    impls=(_split(False), Impl(name="triton", launch=lambda config, *args: _run(config, *args, False), space=SPACE)),
)
