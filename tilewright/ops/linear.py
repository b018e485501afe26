"""`linear`, the one entry for weights of every format: the type of the weight decides which op runs.

A new format adds a row to `LINEAR_OPS`. Its op takes (x [M, K], weight, bias, activation, residual), as `linear_op` does, and
its weight type has the `shape` [N, K], the `dtype` and the `device` of the weight that it stands for.
"""

from torch import Tensor
from torch.nn import Parameter

from tilewright.kernels.matmul import check_epilogue, linear_op, operand_ready
from tilewright.kernels.shapes import rows_ready
from tilewright.op import Op

__all__ = ["LINEAR_OPS", "linear"]

LINEAR_OPS: dict[type, Op] = {Tensor: linear_op, Parameter: linear_op}
"""Weight type -> op. A subclass without a row of its own goes as its nearest base does."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """activation(x @ weight^T + bias) + residual.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        weight: [N, K], of a type in `LINEAR_OPS`.
        bias: [N].
        activation: none, relu, gelu, gelu_tanh, silu; or silu_mul, gelu_mul, where the weight is [2F, K], gate half first, and
            the output is act(gate) * up.
        residual: the shape of the output; added last.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype, contiguous.

    Raises:
        TypeError: no op takes a weight of this type.
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    op = LINEAR_OPS.get(type(weight)) or _inherited(type(weight))
    lead, k = x.shape[:-1], x.shape[-1:]
    if weight.dim() != 2 or k != weight.shape[1:]:
        raise ValueError(
            "linear: x must be [..., K] and weight [N, K]: x's last dimension must be the weight's; "
            f"got x {list(x.shape)} and weight {list(weight.shape)}"
        )
    shape = check_epilogue("linear", x, weight, bias, activation, residual, lead)
    if len(lead) == 1:
        return op(operand_ready(x), weight, bias, activation, None if residual is None else rows_ready(residual))
    if not lead:
        x, residual = x[None], None if residual is None else residual[None]
    residual = None if residual is None else rows_ready(residual.flatten(0, -2))
    return op(operand_ready(x.flatten(0, -2)), weight, bias, activation, residual).view(shape)


def _inherited(kind: type) -> Op:
    for base in kind.__mro__:
        if base in LINEAR_OPS:
            return LINEAR_OPS[base]
    known = ", ".join(t.__name__ for t in LINEAR_OPS)
    raise TypeError(f"linear: no op takes a weight of type {kind.__name__}; there are ops for {known}")
