"""`linear` for weights of every format: the type of the weight decides which product runs.

To add a format, add an entry to `LINEAR_OPS`. Its value is a function (x [M, K], weight, bias, activation, residual), like
`linear_op`. Its key is a weight type with the `shape` [N, K], `dtype` and `device` of the float weight that it replaces.

There are two products for an 8-bit weight. Up to `FEW_ROWS` rows, most of the time is spent on reading the weight, so the
activation stays in 16 bits (`mixed_linear`); this is one launch and more exact. With more rows, the activation is quantised as
well, to use the 8-bit rate of the tensor cores. In the invariant scope the second product is always used, so that the result
does not depend on the number of rows.

With a float weight all operands have gradients (ops/linear_gradient.py). In the invariant scope the result has the same bits
with and without gradients. Therefore an activation is always a separate op in that scope, because its gradient needs its input;
and without an activation, the residual is added before the product is rounded, so that there is one rounding.

A quantised weight is frozen: `linear` is then differentiable in x, bias and residual. The backward pass, in plain torch,
computes the gradients as if y came from the dequantised weight and the input had not been rounded (the straight-through
estimator of Bengio et al., 2013).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from tilewright.kernels.elementwise.activation_backward import activation_backward_op
from tilewright.kernels.elementwise.glu_backward import gated_backward_op
from tilewright.kernels.gemm.linear import check_epilogue, linear_op, operand_ready
from tilewright.kernels.gemm.quantized.block_scaled import block_scaled_linear_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear, scaled_linear_op
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.kernels.launch.autograd import dense, wants_gradient
from tilewright.kernels.launch.shapes import rows_ready
from tilewright.kernels.quantize.mx_to_block import quantize_fold_op
from tilewright.kernels.quantize.per_block import quantize_blocks_op
from tilewright.kernels.quantize.per_row import quantize_rows_op
from tilewright.kernels.quantize.per_tensor import quantize_static_op
from tilewright.ops.linear_gradient import activated, linear_again, linear_with_gradient
from tilewright.ops.values import invariant_scope
from tilewright.ops.weights import BlockScaledWeight, MixedWeight, MXWeight, QuantizedWeight, ScaledWeight, StaticWeight

__all__ = ["FEW_ROWS", "LINEAR_OPS", "QuantizedActivation", "activation_format", "few_rows", "linear", "linear_quantize"]

FEW_ROWS = 16
"""Up to this number of rows an 8-bit weight is multiplied by a 16-bit activation.

