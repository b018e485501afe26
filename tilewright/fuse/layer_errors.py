"""Measures the own error of each layer of a fused graph: the error that the layer itself causes.

Both graphs are run node by node. Each node of the fused graph gets the float model's values as inputs, rounded to its own type.
So an error appears only at the node that causes it. A node is compared if it records which value it computes:
`node.meta[FLOAT_NODE]` is the name of a node in the float graph. For a node that computes several values, see parts.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.fuse.differences import difference
from tilewright.fuse.naming import layer_name, source_line
from tilewright.fuse.parts import FLOAT_PARTS, Part
from tilewright.hw.tf32 import exact_float32

__all__ = ["ANCHOR_NODE", "FLOAT_NODE", "LayerError", "layer_errors"]

FLOAT_NODE = "float_node"
"""Key in a fused node's `meta`: the name of the node in the float graph whose value it computes."""
ANCHOR_NODE = "anchor_node"
"""Optional second key: the name of the node that gives the layer its name (for a convolution and a relu, the convolution)."""


@dataclass(frozen=True)
class LayerError:
    """The error that one node of the fused graph causes."""

    node: str
    """The node's name in the fused graph."""
    layer: str
    """The user's name for the layer (`layer1.0.conv1`), or the name of the node in the float graph."""
    line: str
    """The user's source line, such as "model.py:12", or "" if it is unknown."""
    own: float
    """RMS error with the float model's values as inputs, relative to the RMS of the reference values."""
    words: str = ""
    """A text that describes the error, if the numbers do not."""
    largest: float = 0.0
    """The largest error of an element, relative to the RMS plus the element's magnitude."""
    computes: str = ""
    """The node of the float graph whose value it computes."""
    anchor: str = ""
    """The node of the float graph that gives the fusion its name."""


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, graph: fx.GraphModule, keep: set[str]):
        super().__init__(graph)
        self.keep, self.values = keep, dict[str, Any]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.keep:
            # Copied, because a later in-place node would change the value.
            self.values[n.name] = value.clone() if isinstance(value, Tensor) else value
        return value


_Pair = tuple[fx.Node, str, Part | None]  # node of the float graph, its anchor's name, the part with its value (None: all)


class _Forced(fx.Interpreter):
    """Runs the fused graph. After a node is compared, its value is replaced by the float model's value."""

    def __init__(
        self, graph: fx.GraphModule, pairs: Mapping[str, list[_Pair]], values: Mapping[str, Any], named: Mapping[str, fx.Node]
    ):  # fmt: skip
        super().__init__(graph)
        self.pairs, self.values, self.named, self.found = pairs, values, named, list[LayerError]()

    def run_node(self, n: fx.Node) -> Any:
        got = super().run_node(n)
        if n.name not in self.pairs or not isinstance(got, Tensor):
            return got
        forced = torch.empty_like(got).copy_(got)
        for of, anchor, part in self.pairs[n.name]:
            want, seen = self.values[of.name], got if part is None else part.of(got)
            apart = difference("", want, seen)
            named = self.named.get(anchor, of)
            where = layer_name(named), source_line(named)
            self.found.append(LayerError(n.name, *where, apart.rms, apart.words, apart.largest, of.name, named.name))
            if want.shape == seen.shape:
                (forced if part is None else part.of(forced)).copy_(want)
        return forced


def _pairs(float_graph: fx.GraphModule, fused: fx.GraphModule) -> dict[str, list[_Pair]]:
    """Node of the fused graph -> nodes of the float graph whose values it computes.

    Raises ValueError if the float graph has no such node.
    """
    nodes = {n.name: n for n in float_graph.graph.nodes}
    found = dict[str, list[_Pair]]()
    for n in fused.graph.nodes:
        if n.op == "output":
            continue
        whole = [(n.meta[FLOAT_NODE], n.meta.get(ANCHOR_NODE, ""), None)] if FLOAT_NODE in n.meta else []
        for of, anchor, part in [*whole, *((part.node, part.anchor, part) for part in n.meta.get(FLOAT_PARTS, ()))]:
            if of not in nodes:
                raise ValueError(f"{n.name} is recorded as computing {of!r}, but the float graph has no such node")
            found.setdefault(n.name, []).append((nodes[of], anchor, part))
    return found


def layer_errors(
    float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any] | None = None
) -> list[LayerError]:
    """The own error of every node of the fused graph that records which value it computes, in order.

    Args:
        float_graph: the original model as a functional graph.
        fused: the optimised graph, before it is compiled or captured.
        inputs: flat inputs of both.
        given: inputs of the fused graph, if it does not cast them itself.

    Raises:
        ValueError: a node refers to a node that the float graph does not have.
    """
    pairs = _pairs(float_graph, fused)
    with torch.no_grad(), exact_float32():
        floats = _Recorder(float_graph, {of.name for found in pairs.values() for of, _, _ in found})
        floats.run(*inputs, enable_io_processing=False)
        forced = _Forced(fused, pairs, floats.values, {n.name: n for n in float_graph.graph.nodes})
        forced.run(*(inputs if given is None else given), enable_io_processing=False)
    return forced.found
