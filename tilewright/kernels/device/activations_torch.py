"""The activations of products and convolutions as torch has them, by the names that the operators take.

For whoever compares with torch, hands a call over to it, or looks for one in a graph. Kernels have their own forms.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATION_FORMS"]


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
"""The last two multiply the second half of the columns."""