Speed relative to bf16 on an H100, int8 weight, 16-bit activation: 1.59 at 16 rows; 1.38 at 64 rows, where a quantised
activation reaches 1.57 (docs/results.md#quantised-layers). Nothing was measured between 16 and 64 rows. For other kernels for
few rows see docs/experiments/few-rows-weight-only.md.
"""


class QuantizedActivation(NamedTuple):
    """An activation that a norm or the previous layer has already quantised; `linear` accepts it as x."""

    codes: Tensor
    """[M, K], int8 or float8, as `quantize_rows` lays them out."""
    scales: Tensor
    """[M], float32."""
    dtype: torch.dtype
    """Dtype of the activation before it was quantised, and of the output."""


Weight = Tensor | QuantizedWeight
LinearOp = Callable[[Tensor, Any, Tensor | None, str, Tensor | None], Tensor]


def _mixed(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    rows, cols = weight.block
    return mixed_linear_op(rows_ready(x), weight.operand, weight.scales, weight.zeros, bias, activation, residual, rows, cols)


def _scaled(x: Tensor, weight: ScaledWeight, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    if _few(x):
        return _mixed(x, weight, bias, activation, residual)
    codes, scales = _quantized_input(x, weight)
    return scaled_linear_op(codes, weight.operand, scales, weight.scales, bias, activation, residual, x.dtype, True)


def _static(x: Tensor, weight: StaticWeight, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    if _few(x):
        return _mixed(x, weight, bias, activation, residual)
    if weight.offset is not None:
        bias = weight.offset if bias is None else weight.offset + bias
    codes, scales = _quantized_input(x, weight)
    return scaled_linear_op(codes, weight.operand, scales, weight.scales, bias, activation, residual, x.dtype, True)


def activation_format(weight: Tensor | QuantizedWeight, x: Tensor) -> str | None:
    """The format to which `linear` would quantise the rows of x [M, K] for this weight; None: it would not quantise them.

    With this format, a norm before the layer can write the quantised values itself. This saves a launch and a 16-bit tensor.
    """
    if type(weight) is not ScaledWeight or x.dim() != 2 or _few(x) or (x.requires_grad and torch.is_grad_enabled()):
        return None
    return weight.format


def _from_quantized(
    x: QuantizedActivation, weight: Weight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    zero = isinstance(weight, StaticWeight) and weight.x_zero is not None
    k, codes = x.codes.shape[1], x.codes.dtype
    if not isinstance(weight, ScaledWeight) or zero or weight.operand.dtype != codes or weight.shape[1] != k:
        raise ValueError(
            f"linear: x is quantised to {x.codes.dtype} {list(x.codes.shape)}, so the weight must be a "
            "`ScaledWeight` with the same kind of codes, the same K and no zero point; got a weight of type "
            f"{type(weight).__name__}, {list(weight.shape)}"
        )
    return scaled_linear(x.codes, weight.operand, x.scales, weight.scales, bias, activation, residual, x.dtype, True)


def _block_scaled(
    x: Tensor, weight: BlockScaledWeight, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    if _few(x):
        return _mixed(x, weight, bias, activation, residual)
    codes, scales = quantize_blocks_op(rows_ready(x), "fp8")
    return block_scaled_linear_op(codes, weight.operand, scales, weight.scales, bias, activation, residual, x.dtype, True)


def _mx(x: Tensor, weight: MXWeight, bias: Tensor | None, activation: str, residual: Tensor | None) -> Tensor:
    if _few(x):
        return _mixed(x, weight, bias, activation, residual)
    codes, scales = quantize_fold_op(rows_ready(x), "mxfp8")
    return block_scaled_linear_op(codes, weight.operand, scales, weight.scales, bias, activation, residual, x.dtype, True)


def few_rows(x: Tensor, rows: int) -> bool:
    """Whether an 8-bit weight is multiplied by a 16-bit x. rows: the number of rows, or of rows per expert.

    True for at most `FEW_ROWS` rows, except in the invariant scope.

    Raises:
        ValueError: x is float32 on a GPU, which no quantised product accepts.
    """
    if x.dtype == torch.float32 and x.is_cuda:
        raise ValueError(
            "linear: on a GPU, a quantised weight needs bfloat16 or float16 activations, got float32; load the "
            "model with dtype bfloat16"
        )
    return rows <= FEW_ROWS and not invariant_scope()


def _few(x: Tensor) -> bool:
    return few_rows(x, x.shape[0])


LINEAR_OPS: dict[type, LinearOp] = {
    Tensor: linear_op,
    Parameter: linear_op,
    ScaledWeight: _scaled,
    StaticWeight: _static,
    BlockScaledWeight: _block_scaled,
    MXWeight: _mx,
    MixedWeight: _mixed,
}
"""Weight type -> the function that multiplies by it. A subclass that is not listed uses that of its nearest base class."""


_FLOAT = (Tensor, Parameter)


def linear(
    x: Tensor | QuantizedActivation,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x @ weight^T + bias) + residual.

    Args:
        x: [..., K], bf16, fp16 or fp32; or a `QuantizedActivation` [M, K] in the format that `activation_format` returns.
        weight: [N, K], of a type in `LINEAR_OPS`.
        bias: [N].
        activation: none, relu, gelu, gelu_tanh, silu; or the gated silu_mul and gelu_mul: the weight is then [2F, K], the gate
            half first, and the output is act(gate) * up.
        residual: in the shape of the output; added last.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype, contiguous.

    Raises:
        TypeError: there is no product for a weight of this type.
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    if isinstance(x, QuantizedActivation):
        return _from_quantized(x, weight, bias, activation, residual)
    if residual is None and isinstance(weight, Tensor) and type(weight) in _FLOAT and wants_gradient(x, weight, bias):
        y = linear_again(x, weight, bias, activation)
        if y is not None:
            return y
    bias = dense(bias)
    op = LINEAR_OPS.get(type(weight)) or _inherited(type(weight))
    if torch.is_grad_enabled() and isinstance(weight, QuantizedWeight) and _wants_grad(x, bias, residual):
        return _Frozen.apply(x, weight, bias, activation, residual)  # pyright: ignore[reportReturnType]
    lead, k = x.shape[:-1], x.shape[-1:]
    if weight.dim() != 2 or k != weight.shape[1:]:
        raise ValueError(
            f"linear: x must be [..., K] and weight [N, K], with the same K; got x {list(x.shape)} and weight "
            f"{list(weight.shape)}"
        )
    shape = check_epilogue("linear", x, weight, bias, activation, residual, lead)  # pyright: ignore[reportArgumentType]
    if isinstance(weight, Tensor) and wants_gradient(x, weight, bias, residual):
        return linear_with_gradient(x, weight, bias, activation, residual)
    if activation != "none" and isinstance(weight, Tensor) and invariant_scope():
        y = activated(linear(x, weight, bias), activation)
        return y if residual is None else y + residual
    if isinstance(weight, Tensor):
        weight = operand_ready(weight)
    if len(lead) == 1:
        return op(operand_ready(x), weight, bias, activation, None if residual is None else rows_ready(residual))
    if not lead:
        x, residual = x[None], None if residual is None else residual[None]
    residual = None if residual is None else rows_ready(residual.flatten(0, -2))
    return op(operand_ready(x.flatten(0, -2)), weight, bias, activation, residual).view(shape)


def linear_quantize(
    x: Tensor | QuantizedActivation, weight: Weight, reader: StaticWeight, bias: Tensor | None = None, activation: str = "none"
) -> QuantizedActivation:
    """`linear` whose result is quantised for the next layer, which has static scales: one launch, no 16-bit tensor in between.

    Call this function yourself if two layers follow each other directly. No layer of `nn` calls it, because the operations that
    usually come between two layers (a residual, a norm) need 16 bits.

    Args:
        x: [M, K], bf16 or fp16; or a `QuantizedActivation`.
        weight: [N, K], a float weight of x's dtype, or an 8-bit weight with one scale per row.
        reader: the weight of the next layer; its calibrated activation scale is used.
        bias: [N].
        activation: as in `linear`.

    Returns:
        The quantised result, which `linear` accepts as x with the weight `reader`.

    Raises:
        TypeError: the weight has another type.
        ValueError: shapes or dtypes do not fit, x is quantised but the weight is not, or the reader's activation has a zero
            point.
    """
    if reader.x_zero is not None:
        raise ValueError(
            "linear_quantize: the codes for the next layer have a zero point, which is not supported here; calibrate "
            "without one"
        )
    if isinstance(weight, QuantizedWeight) and not isinstance(weight, ScaledWeight):
        raise TypeError(f"linear_quantize: wanted a float weight or a ScaledWeight, got {type(weight).__name__}")
    out, codes, scales, w_scales = reader.operand.dtype, x, None, None
    if isinstance(weight, ScaledWeight):
        if isinstance(weight, StaticWeight) and weight.offset is not None:
            bias = weight.offset if bias is None else weight.offset + bias
        codes, scales = x[:2] if isinstance(x, QuantizedActivation) else _quantized_input(x, weight)
        w_scales, weight = weight.scales, weight.operand
    elif isinstance(x, QuantizedActivation):
        raise ValueError("linear_quantize: x is quantised, but the weight is not; give x in the weight's dtype")
    y = cast_linear(
        cast(Tensor, codes), cast(Tensor, weight), out, reader.x_scale, x_scales=scales, w_scales=w_scales, bias=bias,
        activation=activation,
    )  # fmt: skip
    return QuantizedActivation(y, reader.x_scale.expand(y.shape[0]).contiguous(), reader.dtype)


def _quantized_input(x: Tensor, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """(x quantised to the format of the weight, its scales)."""
    if isinstance(weight, StaticWeight):
        return quantize_static_op(rows_ready(x), weight.x_scale, weight.value_format, weight.x_zero)
    return quantize_rows_op(rows_ready(x), weight.value_format)


def _inherited(kind: type) -> LinearOp:
    for base in kind.__mro__:
        if base in LINEAR_OPS:
            return LINEAR_OPS[base]
    known = ", ".join(t.__name__ for t in LINEAR_OPS)
    raise TypeError(f"linear: weights of type {kind.__name__} are not supported; supported are {known}")


# ---- gradients of a frozen weight


def _wants_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


class _Frozen(torch.autograd.Function):
    """`linear` with a quantised weight; the module's docstring explains its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activation: str, residual: Tensor | None
    ) -> Tensor:
        """torch disables autograd during this function."""
        ctx.weight, ctx.activation = weight, activation
        ctx.save_for_backward(x, bias)
        return linear(x, weight, bias, activation, residual)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, bias and residual (None for weight and activation), in plain torch, so that Dynamo can trace it."""
        (x, bias), dy, kind = ctx.saved_tensors, grads[0], ctx.activation
        weight = ctx.weight.dequantize(x.dtype)
        dz = dy if kind == "none" else _before_activation(dy, F.linear(x, weight, bias), kind)
        needs_x, _, needs_bias, _, needs_residual = ctx.needs_input_grad
        return (
            dz @ weight if needs_x else None,
            None,
            dz.reshape(-1, dz.shape[-1]).sum(0) if needs_bias else None,
            None,
            dy if needs_residual else None,
        )


def _before_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """The gradient of an activation's input z [..., N]; dy is the gradient of its output."""
    kind = activation.removesuffix("_mul")
    if kind != activation:
        return gated_backward_op.reference(dy, *z.chunk(2, -1), kind, True)
    return activation_backward_op.reference(dy, z, kind, 1.0)
