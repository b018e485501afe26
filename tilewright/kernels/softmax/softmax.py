"""Softmax over the last dimension, and its logarithm.

    y[t, i] = exp(x[t, i] - max(x[t, :])) / sum_j exp(x[t, j] - max(x[t, :]))
    log_softmax: log y[t, i], as x[t, i] - max(x[t, :]) - log(sum), so that small probabilities keep their digits

    x, y: [..., D] of bf16, fp16 or fp32; exponentials and sums are float32. As in torch, a row that contains only -inf, or a
    +inf, or a NaN gives NaN. In a row with finite numbers -inf gives 0.

Limited by bytes: D elements in, D out. A row up to 32 KB wide (16384 columns of bf16) is held in registers. For a wider row,
each thread keeps a running maximum and a sum relative to it (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018). The part of the row that does not fit into registers is read again, from L2 (device/multi_pass_rows.py). On
GPUs that support it, several programs share a wide row (cooperative.py). Rows may be strided, but the last dimension may not.
Not supported: other dimensions, a last dimension with a stride other than 1 (the public functions copy it first). The gradients
are in backward.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import load_block, narrow_rows, rows_space, store_block
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.row_space import Rows, row_problem, row_space
from tilewright.kernels.launch.shapes import ceil_div, rows_of, rows_ready
from tilewright.kernels.softmax.cooperative import LOG_SPLIT, SPLIT, split_first
from tilewright.kernels.softmax.inputs import softmax_arguments
from tilewright.kernels.softmax.work import softmax_work
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["log_softmax", "log_softmax_op", "softmax", "softmax_op"]


def _reference(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _log_reference(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _cost(x: Tensor) -> Cost:
    return Cost(flops=5 * x.numel(), bytes=2 * x.nbytes)


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    # One wide row per SM. H100, 4096 x 131072 bf16: 738 us (a copy: 710). In trials, blocks of 8192 took 749, and 790 without
    # blocks held in registers.
    widest = 32768 // problem.dtype.itemsize
    if problem.cols > widest:
        if problem.cols * problem.dtype.itemsize % 16:
            # Rows that do not start at multiples of 16 bytes are loaded element by element. Small blocks then keep more loads
            # in flight. H100, 2048 x 50257 bf16: 204 us, and 285 with the blocks of the default below.
            return {"BLOCK_T": 1, "BLOCK_D": 2048, "HELD": 3, "num_warps": 32}
        return {"BLOCK_T": 1, "BLOCK_D": widest, "HELD": 3, "num_warps": 32}
    return narrow_rows(problem.cols)


SPACE = rows_space(_default, most_a_thread=64)

LOG_SPACE = row_space(
    _default, BLOCK_T=(1, 2, 4, 8, 16), BLOCK_D=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), HELD=(1, 3),
    num_warps=(4, 8, 16, 32),
)  # fmt: skip


@Example.of
def _example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, row_stride: int = 0, masked: int = 0
) -> tuple[Tensor]:
    x = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype, scale=3.0)[..., : shape[-1]]
    x[..., shape[-1] - masked :] = -torch.inf
    return (x,)


EXAMPLES = (
    _example("rows", 4, 256),
    _example("ragged", 3, 5, 100),
    _example("strided", 5, 128, row_stride=192, dtype=torch.float16),
    _example("one", 1, 1, dtype=torch.float32),
    _example("masked", 2, 70, masked=37),
    _example("all masked", 2, 5, masked=5),
    _example("wide", 2, 16500, dtype=torch.float32),
    _example("many blocks", 1, 81920, dtype=torch.float16),
    _example("wide, all masked", 1, 16500, masked=16500),
    _example("wide, masked", 1, 16500, masked=16490),
)

# ---- kernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _take(top, mass, x):
    """Add a block's columns to a thread's maximum and to its sum of exponentials relative to that maximum."""
    x = x.to(tl.float32)
    higher = tl.maximum(top, tl.max(x, axis=1))
    mass = mass * tl.exp2((top - higher) * _LOG2E) + tl.sum(tl.exp2((x - higher[:, None]) * _LOG2E), axis=1)
    return higher, mass


@triton.jit
def _probability(x, top, mass, LOG: tl.constexpr):
    """exp(x - top) / mass, or its logarithm."""
    x = x.to(tl.float32) - top
    return x - tl.log(mass) if LOG else tl.exp2(x * _LOG2E) * (1.0 / mass)


@triton.jit
def _wide_row(x_ptr, y_ptr, D: tl.constexpr, LOG: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr):
    """Process one row that is wider than a block; the pointers point to its start. The last HELD blocks stay in registers."""
    LAST: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    # If a thread has seen only -inf, it must not subtract -inf from -inf. So its maximum starts at the lowest finite float.
    top = tl.full([BLOCK_D // 8], -3.4028234663852886e38, tl.float32)
    mass = tl.zeros([BLOCK_D // 8], tl.float32)
    for i in range(FIRST_HELD):
        top, mass = _take(top, mass, load_block(x_ptr, i, D, BLOCK_D, False, "again", float("-inf")))
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        held = held + (load_block(x_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", float("-inf")),)
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        top, mass = _take(top, mass, held[block - FIRST_HELD])
    row_top = tl.max(top, axis=0)
    row_mass = tl.sum(mass * tl.exp2((top - row_top) * _LOG2E), axis=0)
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        y = _probability(held[block - FIRST_HELD], row_top, row_mass, LOG)
        store_block(y_ptr, block, y, D, BLOCK_D, RAGGED and block == LAST)
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        x = load_block(x_ptr, j, D, BLOCK_D, False, "last time", float("-inf"))
        store_block(y_ptr, j, _probability(x, row_top, row_mass, LOG), D, BLOCK_D, False)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _softmax_kernel(
    x_ptr, y_ptr, n_rows, x_row_stride,
    D: tl.constexpr, LOG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    if D <= BLOCK_D:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        x_rows, y_rows = row_start(rows, x_row_stride, D), rows * D
        block = tl.arange(0, BLOCK_D)[None, :]
        mask = (rows < n_rows) & (block < D)
        x = tl.load(x_ptr + x_rows + block, mask=mask, other=float("-inf")).to(tl.float32)
        x -= tl.max(x, axis=1, keep_dims=True)
        y = tl.exp2(x * _LOG2E)
        mass = tl.sum(y, axis=1, keep_dims=True)
        y = x - tl.log(mass) if LOG else y * (1.0 / mass)
        tl.store(y_ptr + y_rows + block, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        _wide_row(x_ptr + row_start(row, x_row_stride, D), y_ptr + row * D, D, LOG, BLOCK_D, HELD)


# ---- launchers and ops


def _run(config: Config, x: Tensor, log: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    if rows:
        _softmax_kernel[(ceil_div(rows, config["BLOCK_T"]),)](x, y, rows, row_stride, D=x.shape[-1], LOG=log, **config)
    return y


def _impl(log: bool, space: Space) -> Impl:
    return Impl(
        name="triton", launch=lambda config, x: _run(config, x, log), space=space, batch_invariant=True, work=softmax_work
    )


softmax_op = Op(
    name="softmax",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=softmax_arguments,
    first=split_first,
    impls=(_impl(False, SPACE), SPLIT),
)

log_softmax_op = Op(
    name="log_softmax",
    reference=_log_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=softmax_arguments,
    first=split_first,
    impls=(_impl(True, LOG_SPACE), LOG_SPLIT),
)


# ---- public functions


def softmax(x: Tensor) -> Tensor:
    """Without gradients; `ops.softmax` documents the argument."""
    _check("softmax", x)
    return softmax_op(rows_ready(x))


def log_softmax(x: Tensor) -> Tensor:
    """Without gradients; `ops.log_softmax` documents the argument."""
    _check("log_softmax", x)
    return log_softmax_op(rows_ready(x))


def _check(op: str, x: Tensor) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"{op}: x must hold floats and have a last dimension, got {tuple(x.shape)} {x.dtype}")
