"""`optimize`: a torch.nn model on our operators, as fast as they are, with the reasons for all that was done and left.

    model -> traced (trace.py) -> groups of calls (patterns.py) -> calls of our operators (lower.py, emit.py)
          -> implementations measured (choose.py) -> one CUDA graph (optimized.py) -> compared with the float model (check.py)

The user's model is never changed: a copy is cast to the precision, and the float model's own parameters are what is folded. A
model that is no graph is optimised child by child (partial.py).

Refuses: training, dynamic shapes (an optimised model is for the examples' shapes), models on several devices.
"""

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.check import verify
from tilewright.fuse.choose import choose
from tilewright.fuse.early import start_early
from tilewright.fuse.int8 import in_int8
from tilewright.fuse.leftovers import compile_leftovers
from tilewright.fuse.lower import Lowering
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.partial import optimize_children
from tilewright.fuse.report import Report
from tilewright.fuse.settings import PRECISIONS, Settings, cast
from tilewright.fuse.tokens import assemble
from tilewright.fuse.trace import Traced, Untraceable, trace
from tilewright.fuse.tuning import choices
from tilewright.fuse.tuning import tune as tune_calls

__all__ = ["optimize"]


def optimize(
    model: nn.Module, example_inputs: Tensor | Sequence[Any], precision: str = "fp16", *,
    example_kwargs: Mapping[str, Any] | None = None, report: bool = True, tolerance: float | None = None,
    graph: bool | None = None, copy_outputs: bool = True, search: int | None = 4,
    tune: bool = False, compiled: bool | None = None, progress: Callable[[str], None] | None = None,
) -> Optimized:  # fmt: skip
    """A model for inference that computes what `model` does, on our operators.

    Args:
        model: any torch.nn.Module; it is copied, and stays as it is.
        example_inputs: its arguments, a tuple; or its one tensor. Their shapes are those of every later call.
        precision: fp32, fp16, bf16: of weights and activations. int8: fp16 with quantised products (quantise.py).
        example_kwargs: arguments by name.
        report: print it when done; it stays in `.report`.
        tolerance: relative RMS error of outputs that is allowed; None: what the precision is allowed (check.TOLERANCES).
        graph: whether to capture a CUDA graph; None: on a GPU.
        search: on a GPU: measure for each launch the implementations that take it, and so many configs more that the model
            ranks first; 0 for the implementations alone, None for no measuring.
        tune: on a GPU: search every launch of the model thoroughly first (minutes), into the user's database (tuning.py).
        compiled: on a CPU: whether Inductor compiles the whole graph, weights packed; None for yes. Else operators run singly.
        copy_outputs: whether results outlive the next call; without, one launch less for each.
        progress: told in words how far `tune` is; None: it searches in silence.

    Returns:
        A module with the model's own call. `.report` has every decision, as text and JSON.

    Raises:
        ValueError: no torch.nn.Module, or one of TorchScript, which has no Python to trace; an unknown precision, no inputs,
            parameters without a shape yet, tensors on several devices, or a call that torch does not have in the precision.
        Untraceable: nothing of the model can be traced; the user's line.
        check.Inaccurate: the outputs are too far from the float model's; the guilty layer.
    """
    start = time.perf_counter()
    if precision not in PRECISIONS:
        raise ValueError(f"optimize: precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    _checked(model)
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    kwargs = dict(example_kwargs or {})
    device = _device(model, (args, kwargs))
    gpu = device.type == "cuda"
    graph = gpu if graph is None else graph
    if graph and not gpu:
        raise ValueError(f"optimize: graph=True captures a CUDA graph, and the model is on {device}; leave it None")
    compiled = not gpu if compiled is None else compiled
    if (compiled and gpu) or (tune and not gpu):
        raise ValueError(f"optimize: compiled=True is for a CPU and tune=True for a GPU; the model is on {device}")
    settings = Settings(precision, tolerance, graph, copy_outputs, search if gpu else None, tune, compiled)
    settings = settings if progress is None else settings._replace(progress=progress)
    float_model = _copy(model).eval().requires_grad_(False)
    with torch.cuda.device(device) if gpu else nullcontext():  # streams, graphs and launches are the current device's
        done = _whole_or_parts(float_model, args, kwargs, settings, device)
    said = {**_facts(settings, str(device)), **done.report.facts}
    done.report.facts = said | {"seconds": round(time.perf_counter() - start, 2)}
    if report:
        print(done.report.text())
    return done


def _whole_or_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, device: torch.device
) -> Optimized:
    """As one graph, or child by child. Raises as `optimize`."""
    try:
        return _whole(model, args, kwargs, settings)
    except Untraceable as error:
        why = error
    except NotImplementedError as error:  # torch's kernels for 16 bits on a CPU are not all there
        reason = str(error).strip().split("\n")[0]
        words = f"optimize: torch cannot run the model in {settings.precision} on {device}: {reason}; take another"
        raise ValueError(words) from error
    return optimize_children(model, args, kwargs, settings, why, _whole)


