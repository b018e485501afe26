"""`linear` by a quantised weight, whose gradient reaches the float weight that the codes were made of (straight-through).

    y = activation(x @ q(w)^T + b)          its bits are those of `linear(x, q(w), b, activation)`
    dx, dw, db                              those of activation(x @ w^T + b)

So a model learns while it gives the numbers of the quantised model that is served. The estimate is that of Bengio et al.
(2013): rounding counts as if it were not there, that of the weight and that of the activation. With gradients there are two
products.
"""

from torch import Tensor

from tilewright.kernels.launch.autograd import wants_gradient
from tilewright.ops.linear import linear
from tilewright.ops.linear_gradient import linear_again, linear_with_gradient
from tilewright.ops.values import valued
from tilewright.ops.weights import QuantizedWeight

__all__ = ["linear_coded"]


def linear_coded(
    x: Tensor, weight: Tensor, coded: QuantizedWeight, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """activation(x @ coded^T + bias), differentiable in x, weight and bias as if the product were that of `weight`.

    Args:
        x: [..., K], as `linear` takes it with a quantised weight.
        weight: [N, K], a float weight of x's dtype.
        coded: of the weight's shape and device; whoever changes the weight makes the codes again.
        bias: [N].
        activation: as `linear`'s.

    Returns:
        [..., N] ([..., F] with silu_mul and gelu_mul) of x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the activation is unknown.
    """
    if weight.shape != coded.shape or weight.device != coded.device:
        raise ValueError(
            f"linear_coded: the codes are {list(coded.shape)} on {coded.device}, the weight {list(weight.shape)} on "
            f"{weight.device}; wanted codes of that weight"
        )
    served = linear(x.detach(), coded, None if bias is None else bias.detach(), activation)
    if not wants_gradient(x, weight, bias):
        return served
    y = linear_again(x, weight, bias, activation)
    return valued(linear_with_gradient(x, weight, bias, activation, None) if y is None else y, served)
