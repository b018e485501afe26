"""Runs a graph under construction on fake tensors, to check that operators accept its calls, and to check layouts.

An operator checks its arguments when it is called. Without this module, an error would appear only in the user's first call.
Here each new call is immediately run on fake tensors, which have no memory. If an operator rejects a fusion, the fusion can
still be left to torch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree

from tilewright.fuse.views import View

__all__ = ["Trial"]

_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Errors of calls that cannot run without values. For example, istft reads its window to check it."""


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class Trial:
    """The values of a new graph's nodes, as fake tensors.

    Args:
        root: the module with the tensors that the graph reads.
    """

    def __init__(self, root: nn.Module):
        self.root, self.mode = root, FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[Node, Any] = {}
        self.traced: dict[Node, Any] = {}
        """For torch's own calls: their fake results, from tracing."""

    def run(self, node: Node, view: View | None, like: Any = None) -> None:
        """Run one call.

        Args:
            node: a node of the new graph. Its inputs have been run before, or belong to the module.
            view: the expected layout of the result; None: any layout.
            like: for a placeholder: its fake tensor from tracing.

        Raises:
            ValueError: the result has another shape or layout.
            Exception: any error of the call itself.
        """
        with self.mode, torch.no_grad():
            try:
                value = self._value(node, like)
            except _ON_VALUES:
                if node not in self.traced:
                    raise
                value = pytree.tree_map(_empty_like, self.traced[node])
            self.values[node] = value
        if view is None or not isinstance(value, Tensor) or (value.numel() == 0 and tuple(value.shape) == view.shape):
            return
        wanted = view.strides
        steps = zip(value.shape, value.stride(), wanted or (), strict=False)
        if tuple(value.shape) != view.shape or any(size > 1 and got != want for size, got, want in steps):
            raise ValueError(
                f"{node.target} gives the shape {list(value.shape)} with strides {list(value.stride())}; the graph needs "
                f"{list(view.shape)} with strides {None if wanted is None else list(wanted)}"
            )

    def _value(self, node: Node, like: Any) -> Any:
        if node.op == "placeholder":
            return _empty_like(like)
        if node.op == "output":
            return None
        if node.op == "get_attr":
            held = getattr(self.root, str(node.target))
            return self.mode.from_tensor(held) if isinstance(held, Tensor) else held
        for held in node.all_input_nodes:
            if held.op == "get_attr" and held not in self.values:
                self.values[held] = self._value(held, None)
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)  # pyright: ignore[reportArgumentType]
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
