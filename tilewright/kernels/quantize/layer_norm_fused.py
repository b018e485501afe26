"""Layer norm and the quantisation of its rows in one launch, for the int8 product that reads the result.

    y = layer_norm(x), rounded to x's dtype; codes, scales = quantize_rows(y, "int8")

    x [..., D] of bf16, fp16 or fp32; weight, bias: [D], the bias may be None. codes, scales: as in `quantize_rows`
    (per_row.py). y itself is needed for the residual in post-norm networks. It is written only with `keep`; otherwise the
    returned y has no rows.

Limited by bytes: D elements in, D bytes out; with `keep`, also D elements out. A row is kept in registers, at most 32 KB.

    triton     one launch
    separate   layer_norm, then quantize_rows: for wider rows

Not supported: gradients, other formats than int8, a last dimension with a stride other than 1 (the public function copies it).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude, padded_width, scales_of
from tilewright.kernels.device.row_start import row_start
from tilewright.kernels.launch.autograd import dense
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import ceil_div, check_last_dim, next_pow2, rows_of, rows_ready
from tilewright.kernels.norm.layer_norm import LAYER_EXAMPLES, layer_norm_op
from tilewright.kernels.quantize.inputs import layer_norm_quantize_arguments
from tilewright.kernels.quantize.per_row import check_format, quantize_rows_op
from tilewright.op import Impl, Op
from tilewright.tune.space import Config, Space

__all__ = ["layer_norm_quantize", "layer_norm_quantize_op"]

CodedNorm = tuple[Tensor, Tensor, Tensor]
"""(codes, scales, y)."""

# ---- reference, cost


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = layer_norm_op.reference(x, weight, bias, eps)
    codes, scales = quantize_rows_op.reference(y, "int8")
    return codes, scales, y if keep else _kept(y, False)


def _kept(x: Tensor, keep: bool) -> Tensor:
    """Memory for y; without `keep` it has no rows."""
    return torch.empty(x.shape if keep else (0, x.shape[-1]), dtype=x.dtype, device=x.device)


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep: bool) -> Cost:
    moved = x.nbytes * (2 if keep else 1) + (1 + (bias is not None)) * weight.nbytes
    return Cost(flops=10 * x.numel(), bytes=moved + x.numel() + 4 * x.shape[:-1].numel())


# ---- space and examples


class Problem(NamedTuple):
    """Everything that a config may depend on. The number of rows is not part of it."""

    dtype: torch.dtype
    cols: int
    keep: bool


def _refuse(device: Device, problem: Problem) -> str | None:
    if not problem.cols:
        return "needs at least one column: an empty row has no mean"
    if padded_width(problem.cols) * problem.dtype.itemsize > 32768:
        return f"supports rows of up to 32768 bytes only (in registers), not {problem.cols} numbers of {problem.dtype}"
    return None


def _block_d(cols: int) -> int:
    return next_pow2(padded_width(cols))


def _default(device: Device, problem: Problem) -> Config:
    return {"BLOCK_T": max(1, min(16, 2048 // _block_d(problem.cols)))}


def _refuse_config(device: Device, problem: Problem, c: Config) -> str | None:
    # A program has about 16 elements per thread.
    least = max(1, min(16, 1024 // _block_d(problem.cols)))
    return (
        None if least <= c["BLOCK_T"] <= 2 * least else "the rows of a program must have about 1024 to 2048 elements together"
    )


SPACE = Space(default=_default, axes={"BLOCK_T": (1, 2, 4, 8, 16)}, refusal=_refuse_config)


EXAMPLES = tuple(
    example.then(lambda inputs, *args, keep=example.label in ("rows", "strided", "wide"): (*args, keep))
    for example in LAYER_EXAMPLES
)


@triton.jit(do_not_specialize=["n_rows", "x_row_stride"])
def _layer_norm_quantize_kernel(
    x_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, y_ptr, n_rows, x_row_stride, eps,
    D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    release()
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    rows = row[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < n_rows) & (cols < D)
    given = tl.load(x_ptr + row_start(rows, x_row_stride, D) + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=cols < D, other=0.0) if HAS_BIAS else weight
    x = given.to(tl.float32)
    x = tl.where(mask, x - tl.sum(x, axis=1, keep_dims=True) / D, 0.0)
    wide = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps) * weight.to(tl.float32)
    if HAS_BIAS:
        wide += bias.to(tl.float32)
    y = wide.to(given.dtype)
    if KEEP:
        tl.store(y_ptr + rows * D + cols, y, mask=mask)
    scale, inverse = scales_of(tl.max(magnitude(y), axis=1), 127.0)
    q = encode_tile(y, inverse[:, None], q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows * W + cols, q, mask=(rows < n_rows) & (cols < W))
    tl.store(scale_ptr + row, scale, mask=row < n_rows)


def _launch(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep: bool) -> CodedNorm:
    width, cols = padded_width(x.shape[-1]), x.shape[-1]
    tile = {"BLOCK_D": _block_d(cols), "num_warps": max(4, min(16, _block_d(cols) // 512)), **config}
    q = torch.empty((*x.shape[:-1], width), dtype=torch.int8, device=x.device)
    scale, y = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device), _kept(x, keep)
    if rows := scale.numel():
        _layer_norm_quantize_kernel[(ceil_div(rows, config["BLOCK_T"]),)](
            x, weight, weight if bias is None else bias, q, scale, y if keep else x, rows, rows_of(x)[1], eps,
            D=cols, W=width, HAS_BIAS=bias is not None, KEEP=keep, **UNFUSED, **tile,
        )  # fmt: skip
    return q[..., :cols], scale, y


def _separate(config: Config, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep: bool) -> CodedNorm:
    y = layer_norm_op.run(x, weight, bias, eps)
    return *quantize_rows_op.run(y, "int8"), y if keep else _kept(y, False)


layer_norm_quantize_op = Op(
    name="layer_norm_quantize",
    reference=_reference,
    problem=lambda x, weight, bias, eps, keep: Problem(x.dtype, x.shape[-1], keep),
    cost=_cost,
    examples=EXAMPLES,
    make=layer_norm_quantize_arguments,
    codes_may_move=True,
    impls=(
        Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True),
        Impl(name="separate", launch=_separate, batch_invariant=True),
    ),
)


def layer_norm_quantize(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, keep: bool = False
) -> CodedNorm:
    """Layer norm over the last dimension, quantised by rows to int8.

    Args:
        x: [..., D], bf16, fp16 or fp32.
        weight, bias: [D] of x's dtype; the bias may be None.
        eps: added to the variance.
        keep: whether to return y as well.

    Returns:
        (codes, scales) as `quantize_rows`, and y [..., D] of x's dtype, or [0, D] without `keep`.

    Raises:
        ValueError: weight or bias do not match the last dimension; another dtype.
    """
    check_format("layer_norm_quantize", x, "int8", ("int8",))
    check_last_dim("layer_norm_quantize", x, weight=weight, bias=bias)
    return layer_norm_quantize_op(rows_ready(x), dense(weight), dense(bias), eps, keep)
