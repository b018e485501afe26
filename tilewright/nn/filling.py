"""How parameters are initialised: filled and trainable as in torch.nn, or uninitialised if a checkpoint will fill them.

with unfilled():
    model = build(config)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["begins_empty", "empty_parameter", "parameter", "unfilled", "uniform"]

_EMPTY: ContextVar[bool] = ContextVar("empty", default=False)


@contextmanager
def unfilled() -> Iterator[None]:
    """Inside this scope, layers are created with uninitialised parameters that do not require gradients."""
    before = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(before)


def begins_empty() -> bool:
    """Whether `unfilled` is active."""
    return _EMPTY.get()


def empty_parameter(*shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    """An uninitialised parameter that does not require a gradient."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def parameter(
    *shape: int, fill: Callable[[Tensor], Any], device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """A trainable parameter, initialised by `fill` (a function like those of torch.nn.init); inside `unfilled` an empty one."""
    made = empty_parameter(*shape, device=device, dtype=dtype)
    if not begins_empty():
        fill(made.requires_grad_())
    return made


def uniform(in_features: int) -> Callable[[Tensor], Any]:
    """The initialisation of torch.nn.Linear: uniform, with a bound of 1 / sqrt(in_features)."""
    bound = in_features**-0.5 if in_features else 0.0
    return partial(nn.init.uniform_, a=-bound, b=bound)
