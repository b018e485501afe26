"""Layer norm over the last dimension (Ba, Kiros and Hinton, "Layer normalization", 2016).

    y[t, :] = (x[t, :] - mean) / sqrt(variance + eps) * weight[:] + bias[:],     mean and (biased) variance of x[t, :]

    x, y: [..., D] of bf16, fp16 or fp32; weight, bias: [D]. The bias may be missing.

Statistics are float32. They are never the difference of two large sums: the variance is that of x - mean. For a row that does
not fit in registers, each lane (8 neighbouring columns of every block) sums x - shift and its square. `shift` is the mean of
the lane's columns in the first block. Chan's formula then combines the lanes (Chan, Golub and LeVeque, 1983). The columns that
define the shift are among the lane's n blocks. So the shift is at most sqrt(n - 1) of the lane's standard deviations away from
the lane's mean, and cancellation loses at most a factor n.

Memory-bound: D elements in, D out. A row up to 32 KB wide (16384 columns of bf16) is held in registers. Of a wider row only the
last blocks stay in registers; the other blocks are read again, from L1 and L2 (device/multi_pass_rows.py). Rows may be strided.
A last dimension with a stride other than 1 is not supported: the public functions copy such a tensor first. The gradients are
in backward.py.

layer_norm_stats is the forward pass of a training step. It returns the same norm, and float32 [2, T] with the mean and
1 / sqrt(variance + eps) of each row. With these, backward.py needs one round of sums per row instead of two. The arithmetic and
its order are the same as in layer_norm, but it is a different binary: the compiler may round a product before an addition in
one of them and not in the other. On a card, y may therefore differ from layer_norm's by one unit in the last place of its dtype
(seen on an H100: float16, 16900 columns far from zero).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import columns, load_block, narrow_rows, rows_space, store_block
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.row_space import Rows, row_problem, row_space
from tilewright.kernels.launch.shapes import ceil_div, check_last_dim, rows_of, rows_ready
from tilewright.kernels.norm.cooperative import LAYER_SPLIT, LAYER_STATS_SPLIT, split_first
from tilewright.kernels.norm.inputs import layer_norm_arguments
from tilewright.kernels.norm.work import layer_norm_work
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["LAYER_EXAMPLES", "join_lanes", "layer_norm", "layer_norm_op", "layer_norm_stats", "layer_norm_stats_op", "moments"]


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _stats_reference(x, weight, bias, eps)[0]


def _stats_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * scale * weight.to(wide.dtype)
    y = y if bias is None else y + bias.to(wide.dtype)
    return y.to(x.dtype), torch.stack((mean.flatten(), scale.flatten()))


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Cost:
    return Cost(flops=7 * x.numel(), bytes=2 * x.nbytes + (1 + (bias is not None)) * weight.nbytes)


def _stats_cost(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Cost:
    vectors = (1 + (bias is not None)) * weight.nbytes
    return Cost(flops=7 * x.numel(), bytes=2 * x.nbytes + vectors + 2 * 4 * rows_of(x)[0])


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    # One wide row per SM. H100, 4096 x 131072 bf16: 781 us (a copy: 711). Holding a third block spills and costs 6 %.
    widest = 32768 // problem.dtype.itemsize
    if problem.cols > widest:
        return {"BLOCK_T": 1, "BLOCK_D": widest, "HELD": 3 if problem.dtype.itemsize > 2 else 2, "num_warps": 32}
    # 16 elements per thread: two 16-byte loads of bf16 are in flight, and registers have room for weight and bias too.
    return narrow_rows(problem.cols)


SPACE = rows_space(_default, most_a_thread=64)

STATS_SPACE = row_space(
    _default,
    BLOCK_T=(1, 2, 4, 8, 16),
    BLOCK_D=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    HELD=(1, 2, 3),
    num_warps=(4, 8, 16, 32),
)


def _no_rows(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None, float]:
    return inputs.randn(0, 8, dtype=torch.bfloat16), inputs.randn(8, dtype=torch.bfloat16), None, 1e-5


@Example.of
def _example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True, row_stride: int = 0, mean: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
    weight = inputs.randn(shape[-1], dtype=dtype)
    return x + mean if mean else x, weight, inputs.randn(shape[-1], dtype=dtype) if bias else None, 1e-5


LAYER_EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100, bias=False),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("wide", 2, 16500),
    _example("many blocks", 1, 81920, dtype=torch.float16),
    _example("far from zero", 2, 16900, mean=30.0, dtype=torch.float16),
)

# ---- kernel


@triton.jit
def moments(x, shift, block, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Each lane's sums of x - shift and of its square over a block."""
    gap = x.to(tl.float32) - shift[:, None]
    if MASKED:
        gap = tl.where(columns(block, BLOCK_D) < D, gap, 0.0)
    return tl.sum(gap, axis=1), tl.sum(gap * gap, axis=1)


