"""Writes the arguments of an op call as JSON, and makes similar arguments from it, for tuning.

Of a tensor, shape, strides and dtype are written. New values are drawn at random. Lists, numbers, strings, None and dtypes are
written as they are. Not supported: tensors of indices (int16 to int64, bool), because their values decide which memory is read.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.op import Inputs

__all__ = ["MAX_BYTES", "Unspoken", "arguments_of", "spelled"]

MAX_BYTES = 16 << 30
"""Limit in bytes for one argument, because it must fit into memory in addition to the model."""

_CODES = (torch.int8, torch.uint8)


class Unspoken(ValueError):
    """Arguments cannot be made from shapes and dtypes alone."""


def spelled(args: Sequence[Any]) -> str:
    """The arguments as JSON with sorted keys. Raises Unspoken."""
    return json.dumps([_spelled(a) for a in args], sort_keys=True, separators=(",", ":"))


def _spelled(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.dtype in _CODES):
            raise Unspoken(f"an argument is a tensor of {_name(value.dtype)}, which random values cannot replace")
        return {"shape": list(value.shape), "strides": list(value.stride()), "dtype": _name(value.dtype)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise Unspoken(f"an argument has the type {type(value).__name__}, which cannot be written as JSON")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arguments_of(text: str, inputs: Inputs) -> tuple[Any, ...]:
    """Arguments like those that `spelled` wrote. Tensors come from `inputs`.

    Their values are normally distributed numbers, or quantised values over the full range.

    Raises:
        ValueError: the text is not from `spelled`, or a tensor is larger than MAX_BYTES.
    """
    values = json.loads(text)
    if not isinstance(values, list):
        raise ValueError(f"the arguments must be a JSON list; got a {type(values).__name__}")
    return tuple(_value(v, inputs) for v in values)


def _value(value: Any, inputs: Inputs) -> Any:
    if isinstance(value, list):
        return [_value(v, inputs) for v in value]
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value['dtype']!r} is not a dtype of torch")
    return _drawn(value["shape"], value["strides"], dtype, inputs) if "shape" in value else dtype


def _drawn(shape: list[int], strides: list[int], dtype: torch.dtype, inputs: Inputs) -> Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    if not 0 <= extent * dtype.itemsize <= MAX_BYTES:
        raise ValueError(f"a tensor has {extent} elements of {_name(dtype)}; wanted at most {MAX_BYTES} bytes")
    low, high = (-128, 128) if dtype == torch.int8 else (0, 256)
    flat = inputs.randint(low, high, extent, dtype=dtype) if dtype in _CODES else inputs.randn(extent, dtype=dtype)
    return flat.as_strided(shape, strides)
