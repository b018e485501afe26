"""The operations of a program given to an engine, with the modules from which they come: `engine.Operation`."""

import ast
from typing import Any

import torch

from tilewright.bench.compare.engine import Operation

__all__ = ["exported_operations", "onnx_operations"]


def onnx_operations(model: Any) -> list[Operation]:
    """Of a model of onnx_ir, in its order, from the notes that torch's exporter leaves at each node; without: no module."""
    found: list[Operation] = []
    place: dict[str, int] = {}
    for node in model.graph:
        # Lists as Python writes them: modules from the outermost in, then the exported node; the last class is its operator.
        scopes, classes = (
            ast.literal_eval(node.metadata_props.get(f"pkg.torch.onnx.{key}", "[]"))
            for key in ("name_scopes", "class_hierarchy")
        )
        made = [value.name for value in node.outputs if value.name]
        found.append(
            Operation(
                names=tuple(name for name in (node.name, *made) if name),
                scope=scopes[-2] if len(scopes) > 1 else "",
                op=classes[-1].split(".")[1] if classes and "." in classes[-1] else "",
                reads=tuple(place[value.name] for value in node.inputs if value is not None and value.name in place),
            )
        )
        place |= dict.fromkeys(made, len(found) - 1)
    return found


def exported_operations(program: torch.export.ExportedProgram) -> list[Operation]:
    """Of an archive of torch.export: a node is called as the value that it makes."""
    found: list[Operation] = []
    place: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        scopes = [str(where[0]) for where in (node.meta.get("nn_module_stack") or {}).values()]
        op = node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
        reads = tuple(place[x.name] for x in node.all_input_nodes if x.name in place)
        found.append(Operation(names=(node.name,), scope=scopes[-1] if scopes else "", op=op, reads=reads))
        place[node.name] = len(found) - 1
    return found
