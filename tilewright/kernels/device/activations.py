"""Activations: torch functions for the host, and Triton functions of float32 for kernels.

`gelu` uses erf; it is for kernels that spend most of their time on other work. `normal_cdf` is a polynomial with fewer
instructions, for kernels that compute little else. `hopper/epilogue.py` has its own versions, which use approximate hardware
instructions and the same constants:

    Phi(-x) = (((((A5 t + A4) t + A3) t + A2) t + A1) t) exp(-x^2 / 2),  t = 1 / (1 + RATE x),  x >= 0

Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26. This is erfc(x / sqrt 2) / 2 within 3e-7, with the
factors folded into the constants.
"""

from collections.abc import Callable

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "A1",
    "A2",
    "A3",
    "A4",
    "A5",
    "ACTIVATION_FORMS",
    "RATE",
    "activate",
    "activated",
    "gelu",
    "gelu_tanh",
    "normal_cdf",
    "sigmoid",
    "silu",
    "tanh",
]

# ---- torch


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return function(gate) * up

    return gated


ACTIVATION_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "silu_mul": _gated(F.silu),
    "gelu_mul": _gated(F.gelu),
}
"""By the names that the operators accept. The last two apply the function to the first half of the columns and multiply the
result by the second half."""


def activated(y: Tensor, activation: str) -> Tensor:
    """Apply an activation to a tensor, in its dtype. The result of a gated activation has half as many columns."""
    return ACTIVATION_FORMS[activation](y)


# ---- Triton

RATE = tl.constexpr(0.23164189)
A1 = tl.constexpr(0.127414796)
A2 = tl.constexpr(-0.142248368)
A3 = tl.constexpr(0.7107068705)
A4 = tl.constexpr(-0.7265760135)
A5 = tl.constexpr(0.5307027145)


@triton.jit
def silu(x):
    """x * sigmoid(x) of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """x * Phi(x) of float32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """The tanh form of GELU, of float32. It uses 0.5 (1 + tanh(u)) = logistic(2u)."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def sigmoid(x):
    """The logistic function of float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """tanh of float32, within 2 ulps: a polynomial below 0.625 (Moshier, Cephes, tanhf), the exponential above."""
    z = x * x
    series = -5.70498872745e-3 * z + 2.06390887954e-2
    series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1
    series = (series * z - 3.33332819422e-1) * z * x + x
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.625, series, tl.where(x < 0, -far, far))


@triton.jit
def normal_cdf(x):
    """(Phi(x), exp(-x^2 / 2)) of float32. Phi is within 3e-7. For x far below 0 it has three correct digits; 1 + erf has none.

    It needs a third of the instructions of tl.erf. With tl.erf, gelu ran at 0.95 of torch's speed on an H100 (its gradient at
    0.90), while all other activations ran at the speed of a copy.
    """
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + RATE * tl.abs(x))
    tail = ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation of this name; it must not be a gated one."""
    if ACTIVATION == "relu":
        # Not tl.maximum: a NaN stays a NaN.
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        return gelu(x)
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh(x)
    elif ACTIVATION == "silu":
        return silu(x)
    else:
        return x
