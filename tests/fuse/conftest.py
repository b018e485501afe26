"""What makes torch.export faster in the hundreds of programs that are traced here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch._export.utils
from torch._C import DispatchKey
from torch._ops import OperatorBase


@pytest.fixture(scope="session", autouse=True)
def _operators_are_listed_once() -> Iterator[None]:
    """torch.export asks for all composite operators once for each of some thirty namespaces, a tenth of a tracing's time."""
    once = getattr(torch._export.utils, "_materialize_cpp_cia_ops", None)
    if once is None:  # another torch
        yield
        return
    once()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _registering_is_quick() -> Iterator[None]:
    """torch.export registers some 5,600 implementations for each tracing, and evaluates two generic types for each of them.

    These types are annotations that nobody reads, but they cost a quarter of a tracing's time.
    """
    whole = OperatorBase.py_impl

    def py_impl(self: Any, key: Any) -> Callable[[Any], Any]:
        if type(key) is not DispatchKey or key == DispatchKey.Python or key in self.py_kernels:
            return whole(self, key)

        def inner(function: Any) -> Any:
            self.py_kernels[key] = function
            self._dispatch_cache.clear()
            return function

        return inner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OperatorBase, "py_impl", py_impl)
        yield
