"""The gradient of an activation: dx = dy f'(x), elementwise, for the kinds of kernels/elementwise/activation.py.

    dy, x, dx: the same shape, the same dtype (bf16, fp16 or fp32), dense memory in the same order. f' is computed in float32
    from x, so the forward pass saves only its argument. At a kink the gradient is that of torch: 0 for relu at 0, and for
    hardswish the slope of the same side that torch uses.

Memory-bound: two elements in, one out.
Not supported: a gradient of the gradient, or of alpha.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import normal_cdf, sigmoid, tanh
from tilewright.kernels.device.contiguous import load_flat, store_flat
from tilewright.kernels.elementwise.activation import EXAMPLES as FORWARD_EXAMPLES
from tilewright.kernels.elementwise.activation import FLAT_SPACE, FlatProblem, float32_at_most
from tilewright.kernels.elementwise.inputs import activation_backward_arguments
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Impl, Inputs, Op
from tilewright.tune.space import Config

__all__ = ["activation_backward_op", "gelu_slope", "gelu_tanh_slope", "silu_slope"]


def _reference(dy: Tensor, x: Tensor, kind: str, alpha: float) -> Tensor:
    aten, wide = torch.ops.aten, torch.promote_types(x.dtype, torch.float32)
    g, z = dy.to(wide), x.to(wide)
    if kind == "elu":
        dx = aten.elu_backward(g, alpha, 1.0, 1.0, False, z)
    elif kind in ("gelu", "gelu_tanh"):
        dx = aten.gelu_backward(g, z, approximate="tanh" if kind == "gelu_tanh" else "none")
    elif kind == "relu":
        dx = aten.threshold_backward(g, z, 0.0)
    elif kind == "leaky_relu":
        dx = aten.leaky_relu_backward(g, z, alpha, False)
    else:  # the gradients of tanh and sigmoid need the result instead of x
        dx = getattr(aten, f"{kind}_backward")(g, getattr(z, kind)() if kind in ("tanh", "sigmoid") else z)
    return dx.to(x.dtype)


def _cost(dy: Tensor, x: Tensor, kind: str, alpha: float) -> Cost:
    return Cost(flops=12 * x.numel(), bytes=3 * x.nbytes)


# ---- space and examples


def _with_gradient(inputs: Inputs, x: Tensor, kind: str, alpha: float) -> tuple[Tensor, Tensor, str, float]:
    return torch.empty_like(x).copy_(inputs.randn(*x.shape, dtype=x.dtype)), x, kind, alpha


EXAMPLES = tuple(example.then(_with_gradient) for example in FORWARD_EXAMPLES)

# ---- kernel


@triton.jit
def silu_slope(x):
    """The derivative of x * sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu_slope(x):
    """Phi(x) + x phi(x)."""
    below, bell = normal_cdf(x)
    return below + x * (0.3989422804014327 * bell)


@triton.jit
def gelu_tanh_slope(x):
    """The derivative of x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return s + x * (s * (1.0 - s)) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))


@triton.jit
def _slope(x, alpha, KIND: tl.constexpr):
    """f'(x), x in float32."""
    if KIND == "relu":
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "leaky_relu":
        slope = tl.where(x > 0, 1.0, alpha)
    elif KIND == "sigmoid":
        s = sigmoid(x)
        slope = s * (1.0 - s)
    elif KIND == "tanh":
        t = tanh(x)
        slope = 1.0 - t * t
    elif KIND == "silu":
        slope = silu_slope(x)
    elif KIND == "gelu":
        slope = gelu_slope(x)
    elif KIND == "gelu_tanh":
        slope = gelu_tanh_slope(x)
    elif KIND == "hardswish":
        slope = tl.where(x <= -3, 0.0, tl.where(x < 3, 0.3333333333333333 * x + 0.5, 1.0))
    elif KIND == "mish":
        e = tl.exp(tl.where(x > 20, 20.0, x))
        t = e * (e + 2.0) / (e * (e + 2.0) + 2.0)
        slope = t + x * (1.0 - t * t) * sigmoid(x)
    else:
        slope = tl.where(x > 0, 1.0, alpha * tl.exp(tl.where(x > 0, 0.0, x)))
    return slope


@triton.jit
def _backward_block(dy_ptr, x_ptr, dx_ptr, index, size, alpha, KIND: tl.constexpr, WHOLE: tl.constexpr):
    dy = load_flat(dy_ptr, index, size, WHOLE).to(tl.float32)
    x = load_flat(x_ptr, index, size, WHOLE).to(tl.float32)
    store_flat(dx_ptr, index, dy * _slope(x, alpha, KIND), size, WHOLE)


@triton.jit(do_not_specialize=["size", "alpha"])
def _backward_kernel(dy_ptr, x_ptr, dx_ptr, size, alpha, KIND: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = first + tl.arange(0, BLOCK)
    if first + BLOCK <= size:
        _backward_block(dy_ptr, x_ptr, dx_ptr, index, size, alpha, KIND, True)
    else:
        _backward_block(dy_ptr, x_ptr, dx_ptr, index, size, alpha, KIND, False)


def _launch(config: Config, dy: Tensor, x: Tensor, kind: str, alpha: float) -> Tensor:
    dx = torch.empty_like(x)
    if x.numel():
        grid = (ceil_div(x.numel(), config["BLOCK"]),)
        launch(_backward_kernel, grid, (dy, x, dx), (x.numel(), alpha), {"KIND": kind, **config})
    return dx


activation_backward_op = Op(
    name="activation_backward",
    reference=_reference,
    problem=lambda dy, x, kind, alpha: FlatProblem(x.dtype, kind),
    cost=_cost,
    examples=EXAMPLES,
    make=activation_backward_arguments,
    impls=(Impl(name="triton", launch=_launch, space=FLAT_SPACE, refuse=float32_at_most, batch_invariant=True),),
)
