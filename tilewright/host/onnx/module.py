"""An ONNX file as a `torch.nn.Module`: each node becomes a call of torch's operators, in the file's order.

There are two kinds of values. Values that depend on the inputs are tensors. Small values that do not (shapes, axes, indices)
are NumPy arrays. Nodes with only arrays as inputs are computed by onnx's own reference implementation, whenever the module is
called or traced; so `Shape -> Gather -> Concat -> Reshape` is a plain reshape in every trace, for any number of rows.

Refused, each with a sentence: operators without a row in elements.py, shapes.py and layers.py (including other vendors'
operators and loops), shapes that depend on values, and strings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import numpy_helper, reference, version_converter
from torch import Tensor, nn

from tilewright.host.onnx.elements import ELEMENTS
from tilewright.host.onnx.layers import LAYERS
from tilewright.host.onnx.shapes import SHAPES
from tilewright.host.onnx.values import Unsupported, tensor_of

__all__ = ["OPSET", "OnnxModule", "onnx_model", "read_onnx"]

OPSET = 21
"""The opset to which older files are converted; newer files are used unchanged if each of their operators is in the tables."""
MAX_HOST = 4096
"""Most elements of a constant that may be a shape or the indices of a gather."""
MAX_FACTORS = 8
"""Most elements of a constant that may be the factors of a resize."""
EXAMPLE_ROWS = 2
ARRAYS_ONLY = ("Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size")
"""Operators whose results do not depend on the model's inputs in any supported graph."""
CALLS = {**ELEMENTS, **SHAPES, **LAYERS}

Value = Tensor | np.ndarray | None


class OnnxModule(nn.Module):
    """A graph, ready to be called with its inputs in order; its outputs by name.

    Args:
        model: in an opset that this package supports.

    Raises:
        ValueError: a node is not supported; the message names it.
    """

    def __init__(self, model: onnx.ModelProto):
        super().__init__()
        graph = model.graph
        self._opsets = {one.domain: one.version for one in model.opset_import}
        self._constants, self._weights = dict[str, np.ndarray](), dict[str, str]()
        for number, initializer in enumerate(graph.initializer):
            self._keep(initializer.name, numpy_helper.to_array(initializer), number)
        held = {*self._constants, *self._weights}
        self.input_names = tuple(one.name for one in graph.input if one.name not in held)
        self.output_names = tuple(one.name for one in graph.output)
        self._nodes = [_Node(node, self._opsets) for node in graph.node]
        self._last = _last_uses(self._nodes, self.output_names)

    def _keep(self, name: str, array: np.ndarray, number: int) -> None:
        if array.size <= (MAX_HOST if array.dtype.kind in "iub" else MAX_FACTORS):
            self._constants[name] = array
            return
        self._weights[name] = f"w{number}"
        self.register_buffer(f"w{number}", tensor_of(array))

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Outputs by name. Raises ValueError if a node cannot be computed for its inputs."""
        values: dict[str, Value] = {"": None, **self._constants}
        values |= {name: self.get_buffer(buffer) for name, buffer in self._weights.items()}
        values |= dict(zip(self.input_names, inputs, strict=True))
        for node, done in zip(self._nodes, self._last, strict=True):
            found = node([values[name] for name in node.inputs])
            values.update(zip(node.outputs, found, strict=False))
            wanted = [name for name in node.outputs[len(found) :] if name and name not in done]
            if wanted:
                raise ValueError(
                    f"the ONNX operator {node.name} cannot be taken: its output {wanted[0]!r} is not computed here"
                )
            for name in done:
                values.pop(name, None)
        device = inputs[0].device if inputs else torch.device("cpu")
        return {name: tensor_of(values[name], device) for name in self.output_names}


class _Node:
    """One node: its call, and what it reads and writes."""

    def __init__(self, node: onnx.NodeProto, opsets: Mapping[str, int]):
        self.inputs, self.outputs = tuple(node.input), tuple(node.output)
        self.kind = node.op_type
        self.name = f"{node.op_type} {node.name!r}" if node.name else node.op_type
        self._attributes = {one.name: _plain(one, self.name) for one in node.attribute}
        self._call = None if node.domain not in ("", "ai.onnx") else CALLS.get(node.op_type)
        if self._call is None and (node.domain not in ("", "ai.onnx") or node.op_type not in ARRAYS_ONLY):
            where = f" of domain {node.domain}" if node.domain not in ("", "ai.onnx") else ""
            raise ValueError(f"the ONNX operator {self.name}{where} cannot be taken: it has no counterpart here")
        self._reference = None
        if not any(one.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for one in node.attribute):
            self._reference = _reference(node, opsets)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Node":
        return self  # nothing of it changes

    def __call__(self, values: Sequence[Value]) -> Sequence[Value]:
        try:
            if self.kind in ("Shape", "Size") and isinstance(values[0], Tensor):
                return [_measured(self.kind, values[0], self._attributes)]
            if not any(isinstance(value, Tensor) for value in values) and self._reference is not None:
                given = {name: value for name, value in zip(self.inputs, values, strict=True) if name}
                return [np.asarray(one) for one in self._reference.run(None, given)]
            if self._call is None:
                raise Unsupported("the shape of its output depends on values")
            like = next(value for value in values if isinstance(value, Tensor))
            first = values[0] if values[0] is None else tensor_of(values[0], like.device)
            found = self._call(self._attributes, first, *values[1:])
            return found if isinstance(found, tuple | list) else [found]
        except Unsupported as error:
            raise ValueError(f"the ONNX operator {self.name} cannot be taken: {error}") from None


def _reference(node: onnx.NodeProto, opsets: Mapping[str, int]) -> reference.ReferenceEvaluator:
    """onnx's own implementation of a node."""
    inputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(node.input) if name]
    outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return reference.ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports))


