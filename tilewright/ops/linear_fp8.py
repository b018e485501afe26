"""`linear` of float weights whose products are of float8 codes, for training; weights and gradients stay what they are.

    y  = q(x) q(w)^T + b            q: float8 e4m3 with a scale for each row, or one for all of x and one for all of w
    dx = q(dy) q(w^T)^T             dy by rows in both ways, because gradients of tokens differ most; w^T by its own rows
    dw = dy^T x                     16 bits: what is rounded here would stay in the weights
    db = the sum of dy over its rows, in float32

Scales are those of this very call: nothing is kept between steps, and a row's codes depend on that row alone. The recipe is
that of torchao's "rowwise with high-precision weight gradient"; e4m3 for gradients as well, since a scale for each row has the
range that e5m2 would have. Two of three products run at the rate of 8 bits; what they cost beside it is reading x and dy once
more each, and w twice. `fp8_seconds` is both in numbers. Not supported: a gradient of the gradient.

The forward pass makes the codes of w and of w^T together (`quantize_both_ways`) and keeps those of w^T for the backward pass, a
byte a weight, in the place of w. Made in the backward pass they would cost no memory, and two more readings of w.
"""

from typing import Any

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

__all__ = ["FP8_SCALES", "fp8_seconds", "linear_fp8"]

_FORMAT = "fp8"
FP8_SCALES = tuple(ONE_WAY)
"""What may have a scale of its own."""


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: str) -> Tensor:
        codes = ONE_WAY[scale](rows_ready(x), _FORMAT)
        if not ctx.needs_input_grad[0]:
            ctx.save_for_backward(x)
            return _product(codes, ONE_WAY[scale](rows_ready(weight), _FORMAT), bias, x.dtype)
        w, w_scale, *transposed = quantize_both_ways_op(rows_ready(weight), scale, _FORMAT)
        ctx.save_for_backward(x, *transposed)
        return _product(codes, (w, w_scale), bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, *transposed), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(quantize_rows_op(dy, _FORMAT), (transposed[0], transposed[1]), None, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = matmul(dy.mT, operand_ready(x))
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, None


def _product(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return scaled_linear_op(x[0], w[0], x[1], w[1], bias, "none", None, dtype, False)


def linear_fp8(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", scale: str = "row") -> Tensor:
    """activation(x @ weight^T + bias), its products of float8 codes; differentiable in x, weight and bias.

    Args:
        x: [..., K], bf16; on a CPU, where the reference runs, also fp32.
        weight: [N, K] of x's dtype.
        bias: [N].
        activation: as `linear`'s.
        scale: "row" or "tensor": what has a scale of its own.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype.

    Raises:
        Refused: a card before sm_89.
        ValueError: shapes do not fit, or another `scale`.
    """
    if scale not in FP8_SCALES:
        raise ValueError(f"linear_fp8: scale is {scale!r}, wanted {' or '.join(FP8_SCALES)}")
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.dtype != weight.dtype:
        raise ValueError(
            "linear_fp8: x must be [..., K] and weight [N, K] of one dtype; "
            f"got x {list(x.shape)} of {x.dtype} and weight {list(weight.shape)} of {weight.dtype}"
        )
    y: Any = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias, scale)
    return activated(y.view(*x.shape[:-1], weight.shape[0]), activation)


def fp8_seconds(
    tokens: int, rows: int, cols: int, found: Ceilings, launch_s: float, scale: str = "row"
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the products for y and dx of a weight [rows, cols] and so many tokens under ceilings: (in bf16, in float8 with
    what quantising takes). dw is the same in both.

    Rooflines, and `launch_s` for each launch; a float8 product also waits for its results to be written, which takes a share of
    so short a time. H100, 28 blocks of hidden size 3072 and 8,192 tokens: 70.2 ms for 69.7 measured; 16 of 2048: 25.1 for 24.8;
    28 of 1024 and 16,384 tokens: 25.4 for 25.9.

    Raises:
        ValueError: the card has no float8.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plain = coded = 0.0
    for m, n, k in ((tokens, rows, cols), (tokens, cols, rows)):
        a, b = empty(m, k), empty(n, k)
        plain += launch_s + roof(linear_op.cost(a, b, None, "none", None), found, "bf16").seconds
        scales = empty(m, dtype=torch.float32), empty(n, dtype=torch.float32)
        codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        cost = scaled_linear_op.cost(*codes, *scales, None, "none", None, torch.bfloat16, False)
        coded += launch_s + roof(cost, found, "fp8").seconds + 2 * m * n / found.write
    x, dy, weight = empty(tokens, cols), empty(tokens, rows), empty(rows, cols)
    quantised = (
        ONE_WAY[scale].cost(x, _FORMAT),
        quantize_rows_op.cost(dy, _FORMAT),
        quantize_both_ways_op.cost(weight, scale, _FORMAT),
    )
    launches = {"row": 5, "tensor": 6}[scale]  # of x, 1 or 2; of dy, 1; of the weight, 3
    return plain, coded + launches * launch_s + sum(roof(cost, found, "bf16").seconds for cost in quantised)
