"""What follows an anchor in a graph behind autograd, pulled into its launch as far as the operator's epilogue goes.

    product       + bias, activation, + residual
    convolution   + bias, + residual, activation

The walk goes from value to value by single readers, through reshapes. A value with another reader ends it, since it is stored
all the same: what is kept for a backward pass is such a value.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse.activations import Activation, find_activation
from tilewright.fuse.anchors import Anchor, tensor_of
from tilewright.fuse.decisions import Decision

__all__ = ["Launch", "pull", "symbolic"]

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass
class Launch:
    """An anchor and what its launch does beyond it."""

    anchor: Anchor
    name: str
    last: Node
    """Whose value the launch gives."""
    bias: Node | None
    activation: str = "none"
    residual: Node | None = None
    shape: Any = None
    """The reshape's argument between the anchor and `last`, None where there is none."""
    pulled: list[Decision] = field(default_factory=list)
    refused: list[Decision] = field(default_factory=list)


def symbolic(*shapes: Iterable[Any]) -> bool:
    """Whether a size is not known when the graph is compiled."""
    return any(not isinstance(size, int) for shape in shapes for size in shape)


def pull(launch: Launch) -> None:
    """Extend a launch of a product or a convolution as far as it goes."""
    _Walk(launch).run()


class _Walk:
    def __init__(self, launch: Launch):
        self.launch, self.here, self.shape = launch, launch.last, None
        self.conv = launch.anchor.kind == "conv"
        value = tensor_of(launch.anchor.node)
        assert value is not None, "an anchor's value has a shape"
        self.saved = 0 if symbolic(value.shape) else 2 * math.prod(value.shape) * value.element_size()

    def run(self) -> None:
        """Value by value, until one ends it."""
        launch = self.launch
        while not (self.conv and launch.activation != "none"):
            if self._through_reshape():
                continue
            if launch.activation == "none" and (found := find_activation(self.here)) is not None:
                taken = self._activation(found)
            elif (self.conv or launch.residual is None) and (add := _sum(self.here)) is not None:
                taken = self._sum(*add)
            else:
                return
            if not taken:
                return
            launch.last, launch.shape = self.here, self.shape

    def _through_reshape(self) -> bool:
        """Step over a reshape; a refusal is noted where something behind it would be pulled in and may not be."""
        if self.conv:
            return False
        reshape = next((user for user in self.here.users if user.target in _RESHAPES), None)
        if reshape is None:
            return False
        if not (others := _readers(self.here, (reshape,))):
            self.here, self.shape = reshape, reshape.args[1]
            return True
        if (found := find_activation(reshape)) is not None:
            self._note("activation", found.node, False, f"{found.name}: {_why_kept(self.here, others)}")
        elif (add := _sum(reshape)) is not None:
            self._note("residual", add[0], False, _why_kept(self.here, others))
        return False

    def _activation(self, found: Activation) -> bool:
        kept = [(n, r) for n in (self.here, *found.inside - {found.node}) if (r := _readers(n, found.inside))]
        if kept:
            return self._note("activation", found.node, False, f"{found.name}: {_why_kept(*kept[0])}")
        if not self.conv and self.launch.residual is not None:
            return self._note("activation", found.node, False, f"{found.name} behind a sum, which the operator forms last")
        self.launch.activation, self.here = found.name, found.node
        return self._note("activation", found.node, True, found.name)

    def _sum(self, add: Node, other: Node) -> bool:
        launch = self.launch
        if more := _readers(self.here, (add,)):
            return self._note("residual", add, False, _why_kept(self.here, more))
        bare = launch.bias is None and launch.residual is None and launch.activation == "none"
        if bare and _is_bias(other, self.here, self.conv):
            launch.bias, kind = other, "bias"
        elif launch.residual is None and _like(other, self.here):
            launch.residual, kind = other, "residual"
        else:
            why = "no second sum" if launch.residual is not None else "no tensor of the result's shape and dtype"
            return self._note("residual", add, False, f"+ {other.name}: {why} that the launch can add")
        self.here = add
        return self._note(kind, add, True, f"+ {other.name}")

    def _note(self, kind: str, node: Node, taken: bool, reason: str) -> bool:
        """Record a decision, and say it."""
        launch = self.launch
        # The first that is pulled in spares storing the product and reading it again; Inductor fuses the others anyway.
        saved = self.saved if taken and not launch.pulled else 0
        decision = Decision(anchor=launch.name, kind=kind, node=node.name, taken=taken, reason=reason, bytes_saved=saved)
        (launch.pulled if taken else launch.refused).append(decision)
        return taken


def _readers(node: Node, inside: Iterable[Node]) -> list[Node]:
    """Who reads a node's value beside those inside."""
    within = set(inside)
    return [user for user in node.users if user not in within]


def _why_kept(node: Node, readers: list[Node]) -> str:
    if any(reader.op == "output" for reader in readers):
        return f"{node.name} is a result of this graph, or kept for the backward pass: it is stored all the same"
    return f"{node.name} is also read by {', '.join(reader.name for reader in readers[:3])}: it is stored all the same"


def _sum(here: Node) -> tuple[Node, Node] | None:
    """(the sum that reads a value, what is added to it); None where there is none."""
    for user in here.users:
        if user.target is aten.add.Tensor and not user.kwargs and len(user.args) == 2:
            left, right = user.args
            other = right if left is here else left
            if isinstance(other, Node) and other is not here:
                return user, other
    return None


def _like(other: Node, here: Node) -> bool:
    a, b = tensor_of(other), tensor_of(here)
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _is_bias(other: Node, here: Node, conv: bool) -> bool:
    """A number for each column of a product, [N], or each channel of a convolution's result, [O, 1, 1] or [1, O, 1, 1]."""
    a, b = tensor_of(other), tensor_of(here)
    if a is None or b is None or a.dtype != b.dtype or b.dim() < 2 or symbolic(a.shape):
        return False
    if not conv:
        return a.shape == b.shape[-1:]
    each = [b.shape[1], *[1] * (b.dim() - 2)]
    return list(a.shape) in (each, [1, *each])
