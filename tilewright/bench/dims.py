"""Parses names and dimensions as written on a command line: `matmul M=4096 N=4096 K=4096 dtype=bf16`.

`find_op` finds an Op by its name, `parse_dims` turns `KEY=VALUE` words into keywords of its `make`. For misspelled names the
error lists the nearest ones.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from tilewright.op import Op
from tilewright.ops import ALL

__all__ = ["DTYPES", "find_op", "nearest", "parse_dims", "parse_value"]

ALIASES: Mapping[str, str] = {"matmul": "linear"}
"""Public function -> the op of another name that it calls."""

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "did you mean ...?", then all known words."""
    spelled = {name.lower(): name for name in known}
    close = [spelled[found] for found in get_close_matches(word.lower(), spelled, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}there are {', '.join(spelled.values())}"


def find_op(name: str) -> Op:
    """The op with this name, or behind the public function with this name. Raises ValueError with the nearest names."""
    ops = {op.name: op for op in ALL}
    op = ops.get(ALIASES.get(name, name))
    if op is None:
        raise ValueError(f"there is no operator {name!r}: {nearest(name, sorted([*ops, *ALIASES]))}")
    return op


def parse_dims(op: Op, words: Sequence[str]) -> dict[str, Any]:
    """Keywords for `op.make` from words like "M=4096" and "dtype=bf16".

    Raises:
        ValueError: the op takes no dimensions; a word is not KEY=VALUE, has an unknown key, has a value of the wrong kind or
            is given twice; a dimension without a default is missing.
    """
    if op.make is None:
        raise ValueError(f"{op.name} has no dimensions; leave out {' '.join(words)}")
    wanted = {
        name: parameter
        for name, parameter in inspect.signature(op.make, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{op.name}: dimensions are KEY=VALUE, got {word!r}; the dimensions are {_spelled(wanted)}")
        if key not in wanted:
            raise ValueError(f"{op.name} has no dimension {key!r}: {nearest(key, wanted)}")
        if key in found:
            raise ValueError(f"{op.name}: {key} is given twice, as {key}={found[key]} and {word}")
        value = found[key] = parse_value(f"{op.name}: {key}", text, wanted[key].annotation)
        default = wanted[key].default
        if isinstance(value, torch.dtype) and (value.itemsize == 1) != (default.itemsize == 1):
            same = [name for name, dtype in DTYPES.items() if (dtype.itemsize == 1) == (default.itemsize == 1)]
            raise ValueError(f"{op.name} does not support {key}={text}, only {', '.join(same)}")
    missing = [name for name, p in wanted.items() if p.default is inspect.Parameter.empty and name not in found]
    if missing:
        raise ValueError(f"{op.name}: {', '.join(missing)} is missing; the dimensions are {_spelled(wanted)}")
    return found


def parse_value(what: str, text: str, kind: Any) -> Any:
    """Parse text as a value of this kind: int, float, bool, str, torch.dtype, or one of these or None.

    `what` names the value in errors. Raises ValueError.
    """
    kinds = [k for k in getattr(kind, "__args__", (kind,)) if k is not type(None)]
    if text.lower() == "none" and len(kinds) < len(getattr(kind, "__args__", (kind,))):
        return None
    kind = kinds[0]
    if kind is torch.dtype:
        if text.lower() not in DTYPES:
            raise ValueError(f"{what} is {text!r}, wanted a dtype: {nearest(text, DTYPES)}")
        return DTYPES[text.lower()]
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{what} is {text!r}, wanted true or false")
        return text.lower() in ("true", "1")
    if kind is str:
        return text
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, wanted {'an integer' if kind is int else 'a number'}") from None
    if kind is int and value < 0:
        raise ValueError(f"{what} is {value}, wanted 0 or more")
    return value


def _spelled(wanted: Mapping[str, inspect.Parameter]) -> str:
    """All dimensions, with their defaults if they have one: "M=... N=... dtype=bfloat16"."""
    words = []
    for name, parameter in wanted.items():
        default = "..." if parameter.default is inspect.Parameter.empty else str(parameter.default).removeprefix("torch.")
        words.append(f"{name}={default}")
    return " ".join(words)
