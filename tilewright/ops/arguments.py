"""What public operators say where an argument is of another kind than a tensor."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

__all__ = ["in_words"]


def in_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which names an argument that is a list or a number where a tensor is wanted.

    The arguments are looked at after the call has failed: a call that works pays a tenth of a microsecond.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            words = _wrong(function, args, kwargs)
            if words is None:
                raise
            raise TypeError(words) from error

    return call


def _wrong(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """A sentence about the first argument that is neither a tensor nor what else its annotation allows; None without one."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # too many or too few: Python says it well
        return None
    for name, value in given.items():
        annotation = signature.parameters[name].annotation
        wanted = annotation.__name__ if isinstance(annotation, type) else re.sub(r"\[.*?\]", "", str(annotation))
        kind = type(value).__name__
        if value is None or isinstance(value, Tensor) or kind in wanted:
            continue
        if "Tensor" in wanted and (isinstance(value, list | tuple | int | float | str) or kind == "ndarray"):
            return f"{function.__name__}: {name} must be a tensor, got {kind} {_short(value)}; torch.as_tensor(...) makes one"
        if isinstance(value, int | float) and any(word in wanted for word in ("Sequence", "Iterable", "tuple", "list")):
            return f"{function.__name__}: {name} must be a sequence of integers, got {kind} {_short(value)}"
    return None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
