"""`linear` with a quantised weight whose gradient goes to the float weight that was quantised (straight-through estimator).

    y = activation(x @ q(w)^T + b)          bitwise the result of `linear(x, q(w), b, activation)`
    dx, dw, db                              the gradients of activation(x @ w^T + b)

A model is thus trained on exactly the values that the quantised model computes when it is served. In the gradient, both
roundings (of the weight and of the activation) are treated as the identity (Bengio et al., 2013). If a gradient is needed, the
forward pass computes both products.
"""

from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.ops.linear import linear
from tilewright.ops.linear_gradient import linear_again, linear_with_gradient
from tilewright.ops.values import valued
from tilewright.ops.weights import QuantizedWeight

__all__ = ["linear_straight_through"]


def linear_straight_through(
    x: Tensor, weight: Tensor, quantized_weight: QuantizedWeight, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """activation(x @ quantized_weight^T + bias), with the gradients that the product with `weight` would have.

    Args:
        x: [..., K], as in `linear` with a quantised weight.
        weight: [N, K], a float weight of x's dtype.
        quantized_weight: the quantised `weight`, on the same device. The caller must quantise again after each change of
            `weight`.
        bias: [N].
        activation: as in `linear`.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    if weight.shape != quantized_weight.shape or weight.device != quantized_weight.device:
        raise ValueError(
            "linear_straight_through: quantized_weight must be the weight in quantised form, with its shape and "
            f"device; got {list(quantized_weight.shape)} on {quantized_weight.device} for a weight of "
            f"{list(weight.shape)} on {weight.device}"
        )
    served = linear(x.detach(), quantized_weight, None if bias is None else bias.detach(), activation)
    if not wants_gradient(x, weight, bias):
        return served
    y = linear_again(x, weight, bias, activation)
    return valued(linear_with_gradient(x, weight, bias, activation, None) if y is None else y, served)