def _measured(kind: str, value: Tensor, attributes: Mapping[str, Any]) -> np.ndarray:
    if kind == "Size":
        return np.asarray(value.numel(), np.int64)
    return np.asarray(list(value.shape)[attributes.get("start", 0) : attributes.get("end")], np.int64)


def _plain(attribute: onnx.AttributeProto, name: str) -> Any:
    """An attribute's value: numbers, words, an array."""
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        raise ValueError(f"the ONNX operator {name} cannot be taken: it has graphs of its own (branches or loops)")
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return [one.decode("utf-8", errors="replace") if isinstance(one, bytes) else one for one in value] if isinstance(
        value, list | tuple
    ) or hasattr(value, "append") else value  # fmt: skip


def _last_uses(nodes: Sequence[_Node], outputs: Sequence[str]) -> list[list[str]]:
    """For each node, the values that no later node needs."""
    seen, found = set(outputs) | {""}, list[list[str]]()
    for node in reversed(nodes):
        names = dict.fromkeys((*node.inputs, *node.outputs))
        found.append([name for name in names if name not in seen])
        seen.update(names)
    return found[::-1]


# ---- files


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read and check a file, and convert it to a supported opset. Raises ValueError if it is invalid or cannot be converted."""
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model, check_custom_domain=False)
    except (OSError, onnx.checker.ValidationError, ValueError) as error:
        raise ValueError(f"{path} is no ONNX model: {str(error).strip().splitlines()[0][:300]}") from None
    except Exception as error:
        if type(error).__name__ != "DecodeError":  # protobuf's, whose module depends on its implementation
            raise
        raise ValueError(f"{path} is no ONNX model: {str(error)[:300]}") from None
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    version = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), OPSET)
    if version < OPSET:
        try:
            model = version_converter.convert_version(model, OPSET)
        except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
            why = str(error).strip().splitlines()[0][:300]
            raise ValueError(f"{path} has opset {version}, which onnx cannot convert to {OPSET}: {why}") from None
    return model


def onnx_model(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> tuple[OnnxModule, tuple[Tensor, ...]]:
    """(the module, example inputs) of a file.

    Args:
        path: the file.
        shapes: by name, shapes of inputs with dimensions that the file leaves open.

    Raises:
        ValueError: the file is not an ONNX file, is not supported, or leaves a dimension other than the first open.
    """
    model = read_onnx(path)
    module = OnnxModule(model).eval().requires_grad_(False)
    shapes = dict(shapes or {})
    unknown = [name for name in shapes if name not in module.input_names]
    if unknown:
        raise ValueError(f"--shape names an input {unknown[0]!r}; {path} has {', '.join(module.input_names)}")
    given = {one.name: one for one in model.graph.input}
    return module, tuple(_example(given[name], shapes.get(name), path) for name in module.input_names)


def _example(value: onnx.ValueInfoProto, shape: Sequence[int] | None, path: Path) -> Tensor:
    if not value.type.HasField("tensor_type"):
        raise ValueError(f"{path}: input {value.name!r} is not a tensor; only tensors are supported")
    kind = value.type.tensor_type
    numpy_type = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    sizes = [one.dim_value if one.HasField("dim_value") and one.dim_value > 0 else None for one in kind.shape.dim]
    if shape is None:
        shape = [n if n is not None else EXAMPLE_ROWS if not i else 0 for i, n in enumerate(sizes)]
        if 0 in shape:
            said = f"{value.name}={','.join(str(n or 'N') for n in shape)}"
            raise ValueError(
                f"{path}: input {value.name!r} has open dimensions; give them: tilewright export ... --shape {said}"
            )
    elif len(shape) != len(sizes) or any(n is not None and n != s for n, s in zip(sizes, shape, strict=True)):
        raise ValueError(f"--shape of {value.name!r} is {list(shape)}, but the file has {sizes}")
    dtype = tensor_of(np.zeros(0, numpy_type)).dtype
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(*shape, dtype=dtype)
