"""Reads whether torch may multiply float32 in TF32 on a card, or forbids it for a while, however it was allowed.

torch has settings on three levels: for everything, for a card, and for a card's convolutions or products. A level that is not
set inherits from the one above. `torch.backends.*.fp32_precision` sets them. The older `allow_tf32` flags set the lowest level,
and raise an error if they are read after the newer settings were used. One can read only the effect of a level, not its own
setting. So this module changes the first level that makes a difference, and no other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Before", "allow_again", "allows_tf32", "exact_float32", "forbid_tf32"]

_get = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter

Before = tuple[str, str, str]
"""A setting, identified by two names, and its value before."""


def allows_tf32(op: str) -> bool:
    """Whether TF32 is allowed for float32 "conv" or "matmul" on a card."""
    return _get("cuda", op) == "tf32"


def forbid_tf32(op: str) -> Before | None:
    """Forbid TF32 for "conv" or "matmul" in all threads. Returns the argument of `allow_again`; None if nothing changed."""
    if _get("cuda", op) != "tf32":
        return None
    of_all = _get("generic", "all")  # the highest level, so this is its own value
    _set("generic", "all", "ieee")
    if _get("cuda", op) != "tf32":
        return "generic", "all", of_all
    of_card = _get("cuda", "all")  # "tf32" must be its own value, because the level above is "ieee"
    _set("generic", "all", of_all)
    if of_card == "tf32":
        _set("cuda", "all", "ieee")
        if _get("cuda", op) != "tf32":
            return "cuda", "all", "tf32"
        _set("cuda", "all", "tf32")
    _set("cuda", op, "ieee")
    return "cuda", op, "tf32"


def allow_again(before: Before | None) -> None:
    """Undo the change of `forbid_tf32`."""
    if before is not None:
        _set(*before)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Inside this scope, convolutions and products of float32 are computed in float32."""
    before = [forbid_tf32(op) for op in ("conv", "matmul")]
    try:
        yield
    finally:
        for place in reversed(before):
            allow_again(place)
