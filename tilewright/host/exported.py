"""An exported model: a folder of data that runs without the user's code and without a compiler.

    DIR/program.json           inputs and outputs, and for each number of rows the calls of the planned graph, in order
    DIR/weights.safetensors    weights as folded by the plan
    DIR/kernels/               with `--card`: the compiled kernels (asm/bundle.py)

A call names an operator of torch (`aten.relu.default`), a call of our planned graphs (`calls.linear`), or one of a few
functions of Python's `operator`. Nothing else can be named, and names in the file never become Python source. So a malicious
folder can cause errors in loading or calling, but cannot run code.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, fx

from tilewright.asm import bundle
from tilewright.fuse import calls, int8_calls, op_calls
from tilewright.fuse.captured import Captured, Turns
from tilewright.fuse.structure import flatten
from tilewright.host.tensors import DATATYPES, Signature
from tilewright.hw.device import device_of

__all__ = ["FORMAT", "KERNELS", "PROGRAM", "WEIGHTS", "Exported", "function_named", "load_exported", "name_of", "use_of"]

FORMAT = 1
PROGRAM, WEIGHTS, KERNELS = "program.json", "weights.safetensors", "kernels"
MAX_PROGRAM_BYTES = 256 << 20
MAX_DEPTH = 16

_OURS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in (calls, op_calls)
    for name in module.__all__
    if name not in ("Choice", "run")  # these are not calls of a graph
} | {
    # Files have these names, whatever the functions are called today.
    "coded_calls.conv_from_codes": int8_calls.conv_int8_to_float,
    "coded_calls.conv_to_codes": int8_calls.conv_int8_to_int8,
    "coded_calls.dequantise": int8_calls.dequantise,
    "coded_calls.layer_norm_codes": int8_calls.layer_norm_quantise,
    "coded_calls.linear_from_codes": int8_calls.linear_int8_to_float,
    "coded_calls.linear_to_codes": int8_calls.linear_int8_to_int8,
    "coded_calls.quantise": int8_calls.quantise,
}
_PYTHON = {
    f"operator.{name}": getattr(operator, name) for name in ("add", "floordiv", "getitem", "mul", "neg", "sub", "truediv")
}
_ATEN = re.compile(r"aten\.([a-z][a-z0-9_]*|_[a-z][a-z0-9_]*)\.([A-Za-z][A-Za-z0-9_]*)")
_NAMES = {function: name for name, function in (_OURS | _PYTHON).items()}


def name_of(target: Any) -> str:
    """The name of a call in the file. Raises ValueError if the format has no name for it."""
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name if function_named(name) is target else _no_name(name)
    return _NAMES.get(target) or _no_name(getattr(target, "__name__", str(target)))


def _no_name(name: str) -> str:
    raise ValueError(f"a call of {name!r} cannot be exported; wanted calls of torch's own operators and of tilewright's")


def function_named(name: str) -> Callable[..., Any]:
    """The function for a name in the file. Raises ValueError if a file may not name it."""
    found = _OURS.get(name) or _PYTHON.get(name)
    if found is not None:
        return found
    match = _ATEN.fullmatch(name)
    packet = None if match is None else getattr(torch.ops.aten, match[1], None)
    overload = None if match is None else getattr(packet, match[2], None)
    # Functions that TorchScript adds to this namespace have no kernel in the dispatcher; one function that has reads a file.
    if not isinstance(overload, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel(overload.name()):
        raise ValueError(f"the program calls {name[:80]!r}, which is not an operator")
    if any(argument.name == "filename" for argument in overload._schema.arguments):
        raise ValueError(f"the program calls {name!r}, which reads files")
    return overload


class Exported:
    """A model from a folder: called with tensors of one of the numbers of rows that it was exported for."""

    def __init__(self, graphs: Mapping[int | None, Captured]):
        self.graphs = dict(graphs)

    def __call__(self, *inputs: Tensor) -> Any:
        """Outputs by name. Raises ValueError for a number of rows for which the model was not exported."""
        rows = None if None in self.graphs else len(inputs[0])
        if rows not in self.graphs:
            raise ValueError(f"the model was exported for {', '.join(map(str, self.graphs))} rows, and got {rows}")
        return self.graphs[rows](inputs)

    def replays(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> bool:
        """Whether a call with tensors of these shapes and dtypes replays a CUDA graph."""
        captured = self.graphs.get(None if None in self.graphs else kinds[0][0][0])
        return captured is not None and captured.graph is not None

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows for which the model was exported; (): it has no rows."""
        return tuple(sorted(rows for rows in self.graphs if rows is not None))


