"""The arguments of an op call as JSON, and new arguments like them from it, for tuning.

A tensor is written as its shape, strides and dtype; its values are drawn at random. Lists, numbers, strings, None and dtypes
are written as they are. Refused: tensors of indices (int16 to int64, bool), because their values decide what is read.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.op import Inputs

__all__ = ["MAX_BYTES", "Unspoken", "arguments_of", "spelled"]

MAX_BYTES = 16 << 30
"""Limit for one argument: it must fit beside the model."""

_CODES = (torch.int8, torch.uint8)


class Unspoken(ValueError):
    """These arguments cannot be drawn from their shapes."""


def spelled(args: Sequence[Any]) -> str:
    """JSON with sorted keys. Raises Unspoken."""
    return json.dumps([_spelled(a) for a in args], sort_keys=True, separators=(",", ":"))


def _spelled(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.dtype in _CODES):
            raise Unspoken(f"an argument of {str(value.dtype).removeprefix('torch.')}, whose values matter")
        return {"shape": list(value.shape), "strides": list(value.stride()), "dtype": _name(value.dtype)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Unspoken(f"an argument of type {type(value).__name__}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments_of(text: str, inputs: Inputs) -> tuple[Any, ...]:
    """The arguments that `spelled` wrote, with tensors from `inputs`: normal numbers, or quantised values over the full range.

    Raises:
        ValueError: the text is not from `spelled`, or a tensor is larger than MAX_BYTES.
    """
    values = json.loads(text)
    if not isinstance(values, list):
        raise ValueError(f"arguments are a JSON list; got {type(values).__name__}")
    return tuple(_value(v, inputs) for v in values)


def _value(value: Any, inputs: Inputs) -> Any:
    if isinstance(value, list):
        return [_value(v, inputs) for v in value]
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['dtype']!r} is no dtype")
    return _drawn(value["shape"], value["strides"], dtype, inputs) if "shape" in value else dtype


def _drawn(shape: list[int], strides: list[int], dtype: torch.dtype, inputs: Inputs) -> Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    if not 0 <= extent * dtype.itemsize <= MAX_BYTES:
        raise ValueError(f"a tensor of {extent} numbers of {_name(dtype)}; wanted at most {MAX_BYTES} bytes")
    low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
    flat = inputs.randint(low, high, extent, dtype=dtype) if dtype in _CODES else inputs.randn(extent, dtype=dtype)
    return flat.as_strided(shape, strides)
