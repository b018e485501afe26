"""A graph that is being built, run on tensors without memory: whether operators take its calls, and where results lie.

An operator checks its arguments when it is called, which for an optimised model would be the user's first call. Here each new
call is made at once on fake tensors: a fusion that its operator refuses is noticed while it can still be left to torch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node, map_arg

from tilewright.fuse.views import View

__all__ = ["Trial"]


class Trial:
    """Values of a new graph's nodes, without memory.

    Args:
        root: the module that holds what the graph reads.
    """

    def __init__(self, root: nn.Module):
        self.root, self.mode = root, FakeTensorMode(allow_non_fake_inputs=True)
        self.values: dict[Node, Any] = {}

    def run(self, node: Node, view: View | None, like: Any = None) -> None:
        """Make one call.

        Args:
            node: of the new graph; what it reads was run before, or is held by the module.
            view: how its result is said to lie in memory; None where that is not said.
            like: of a placeholder: what tracing has of it.

        Raises:
            ValueError: the result has another shape, or lies otherwise. And whatever the call raises.
        """
        with self.mode, torch.no_grad():
            self.values[node] = value = self._value(node, like)
        if view is None or not isinstance(value, Tensor):
            return
        wanted = view.strides
        steps = zip(value.shape, value.stride(), wanted or (), strict=False)
        if tuple(value.shape) != view.shape or any(size > 1 and got != want for size, got, want in steps):
            raise ValueError(
                f"{node.target} gives {list(value.shape)} with strides {list(value.stride())}; the graph counts on "
                f"{list(view.shape)} with {None if wanted is None else list(wanted)}"
            )

    def _value(self, node: Node, like: Any) -> Any:
        if node.op == "placeholder":
            if not isinstance(like, Tensor):
                return like
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
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
