"""Error messages of public operators for an argument that should be a tensor and is not."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

__all__ = ["in_words"]


def in_words(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its error names the argument if a list or number is passed instead of a tensor.

    Arguments are examined only after the call has failed, so the overhead of a successful call is a tenth of a microsecond.
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
    """An error message about the first argument that does not match its annotation; None if there is no such argument."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # too many or too few arguments: Python's own message is clear
        return None
    for name, value in given.items():
        annotation = signature.parameters[name].annotation
        wanted = annotation.__name__ if isinstance(annotation, type) else re.sub(r"\[.*?\]", "", str(annotation))
        kind = type(value).__name__
        if value is None or isinstance(value, Tensor) or kind in wanted:
            continue
        if "Tensor" in wanted and (isinstance(value, list | tuple | int | float | str) or kind == "ndarray"):
            return (
                f"{function.__name__}: {name} must be a tensor, got {kind} {_short(value)}; convert it with "
                "torch.as_tensor(...)"
            )
        if isinstance(value, int | float) and any(word in wanted for word in ("Sequence", "Iterable", "tuple", "list")):
            return f"{function.__name__}: {name} must be a sequence of integers, got {kind} {_short(value)}"
    return None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
