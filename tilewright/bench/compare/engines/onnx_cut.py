"""Builds variants as parts of one exported ONNX graph, for engines that read ONNX files, because an export takes seconds.

The chain is exported once, with every value that is passed between layers as an output; a variant is assembled from its layers'
nodes, as `cutting.py` does with torch's graphs. The exporter transposes some weights, folds batch norms into others and merges
equal ones. Weights of second and later copies are therefore found by their values; copies differ by a factor.

Refused (NotCut has the reason; the variant is then exported like any module): nodes that contain graphs (If, Loop, Scan),
copied layers whose weights are not found in the exported graph, two values of the chain that were merged.
"""

import operator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from tilewright.bench.compare.cutting import NotCut, boundaries, instances, with_boundaries
from tilewright.bench.compare.engine import need
from tilewright.bench.compare.engines.onnx_export import export_onnx, export_program, input_name, save_program
from tilewright.bench.compare.layers import Chain
from tilewright.bench.compare.variants import Key, Variant, copy_of

__all__ = ["OnnxCutter", "OnnxParts"]

Value = Any
"""onnx_ir.Value: the package is none of tilewright's own."""


class OnnxCutter:
    """The exported graph of a chain.

    Args:
        chain: whose variants are asked for.
        opset: as for `export_onnx`.
    """

    def __init__(self, chain: Chain, opset: int | None = None):
        self.chain, self.boundaries = chain, boundaries(chain)
        names = [f"value_{i}" for i in range(len(self.boundaries))]
        program = export_program(with_boundaries(chain), chain.inputs, "the model with all its values", opset, names)
        self.model: Any = program.model
        given = {value.name: value for value in self.model.graph.inputs}
        placeholders = chain.root.graph.find_nodes(op="placeholder")
        self.places: dict[fx.Node, Value] = {
            n: given[input_name(i)] for i, n in enumerate(placeholders) if input_name(i) in given
        }
        self.places |= dict(zip(self.boundaries, self.model.graph.outputs, strict=True))
        self.found: dict[tuple[str, int], str | None] = {}

    def save(self, variant: Variant, path: Path) -> None:
        """Write the variant's program. NotCut: it cannot be put together."""
        save_program(_Program(self, variant).model(), path)

    def matrices(self, layer: int) -> dict[str, Tensor]:
        """Weights of a layer that its copies have of their own."""
        root, found = self.chain.root, {}
        for node in self.chain.layers[layer].nodes:
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                found |= {f"{node.target}.{name}": value for name, value in module.named_parameters()}
            for x in node.all_input_nodes:
                if x.op == "get_attr":
                    found[str(x.target)] = operator.attrgetter(str(x.target))(root)
        return {
            n: w.detach() for n, w in found.items() if isinstance(w, Tensor) and w.dim() > 1 and w.is_floating_point()
        }  # fmt: skip

    def weight_behind(self, initializer: Value, layer: int) -> str | None:
        """The matrix of the layer that an initializer holds, however it lies; None: another constant."""
        key = initializer.name, layer
        if key not in self.found:
            array = initializer.const_value.numpy()
            found = None
            if array.ndim > 1 and array.dtype.kind == "f":
                held = torch.from_numpy(np.ascontiguousarray(array))
                found = next((name for name, weight in self.matrices(layer).items() if _holds(held, weight.cpu())), None)
            self.found[key] = found
        return self.found[key]


def _holds(held: Tensor, weight: Tensor) -> bool:
    """Whether it is the weight, as it is, transposed, or with each row times a number (a batch norm's)."""
    if weight.dim() == 2 and held.shape == weight.T.shape and torch.equal(held, weight.T):
        return True
    if held.shape != weight.shape:
        return False
    rows, own = held.flatten(1).double(), weight.flatten(1).double()
    factors = (rows * own).sum(1, keepdim=True) / own.square().sum(1, keepdim=True).clamp_min(1e-300)
    return torch.allclose(rows, factors * own, rtol=1e-4, atol=1e-6 * float(rows.abs().max()))


class OnnxParts:
    """Variants of whatever chain, cut where they can be.

    Args:
        opset: as for `export_onnx`.
    """

    def __init__(self, opset: int | None = None):
        self.opset = opset
        self.cutter: OnnxCutter | None = None

    def save(self, variant: Variant, path: Path) -> None:
        """Write a variant: a part of its model's graph, else exported by itself. EngineError: see `export_onnx`."""
        try:
            if self.cutter is None or self.cutter.chain is not variant.chain:
                self.cutter = OnnxCutter(variant.chain, self.opset)
            self.cutter.save(variant, path)
        except NotCut:
            export_onnx(variant.module, variant.inputs, path, variant.name, self.opset)


