"""Builds variants as parts of one exported graph, for engines that take graphs, without tracing each variant.

`Cutter` exports a chain's graph once per precision; every value that is passed between layers is among its outputs. A variant's
program is then assembled layer by layer: from each of a layer's outputs back to its inputs, node by node. The result has the
same nodes as a trace of the variant itself (a test compares them), and takes milliseconds instead of seconds. Weights are those
of the export; second and later copies of a layer have the variant's.

Refused (NotCut has the reason; the variant is then traced like any module): layers that pass on other objects than tensors, and
graphs in which two values of the chain are the same.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from tilewright.bench.compare.layers import Chain
from tilewright.bench.compare.variants import Key, Variant, copy_of
from tilewright.fuse.trace import Known, Traced, Untraceable, trace

__all__ = ["Cutter", "NotCut", "boundaries", "instances"]


class NotCut(ValueError):
    """A chain, or a variant of it, is not a part of an exported graph."""


def boundaries(chain: Chain) -> list[fx.Node]:
    """The values that the layers of a chain pass to each other and to the caller, in order.

    Raises NotCut if one is not a tensor.
    """
    of = {node: i for i, layer in enumerate(chain.layers) for node in layer.nodes}
    final = set(chain.outputs)
    found = [n for n in of if n in final or any(of.get(user, of[n]) != of[n] for user in n.users)]
    odd = [n.name for n in found if n not in chain.shapes]
    if odd:
        raise NotCut(f"layers pass on {', '.join(odd)}, which are not tensors")
    return found


def with_boundaries(chain: Chain) -> fx.GraphModule:
    """The chain's graph with all its `boundaries` as outputs."""
    graph, env = fx.Graph(), {}
    for node in chain.root.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in boundaries(chain)))
    return fx.GraphModule(chain.root, graph)


def instances(chain: Chain, variant: Variant) -> list[tuple[int, int, dict[fx.Node, Key]]]:
    """(layer, number of the copy, its inputs: value of the chain -> value of the program), in order."""
    of = {node: i for i, layer in enumerate(chain.layers) for node in layer.nodes}
    found = []
    for (layer, number), steps in groupby(variant.program.steps, lambda step: (of[step.key[0]], step.key[1])):
        given = {x: key for step in steps for x, key in step.reads.items() if of.get(x) != layer and x.op != "get_attr"}
        found.append((layer, number, given))
    return found


class Cutter:
    """Exports of one chain.

    Args:
        chain: whose variants are asked for. NotCut: see `boundaries`.
    """

    def __init__(self, chain: Chain):
        self.chain = chain
        self.boundaries = boundaries(chain)
        self._exported: dict[torch.dtype | None, tuple[Traced, dict[fx.Node, fx.Node]]] = {}

    def known(self, variant: Variant) -> "Cut":
        """The variant as a module that needs no tracing. NotCut: it cannot be put together."""
        found = Cut(self, variant)
        found.as_traced(variant.inputs, {})
        return found

    def exported(self, dtype: torch.dtype | None) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        """(the graph in `dtype`, value of the chain -> its node there). None: the model's dtype. Raises NotCut."""
        if dtype not in self._exported:
            root, inputs = with_boundaries(self.chain), self.chain.inputs
            if dtype is not None:
                root = copy.deepcopy(root).to(dtype)
                inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
            try:
                traced = trace(root, inputs)
            except Untraceable as error:
                raise NotCut(str(error)) from error
            if traced.mutated:
                raise NotCut(f"it writes to its inputs {', '.join(traced.mutated)}")
            places = dict(zip(self.chain.root.graph.find_nodes(op="placeholder"), traced.graph.find_nodes(op="placeholder")))
            results: Any = traced.graph.output_node().args[0]
            self._exported[dtype] = traced, places | dict(zip(self.boundaries, results, strict=True))
        return self._exported[dtype]


class _Source:
    """What a `Cut` is made from; its copies share it."""

    def __init__(self, cutter: Cutter, variant: Variant):
        self.cutter = cutter
        self.variant, self.module = variant, variant.module
        self.instances = instances(cutter.chain, variant)
        self.outputs = variant.program.outputs
        self.inputs = variant.program.inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Source":
        return self


class Cut(Known):
    """A variant, as `tilewright.fuse` takes it: its graph is a part of the chain's."""

    kind: Tensor

    def __init__(self, cutter: Cutter, variant: Variant):
        super().__init__()
        self.source = _Source(cutter, variant)
        # What a cast of the module shows in: weights are the export's.
        self.register_buffer("kind", torch.empty(0, device=variant.inputs[0].device), persistent=False)
        self.own = self.kind.dtype

    def forward(self, *inputs: Tensor) -> Any:
        """The variant's own call."""
        return self.source.module(*inputs)

    def as_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        """The program as a graph in the module's type. NotCut: two values of the chain are one in the graph."""
        dtype = None if self.kind.dtype == self.own else self.kind.dtype
        whole, places = self.source.cutter.exported(dtype)
        made = _Program(self.source, whole, places)
        return Traced(made.module(), made.state)


class _Program:
    """Puts a program together.

    Args:
        source: its layers and their wiring.
        whole: the exported graph.
        places: value of the chain -> its node there.
    """

    def __init__(self, source: _Source, whole: Traced, places: dict[fx.Node, fx.Node]):
        self.source, self.whole, self.places = source, whole, places
        self.graph, self.state = fx.Graph(), {}
        self.taken: dict[str, fx.Node] = {}
        self.values: dict[Key, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        """Of flat inputs, giving a tuple."""
        for i, node in enumerate(self.source.inputs):
            self.values[(node, 0)] = self.graph.placeholder(f"input_{i}")
            self.values[(node, 0)].meta = dict(self.places[node].meta)
        handed = self.source.cutter.boundaries
        layers = self.source.cutter.chain.layers
        for layer, number, given in self.source.instances:
            local: dict[fx.Node, fx.Node] = {}
            for x, key in given.items():
                if local.setdefault(self.places[x], self.values[key]) is not self.values[key]:
                    raise NotCut(f"{x.name} and another value are the same value in the exported graph")
            inside = set(layers[layer].nodes)
            for node in handed:
                if node in inside:
                    self.values[(node, number)] = self._emit(self.places[node], number, local)
        self.graph.output(tuple(self.values[key] for key in self.source.outputs))
        root = nn.Module()
        for name, value in self.state.items():
            root.register_buffer(name, value, persistent=False)
        return fx.GraphModule(root, self.graph)

    def _emit(self, wanted: fx.Node, number: int, local: dict[fx.Node, fx.Node]) -> fx.Node:
        """A copy of a node of the exported graph, after those that it reads and that are not there yet."""
        waiting = [wanted]
        while waiting:
            node = waiting[-1]
            missing = [x for x in node.all_input_nodes if x not in local] if node not in local else []
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if node in local:
                continue
            if node.op == "placeholder":
                raise NotCut(f"a layer reads the input {node.name}, which it does not receive")
            local[node] = self._weight(node, number) if node.op == "get_attr" else self.graph.node_copy(node, local.__getitem__)
        return local[wanted]

    def _weight(self, node: fx.Node, number: int) -> fx.Node:
        target = str(node.target)
        value, name = self.whole.state[target], target.replace(".", "_")
        own = copy_of(self.source.module, target, number) if number else None
        if own is not None:
            value, name = own.to(value.dtype), f"copy_{number}_{name}"
        if name not in self.taken:
            self.state[name] = value
            self.taken[name] = self.graph.get_attr(name)
            self.taken[name].meta = dict(node.meta)
        return self.taken[name]