def use_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The facts for which a bundle of this program's kernels is valid: its calls and shapes."""
    import hashlib

    calls_of = json.dumps(said["graphs"], sort_keys=True).encode()
    return {"program": hashlib.sha256(calls_of).hexdigest()}


def load_exported(folder: Path, device: torch.device) -> tuple[Exported, Signature]:
    """Load the model of a folder onto a device.

    Raises:
        ValueError: there is no such folder, it has another format, or the program is damaged; the message says where.
        bundle.BundleRefused: the kernels were compiled for something else.
    """
    said = _read(folder)
    try:
        signature = Signature.of(said["signature"])
        held = load_file(str(folder / WEIGHTS))
        weights = {name: _laid(held[name], order).to(device) for name, order in said["weights"].items()}
        turns = Turns(device, copies=True) if device.type == "cuda" else None
        if device.type == "cuda" and (folder / KERNELS).is_dir():
            bundle.use(folder / KERNELS, arch=device_of(device).arch, facts=use_of(said))
        names = [spec.name for spec in signature.outputs]
        graphs = {one["rows"]: _graph(one, signature, names, weights, device, turns) for one in said["graphs"]}
    except (KeyError, TypeError, IndexError, AttributeError, OSError, SafetensorError, RecursionError) as error:
        raise ValueError(f"{folder}: the exported model is damaged: {type(error).__name__}: {str(error)[:200]}") from None
    if not graphs or (signature.batched and None in graphs):
        raise ValueError(f"{folder}: the exported model has no program for its signature")
    return Exported(graphs), signature


def _read(folder: Path) -> dict[str, Any]:
    path = folder / PROGRAM
    try:
        if path.stat().st_size > MAX_PROGRAM_BYTES:
            raise ValueError(f"it is larger than {MAX_PROGRAM_BYTES} bytes")
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; wanted a folder of `tilewright export`") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ValueError(f"{path} is not a program of format {FORMAT}; wanted a folder of `tilewright export`")
    return said


def _laid(value: Tensor, order: list[int] | None) -> Tensor:
    """A weight with its original order of dimensions in memory; `order`: the order in which they were written."""
    if order is None:
        return value
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.permute(back)


def _graph(
    said: Mapping[str, Any],
    signature: Signature,
    names: list[str],
    weights: Mapping[str, Tensor],
    device: torch.device,
    turns: Turns | None,
) -> Captured:
    """One graph, ready to be called. Its nodes and weights get new names; names from the file are only keys of a dict."""
    root, graph, values = torch.nn.Module(), fx.Graph(), dict[str, fx.Node]()
    for number, name in enumerate(said["inputs"]):
        values[name] = graph.placeholder(f"x{number}")
    for number, name in enumerate(said["weights"]):
        root.register_buffer(f"w{number}", weights[name])
        values[name] = graph.get_attr(f"w{number}")
    for name, function, args, kwargs in said["calls"]:
        found = [_value(one, values, device, 0) for one in args]
        named = {key: _value(one, values, device, 0) for key, one in kwargs.items() if key.isidentifier()}
        values[name] = graph.call_function(function_named(function), tuple(found), named)
    graph.output(tuple(values[name] for name in said["results"]))
    module = fx.GraphModule(root, graph)
    shapes = [[said["rows"] if n == -1 else n for n in spec.shape] for spec in signature.inputs]
    examples = [
        torch.zeros(shape, dtype=getattr(torch, DATATYPES[spec.datatype].torch), device=device)
        for spec, shape in zip(signature.inputs, shapes, strict=True)
    ]
    dtypes = [getattr(torch, DATATYPES[spec.datatype].torch) for spec in signature.outputs]
    _, structure = flatten(dict.fromkeys(names, torch.empty(0)))
    return Captured(module, module, examples, dtypes, structure, device, turns)


def _value(said: Any, values: Mapping[str, fx.Node], device: torch.device, depth: int) -> Any:
    """An argument of a call: a node, or a constant."""
    if depth > MAX_DEPTH:
        raise ValueError("the program has lists within lists within lists")
    if isinstance(said, list):
        return [_value(one, values, device, depth + 1) for one in said]
    if not isinstance(said, dict):
        return said
    (kind, of), *more = said.items()
    if more or kind not in ("node", "tuple", "float", "dtype", "layout", "memory_format", "device"):
        raise ValueError(f"the program has an argument {str(said)[:80]}, which is invalid")
    if kind == "node":
        return values[of]
    if kind == "tuple":
        return tuple(_value(one, values, device, depth + 1) for one in of)
    if kind == "device":
        return device
    if kind == "float":
        return float(of)
    wanted = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}[kind]
    found = getattr(torch, of)
    if not isinstance(found, wanted):
        raise ValueError(f"the program names the {kind} {of[:40]!r}, which does not exist")
    return found
