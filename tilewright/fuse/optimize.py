"""`optimize`: a torch.nn model on our operators, as fast as they are, with the reasons for all that was done and left.

    model -> traced (trace.py) -> groups of calls (patterns.py) -> calls of our operators (lower.py, emit.py)
          -> implementations measured (choose.py) -> one CUDA graph (captured.py) -> compared with the float model (check.py)
          -> timed beside it (judge.py) -> called by shapes (optimized.py)

The user's model is never changed: a copy is cast to the precision, and the float model's own parameters are what is folded. A
model that is no graph is optimised child by child (partial.py).

Refuses: training, models on several devices.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tilewright.fuse.captured import Captured, share_weights
from tilewright.fuse.check import Inaccurate, LayerError, allowed_of, verify
from tilewright.fuse.choose import choose
from tilewright.fuse.early import start_early
from tilewright.fuse.int8 import in_int8
from tilewright.fuse.judge import Right, faults_of, right_outputs, same_as_graph, timed_us, torchs_own
from tilewright.fuse.leftovers import compile_leftovers
from tilewright.fuse.lower import Lowering
from tilewright.fuse.optimized import BUILDING, Made, Optimized
from tilewright.fuse.partial import optimize_children
from tilewright.fuse.report import Report
from tilewright.fuse.rivals import NOISE, Rivals, fastest
from tilewright.fuse.settings import MAX_SHAPES, PRECISIONS, Dynamic, Settings, cast
from tilewright.fuse.structure import flatten, rebuild
from tilewright.fuse.tokens import assemble
from tilewright.fuse.trace import Traced, Untraceable, trace
from tilewright.fuse.tuning import choices
from tilewright.fuse.tuning import tune as tune_calls

__all__ = ["copy_of", "lowered", "optimize"]


def optimize(
    model: nn.Module, example_inputs: Tensor | Sequence[Any] | Mapping[str, Any], precision: str | None = None, *,
    example_kwargs: Mapping[str, Any] | None = None, report: bool = True, tolerance: float | None = None,
    dynamic: Dynamic = True, max_shapes: int = MAX_SHAPES, measure: bool | None = None, graph: bool | None = None,
    copy_outputs: bool = True, search: int | None = 4, tune: bool = False, compiled: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Optimized:  # fmt: skip
    """A model for inference that computes what `model` does, on our operators: a module with the model's own call.

    Args:
        model: any torch.nn.Module; it is copied, and stays as it is.
        example_inputs: its arguments: its one tensor, a tuple of arguments, or a dict of arguments by name.
        precision: of weights and activations: fp32, fp16, bf16; int8: fp16 with quantised products (quantise.py). None: fp16 on
            a GPU, fp32 on a CPU.
        example_kwargs: arguments by name, beside a tuple.
        report: print it when done; it stays in `.report`, as text and JSON.
        tolerance: relative RMS error of outputs that is allowed; None: what the precision is allowed (check.TOLERANCES).
        dynamic: which dimensions may differ from the examples' in calls that get a graph of their own: True for all, False for
            none, {0: [0], "mask": [0, 1]} for those of arguments by place or name. Other calls run the model as given.
        max_shapes: for how many combinations of shapes graphs are made, each at its first call.
        measure: time the graph beside the model as given, and let the faster one answer. None: yes, but not with
            compiled=False on a CPU, which asks for the operators one by one.
        graph: whether to capture a CUDA graph; None: on a GPU.
        copy_outputs: whether results outlive the next call; without, one launch less for each, and calls from one thread alone.
        search: on a GPU: measure for each launch the implementations that take it, and so many configs more that the model
            ranks first; 0 for the implementations alone, None for no measuring.
        tune: on a GPU: search every launch of the model thoroughly first (minutes), into the user's database (tuning.py).
        compiled: on a CPU: whether Inductor compiles the whole graph, weights packed; None for yes. Else operators run singly.
        progress: told in words how far `tune` is; None: it searches in silence.

    Raises:
        ValueError: no torch.nn.Module, or one of TorchScript, which has no Python to trace; an option that is none, no inputs,
            parameters without a shape yet, several devices, a model that fails, a call that torch has not in the precision.
        Untraceable: nothing of the model can be traced; the user's line.
        check.Inaccurate: the outputs are too far from the float model's; the guilty layer.
    """
    _checked(model)
    args, kwargs = _arguments(example_inputs, example_kwargs)
    device = _device(model, (args, kwargs))
    asked = {"tolerance": tolerance, "dynamic": dynamic, "max_shapes": max_shapes, "measure": measure, "graph": graph}
    asked |= {"copy_outputs": copy_outputs, "search": search, "tune": tune, "compiled": compiled, "progress": progress}
    done = _optimized(model, args, kwargs, _settings(device, precision, **asked), device)
    if report:
        print(done.report.text())
    return done


def _optimized(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, device: torch.device
) -> Optimized:
    """Of a copy of the model. Raises as `optimize`."""
    start = time.perf_counter()
    model = copy_of(model).eval().requires_grad_(False)
    # Streams, graphs and launches are the current device's.
    with BUILDING, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        done = _whole_or_parts(model, args, kwargs, settings, device)
    done.keep_examples(args, kwargs)
    facts = done.report.facts
    first = {name: facts.pop(name) for name in ("speed", "differs") if name in facts}
    done.report.facts = {**first, **_facts(settings, str(device)), **facts, "seconds": round(time.perf_counter() - start, 2)}
    return done


def _arguments(inputs: Any, named: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the examples."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(named or {})}
    if not isinstance(inputs, Tensor | tuple | list):
        raise ValueError(
            f"optimize: example_inputs is {type(inputs).__name__}; wanted the model's one tensor, a tuple of its arguments, or "
            "a dict of them by name"
        )
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), dict(named or {})


def _settings(device: torch.device, precision: str | None, **asked: Any) -> Settings:
    """What was asked for, with the device's defaults. Raises ValueError: it cannot be had there."""
    gpu = device.type == "cuda"
    precision = precision or ("fp16" if gpu else "fp32")
    if precision not in PRECISIONS:
        raise ValueError(f"optimize: precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    allowed_of(precision, asked["tolerance"])
    if asked["graph"] and not gpu:
        raise ValueError(f"optimize: graph=True captures a CUDA graph, and the model is on {device}; leave it None")
    if (asked["compiled"] and gpu) or (asked["tune"] and not gpu):
        raise ValueError(
            f"optimize: compiled=True is for a CPU and tune=True for a GPU; the model is on {device}: leave them out"
        )
    dynamic, most = asked["dynamic"], asked["max_shapes"]
    if not isinstance(dynamic, bool | Mapping) or (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(
            f"optimize: dynamic is {dynamic!r} and max_shapes {most!r}; wanted True, False or a dict from an argument's place "
            "or name to its dimensions, and a whole number of at least 1"
        )
    compiled = not gpu if asked["compiled"] is None else asked["compiled"]
    known = {
        "graph": gpu if asked["graph"] is None else asked["graph"],
        "search": asked["search"] if gpu else None,
        "compiled": compiled,
        "measure": (gpu or compiled) if asked["measure"] is None else asked["measure"],
    }
    given = {**asked, **known, "precision": precision}
    if given["progress"] is None:
        del given["progress"]
    return Settings(**given)


def _whole_or_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, device: torch.device
) -> Optimized:
    """As one graph, or child by child. Raises as `optimize`."""
    try:
        return _whole(model, args, kwargs, settings, device)
    except Untraceable as error:
        why = error
    except NotImplementedError as error:  # torch's kernels for 16 bits on a CPU are not all there
        reason = str(error).strip().split("\n")[0]
        words = f"optimize: torch cannot run the model in {settings.precision} on {device}: {reason}; take another"
        raise ValueError(words) from error
    return optimize_children(model, args, kwargs, settings, device, why, _whole)


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


def copy_of(model: nn.Module) -> nn.Module:
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


def _compiled(fused: fx.GraphModule, flat: Sequence[Any], found: Report) -> Any:
    """The graph through Inductor, weights packed as constants; torch.compile loses `freezing` when it is given as an option.

    Where Inductor itself fails when it packs them (torch 2.13: convolutions of single pixels in 16 bits, which are products),
    without that, and the report says so. Nothing guards the code: it is called with tensors that lie as the examples do, and
    must not be compiled anew, without packing, because a caller is in another mode.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config  # seconds to import, and for CPUs alone

    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    called = torch.compile(fused, fullgraph=True, options=options)
    try:
        with config.patch(freezing=True), torch.no_grad():
            called(*flat)
    except BackendCompilerFailed as error:
        reason = str(error.inner_exception).strip().split("\n")[0]
        found.facts["compiled"] = f"by Inductor, weights as they are, for it fails to pack them: {reason}"
        called = torch.compile(fused, fullgraph=True, options=options)
        with torch.no_grad():
            called(*flat)
    return called


def _whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, device: torch.device
) -> Optimized:
    """A module that can be traced, as one graph. Raises Untraceable."""
    done = Optimized(model, settings, device, _made)
    done.first_call(args, dict(kwargs))
    done.report = replace(done.made[0].report, own_shapes=done.report.own_shapes)
    return done


def _made(owner: Optimized, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Made:
    """A graph of a module for arguments, checked and timed. Raises as `optimize`."""
    model, settings = owner.model, owner.settings
    tensors, _ = flatten((args, dict(kwargs)))
    right = right_outputs(model, args, kwargs)
    exact = trace(model, args, kwargs)
    right = same_as_graph(model, right, exact, args, kwargs)
    faults: dict[str, LayerError] = {}
    while True:
        found = Report()
        fused, traced = lowered(model, exact, args, kwargs, settings.dtype, found, frozenset(faults))
        try:
            captured = _checked_capture(owner, exact, fused, traced, tensors, right, found)
            break
        except Inaccurate as error:
            new, torchs = _to_blame(model, exact, traced, args, kwargs, settings, frozenset(faults))
            if not new or any(e.anchor in faults for e in new):
                raise Inaccurate(replace(error.check, faults=tuple(new), torchs=torchs)) from None
        faults.update((e.anchor, e) for e in new)
    for e in faults.values():
        words = e.words or f"own error {e.own:.2e} in float32"
        reason = f"a fault of the fuser: {e.layer}{f' ({e.line})' if e.line else ''}, {words}: left to torch; please report it"
        found.add(e.layer, "fault", e.anchor, False, reason)
    if right.words:
        found.facts["differs"] = right.words
    if traced.mutated:
        found.facts["not written"] = f"inputs that the model writes to stay as they are: {', '.join(traced.mutated)}"
    owner.writes, owner.layers_only = owner.writes or bool(traced.mutated), owner.layers_only or right.layers_only
    rivals = None
    if settings.graph and settings.measure and not settings.quantised:
        copies, dtypes = settings.copy_outputs, [t.dtype for t in right.tensors]
        rivals = Rivals(traced, settings.dtype, tensors, dtypes, right.structure, owner.device, copies)
    return _faster(owner, captured, tensors, args, kwargs, found, rivals)


def _checked_capture(
    owner: Optimized, exact: Traced, fused: fx.GraphModule, traced: Traced, tensors: list[Tensor], right: Right, found: Report
) -> Captured:
    """The lowered graph with its implementations chosen, captured, and compared with the right outputs. Raises Inaccurate."""
    settings = owner.settings
    fused = _chosen(fused, tensors, right, found, settings)
    share_weights(fused, (made.captured.fused for made in owner.made if made.captured is not None))
    called = _compiled(fused, tensors, found) if settings.compiled else fused
    dtypes = [t.dtype for t in right.tensors]
    captured = Captured(fused, called, tensors, dtypes, right.structure, owner.device, owner.turns)

    def run(*given: Tensor) -> Any:
        return captured(given)

    def native(*given: Tensor) -> Any:
        """torch's own calls in the precision."""
        return rebuild(right.structure, traced.module(*(cast(settings.dtype, t) for t in given)))

    check = verify(
        exact.module, fused, tensors, right.outputs, precision=settings.precision, tolerance=settings.tolerance, run=run,
        native=native,
    )  # fmt: skip
    found.error = check.to_json()
    return captured


def _chosen(fused: fx.GraphModule, flat: list[Tensor], right: Right, found: Report, settings: Settings) -> fx.GraphModule:
    """The graph with everything that is measured decided."""
    if not settings.compiled:
        assemble(fused, found)
    # As it is before measuring moves sums into norms: in int8 norms write codes.
    plain = _copied(fused) if settings.quantised else None
    if settings.tune:
        found.tuned = tune_calls(lambda: fused(*flat), progress=settings.progress)
    if settings.search is not None:
        found.choices = choose(fused, flat, settings.search)
    if plain is not None:
        fused = in_int8(plain, fused, flat, right.tensors, found, settings)
    if settings.search is not None:
        found.provenance = choices(lambda: fused(*flat))
        fused = compile_leftovers(fused, flat, found)
        if early := start_early(fused, flat):
            found.facts["early"] = f"{early} products of one row start while the launch before them runs"
    return fused


def _to_blame(
    model: nn.Module, exact: Traced, traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings,
    refused: frozenset[str],
) -> tuple[list[LayerError], dict[str, float]]:  # fmt: skip
    """(fusions that are wrong in float32 too, own errors of torch's layers in the precision)."""
    tensors, _ = flatten((tuple(args), dict(kwargs)))
    wide, right = lowered(model, exact, args, kwargs, torch.float32, Report(), refused)
    faults = faults_of(right.module, wide, [cast(torch.float32, t) for t in tensors])
    return faults, torchs_own(exact.module, traced, tensors, [cast(settings.dtype, t) for t in tensors])


def _faster(
    owner: Optimized, captured: Captured, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any],
    found: Report, rivals: Rivals | None,
) -> Made:  # fmt: skip
    """The graph, or what takes less: torch's own calls in the precision, or the model as given."""
    if not owner.settings.measure:
        return Made(captured, "", found)
    ours, given = timed_us((lambda: captured(tensors), lambda: owner.as_given(*args, **kwargs)), owner.device)
    words = f"{ours / 1e3:.3f} ms a call, the model as given {given / 1e3:.3f} ms"
    best, name = (
        (captured, "") if rivals is None else fastest(captured, tensors, rivals, found, partial(_compiled, found=found))
    )
    if name:
        found.facts["speed"] = (
            f"{name} is faster, and answers: {found.facts['rivals']}; the model as given {given / 1e3:.3f} ms"
        )
        return Made(best, found.facts["speed"], found)
    if ours <= NOISE * given:
        found.facts["speed"] = f"{words}: {given / ours:.2f} times as fast"
        return Made(captured, words, found)
    found.facts["speed"] = (
        f"{words}: not faster, so calls run the model as given, in its own dtype; measure=False keeps the graph"
    )
    return Made(None, words, found)


def _copied(fused: fx.GraphModule) -> fx.GraphModule:
    """The same calls on the same parameters, as a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(fused.graph, {}))
    return fx.GraphModule(fused, graph)


def lowered(
    model: nn.Module, exact: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, report: Report,
    refused: frozenset[str] = frozenset(),
) -> tuple[fx.GraphModule, Traced]:  # fmt: skip
    """(the optimised graph without the fusions that are refused by their anchors, what was traced in `dtype`)."""
    to_dtype = partial(cast, dtype)
    given = flatten((tuple(args), dict(kwargs)))[0]
    traced = exact
    if any(t.is_floating_point() and t.dtype != dtype for t in (*exact.state.values(), *given)):
        tensors, structure = flatten((tuple(args), dict(kwargs)))
        inputs, named = rebuild(structure, map(to_dtype, tensors))
        traced = trace(copy_of(model).to(dtype), inputs, named)
    return Lowering(traced, exact.state, report, refused=refused).run(), traced