@triton.jit
def join_lanes(shift, first, second, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(mean, variance) of the row, from the sums of its lanes."""
    lane = tl.arange(0, BLOCK_D // 8) * 8
    LAST_START: tl.constexpr = (D - 1) // BLOCK_D * BLOCK_D
    count = (LAST_START // BLOCK_D * 8 + tl.minimum(tl.maximum(D - LAST_START - lane, 0), 8)).to(tl.float32)
    lane_mean = shift + first / count
    mean = tl.sum(lane_mean * count, axis=0) / D
    gap = lane_mean - mean
    return mean, tl.sum(second - first * first / count + gap * gap * count, axis=0) / D


@triton.jit
def _wide_affine(
    x, mean, scale, weight_ptr, bias_ptr, y_ptr, block,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    weight = load_block(weight_ptr, block, D, BLOCK_D, MASKED, "shared", 0.0)
    bias = load_block(bias_ptr, block, D, BLOCK_D, MASKED, "shared", 0.0) if HAS_BIAS else weight
    y = (x.to(tl.float32) - mean) * scale * weight.to(tl.float32)
    if HAS_BIAS:
        y += bias.to(tl.float32)
    store_block(y_ptr, block, y, D, BLOCK_D, MASKED)


@triton.jit
def _wide_row(
    x_ptr, weight_ptr, bias_ptr, y_ptr, eps, D: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr
):
    """Write the norm of one row that is wider than a block; return (mean, 1 / deviation).

    The pointers are at the start of the row. Its last HELD blocks stay in registers.
    """
    LAST: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    x = load_block(x_ptr, 0, D, BLOCK_D, False, "again", 0.0)
    shift = tl.sum(x.to(tl.float32), axis=1) / 8
    first, second = moments(x, shift, 0, D, BLOCK_D, False)
    for i in range(1, FIRST_HELD):
        x = load_block(x_ptr, i, D, BLOCK_D, False, "again", 0.0)
        more_first, more_second = moments(x, shift, i, D, BLOCK_D, False)
        first += more_first
        second += more_second
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        x = load_block(x_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        held = held + (x,)
        more_first, more_second = moments(x, shift, block, D, BLOCK_D, RAGGED and block == LAST)
        first += more_first
        second += more_second
    mean, variance = join_lanes(shift, first, second, D, BLOCK_D)
    scale = tl.rsqrt(variance + eps)
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        x = held[block - FIRST_HELD]
        _wide_affine(x, mean, scale, weight_ptr, bias_ptr, y_ptr, block, D, HAS_BIAS, BLOCK_D, RAGGED and block == LAST)
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        x = load_block(x_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        _wide_affine(x, mean, scale, weight_ptr, bias_ptr, y_ptr, j, D, HAS_BIAS, BLOCK_D, False)
    return mean, scale


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, n_rows, x_row_stride, eps,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """stats_ptr: float32 [2, n_rows], receives the mean and 1 / deviation of each row. None (at compile time): not stored."""
    release()
    if D <= BLOCK_D:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        x_rows, y_rows = row_start(rows, x_row_stride, D), rows * D
        block = tl.arange(0, BLOCK_D)[None, :]
        mask = (rows < n_rows) & (block < D)
        x = tl.load(x_ptr + x_rows + block, mask=mask, other=0.0).to(tl.float32)
        # Where registers have room, load weight and bias before the reductions. At 16384 columns the early loads would leave
        # one resident program per SM instead of two (H100, 8192 rows: 236 us early, 182 late; no difference at 4096 columns).
        if BLOCK_D <= 4096:
            weight = tl.load(weight_ptr + block, mask=block < D, other=0.0)
            bias = tl.load(bias_ptr + block, mask=block < D, other=0.0) if HAS_BIAS else weight
        mean = tl.sum(x, axis=1, keep_dims=True) / D
        x = tl.where(mask, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        if stats_ptr is not None:
            tl.store(stats_ptr + rows, mean, mask=rows < n_rows)
            tl.store(stats_ptr + n_rows + rows, scale, mask=rows < n_rows)
        if BLOCK_D > 4096:
            weight = tl.load(weight_ptr + block, mask=block < D, other=0.0)
            bias = tl.load(bias_ptr + block, mask=block < D, other=0.0) if HAS_BIAS else weight
        y = x * scale * weight.to(tl.float32)
        if HAS_BIAS:
            y += bias.to(tl.float32)
        tl.store(y_ptr + y_rows + block, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        x_ptr += row_start(row, x_row_stride, D)
        mean, scale = _wide_row(x_ptr, weight_ptr, bias_ptr, y_ptr + row * D, eps, D, HAS_BIAS, BLOCK_D, HELD)
        if stats_ptr is not None:
            tl.store(stats_ptr + row, mean)
            tl.store(stats_ptr + n_rows + row, scale)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, stats: Tensor | None = None) -> Tensor:
    """Return the norm. Write the mean and 1 / deviation of each row to stats, float32 [2, rows], if given."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    if rows:
        operands = (x, weight, weight if bias is None else bias, y, stats)
        constants = {"D": x.shape[-1], "HAS_BIAS": bias is not None, **config}
        launch(_layer_norm_kernel, (ceil_div(rows, config["BLOCK_T"]),), operands, (rows, row_stride, eps), constants)
    return y


def _stats_launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(2, rows_of(x)[0], dtype=torch.float32, device=x.device)
    return _launch(config, x, weight, bias, eps, stats), stats


layer_norm_op = Op(
    name="layer_norm",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=LAYER_EXAMPLES,
    make=layer_norm_arguments,
    first=split_first,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True, work=layer_norm_work),
        LAYER_SPLIT,
    ),
)

layer_norm_stats_op = Op(
    name="layer_norm_stats",
    reference=_stats_reference,
    problem=row_problem,
    cost=_stats_cost,
    examples=(*LAYER_EXAMPLES, Example("no rows", _no_rows)),
    make=layer_norm_arguments,
    first=split_first,
    impls=(
        Impl(name="triton", launch=_stats_launch, space=STATS_SPACE, batch_invariant=True, work=layer_norm_work),
        LAYER_STATS_SPLIT,
    ),
)


# ---- public functions


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm without gradients. `ops.layer_norm` describes the arguments."""
    check_last_dim("layer_norm", x, weight=weight, bias=bias)
    return layer_norm_op(rows_ready(x), weight, bias, eps)


def layer_norm_stats(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(layer_norm, stats) without gradients. `ops.layer_norm` describes the arguments."""
    check_last_dim("layer_norm", x, weight=weight, bias=bias)
    return layer_norm_stats_op(rows_ready(x), weight, bias, eps)
