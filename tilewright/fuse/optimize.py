"""`optimize`: runs a torch.nn model on our operators, as fast as possible, and reports all decisions with their reasons.

    model -> traced (trace.py) -> groups of calls (walk.py) -> calls of our operators (lower.py, emit.py)
          -> implementations measured (choose.py) -> one CUDA graph (captured.py) -> compared with the float model (check.py)
          -> timed against it (judge.py) -> selected in each call by the input shapes (optimized.py)

The user's model is never changed: a copy is cast to the precision. Folding uses the parameters of the float model. A model that
cannot be traced as one graph is optimised child by child (partial.py).

Not supported: training, and models on several devices.
"""

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
from tilewright.fuse.check import Check, Inaccurate, LayerError, allowed_of, verify
from tilewright.fuse.choose import choose
from tilewright.fuse.early import start_early
from tilewright.fuse.inductor import compiled, compiled_if_right, copied
from tilewright.fuse.int8 import in_int8
from tilewright.fuse.judge import Right, faults_of, right_outputs, same_as_graph, timed_us, torchs_own
from tilewright.fuse.leftovers import compile_leftovers
from tilewright.fuse.lower import Lowering
from tilewright.fuse.optimized import BUILDING, Made, Optimized
from tilewright.fuse.partial import optimize_children
from tilewright.fuse.report import Report
from tilewright.fuse.rivals import NOISE, Rivals, fastest
from tilewright.fuse.settings import MAX_SHAPES, PRECISIONS, Dynamic, Settings, cast
from tilewright.fuse.state import copied_model
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
    """Optimise a model for inference. The result is a module that is called like `model` and computes the same.

    Args:
        model: any torch.nn.Module; it is copied, and not changed.
        example_inputs: arguments for the model: a single tensor, a tuple of arguments, or a dict of arguments by name.
        precision: precision of weights and activations: fp32, fp16, bf16, or int8 (fp16 with quantised matrix products, see
            quantise.py). None: fp16 on a GPU, fp32 on a CPU.
        example_kwargs: further arguments by name, in addition to a tuple.
        report: print the report at the end. It is always available in `.report`, as text and JSON.
        tolerance: allowed relative RMS error of outputs; None: the tolerance of the precision (check.TOLERANCES).
        dynamic: which dimensions may differ from those of the example inputs: True for all, False for none, or dimensions of
            arguments by position or name, as in {0: [0], "mask": [0, 1]}. A call that differs only in these dimensions gets
            its own graph; other calls run the original model.
        max_shapes: the maximum number of shape combinations that get a graph. Each graph is made in the first call with its
            shapes.
        measure: time the graph and the original model, and use the faster one. None: yes, except on a CPU with
            compiled=False, where the operators run one by one.
        graph: whether to capture a CUDA graph; None: yes on a GPU, no on a CPU.
        copy_outputs: whether results stay valid after the next call. False saves one launch per result, but then all calls must
            come from one thread.
        search: on a GPU: for each launch, measure all implementations that accept it, with their default configs. In addition,
            measure this many configs: the best ones according to the analytical performance model (choose.py). 0: default
            configs only; None: measure nothing.
        tune: on a GPU: first search the configs of every launch thoroughly. This takes minutes. The results are stored in the
            user's tuning database (tuning.py).
        compiled: on a CPU: whether Inductor compiles the whole graph, with packed weights; None: yes. Otherwise operators run
            one by one.
        progress: called with a text that describes the progress of `tune`; None: no messages.

    Raises:
        ValueError: `model` is not a torch.nn.Module, or it is TorchScript, which has no Python code to trace; an invalid
            option; no inputs; parameters without a shape; several devices; the model itself fails on the example inputs;
            torch does not support one of its calls in the precision.
        Untraceable: no part of the model can be traced; the message contains the user's source line.
        check.Inaccurate: the outputs differ too much from those of the float model; the message names the faulty layer.
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
    """Optimise a copy of the model. Raises the same errors as `optimize`."""
    start = time.perf_counter()
    model = copy_of(model).eval().requires_grad_(False)
    # Streams, graphs and launches belong to the current device.
    with BUILDING, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        done = _whole_or_parts(model, args, kwargs, settings, device)
    done.keep_examples(args, kwargs)
    facts = done.report.facts
    first = {name: facts.pop(name) for name in ("speed", "differs") if name in facts}
    done.report.facts = {**first, **_facts(settings, str(device)), **facts, "seconds": round(time.perf_counter() - start, 2)}
    return done


def _arguments(inputs: Any, named: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as (args, kwargs)."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(named or {})}
    if not isinstance(inputs, Tensor | tuple | list):
        raise ValueError(
            f"optimize: example_inputs is {type(inputs).__name__}; wanted one tensor, a tuple of the model's arguments, or a "
            "dict of them by name"
        )
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), dict(named or {})


def _settings(device: torch.device, precision: str | None, **asked: Any) -> Settings:
    """The options, with the device's defaults filled in. Raises ValueError if the device does not support one."""
    gpu = device.type == "cuda"
    precision = precision or ("fp16" if gpu else "fp32")
    if precision not in PRECISIONS:
        raise ValueError(f"optimize: precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    allowed_of(precision, asked["tolerance"])
    if asked["graph"] and not gpu:
        raise ValueError(f"optimize: graph=True captures a CUDA graph, but the model is on {device}; leave graph=None")
    if (asked["compiled"] and gpu) or (asked["tune"] and not gpu):
        raise ValueError(
            f"optimize: compiled=True is only for a CPU and tune=True only for a GPU, but the model is on {device}: omit it"
        )
    dynamic, most = asked["dynamic"], asked["max_shapes"]
    if not isinstance(dynamic, bool | Mapping) or (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(
            f"optimize: dynamic is {dynamic!r} and max_shapes is {most!r}; wanted dynamic to be True, False, or a dict from an "
            "argument's position or name to its dimensions that vary, and max_shapes to be an integer of at least 1"
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
    """Optimise the model as one graph, or child by child. Raises the same errors as `optimize`."""
    try:
        return _whole(model, args, kwargs, settings, device)
    except Untraceable as error:
        why = error
    except NotImplementedError as error:  # torch lacks some 16-bit CPU kernels
        reason = str(error).strip().split("\n")[0]
        words = f"optimize: torch cannot run the model in {settings.precision} on {device}: {reason}; choose another"
        raise ValueError(words) from error
    return optimize_children(model, args, kwargs, settings, device, why, _whole)


def _facts(settings: Settings, device: str) -> dict[str, Any]:
    """Facts for the report: precision, device, and how inputs and outputs are handled."""
    graph = settings.graph
    return {
        "precision": settings.precision,
        "device": device,
        "cuda_graph": graph,
        "inputs": ("copied in, " if graph else "") + "cast to the precision, images channels-last",
        "compiled": "by Inductor, weights frozen" if settings.compiled else "no",
        "outputs": "as computed" if not graph else "copied out" if settings.copy_outputs else "overwritten by the next call",
    }


def _checked(model: Any) -> None:
    """Raises ValueError if the model cannot be copied and traced."""
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        raise ValueError(f"optimize: wanted a torch.nn.Module with Python code of its own; got {type(model).__name__}")
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"optimize: {lazy[0]} has no shape yet, because its module is lazy; call the model once before optimising"
        )


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy of the model.

    Some modules compute tensors and store them as attributes (torch.nn.utils.weight_norm). These are copied without their
    autograd history.
    """
    kept = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf)
    return copied_model(model, {id(v): v.detach().clone() for v in kept})


def _device(model: nn.Module, inputs: Any) -> torch.device:
    given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    if not given:
        raise ValueError("optimize: the example inputs contain no tensor; wanted at least one")
    devices = {t.device for t in (*model.parameters(), *model.buffers(), *given)}
    if len(devices) > 1:
        raise ValueError(f"optimize: model and inputs must be on one device; got {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, device: torch.device
) -> Optimized:
    """Optimise a module as one graph. Raises Untraceable if it cannot be traced."""
    done = Optimized(model, settings, device, _made)
    done.first_call(args, dict(kwargs))
    done.report = replace(done.made[0].report, own_shapes=done.report.own_shapes)
    return done


def _made(owner: Optimized, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Made:
    """Make a graph of a module for these arguments, check it and time it. Raises the same errors as `optimize`."""
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
            captured, check = _checked_capture(owner, exact, fused, traced, tensors, right, found)
            break
        except Inaccurate as error:
            new, torchs = _to_blame(model, exact, traced, args, kwargs, settings, frozenset(faults))
            if not new or any(e.anchor in faults for e in new):
                raise Inaccurate(replace(error.check, faults=tuple(new), torchs=torchs)) from None
        faults.update((e.anchor, e) for e in new)
    for e in faults.values():
        words = e.words or f"its own error is {e.own:.2e} in float32"
        where = e.layer + (f" ({e.line})" if e.line else "")
        reason = f"a bug in tilewright's fusion: {where}, {words}; torch computes it instead; please report it"
        found.add(e.layer, "fault", e.anchor, False, reason)
    if right.words:
        found.facts["differs"] = right.words
    if traced.mutated:
        found.facts["not written"] = (
            f"inputs that the original model writes to, but this one does not: {', '.join(traced.mutated)}"
        )
    owner.writes, owner.layers_only = owner.writes or bool(traced.mutated), owner.layers_only or right.layers_only
    rivals = None
    if settings.graph and settings.measure and not settings.quantised:
        rivals = Rivals(traced, settings.dtype, tensors, right, check, owner.device, settings.copy_outputs)
    return _faster(owner, captured, tensors, args, kwargs, found, rivals)


def _checked_capture(
    owner: Optimized, exact: Traced, fused: fx.GraphModule, traced: Traced, tensors: list[Tensor], right: Right, found: Report
) -> tuple[Captured, Check]:
    """Choose implementations for the lowered graph, capture it, and compare its outputs with the reference outputs.

    Raises Inaccurate if an output is out of tolerance.
    """
    settings = owner.settings
    fused = _chosen(fused, tensors, right, found, settings)
    share_weights(fused, (made.captured.fused for made in owner.made if made.captured is not None))
    dtypes = [t.dtype for t in right.tensors]

    def native(*given: Tensor) -> Any:
        """Run torch's own operators in the chosen precision."""
        return rebuild(right.structure, traced.module(*(cast(settings.dtype, t) for t in given)))

    def checked(called: Callable[..., Any]) -> tuple[Captured, Check]:
        captured = Captured(fused, called, tensors, dtypes, right.structure, owner.device, owner.turns)
        check = verify(
            exact.module, fused, tensors, right.outputs, precision=settings.precision, tolerance=settings.tolerance,
            run=lambda *given: captured(given), native=native,
        )  # fmt: skip
        return captured, check

    captured, check = compiled_if_right(fused, tensors, found, checked) if settings.compiled else checked(fused)
    found.error = check.to_json()
    return captured, check


def _chosen(fused: fx.GraphModule, flat: list[Tensor], right: Right, found: Report, settings: Settings) -> fx.GraphModule:
    """Make all decisions that need measurements, and return the resulting graph."""
    if not settings.compiled:
        assemble(fused, found)
    # Copied here, because `choose` may move sums into the norms after them. In int8 the norms quantise their results instead.
    plain = copied(fused) if settings.quantised else None
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
            found.facts["early"] = f"{early} matrix products of one row start before the launch before them has finished"
    return fused


def _to_blame(
    model: nn.Module, exact: Traced, traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings,
    refused: frozenset[str],
) -> tuple[list[LayerError], dict[str, float]]:  # fmt: skip
    """(fusions that are wrong even in float32, the error that each layer has in torch's own model in the precision)."""
    tensors, _ = flatten((tuple(args), dict(kwargs)))
    wide, right = lowered(model, exact, args, kwargs, torch.float32, Report(), refused)
    faults = faults_of(right.module, wide, [cast(torch.float32, t) for t in tensors])
    return faults, torchs_own(exact.module, traced, tensors, [cast(settings.dtype, t) for t in tensors])


def _faster(
    owner: Optimized, captured: Captured, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any],
    found: Report, rivals: Rivals | None,
) -> Made:  # fmt: skip
    """Select the fastest of three: the graph, torch's own operators in the precision, and the original model."""
    if not owner.settings.measure:
        return Made(captured, "", found)
    ours, given = timed_us((lambda: captured(tensors), lambda: owner.as_given(*args, **kwargs)), owner.device)
    words = f"{ours / 1e3:.3f} ms a call, the original model {given / 1e3:.3f} ms"
    best, name = (captured, "") if rivals is None else fastest(captured, tensors, rivals, found, partial(compiled, found=found))
    if name:
        found.facts["speed"] = f"{name} is faster and is used: {found.facts['rivals']}; the original model {given / 1e3:.3f} ms"
        return Made(best, found.facts["speed"], found)
    if ours <= NOISE * given:
        found.facts["speed"] = f"{words}: {given / ours:.2f} times as fast"
        return Made(captured, words, found)
    found.facts["speed"] = (
        f"{words}: not faster, so calls run the original model, in its own dtype; measure=False keeps the graph"
    )
    return Made(None, words, found)


def lowered(
    model: nn.Module, exact: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, report: Report,
    refused: frozenset[str] = frozenset(),
) -> tuple[fx.GraphModule, Traced]:  # fmt: skip
    """(the optimised graph, the model traced in `dtype`). Anchors in `refused` are not fused."""
    to_dtype = partial(cast, dtype)
    given = flatten((tuple(args), dict(kwargs)))[0]
    traced = exact
    if any(t.is_floating_point() and t.dtype != dtype for t in (*exact.state.values(), *given)):
        tensors, structure = flatten((tuple(args), dict(kwargs)))
        inputs, named = rebuild(structure, map(to_dtype, tensors))
        traced = trace(copy_of(model).to(dtype), inputs, named)
    return Lowering(traced, exact.state, report, refused=refused).run(), traced
