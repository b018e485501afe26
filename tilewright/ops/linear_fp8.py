"""`linear` for training with float8 products; weights and gradients keep their float type.

    y  = q(x) q(w)^T + b            q: float8 e4m3 with a scale for each row, or one for all of x and one for all of w
    dx = q(dy) q(w^T)^T             dy always has a scale per row, because gradients differ most between tokens
    dw = dy^T x                     in 16 bits, or, with `weight_gradient`, q(dy^T) q(x^T)^T
    db = the sum of dy over its rows, in float32

With scales per row, w^T has a scale for each of its own rows, that is for each column of w; so have x^T and dy^T. Scales are
computed in every call: nothing is kept between steps, and with scales per row the quantised values of a row depend on that row
alone. These are torchao's recipes "rowwise with high-precision weight gradient" and, with `weight_gradient`, "rowwise".
Gradients are e4m3 as well: with a scale per row the wider range of e5m2 is not needed. Two or all three products run at the
8-bit rate. In exchange, x, dy and w are read more often, to quantise them. `fp8_seconds` predicts both effects. Second
derivatives are not supported.

The forward pass quantises w and w^T together (`quantize_both_ways`) and saves the quantised w^T for the backward pass instead
of w: one byte per weight. Quantising w^T in the backward pass would save this memory, but read w two more times. With
`weight_gradient` it does the same with x: the backward pass keeps one byte per element of x instead of two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.hw.ceilings import Ceilings
from tilewright.hw.roofline import roof
from tilewright.kernels.gemm.linear import linear_op, matmul, operand_ready
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.kernels.quantize.both_ways import ONE_WAY, quantize_both_ways_op
from tilewright.kernels.quantize.per_row import quantize_rows_op
from tilewright.ops.linear_gradient import activated

__all__ = ["FP8_SCALES", "Fp8Recipe", "fp8_seconds", "linear_fp8"]

_FORMAT = "fp8"
FP8_SCALES = tuple(ONE_WAY)
"""The possible values of `scale`: which values share a scale."""


class Fp8Recipe(NamedTuple):
    """Arguments of `linear_fp8`."""

    scale: str = "row"
    weight_gradient: bool = False


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: str, weight_gradient: bool
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.weight_codes = weight_gradient and needs_dw
        x_codes, saved_x = _both_ways(x, scale) if ctx.weight_codes else (ONE_WAY[scale](rows_ready(x), _FORMAT), (x,))
        w_codes, saved_w = _both_ways(weight, scale) if needs_dx else (ONE_WAY[scale](rows_ready(weight), _FORMAT), ())
        ctx.save_for_backward(*saved_x, *saved_w)
        return _product(x_codes, w_codes, bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dy, saved = grads[0].contiguous(), ctx.saved_tensors
        x, w = (saved[:2], saved[2:]) if ctx.weight_codes else (saved[:1], saved[1:])
        if ctx.weight_codes:
            codes, transposed = _both_ways(dy, "row")
            dw = _product(transposed, x, None, dy.dtype)
        else:
            codes = quantize_rows_op(dy, _FORMAT) if needs_dx else ()
            dw = matmul(dy.mT, operand_ready(x[0])) if needs_dw else None
        dx = _product(codes, w, None, dy.dtype) if needs_dx else None
        return dx, dw, dy.sum(0) if needs_db else None, None, None


def _both_ways(x: Tensor, scale: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(the codes of x [N, K] and their scales, those of x^T)"""
    found = quantize_both_ways_op(rows_ready(x), scale, _FORMAT)
    return found[:2], found[2:]


def _product(x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x w^T + bias of codes and their scales."""
    return scaled_linear_op(x[0], w[0], x[1], w[1], bias, "none", None, dtype, False)


def linear_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", scale: str = "row",
    weight_gradient: bool = False,
) -> Tensor:  # fmt: skip
    """activation(x @ weight^T + bias) with float8 products; differentiable in x, weight and bias.

    Args:
        x: [..., K], bf16; on a CPU, where the reference runs, also fp32.
        weight: [N, K] of x's dtype.
        bias: [N].
        activation: as in `linear`.
        scale: "row" or "tensor": whether each row or each tensor has its own scale.
        weight_gradient: compute the weight's gradient with a float8 product, too.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype.

    Raises:
        Refused: a card older than sm_89.
        ValueError: shapes do not fit, or `scale` is unknown.
    """
    if scale not in FP8_SCALES:
        raise ValueError(f"linear_fp8: scale is {scale!r}, wanted {' or '.join(FP8_SCALES)}")
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.dtype != weight.dtype:
        raise ValueError(
            f"linear_fp8: x must be [..., K] and weight [N, K], of the same dtype; got x {list(x.shape)} of "
            f"{x.dtype} and weight {list(weight.shape)} of {weight.dtype}"
        )
    y: Any = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, scale, weight_gradient)
    return activated(y.view(*x.shape[:-1], weight.shape[0]), activation)


def fp8_seconds(
    tokens: int, rows: int, cols: int, found: Ceilings, launch_s: float, scale: str = "row", weight_gradient: bool = False
) -> tuple[float, float]:  # fmt: skip
    """Predicted seconds for the products of a weight [rows, cols]: (in bf16, in float8 including quantisation).

    These are y and dx, and with `weight_gradient` also dw, which otherwise is the same in both. The prediction is the roofline
    of each launch plus `launch_s`. For a float8 product the time to write the result is added, a notable share of so short a
    time. Predicted and measured on an H100, without `weight_gradient`: 28 blocks of hidden size 3072 and 8,192 tokens: 70.2 ms
    and 69.7 ms; 16 blocks of 2048: 25.1 and 24.8; 28 blocks of 1024 and 16,384 tokens: 25.4 and 25.9.

    Raises:
        ValueError: the card has no float8.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plain = fp8 = 0.0
    products = [(tokens, rows, cols), (tokens, cols, rows), (rows, cols, tokens)]
    for m, n, k in products if weight_gradient else products[:2]:
        a, b = empty(m, k), empty(n, k)
        plain += launch_s + roof(linear_op.cost(a, b, None, "none", None), found, "bf16").seconds
        scales = empty(m, dtype=torch.float32), empty(n, dtype=torch.float32)
        codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        cost = scaled_linear_op.cost(*codes, *scales, None, "none", None, torch.bfloat16, False)
        fp8 += launch_s + roof(cost, found, "fp8").seconds + 2 * m * n / found.write
    x, dy, weight = empty(tokens, cols), empty(tokens, rows), empty(rows, cols)
    both, one = quantize_both_ways_op.cost, quantize_rows_op.cost
    quantised = (
        both(x, scale, _FORMAT) if weight_gradient else ONE_WAY[scale].cost(x, _FORMAT),
        both(dy, "row", _FORMAT) if weight_gradient else one(dy, _FORMAT),
        both(weight, scale, _FORMAT),
    )
    # Quantised both ways: 3 launches. One way: 1, or 2 for x with a scale for the whole tensor.
    launches = 9 if weight_gradient else {"row": 5, "tensor": 6}[scale]
    return plain, fp8 + launches * launch_s + sum(roof(cost, found, "bf16").seconds for cost in quantised)
