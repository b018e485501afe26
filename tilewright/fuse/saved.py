"""Saves an optimised model to a file and loads it in another process, without pickle.

    fast.save("model.safetensors")
    fast = tilewright.load_optimized("model.safetensors", UsersModel())

The file has the safetensors format. It contains the float model's weights with the user's names, the example inputs, and the
options of `optimize` as JSON. It contains no code: the caller passes a module of the same class, and its copy gets the weights
of the file. Graphs, compiled code and measurements are specific to a machine, and are made again when the file is loaded. The
results of a thorough search (`tune=True`) are in the tuning database.

Not supported: example inputs that are or contain objects of the user's classes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.fuse.optimize import copy_of, optimize
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.structure import Constant, Structure, rebuild

__all__ = ["load_optimized", "save"]

_KEY, _FORMAT = "tilewright.optimized", 1
_PLAIN = (bool, int, float, str, type(None))


def save(model: Optimized, path: str | Path) -> None:
    """Write an optimised model to a file.

    Raises:
        ValueError: an example contains something that cannot be stored, or the path cannot be written.
    """
    if model.examples is None:
        raise ValueError("optimized model: it is a part of another one and has no examples of its own: save the whole model")
    tensors, structure = model.examples
    held, names = dict[str, Tensor](), dict[str, str]()
    first: dict[Any, str] = {}
    for name, value in model.state_dict().items():
        # A weight that has two names is written once.
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        names[name] = first.setdefault(key if value.numel() else name, name)
        if names[name] == name:
            held[f"weight.{name}"] = value.detach().to("cpu", copy=True).contiguous()
    held |= {f"example.{i}": t.contiguous() for i, t in enumerate(tensors)}
    settings = model.settings
    dynamic = settings.dynamic if isinstance(settings.dynamic, bool) else [[k, list(d)] for k, d in settings.dynamic.items()]
    options = {name: getattr(settings, name) for name in ("precision", "tolerance", "max_shapes", "copy_outputs")}
    there = {name: getattr(settings, name) for name in ("graph", "search", "compiled", "measure")}
    said = {
        "format": _FORMAT, "class": _class_of(model.model), "options": options | {"dynamic": dynamic},
        "device": model.device.type, "device_options": there, "examples": _as_json(structure), "names": names,
    }  # fmt: skip
    try:
        save_file(held, str(path), {_KEY: json.dumps(said)})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"optimized model: {path} cannot be written: {error}") from error


def load_optimized(path: str | Path, model: nn.Module, *, report: bool = True) -> Optimized:
    """Load an optimised model from a file written by `Optimized.save`.

    Args:
        path: the file.
        model: a module of the class that was optimised, on the device where it will run. Its weights may have any values. It is
            not changed.
        report: print the report.

    Raises:
        ValueError: the file does not exist or has another format; the module has another class, or its weights have other names
            or shapes.
        Untraceable, check.Inaccurate: as in `optimize`.
    """
    said, held = _read(Path(path))
    if said["class"] != _class_of(model):
        raise ValueError(
            f"load_optimized: {path} contains a {said['class']}; got a {_class_of(model)}: pass a module of the same class"
        )
    copied = copy_of(model)
    state = {name: held[f"weight.{of}"] for name, of in said["names"].items()}
    try:
        copied.load_state_dict(state)
    except RuntimeError as error:
        lines = " ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ValueError(f"load_optimized: the weights in {path} do not fit the module: {lines or error}") from error
    tensors = [t for name, t in sorted(held.items(), key=_number) if name.startswith("example.")]
    device = next((t.device for t in (*copied.parameters(), *copied.buffers())), torch.device("cpu"))
    args, kwargs = rebuild(_from_json(said["examples"]), [t.to(device) for t in tensors])
    options: dict[str, Any] = dict(said["options"])
    if not isinstance(options["dynamic"], bool):
        options["dynamic"] = dict(options["dynamic"])
    if device.type == said["device"]:
        options |= said["device_options"]
    return optimize(copied, args, example_kwargs=kwargs, report=report, **options)


def _number(item: tuple[str, Any]) -> int:
    kind, _, rest = item[0].partition(".")
    return int(rest) if kind == "example" else -1


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(the description in a file, its tensors). Raises ValueError if the file was not written by `save`."""
    try:
        with safe_open(str(path), framework="pt") as file:
            said = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            held = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"load_optimized: {path} cannot be read: {error}; wanted a file that save() of an optimised model has written"
        ) from error
    if said.get("format") != _FORMAT:
        raise ValueError(
            f"load_optimized: {path} has format {said.get('format')}; wanted a file that save() of an optimised model has "
            f"written, which has format {_FORMAT}"
        )
    return said, held


def _class_of(model: nn.Module) -> str:
    return type(model).__qualname__


def _as_json(structure: Structure) -> dict[str, Any]:
    leaves = []
    for leaf in structure.leaves:
        if leaf is not None and not (isinstance(leaf, Constant) and isinstance(leaf.value, _PLAIN)):
            raise ValueError(
                f"optimized model: an example input contains a {leaf.kind.__name__}, which save cannot write; wanted tensors, "
                "numbers, strings, None, and tuples, lists and dicts of them. Instead, optimise the model in the other process"
            )
        leaves.append(None if leaf is None else [leaf.value])
    try:
        return {"spec": pytree.treespec_dumps(structure.spec), "leaves": leaves}
    except NotImplementedError as error:
        raise ValueError(f"optimized model: save cannot write the structure of the example inputs: {error}") from error


def _from_json(said: Mapping[str, Any]) -> Structure:
    leaves = (None if leaf is None else Constant(type(leaf[0]), leaf[0]) for leaf in said["leaves"])
    return Structure(pytree.treespec_loads(said["spec"]), tuple(leaves))
