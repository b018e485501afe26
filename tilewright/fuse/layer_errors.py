"""What each layer of a fused graph adds to the error of its outputs.

Both graphs are run node by node, and each node of the fused one gets the float model's values for what comes before it, rounded
to its own type. So an error is seen where it arises, not where it arrives. Nodes are compared that say whose value they
compute: `node.meta[FLOAT_NODE]` is the name of a node in the float graph (parts.py: of several).
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
"""Key of a fused node's `meta`: the name of the node of the float graph whose value it computes."""
ANCHOR_NODE = "anchor_node"
"""Another, optional: the name of the one that its layer is called by (of a convolution and a relu the convolution)."""


@dataclass(frozen=True)
class LayerError:
    """What one node of the fused graph adds to the error."""

    node: str
    """Name in the fused graph."""
    layer: str
    """The user's name of it (`layer1.0.conv1`), else the float graph's."""
    line: str
    """The user's line, "model.py:12", or "" where it is not known."""
    own: float
    """RMS error with the float model's values as its inputs, relative to the RMS of the right values."""
    words: str = ""
    """What is wrong beyond a number."""
    largest: float = 0.0
    """Largest error, each relative to the RMS and its own right value."""
    computes: str = ""
    """The node of the float graph whose value it computes."""
    anchor: str = ""
    """The one that its fusion is named by."""


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, graph: fx.GraphModule, keep: set[str]):
        super().__init__(graph)
        self.keep, self.values = keep, dict[str, Any]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.keep:
            # An in-place node behind it would change it.
            self.values[n.name] = value.clone() if isinstance(value, Tensor) else value
        return value


_Pair = tuple[fx.Node, str, Part | None]  # node of the float graph, its anchor's name, where its value is (None: it is all)


class _Forced(fx.Interpreter):
    """Runs the fused graph; a paired node's value is compared, then the float model's goes on in its place."""

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
    """Node of the fused graph -> what it computes of the float one. Raises ValueError: there is no such node."""
    nodes = {n.name: n for n in float_graph.graph.nodes}
    found = dict[str, list[_Pair]]()
    for n in fused.graph.nodes:
        if n.op == "output":
            continue
        whole = [(n.meta[FLOAT_NODE], n.meta.get(ANCHOR_NODE, ""), None)] if FLOAT_NODE in n.meta else []
        for of, anchor, part in [*whole, *((part.node, part.anchor, part) for part in n.meta.get(FLOAT_PARTS, ()))]:
            if of not in nodes:
                raise ValueError(f"{n.name} says that it computes {of!r}, and the float graph has no such node")
            found.setdefault(n.name, []).append((nodes[of], anchor, part))
    return found


def layer_errors(
    float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Any], given: Sequence[Any] | None = None
) -> list[LayerError]:
    """The own error of every node of the fused graph that says whose value it computes, in order.

    Args:
        float_graph: the model as it was, functional.
        fused: the optimised one, before it is compiled or captured.
        inputs: flat, for both.
        given: for the optimised one, where its graph casts none.

    Raises:
        ValueError: a node names one that the float graph has not.
    """
    pairs = _pairs(float_graph, fused)
    with torch.no_grad(), exact_float32():
        floats = _Recorder(float_graph, {of.name for found in pairs.values() for of, _, _ in found})
        floats.run(*inputs, enable_io_processing=False)
        forced = _Forced(fused, pairs, floats.values, {n.name: n for n in float_graph.graph.nodes})
        forced.run(*(inputs if given is None else given), enable_io_processing=False)
    return forced.found
