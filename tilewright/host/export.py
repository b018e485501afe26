"""Writes a model as a folder that can be served without its code; `exported.py` describes the format.

The model is optimised once for each number of rows to which batches will be padded, and each graph is written call by call. If
a card is named, its kernels are compiled into the folder, without a GPU: the graphs are run on tensors without memory.

Refuses, with the reason: a model that cannot be traced as a whole, calls for which the format has no name, and variable
dimensions other than the rows.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from tilewright import __version__
from tilewright.asm import bundle
from tilewright.asm.compile import compile_only, stand_in
from tilewright.fuse import Optimized, optimize
from tilewright.host.config import ModelConfig
from tilewright.host.exported import FORMAT, KERNELS, PROGRAM, WEIGHTS, name_of, use_of
from tilewright.host.loaded import buckets_of, rows_of, signature_of
from tilewright.host.tensors import Signature
from tilewright.hw.device import Device
from tilewright.op import on_card

__all__ = ["export"]


def export(
    module: nn.Module,
    examples: tuple[Tensor, ...],
    folder: Path,
    config: ModelConfig,
    *,
    card: Device | None = None,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda words: None,
) -> Signature:
    """Write a model as a folder; return its signature.

    Args:
        module: in evaluation mode, on the device where it will run, or on a CPU.
        examples: example inputs.
        folder: new or empty.
        config: its fields `precision`, `max_batch`, `preferred` and the names of inputs and outputs are used.
        card: also compile the kernels for this card.
        jobs: number of kernels to compile at a time.
        progress: called with a short text at each stage.

    Raises:
        ValueError: the model cannot be exported; the message names the part that cannot.
        FileExistsError: the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"--out {folder} is not empty; wanted a new folder")
    if config.inputs:
        raise ValueError("a model with open dimensions other than its rows cannot be exported: a graph has fixed shapes")
    if isinstance(module, Optimized):
        module = module.model
    signature = signature_of(module, examples, config)
    sizes: Sequence[int | None] = buckets_of(config, optimised=True) if signature.batched else (None,)
    graphs = dict[int | None, fx.GraphModule]()
    for size in sizes:
        progress(f"Planning {'' if size is None else f'{size} rows'}")
        inputs = examples if size is None else tuple(rows_of(x, size) for x in examples)
        graphs[size] = _fused(module, inputs, config.precision)
    weights, said = _Weights(), list[dict[str, Any]]()
    for size, graph in graphs.items():
        said.append({"rows": size, **_written(graph, weights)})
    whole = {
        "format": FORMAT,
        "tilewright": __version__,
        "precision": config.precision,
        "signature": signature.json(),
        "weights": weights.orders,
        "graphs": said,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights.held, str(folder / WEIGHTS))
    (folder / PROGRAM).write_text(json.dumps(whole, allow_nan=False) + "\n", encoding="utf-8")
    if card is not None:
        progress(f"Compiling for {card.name}")
        _compiled(folder / KERNELS, graphs, examples, card, jobs, use_of(whole))
    return signature


def _fused(module: nn.Module, inputs: tuple[Tensor, ...], precision: str | None) -> fx.GraphModule:
    made = optimize(module, inputs, precision, report=False, compiled=False, measure=False, graph=False)
    if not made.made or made.made[0].captured is None:
        raise ValueError(
            "the model cannot be traced as a whole: only parts of it are optimised, and the code between them is Python, "
            "which an exported folder cannot contain; serve MODULE:FUNCTION instead"
        )
    return made.fused


class _Weights:
    """The tensors of all graphs, each once."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.orders: dict[str, list[int] | None] = {}
        self._known: dict[Any, list[tuple[str, Tensor]]] = {}

    def name(self, value: Tensor) -> str:
        """The name of a tensor; a new tensor is added."""
        alike = self._known.setdefault((value.shape, value.stride(), value.dtype), [])
        for name, other in alike:
            if other is value or torch.equal(other, value):
                return name
        name = f"w{len(self.held)}"
        order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
        laid = value.detach().cpu().permute(order)
        plain = order == list(range(value.dim())) or not laid.is_contiguous()
        self.held[name] = value.detach().cpu().contiguous().clone() if plain else laid.contiguous().clone()
        self.orders[name] = None if plain else order
        alike.append((name, value))
        return name


def _written(module: fx.GraphModule, weights: _Weights) -> dict[str, Any]:
    """The calls of a graph, as JSON values."""
    inputs, attributes, calls, results = list[str](), list[str](), list[Any](), list[str]()
    names = dict[fx.Node, str]()
    for number, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            names[node] = f"x{len(inputs)}"
            inputs.append(names[node])
        elif node.op == "get_attr":
            names[node] = weights.name(_attribute(module, str(node.target)))
            if names[node] not in attributes:
                attributes.append(names[node])
        elif node.op == "call_function":
            names[node] = f"n{number}"
            args = [_spelled(one, names) for one in node.args]
            kwargs = {key: _spelled(one, names) for key, one in node.kwargs.items()}
            calls.append([names[node], name_of(node.target), args, kwargs])
        elif node.op == "output":
            results = [names[one] for one in node.args[0]]  # pyright: ignore[reportGeneralTypeIssues]
        else:
            raise ValueError(f"a node of kind {node.op!r} ({node.target}) cannot be exported")
    return {"inputs": inputs, "weights": attributes, "calls": calls, "results": results}


def _attribute(module: fx.GraphModule, path: str) -> Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, Tensor):
        raise ValueError(f"the graph holds {path!r}, a {type(found).__name__}, which cannot be exported; wanted tensors")
    return found


def _spelled(value: Any, names: dict[fx.Node, str]) -> Any:
    """An argument as JSON; `exported._value` reads it."""
    if isinstance(value, fx.Node):
        return {"node": names[value]}
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return {"tuple": [_spelled(one, names) for one in value]}
    if isinstance(value, list | torch.Size):
        return [_spelled(one, names) for one in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else {"float": str(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    for kind, of in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": True}
    raise ValueError(f"an argument of type {type(value).__name__} cannot be exported")


def _compiled(
    folder: Path,
    graphs: dict[int | None, fx.GraphModule],
    examples: tuple[Tensor, ...],
    card: Device,
    jobs: int,
    use: dict[str, Any],
) -> None:
    """Compile the kernels that the graphs launch on a card."""

    def compile() -> None:
        with on_card(card), compile_only(card.arch, jobs), torch.no_grad():
            for size, graph in graphs.items():
                inputs = examples if size is None else tuple(rows_of(x, size) for x in examples)
                graph.to("meta")(*map(stand_in, inputs))

    bundle.write(folder, arch=card.arch, use=use, compile=compile)
