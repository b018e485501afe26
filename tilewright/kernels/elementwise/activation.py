"""Activations: y = f(x), elementwise, for any of `KINDS`.

    relu        max(x, 0)                       leaky_relu   x if x > 0 else alpha x
    sigmoid     1 / (1 + exp(-x))               elu          x if x > 0 else alpha (exp(x) - 1)   (Clevert et al., 2015)
    tanh        (e^x - e^-x) / (e^x + e^-x)     silu         x sigmoid(x)
    hardswish   x min(max(x + 3, 0), 6) / 6  (Howard et al., "MobileNetV3", 2019)
    mish        x tanh(log(1 + exp(x)))      (Misra, "Mish", 2019)
    gelu        x Phi(x) with erf; gelu_tanh: the tanh form (Hendrycks and Gimpel, "GELUs", 2016)

    x: any shape, bf16, fp16 or fp32. Dense memory is processed in storage order, and y has the strides of x. Any other x is
    copied first. f is computed in float32 and rounded once. NaN stays NaN.

Memory-bound: one element in, one out. tanh, elu and the functions built from them keep their relative accuracy around 0.
Not supported: in place (it saves no bytes), integer and complex types, a learnt slope (PReLU).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.device.activations import gelu_tanh, normal_cdf, sigmoid, silu, tanh
from tilewright.kernels.device.contiguous import dense, load_flat, store_flat
from tilewright.kernels.elementwise.inputs import activation_arguments
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.launch.shapes import ceil_div
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["FLAT_SPACE", "KINDS", "FlatProblem", "activation", "activation_op", "check", "float32_at_most"]

KINDS = ("elu", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "mish", "relu", "sigmoid", "silu", "tanh")


def _reference(x: Tensor, kind: str, alpha: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "elu":
        y = F.elu(wide, alpha)
    elif kind == "leaky_relu":
        y = F.leaky_relu(wide, alpha)
    elif kind == "gelu_tanh":
        y = F.gelu(wide, approximate="tanh")
    else:
        y = getattr(F, kind)(wide)
    return y.to(x.dtype)


def _cost(x: Tensor, kind: str, alpha: float) -> Cost:
    return Cost(flops=8 * x.numel(), bytes=2 * x.nbytes)


# ---- space and examples


class FlatProblem(NamedTuple):
    """Everything that a config may depend on. The kernel runs over flat memory, so sizes do not matter."""

    dtype: torch.dtype
    kind: str


FLAT_SPACE = Space(
    # 32 bytes of each operand per thread: two loads of 16 bytes.
    default=lambda device, problem: {"BLOCK": 4096 // problem.dtype.itemsize, "num_warps": 4},
    axes={"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8)},
    refusal=lambda device, problem, c: "under 16 bytes per thread" if c["BLOCK"] < 256 * c["num_warps"] else None,
)


def float32_at_most(device: Device, problem: Any) -> str | None:
    """Why a kernel that computes in float32 refuses a problem, or None."""
    return "does not support float64: it computes in float32" if problem.dtype == torch.float64 else None


@Example.of
def _example(
    inputs: Inputs, kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16, alpha: float = 1.0, last: bool = False
) -> tuple[Tensor, str, float]:
    x = inputs.randn(*shape, dtype=dtype, scale=2.0)
    return (x.contiguous(memory_format=torch.channels_last) if last else x), kind, alpha


EXAMPLES = (
    _example("gelu", "gelu", 3, 1000),
    _example("gelu_tanh", "gelu_tanh", 2, 8, 5, 6, last=True),
    _example("silu", "silu", 4, 512, dtype=torch.float16),
    _example("relu", "relu", 7, 11),
    _example("leaky_relu", "leaky_relu", 5, 30, alpha=0.1),
    _example("hardswish", "hardswish", 2, 100, dtype=torch.float32),
    _example("sigmoid", "sigmoid", 5, 60, dtype=torch.float32),
    _example("tanh", "tanh", 5, 60, dtype=torch.float32),
    _example("mish", "mish", 5, 60, dtype=torch.float32),
    _example("elu", "elu", 5, 60, dtype=torch.float32, alpha=0.7),
    _example("one", "gelu", 1, dtype=torch.float32),
)

# ---- kernel


@triton.jit
def _activate(x, alpha, KIND: tl.constexpr):
    """f(x), x in float32."""
    if KIND == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif KIND == "leaky_relu":
        y = tl.where(x < 0, alpha * x, x)
    elif KIND == "sigmoid":
        y = sigmoid(x)
    elif KIND == "tanh":
        y = tanh(x)
    elif KIND == "silu":
        y = silu(x)
    elif KIND == "gelu":
        below, _ = normal_cdf(x)
        y = x * below
    elif KIND == "gelu_tanh":
        y = gelu_tanh(x)
    elif KIND == "hardswish":
        y = x * tl.where(x < -3, 0.0, tl.where(x > 3, 6.0, x + 3)) * 0.16666666666666667
    elif KIND == "mish":
        # With e = exp(x): tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2), which is 1 in float32 from x = 20 on.
        e = tl.exp(tl.where(x > 20, 20.0, x))
        y = x * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))
    else:
        # exp(x) - 1 = tanh(x / 2) (exp(x) + 1): this avoids the difference of two numbers near 1.
        below = tl.where(x > 0, 0.0, x)
        y = tl.where(x > 0, x, alpha * (tanh(0.5 * below) * (tl.exp(below) + 1.0)))
    return y


@triton.jit
def _activation_block(x_ptr, y_ptr, index, size, alpha, KIND: tl.constexpr, WHOLE: tl.constexpr):
    x = load_flat(x_ptr, index, size, WHOLE).to(tl.float32)
    store_flat(y_ptr, index, _activate(x, alpha, KIND), size, WHOLE)


@triton.jit(do_not_specialize=["size", "alpha"])
def _activation_kernel(x_ptr, y_ptr, size, alpha, KIND: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = first + tl.arange(0, BLOCK)
    if first + BLOCK <= size:
        _activation_block(x_ptr, y_ptr, index, size, alpha, KIND, True)
    else:
        _activation_block(x_ptr, y_ptr, index, size, alpha, KIND, False)


def _launch(config: Config, x: Tensor, kind: str, alpha: float) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        grid = (ceil_div(x.numel(), config["BLOCK"]),)
        launch(_activation_kernel, grid, (x, y), (x.numel(), alpha), {"KIND": kind, **config})
    return y


activation_op = Op(
    name="activation",
    reference=_reference,
    problem=lambda x, kind, alpha: FlatProblem(x.dtype, kind),
    cost=_cost,
    examples=EXAMPLES,
    make=activation_arguments,
    impls=(Impl(name="triton", launch=_launch, space=FLAT_SPACE, refuse=float32_at_most, batch_invariant=True),),
)


# ---- public function


def activation(x: Tensor, kind: str, alpha: float = 1.0) -> Tensor:
    """The activation without gradients. `ops.activation` describes the arguments."""
    check(x, kind)
    return activation_op(dense(x), kind, float(alpha))


def check(x: Tensor, kind: str) -> None:
    """Raise ValueError for an unknown kind or an unsupported dtype."""
    if kind not in KINDS:
        raise ValueError(f"activation: kind is {kind!r}, wanted one of {', '.join(KINDS)}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"activation: x is {x.dtype}, wanted bfloat16, float16 or float32")
