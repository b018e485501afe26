"""Values of ONNX graphs: tensors, which depend on the model's inputs, and NumPy arrays, which do not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["A", "Call", "Unsupported", "ints", "number", "pair", "tensor_of"]

A = dict[str, Any]
"""Attributes of a node."""
Call = Callable[..., Any]
"""(attributes, input, ...) -> an output, or several."""


class Unsupported(ValueError):
    """Why a node cannot be computed."""


def tensor_of(value: Any, device: torch.device | None = None) -> Tensor:
    """A value as a tensor. Raises Unsupported for strings, and for types that torch does not have."""
    if isinstance(value, Tensor):
        return value
    array = np.array(value)  # a copy: torch wants memory that may be written
    try:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)
    except TypeError:
        raise Unsupported(f"numbers of type {array.dtype.name} are not supported") from None


def ints(value: Any, what: str) -> list[int]:
    """Numbers that do not depend on the inputs, such as a shape."""
    if isinstance(value, Tensor):
        raise Unsupported(f"{what} depend on what the numbers are")
    return [int(one) for one in np.ravel(value)]


def number(value: Any, what: str) -> Any:
    """A number that does not depend on the inputs."""
    if isinstance(value, Tensor):
        raise Unsupported(f"{what} depend on what the numbers are")
    return np.ravel(value)[0].item()


def pair(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands, one of which is a tensor. A single number stays a number, so that it is fused and not broadcast."""
    like = a if isinstance(a, Tensor) else b

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value
        array = np.asarray(value)
        return array.item() if array.ndim == 0 else tensor_of(array, like.device)

    return one(a), one(b)
