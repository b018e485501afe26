"""What torch does where a call is made: which card is current, and whether tensors and operators are what they look like.

Launchers read addresses and launch on the current card, so whoever calls them asks here first. The answers are of this thread.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_given", "autocasts", "away", "dispatch_modes", "indirect", "stands_for_many", "transforms", "wrapped"]

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_current_card: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)  # a torch without CUDA has no tensor there
_interpreters: Callable[[], Any] = _functorch.peek_interpreter_stack

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on: fake tensors, a profiler, opcheck."""
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether `torch.autocast` is on for any device: then torch's operators choose dtypes of their own."""
stands_for_many: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of gradients (`is_grads_batched=True`) that looks like one."""


def transforms() -> bool:
    """Whether the call is inside of one of torch.func's transforms, whose tensors look like any other."""
    return _interpreters() is not None


def indirect() -> bool:
    """Whether calls have to go an op's own way: tensors may have no memory, or torch's operators other dtypes."""
    return dispatch_modes() > 0 or _interpreters() is not None or autocasts()


def wrapped(t: Tensor) -> bool:
    """Whether a gradient stands for tensors of another kind, or for many: it has no address."""
    return type(t) is not Tensor or stands_for_many(t)


def away(index: int) -> bool:
    """Whether a card is not the current one, on which Triton launches; False of what is on no card, -1."""
    return index >= 0 and index != _current_card()


def as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its operators in the dtypes that they are given: without `torch.autocast`."""

    @wraps(function)
    def call(*args: Any) -> Any:
        if not autocasts():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)

    return call
