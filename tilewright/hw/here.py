"""The state of torch at a call: which card is current, and whether tensors and operators behave as usual.

Launchers read addresses and launch on the current card, so callers check these functions first. The answers hold for the
calling thread.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_given", "autocasts", "away", "dispatch_modes", "indirect", "stands_for_many", "transforms", "wrapped"]

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_current_card: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)  # without CUDA no tensor is on a card
_interpreters: Callable[[], Any] = _functorch.peek_interpreter_stack

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes: fake tensors, a profiler, opcheck."""
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether `torch.autocast` is active for any device; torch's operators then choose dtypes of their own."""
stands_for_many: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor
"""Whether a tensor is really a batch of gradients (`is_grads_batched=True`)."""


def transforms() -> bool:
    """Whether the call is inside a transform of torch.func, whose tensors look like ordinary ones."""
    return _interpreters() is not None


def indirect() -> bool:
    """Whether calls must go through the dispatcher: tensors may have no memory, or torch's operators may change dtypes."""
    return dispatch_modes() > 0 or _interpreters() is not None or autocasts()


def wrapped(t: Tensor) -> bool:
    """Whether a gradient is a tensor subclass or a batch of gradients: then it may have no address."""
    return type(t) is not Tensor or stands_for_many(t)


def away(index: int) -> bool:
    """Whether a card is not the current one, on which Triton launches; False for -1 (no card)."""
    return index >= 0 and index != _current_card()


def as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its operators keep the dtypes of their arguments, even under `torch.autocast`."""

    @wraps(function)
    def call(*args: Any) -> Any:
        if not autocasts():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)

    return call
