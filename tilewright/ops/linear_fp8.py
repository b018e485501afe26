"""`linear` of float weights whose products are of float8 codes, for training; weights and gradients stay what they are.

    y  = q(x) q(w)^T + b            q: float8 e4m3 with a scale for each row, or one for all of x and one for all of w
    dx = q(dy) q(w^T)^T             dy by rows in both ways, because gradients of tokens differ most; w^T by its own rows
    dw = dy^T x                     16 bits: what is rounded here would stay in the weights
    db = the sum of dy over its rows, in float32

Scales are those of this very call: nothing is kept between steps, and a row's codes depend on that row alone. The recipe is
that of torchao's "rowwise with high-precision weight gradient"; e4m3 for gradients as well, since a scale for each row has the
range that e5m2 would have. Two of three products run at the rate of 8 bits; what they cost beside it is reading x, w and dy
once more each, and w^T as a copy. `fp8_seconds` is both in numbers. Not supported: a gradient of the gradient.
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
from tilewright.kernels.quantize.per_row import quantize_rows_op
from tilewright.kernels.quantize.per_tensor import quantize_tensor_op
from tilewright.ops.linear_gradient import activated

__all__ = ["FP8_SCALES", "fp8_seconds", "linear_fp8"]

_FORMAT = "fp8"
FP8_SCALES = {"row": quantize_rows_op, "tensor": quantize_tensor_op}
"""What has a scale of its own -> what quantises so."""


class _Product(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.quantize = FP8_SCALES[scale]
        return _product(ctx.quantize(rows_ready(x), _FORMAT), ctx.quantize(rows_ready(weight), _FORMAT), bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(quantize_rows_op(dy, _FORMAT), ctx.quantize(weight.mT.contiguous(), _FORMAT), None, x.dtype)
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


def fp8_seconds(tokens: int, rows: int, cols: int, found: Ceilings, launch_s: float) -> tuple[float, float]:
    """Seconds of the products for y and dx of a weight [rows, cols] and so many tokens under ceilings: (in bf16, in float8 with
    what quantising takes). Rooflines, and `launch_s` for each launch; dw is the same in both.

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
        coded += 3 * launch_s + roof(cost, found, "fp8").seconds
        coded += sum(roof(quantize_rows_op.cost(t, _FORMAT), found, "bf16").seconds for t in (a, b))
    return plain, coded + launch_s + 4 * rows * cols / found.copy  # the copy of w^T