def _facts(settings: Settings, device: str) -> dict[str, Any]:
    """How the model is called, for its report."""
    graph = settings.graph
    return {
        "precision": settings.precision,
        "device": device,
        "cuda_graph": graph,
        "inputs": ("copied in, " if graph else "") + "cast, images channels-last",
        "compiled": "by Inductor, weights frozen" if settings.compiled else "no",
        "outputs": "as computed" if not graph else "copied out" if settings.copy_outputs else "overwritten by the next call",
    }


def _checked(model: Any) -> None:
    """Raises ValueError: nothing that can be copied and traced."""
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        raise ValueError(f"optimize: wanted a torch.nn.Module with Python code of its own; got {type(model).__name__}")
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise ValueError(f"optimize: {lazy[0]} has no shape yet (a lazy module): call the model once on its inputs before")


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy; what a module has computed and keeps (torch.nn.utils.weight_norm) without its history, which has none."""
    kept = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf)
    return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept})


def _device(model: nn.Module, inputs: Any) -> torch.device:
    given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if not given:
        raise ValueError("optimize: wanted example inputs, a tensor or a tuple with at least one; got none")
    devices = {t.device for t in (*model.parameters(), *model.buffers(), *given)}
    if len(devices) > 1:
        raise ValueError(f"optimize: model and inputs must be on one device; got {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _compiled(fused: fx.GraphModule, flat: list[Any], found: Report) -> Any:
    """The graph through Inductor, weights packed as constants; torch.compile loses `freezing` when it is given as an option.

    Where Inductor itself fails when it packs them (torch 2.13: convolutions of single pixels in 16 bits, which are products),
    without that, and the report says so.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config  # seconds to import, and for CPUs alone

    called = torch.compile(fused, fullgraph=True)
    try:
        with config.patch(freezing=True), torch.no_grad():
            called(*flat)
    except BackendCompilerFailed as error:
        reason = str(error.inner_exception).strip().split("\n")[0]
        found.facts["compiled"] = f"by Inductor, weights as they are, for it fails to pack them: {reason}"
        called = torch.compile(fused, fullgraph=True)
        with torch.no_grad():
            called(*flat)
    return called


def _whole(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings) -> Optimized:
    """A module that can be traced, as one graph. Raises Untraceable."""
    exact, found = trace(model, args, kwargs), Report()
    flat = pytree.tree_leaves((args, dict(kwargs)))
    fused, traced = lowered(model, exact, args, kwargs, settings.dtype, found)
    if not settings.compiled:
        assemble(fused, found)
    # As it is before measuring moves sums into norms: in int8 norms write codes.
    plain = _copied(fused) if settings.quantised else None
    if settings.tune:
        found.tuned = tune_calls(lambda: fused(*flat), progress=settings.progress)
    if settings.search is not None:
        found.choices = choose(fused, flat, settings.search)
    if plain is not None:
        with torch.no_grad():
            want = pytree.tree_leaves(exact.module(*args, **kwargs))
        fused = in_int8(plain, fused, flat, want, found, settings)
    if settings.search is not None:
        found.provenance = choices(lambda: fused(*flat))
        fused = compile_leftovers(fused, flat, found)
        if early := start_early(fused, flat):
            found.facts["early"] = f"{early} products of one row start while the launch before them runs"
    results = next(n for n in exact.graph.nodes if n.op == "output").args[0]
    outputs = [None if (o := tensor_of(n)) is None else o.dtype for n in results]  # pyright: ignore[reportGeneralTypeIssues]
    called = _compiled(fused, flat, found) if settings.compiled else fused
    done = Optimized(fused, called, exact, flat, outputs, found, graph=settings.graph, copy_outputs=settings.copy_outputs)

    def native() -> Any:
        """torch's own calls in the precision."""
        given, named = pytree.tree_map(partial(cast, settings.dtype), (args, dict(kwargs)))
        return traced.module(*given, **named)

    tolerance = settings.tolerance
    check = verify(
        exact.module, fused, args, kwargs, precision=settings.precision, tolerance=tolerance, run=done, native=native
    )  # fmt: skip
    found.error = check.to_json()
    if traced.mutated:
        found.facts["not written"] = f"inputs that the model writes to stay as they are: {', '.join(traced.mutated)}"
    return done


def _copied(fused: fx.GraphModule) -> fx.GraphModule:
    """The same calls on the same parameters, as a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(fused.graph, {}))
    return fx.GraphModule(fused, graph)


def lowered(
    model: nn.Module, exact: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, report: Report,
    refused: Collection[str] = frozenset(),
) -> tuple[Any, Traced]:  # fmt: skip
    """(the optimised graph, what was traced in `dtype`); names in `refused` are not fused (walk.plan)."""
    to_dtype = partial(cast, dtype)
    floats = [t for t in (*exact.state.values(), *pytree.tree_leaves(args)) if isinstance(t, Tensor) and t.is_floating_point()]
    traced = exact
    if any(t.dtype != dtype for t in floats):
        traced = trace(_copy(model).to(dtype), pytree.tree_map(to_dtype, args), pytree.tree_map(to_dtype, dict(kwargs)))
    return Lowering(traced, exact.state, report, refused).run(), traced