class _Program:
    """A variant's graph."""

    def __init__(self, cutter: OnnxCutter, variant: Variant):
        self.cutter, self.variant = cutter, variant
        self.ir = need("onnx_ir", "onnxruntime, openvino and cmd")
        self.nodes: list[Any] = []
        self.weights: dict[str, Value] = {}
        self.values: dict[Key, Value] = {}

    def model(self) -> Any:
        """As onnx_ir has it."""
        source, chain = self.cutter.model, self.cutter.chain
        inputs = []
        for i, node in enumerate(self.variant.program.inputs):
            if node not in self.cutter.places:
                raise NotCut(f"{node.name} is not in the exported graph")
            inputs.append(self._like(self.cutter.places[node], input_name(i)))
            self.values[(node, 0)] = inputs[-1]
        for layer, number, given in instances(chain, self.variant):
            local: dict[int, Value] = {}
            for x, key in given.items():
                if local.setdefault(id(self.cutter.places.get(x)), self.values[key]) is not self.values[key]:
                    raise NotCut(f"{x.name} and another value are the same value in the exported graph")
            inside, used = set(chain.layers[layer].nodes), set()
            for node in self.cutter.boundaries:
                if node in inside:
                    self.values[(node, number)] = self._emit(self.cutter.places[node], layer, number, local, used)
            if number and (lost := set(self.cutter.matrices(layer)) - used):
                raise NotCut(f"{', '.join(sorted(lost))} of a copied layer is not in the exported graph unchanged")
        outputs = [self.values[key] for key in self.variant.program.outputs]
        if any(value.producer() is None for value in outputs):
            raise NotCut("an output of the program is one of its inputs")
        graph = self.ir.Graph(
            inputs, outputs, nodes=self.nodes, initializers=list(self.weights.values()),
            opset_imports=dict(source.graph.opset_imports), name="main_graph",
        )  # fmt: skip
        return self.ir.Model(graph, ir_version=source.ir_version, functions=tuple(source.functions.values()))

    def _like(self, value: Value, name: str) -> Value:
        return self.ir.Value(name=name, shape=value.shape, type=value.type)

    def _emit(self, value: Value, layer: int, number: int, local: dict[int, Value], used: set[str]) -> Value:
        """What stands for a value of the exported graph, after the nodes that it needs."""
        if id(value) in local:
            return local[id(value)]
        node = value.producer()
        if node is None:
            if value.const_value is None:
                raise NotCut(f"a layer reads {value.name}, which it does not receive")
            local[id(value)] = self._weight(value, layer, number, used)
            return local[id(value)]
        if any(a.type in (self.ir.AttributeType.GRAPH, self.ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise NotCut(f"{node.op_type} contains a subgraph")
        given = [None if x is None else self._emit(x, layer, number, local, used) for x in node.inputs]
        attributes = list(node.attributes.values())
        new = self.ir.Node(
            node.domain, node.op_type, given, attributes, overload=node.overload, num_outputs=len(node.outputs),
            name=f"node_{len(self.nodes)}",
        )  # fmt: skip
        for i, (old, out) in enumerate(zip(node.outputs, new.outputs, strict=True)):
            # An output that nobody wants has no name.
            out.name = f"made_{len(self.nodes)}_{i}" if old.name else ""
            out.shape, out.type = old.shape, old.type
            local[id(old)] = out
        self.nodes.append(new)
        return local[id(value)]

    def _weight(self, value: Value, layer: int, number: int, used: set[str]) -> Value:
        behind = self.cutter.weight_behind(value, layer) if number else None
        name, held = value.name, value.const_value
        if behind is not None:
            used.add(behind)
            own = copy_of(self.variant.module, behind, number)
            if own is None:
                raise NotCut(f"copy {number} has no weight {behind}")
            name = f"copy_{number}_{name}"
            factor = own.detach().norm() / self.cutter.matrices(layer)[behind].norm()
            held = self.ir.tensor(held.numpy() * np.array(float(factor), held.numpy().dtype), name=name)
        if name not in self.weights:
            self.weights[name] = self.ir.Value(name=name, shape=value.shape, type=value.type, const_value=held)
        return self.weights[name]
