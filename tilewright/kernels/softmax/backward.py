"""The gradients of softmax and log_softmax over the last dimension, from their results.

    softmax:      dx[t, i] = y[t, i] (dy[t, i] - sum_j dy[t, j] y[t, j])
    log_softmax:  dx[t, i] = dy[t, i] - exp(y[t, i]) sum_j dy[t, j]

    dy, y, dx: [..., D] of bf16, fp16 or fp32; sums are float32. The order of addition is fixed, so the bits are always the
    same.

Limited by bytes: two elements in, one out. A row that does not fit into registers is read again, from L1 and L2
(device/multi_pass_rows.py). Two rows of 131072 bf16 columns are 512 KB. If each of 132 SMs processes such a pair, they still
find it in L2, but not with twice the columns. Rows may be strided, but the last dimension may not. Not supported: second
derivatives.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.multi_pass_rows import load_block, store_block
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.row_space import Rows, row_problem, row_space
from tilewright.kernels.launch.shapes import ceil_div, next_pow2, rows_of
from tilewright.kernels.softmax.backward_cooperative import SPLIT_SPACE, gradient, launch_split, refuse_split, term
from tilewright.kernels.softmax.inputs import log_softmax_backward_arguments, softmax_backward_arguments
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["log_softmax_backward_op", "softmax_backward_op"]


def _reference(dy: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    dy, out = dy.to(wide), y.to(wide)
    return (out * (dy - (dy * out).sum(-1, keepdim=True))).to(y.dtype)


def _log_reference(dy: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    return (dy.to(wide) - y.to(wide).exp() * dy.to(wide).sum(-1, keepdim=True)).to(y.dtype)


def _cost(dy: Tensor, y: Tensor) -> Cost:
    return Cost(flops=4 * y.numel(), bytes=3 * y.nbytes)


# ---- space and examples


def _default(device: Device, problem: Rows) -> Config:
    widest = 32768 // problem.dtype.itemsize
    if problem.cols > widest:
        # Rows that do not start at multiples of 16 bytes are loaded element by element. Small blocks keep more loads in flight.
        odd = problem.cols * problem.dtype.itemsize % 16
        # H100, 4096 x 131072 bf16: 1393 us (a copy: 1064). With two blocks held in registers, which spill, 1647. Fewer programs
        # than SMs with one row at a time, so that L2 keeps more of each row, are no faster.
        return {"BLOCK_T": 1, "BLOCK_D": 2048 if odd else widest, "HELD": 1, "num_warps": 32}
    block_d = max(32, next_pow2(problem.cols))
    block_t = max(1, min(32, 2048 // block_d))
    return {"BLOCK_T": block_t, "BLOCK_D": block_d, "HELD": 1, "num_warps": max(4, min(16, block_d // 512))}


SPACE = row_space(
    _default,
    BLOCK_T=(1, 2, 4, 8, 16, 32),
    BLOCK_D=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    HELD=(1,),
    num_warps=(4, 8, 16, 32),
)


@Example.of
def _example(
    inputs: Inputs, *shape: int, dtype: torch.dtype = torch.bfloat16, log: bool, row_stride: int = 0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dy = inputs.randn(*shape[:-1], row_stride or shape[-1], dtype=dtype)[..., : shape[-1]]
    x = inputs.randn(*shape, scale=2.0)
    return dy, (torch.log_softmax(x, -1) if log else torch.softmax(x, -1)).to(dtype)


def _examples(log: bool) -> tuple[Example, ...]:
    return (
        _example("rows", 4, 256, log=log),
        _example("ragged", 3, 5, 100, log=log),
        _example("strided", 5, 128, dtype=torch.float16, row_stride=192, log=log),
        _example("one", 1, 1, dtype=torch.float32, log=log),
        _example("wide", 2, 16500, log=log),
        _example("many blocks", 1, 40001, dtype=torch.float32, log=log),
        _example("no rows", 0, 5, log=log),
    )


# ---- kernel


@triton.jit
def _wide_row(dy_ptr, y_ptr, dx_ptr, D: tl.constexpr, LOG: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr):
    """Process one row that is wider than a block; the pointers point to its start. The last HELD blocks stay in registers."""
    LAST: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D - 1
    FIRST_HELD: tl.constexpr = LAST + 1 - min(HELD, LAST)
    RAGGED: tl.constexpr = D % BLOCK_D != 0
    sums = tl.zeros([BLOCK_D // 8], tl.float32)
    for i in range(FIRST_HELD):
        dy = load_block(dy_ptr, i, D, BLOCK_D, False, "again", 0.0)
        # The sum of log_softmax needs only dy.
        y = dy if LOG else load_block(y_ptr, i, D, BLOCK_D, False, "again", 0.0)
        sums += tl.sum(term(dy, y, LOG), axis=1)
    held = ()
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        dy = load_block(dy_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        y = load_block(y_ptr, block, D, BLOCK_D, RAGGED and block == LAST, "once", 0.0)
        held = held + (dy, y)
    for block in tl.static_range(FIRST_HELD, LAST + 1):
        sums += tl.sum(term(held[2 * (block - FIRST_HELD)], held[2 * (block - FIRST_HELD) + 1], LOG), axis=1)
    total = tl.sum(sums, axis=0)
    for block in tl.static_range(LAST, FIRST_HELD - 1, -1):
        dx = gradient(held[2 * (block - FIRST_HELD)], held[2 * (block - FIRST_HELD) + 1], total, LOG)
        store_block(dx_ptr, block, dx, D, BLOCK_D, RAGGED and block == LAST)
    for i in range(FIRST_HELD):
        j = FIRST_HELD - 1 - i
        dy = load_block(dy_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        y = load_block(y_ptr, j, D, BLOCK_D, False, "last time", 0.0)
        store_block(dx_ptr, j, gradient(dy, y, total, LOG), D, BLOCK_D, False)


@triton.jit(do_not_specialize=["n_rows", "dy_row_stride", "y_row_stride"])
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, n_rows, dy_row_stride, y_row_stride,
    D: tl.constexpr, LOG: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    if D <= BLOCK_D:
        rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        cols = tl.arange(0, BLOCK_D)[None, :]
        mask = (rows < n_rows) & (cols < D)
        dy = tl.load(dy_ptr + row_start(rows, dy_row_stride, D) + cols, mask=mask, other=0.0)
        y = tl.load(y_ptr + row_start(rows, y_row_stride, D) + cols, mask=mask, other=0.0)
        total = tl.sum(term(dy, y, LOG), axis=1, keep_dims=True)
        tl.store(dx_ptr + rows * D + cols, gradient(dy, y, total, LOG).to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        row = tl.program_id(0).to(tl.int64)
        dy_ptr += row_start(row, dy_row_stride, D)
        y_ptr += row_start(row, y_row_stride, D)
        _wide_row(dy_ptr, y_ptr, dx_ptr + row * D, D, LOG, BLOCK_D, HELD)


# ---- launchers and ops


def _run(config: Config, dy: Tensor, y: Tensor, log: bool) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    rows, dy_row_stride = rows_of(dy)
    if rows:
        _softmax_backward_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            dy, y, dx, rows, dy_row_stride, rows_of(y)[1], D=y.shape[-1], LOG=log, **config
        )
    return dx


def _impls(log: bool) -> tuple[Impl, ...]:
    return (
        Impl(
            name="split", launch=lambda config, dy, y: launch_split(config, dy, y, log), space=SPLIT_SPACE, refuse=refuse_split,
            batch_invariant=True, interpretable=False,
        ),
        Impl(name="triton", launch=lambda config, dy, y: _run(config, dy, y, log), space=SPACE, batch_invariant=True),
    )  # fmt: skip


softmax_backward_op = Op(
    name="softmax_backward",
    reference=_reference,
    problem=lambda dy, y: row_problem(y),
    cost=_cost,
    examples=_examples(False),
    make=softmax_backward_arguments,
    impls=_impls(False),
)

log_softmax_backward_op = Op(
    name="log_softmax_backward",
    reference=_log_reference,
    problem=lambda dy, y: row_problem(y),
    cost=_cost,
    examples=_examples(True),
    make=log_softmax_backward_arguments,
    impls=_impls(True),
)
