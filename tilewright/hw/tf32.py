"""Whether torch may multiply float32 in TF32 on a card: read, and forbidden for a while, whichever way it was allowed.

torch has three places for it, each of which stands where the one below says nothing: of everything, of a card, of a card's
convolutions or products. `torch.backends.*.fp32_precision` sets them. The older `allow_tf32` flags set the last, and raise
where they are asked after the first ones were used. What a place holds is not told, only what counts in the end; so here the
first place is changed that makes a difference, and no other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Before", "allow_again", "allows_tf32", "exact_float32", "forbid_tf32"]

_get = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter

Before = tuple[str, str, str]
"""A place, which are two names, and what it held."""


def allows_tf32(op: str) -> bool:
    """Whether TF32 is allowed in float32 "conv" or "matmul" on a card."""
    return _get("cuda", op) == "tf32"


def forbid_tf32(op: str) -> Before | None:
    """Multiply float32 as such in "conv" or "matmul" of all threads; what `allow_again` wants, None where nothing changed."""
    if _get("cuda", op) != "tf32":
        return None
    of_all = _get("generic", "all")  # nothing is above it: what it holds
    _set("generic", "all", "ieee")
    if _get("cuda", op) != "tf32":
        return "generic", "all", of_all
    of_card = _get("cuda", "all")  # "tf32" is its own: above it is "ieee"
    _set("generic", "all", of_all)
    if of_card == "tf32":
        _set("cuda", "all", "ieee")
        if _get("cuda", op) != "tf32":
            return "cuda", "all", "tf32"
        _set("cuda", "all", "tf32")
    _set("cuda", op, "ieee")
    return "cuda", op, "tf32"


def allow_again(before: Before | None) -> None:
    """Put back what `forbid_tf32` changed."""
    if before is not None:
        _set(*before)


@contextmanager
def exact_float32() -> Iterator[None]:
    """The scope in which convolutions and products of float32 are computed in float32."""
    before = [forbid_tf32(op) for op in ("conv", "matmul")]
    try:
        yield
    finally:
        for place in reversed(before):
            allow_again(place)
