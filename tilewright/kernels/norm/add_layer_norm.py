"""Layer norm over the last dimension, fused with the residual addition before it, as between two blocks of a transformer.

    r = x + residual;     y[t, :] = (r[t, :] - mean) / sqrt(variance + eps) * weight[:] + bias[:];     returns (y, r)

    x, residual, y, r: [..., D] of bf16, fp16 or fp32; weight, bias: [D]. The bias may be missing. r is rounded to x's dtype
    like the eager sum, and y is the norm of the rounded r. The residual may be one row for all rows of x (a stride of 0).
    Without want_sum, r is not written; together these compute the norm of x + a vector. Statistics are float32. The variance is
    that of r - mean (the formula and its source are in layer_norm.py).

Memory-bound: two arrays of D columns in, two out. A row up to 32 KB wide is held in registers.

    triton    rows up to 16384 columns of 16 bits, or 8192 of 32 bits
    apart     any row: torch computes the sum, `layer_norm` its norm

Rows may be strided. The last dimension may not; the public function copies such a tensor. The gradients are in backward.py.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.row_space import Rows, row_problem
from tilewright.kernels.launch.shapes import ceil_div, check_alike, check_last_dim, next_pow2, rows_of, rows_ready
from tilewright.kernels.norm.inputs import add_layer_norm_arguments
from tilewright.kernels.norm.layer_norm import LAYER_EXAMPLES, layer_norm_op
from tilewright.kernels.norm.work import add_layer_norm_work
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["add_layer_norm", "add_layer_norm_op"]


def _reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool
) -> tuple[Tensor, Tensor]:
    total, wide = x + residual, torch.promote_types(x.dtype, torch.float32)
    y = F.layer_norm(total.to(wide), x.shape[-1:], weight.to(wide), None if bias is None else bias.to(wide), eps)
    return y.to(x.dtype), total if want_sum else x.new_empty(0)


def _cost(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool) -> Cost:
    vectors = 1 + (bias is not None) + (residual.stride(0) == 0)
    arrays = 2 + (residual.stride(0) != 0) + want_sum
    return Cost(flops=8 * x.numel(), bytes=arrays * x.nbytes + vectors * weight.nbytes)


# ---- space and examples


def _refuse(device: Device, problem: Rows) -> str | None:
    return "supports rows of up to 32 KB only" if problem.cols * problem.dtype.itemsize > 32768 else None


def _default(device: Device, problem: Rows) -> Config:
    # 16 elements per thread, or 32 for the widest rows: two 16-byte loads of each operand are in flight.
    block_d = next_pow2(problem.cols)
    block_t = max(1, min(8, 2048 // block_d))
    return {"BLOCK_T": block_t, "num_warps": max(1, min(16, next_pow2(block_t * block_d // 512)))}


SPACE = Space(
    default=_default,
    axes={"BLOCK_T": (1, 2, 4, 8), "num_warps": (1, 4, 8, 16)},
    refusal=lambda device, problem, c: (
        "over 32 elements per thread, which spill registers together with the residual"
        if c["BLOCK_T"] * next_pow2(problem.cols) > 32 * 32 * c["num_warps"]
        else "fewer than 4 elements per thread"
        if c["num_warps"] > 1 and c["BLOCK_T"] * next_pow2(problem.cols) < 4 * 32 * c["num_warps"]
        else None
    ),
)


def _with_residual(
    inputs: Inputs, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    return x, inputs.randn(*x.shape, dtype=x.dtype), weight, bias, eps, True


EXAMPLES = (
    # "far from zero" is left out: there the error would come almost entirely from the rounding of the sum.
    *(example.then(_with_residual) for example in LAYER_EXAMPLES if example.label != "far from zero"),
    Example.sized(add_layer_norm_arguments)("several a row", 2, 5000, torch.float16),
    Example.sized(add_layer_norm_arguments)("no sum", 5, 768, torch.float16, want_sum=False),
)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride", "residual_row_stride"])
def _add_layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, n_rows, x_row_stride, residual_row_stride, eps,
    D: tl.constexpr, HAS_BIAS: tl.constexpr, WANT_SUM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    release()
    rows = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    block = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < n_rows) & (block < D)
    x = tl.load(x_ptr + row_start(rows, x_row_stride, D) + block, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row_start(rows, residual_row_stride, D) + block, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + block, mask=block < D, other=0.0)
    bias = tl.load(bias_ptr + block, mask=block < D, other=0.0) if HAS_BIAS else weight
    # Computed in float32, then rounded: the same bits as the eager sum, and Triton's interpreter can compute it.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    if WANT_SUM:
        tl.store(total_ptr + rows * D + block, total, mask=mask)
    r = total.to(tl.float32)
    r = tl.where(mask, r - tl.sum(r, axis=1, keep_dims=True) / D, 0.0)
    scale = tl.rsqrt(tl.sum(r * r, axis=1, keep_dims=True) / D + eps)
    y = r * scale * weight.to(tl.float32)
    if HAS_BIAS:
        y += bias.to(tl.float32)
    tl.store(y_ptr + rows * D + block, y.to(y_ptr.dtype.element_ty), mask=mask)


def _launch(
    config: Config, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape if want_sum else (0,), dtype=x.dtype, device=x.device)
    rows, row_stride = rows_of(x)
    if rows:
        _add_layer_norm_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            x, residual, weight, weight if bias is None else bias, y, total, rows, row_stride, rows_of(residual)[1], eps,
            D=x.shape[-1], HAS_BIAS=bias is not None, WANT_SUM=want_sum, BLOCK_D=next_pow2(x.shape[-1]), **config,
        )  # fmt: skip
    return y, total


def _apart(
    config: Config, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool
) -> tuple[Tensor, Tensor]:
    total = (x + residual).contiguous()
    return layer_norm_op.run(total, weight, bias, eps), total if want_sum else x.new_empty(0)


add_layer_norm_op = Op(
    name="add_layer_norm",
    reference=_reference,
    problem=row_problem,
    cost=_cost,
    examples=EXAMPLES,
    make=add_layer_norm_arguments,
    # It rounds twice: first the sum that it returns, then the norm of that sum.
    tolerance={torch.bfloat16: (8e-3, 4e-3), torch.float16: (1e-3, 5e-4)},
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True, work=add_layer_norm_work),
        Impl(name="apart", launch=_apart, batch_invariant=True),
    ),
)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Residual addition and layer norm without gradients. `ops.add_layer_norm` describes the arguments."""
    check_last_dim("add_layer_norm", x, weight=weight, bias=bias)
    check_alike("add_layer_norm", "residual", residual, "x", x)
    return add_layer_norm_op(rows_ready(x), rows_ready(residual), weight, bias, eps, True)
