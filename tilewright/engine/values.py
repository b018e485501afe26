"""Values from callers: checks of numbers, values in error messages, and the seeds of samples."""

import reprlib
import secrets
from typing import Any

__all__ = ["integer", "real", "sample_seed", "shown"]


def integer(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError unless `value` is an integer in [low, high] and not a bool."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, wanted an integer")
    if not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}, wanted {low} to {high}")


def real(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError unless `value` is a number in [low, high] and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, wanted a number")
    if not low <= value <= high:  # NaN is in no range
        raise ValueError(f"{name} is {shown(value)}, wanted {low:g} to {high:g}")


def shown(value: Any, most: int = 200) -> str:
    """A value for an error message, in at most `most` characters. Python cannot print integers of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"{'-' if value < 0 else ''}an integer of some {int(value.bit_length() * 0.30103)} digits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    words = short.repr(value)
    return words if len(words) <= most else words[: most - 3] + "..."


def sample_seed(seed: int | None, index: int) -> int:
    """The int64 seed of sample `index`: `seed + index`, wrapped to int64; for None a random seed from the system's entropy."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + index + 2**63) % 2**64 - 2**63
