"""The result of `optimize`: a module that is called like the user's, from any number of threads and streams.

Each combination of input shapes, dtypes and other arguments has its own graph (captured.py). The first graph is made from the
example inputs. A call with a new combination makes another graph if `dynamic` allows these dimensions to vary, for up to
`max_shapes` combinations. Like the first graph, it is checked against the original model, on the inputs of that call. All other
calls run the original model: the float model, in evaluation mode, in its own dtype. `report.shapes` has a row for each
combination, with the reason and the number of calls.

Floating-point inputs are cast to the dtype of the example inputs. Outputs have the dtypes of the float model's outputs.

Not supported: gradients, moving to another device or dtype, loading other weights, copying, and pickling (`save` writes a file
instead).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn

from tilewright.fuse.captured import Captured, Turns, plainly
from tilewright.fuse.report import Report, Shape
from tilewright.fuse.settings import Settings
from tilewright.fuse.structure import Constant, Opened, Structure, arguments, count, flatten, rebuild
from tilewright.fuse.trace import without_fast_path

__all__ = ["BUILDING", "Made", "Optimized", "described"]

BUILDING = threading.RLock()
"""A lock that is held while a graph is made, because torch.export, Inductor's settings and TF32 flags are process-wide."""


class Made(NamedTuple):
    """A graph for one combination of inputs."""

    captured: Captured | None
    """None if the original model is faster."""
    reason: str
    """A text that states how fast the graph is; empty if this was not measured."""
    report: Report


Make = Callable[["Optimized", tuple[Any, ...], Mapping[str, Any]], Made]


class Optimized(nn.Module):
    """The user's model, running on our operators.

    Args:
        model: the original float model: a copy of the user's model in evaluation mode. Calls without a graph run it.
        settings: settings of all graphs.
        device: the device of the model.
        make: a function that makes a graph of the model for given arguments. If it raises an error, such calls run the original
            model, and the error is reported as the reason. The first call raises the error instead.
    """

    model: nn.Module
    report: Report
    shared_by_copies = True
    """Tells `state.with_own_state` to share this module instead of copying it."""

    def __init__(self, model: nn.Module, settings: Settings, device: torch.device, make: Make):
        super().__init__()
        self.model, self.settings, self.device, self.report = model, settings, device, Report()
        self.make, self.made, self.writes, self.layers_only = make, list[Made](), False, False
        self.examples: tuple[list[Tensor], Structure] | None = None
        self.turns = Turns(device, settings.copy_outputs) if settings.graph else None
        self._known: dict[Any, tuple[Shape, Captured | None]] = {}
        self._others: dict[str, Shape] = {}
        self._held: set[int] | None = None
        self._example: tuple[Structure, tuple[Any, ...]] | None = None
        super().train(False)

    @property
    def captured(self) -> torch.cuda.CUDAGraph | None:
        """The CUDA graph for the example inputs, if there is one."""
        first = self.made[0].captured if self.made else None
        return None if first is None else first.graph

    @property
    def fused(self) -> fx.GraphModule:
        """The graph for the example inputs. Raises ValueError if the original model is faster."""
        first = self.made[0].captured if self.made else None
        if first is None:
            raise ValueError("optimized model: it has no graph, because the original model is faster; measure=False keeps it")
        return first.fused

    # ---- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimised model, with the same arguments as the user's model.

        Raises:
            ValueError: an input requires a gradient or is on another device, or an argument cannot be compared.
        """
        key: Any = () if kwargs else tuple([(a.shape, a.dtype) for a in args if type(a) is Tensor])
        tensors: Sequence[Tensor] = args
        if kwargs or len(key) != len(args):
            tensors, structure = flatten((args, {name: kwargs[name] for name in sorted(kwargs)}))
            key = structure, tuple([(t.shape, t.dtype) for t in tensors])
        tensors = self._placed(tensors)
        found = self._known.get(key) if _hashable(key) else None
        shape, captured = self._first_seen(key, args, kwargs) if found is None else found
        shape.count()
        return self.as_given(*args, **kwargs) if captured is None else captured(tensors)

    def replays(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> bool:
        """Whether a call with tensors of these shapes and dtypes, and nothing else, replays a CUDA graph.

        Such a call does not run the original model, and does not wait for the GPU if the tensors are there.
        """
        _, captured = self._known.get(tuple(kinds), (None, None))
        return captured is not None and captured.graph is not None

    def as_given(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original float model, without gradients."""
        tensors, structure = flatten((args, kwargs))
        moved = [t.clone() if self.writes else t for t in self._placed(tensors, always=True)]
        args, kwargs = rebuild(structure, moved)
        with plainly(self.device), without_fast_path() if self.layers_only else nullcontext():
            return self._own(self.model(*args, **kwargs))

    def _own(self, outputs: Any) -> Any:
        """Outputs that the user may modify: an output that is a weight of the model, or a view of one, is copied."""
        if self._held is None:
            weights = (*self.model.parameters(), *self.model.buffers())
            self._held = {t.untyped_storage().data_ptr() for t in weights if t.numel()}
        tensors, structure = flatten(outputs)
        if all(t.untyped_storage().data_ptr() not in self._held for t in tensors):
            return outputs
        return rebuild(structure, [t.clone() for t in tensors])

    def _placed(self, tensors: Sequence[Tensor], always: bool = False) -> Sequence[Tensor]:
        """Check the tensors and return them. With `always`, tensors on the host are moved to the model's device.

        Without it, a CUDA graph copies them.
        """
        if torch.is_grad_enabled():
            for at, t in enumerate(tensors):
                if t.requires_grad:
                    raise ValueError(
                        f"optimized model: input {at} requires a gradient, but an optimised model is for inference only: call "
                        "it under torch.no_grad(), or train the original model"
                    )
        elsewhere = [at for at, t in enumerate(tensors) if t.device != self.device]
        for at in elsewhere:
            given = tensors[at].device
            if self.turns is None or given.type != "cpu":
                raise ValueError(f"optimized model: input {at} is on {given}, but the model is on {self.device}: move it there")
        return [t.to(self.device) for t in tensors] if always and elsewhere else tensors

    # ---- shapes

    def first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the graph for the example inputs. Raises the same errors as `make`."""
        tensors, structure = flatten((args, kwargs))
        self._first_seen((structure, tuple([(t.shape, t.dtype) for t in tensors])), args, kwargs)

    def _first_seen(self, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Shape, Captured | None]:
        """The row of the report and the graph for a new combination of inputs; None instead of a graph: the original model."""
        named = {name: kwargs[name] for name in sorted(kwargs)}
        tensors, structure = flatten((args, named))
        whole = structure, tuple((t.shape, "float" if t.is_floating_point() else t.dtype) for t in tensors)
        if not _hashable(whole):
            kinds = ", ".join(sorted(set(_unhashable(structure))))
            raise ValueError(
                f"optimized model: an argument is or contains a {kinds}, which cannot be compared with that of another call; "
                "wanted tensors, numbers, strings, None, and tuples, lists, dicts and dataclasses of them"
            )
        with BUILDING:
            if whole not in self._known:
                why = self._refusal(structure, tensors)
                if why is not None:
                    return self._other(why), None
                self._known[whole] = self._made(args, named, tensors, structure)
            self._known[key] = self._known[whole]
            return self._known[whole]

    def _refusal(self, structure: Structure, tensors: Sequence[Tensor]) -> str | None:
        """The reason why no graph is made for a new combination of inputs; None if a graph is made."""
        if self._example is None:
            return None
        dynamic, (like, shapes) = self.settings.dynamic, self._example
        if len(self.report.own_shapes) - len(self._others) >= self.settings.max_shapes:
            return f"more than max_shapes={self.settings.max_shapes} combinations of inputs"
        if dynamic is True:
            return None
        if dynamic is False or structure != like:
            return f"dynamic={dynamic!r} allows only the shapes of the example inputs"
        free, first = dict[int, Any](), 0
        for name, given in arguments(structure):
            if given.leaves == (None,) and name in dynamic:
                free[first] = dynamic[name]
            first += count(given)
        for at, (t, wanted) in enumerate(zip(tensors, shapes, strict=True)):
            may = {d % max(1, t.dim()) for d in free.get(at, ())}
            if t.dim() != len(wanted) or any(t.shape[d] != wanted[d] and d not in may for d in range(t.dim())):
                return f"dynamic={dynamic!r} does not allow the dimensions to vary that differ from the example inputs"
        return None

    def _other(self, why: str) -> Shape:
        """The row of the report for all calls that get no graph for this reason."""
        if why not in self._others:
            self._others[why] = Shape("others", False, why)
            self.report.own_shapes.append(self._others[why])
        return self._others[why]

    def _made(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], structure: Structure
    ) -> tuple[Shape, Captured | None]:
        """Make a graph for a new combination of inputs. Returns (the row of the report, the graph or None).

        An error for the first combination is raised. For later ones it is the reason in the row.
        """
        first, words = self._example is None, described(tensors, structure)
        args, kwargs = rebuild(structure, [t.to(self.device) for t in tensors])
        if first:
            made = self.make(self, args, kwargs)
            self._example = structure, tuple(t.shape for t in tensors)
        else:
            self.as_given(*args, **kwargs)  # errors of the user's own code are raised here
            try:
                made = self.make(self, args, kwargs)
            except (ValueError, RuntimeError) as error:
                row = Shape(words, False, f"no graph: {str(error).strip().splitlines()[0]}")
                self.report.own_shapes.append(row)
                return row, None
        self.made.append(made)
        self.report.own_shapes.append(Shape(words, made.captured is not None, made.reason, None if first else made.report))
        return self.report.own_shapes[-1], made.captured

    # ---- other methods of a module

    def keep_examples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Store copies of the example inputs on the host, for `save`."""
        tensors, structure = flatten((args, dict(kwargs)))
        self.examples = [t.detach().to("cpu", copy=True) for t in tensors], structure

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original model (`config`, `weight`, submodules). Raises AttributeError for its methods."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = vars(self).get("_modules", {}).get("model")
            if model is None or name.startswith("__"):
                raise
        found = getattr(model, name)
        if callable(found) and not isinstance(found, nn.Module):
            raise AttributeError(
                f"optimized model: {name} is a method of {type(model).__name__}, but only calls of the model itself are "
                f"optimised: call {name} of the original model"
            )
        return found

    def train(self, mode: bool = True) -> Self:
        """Does nothing: an optimised model is for inference only, even inside a model in training mode."""
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The float model's state dict, with the user's names."""
        return self.model.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError, because weights are folded into the graphs.

        `load_state_dict` of this module, or of a module that contains it, calls this method.
        """
        raise ValueError(
            "optimized model: its weights are folded into its graphs, so others cannot be loaded: load them into the original "
            "model, and optimise that again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Accepts moves and casts that change nothing. Raises ValueError for others, because graphs use the current tensors."""
        held = {(t.dtype, t.device) for t in (*self.model.parameters(), *self.model.buffers())}
        for dtype, device in held:
            probe = torch.empty(0, dtype=dtype, device=device)
            if fn(probe) is not probe:
                raise ValueError(
                    f"optimized model: its graphs are for {self.settings.precision} on {self.device}, so it cannot be moved "
                    "or cast: move or cast the original model, and optimise that again"
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError, because CUDA graphs exist only in this process."""
        raise TypeError(
            "optimized model: it cannot be copied or pickled (torch.save, copy.deepcopy, multiprocessing). Its save(path) "
            "writes a file that tilewright.load_optimized(path, model) reads in any process. Threads can share the same model"
        )

    def save(self, path: str | Path) -> None:
        """Write a file that `load_optimized` can load (saved.py). Raises ValueError if something cannot be written."""
        from tilewright.fuse.saved import save  # imports this class

        save(self, path)


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _unhashable(structure: Structure) -> list[str]:
    """Names of the types of constants that cannot be compared."""
    found = list[str]()
    for leaf in structure.leaves:
        if isinstance(leaf, Constant) and not _hashable(leaf.value):
            found.append(leaf.kind.__name__)
        elif isinstance(leaf, Opened):
            found += _unhashable(leaf.inside)
    return found


def described(tensors: Sequence[Tensor], structure: Structure) -> str:
    """The inputs as text, such as `[3, 8] float32, scale 2.0`."""
    texts = iter([f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors])
    return ", ".join(
        ("" if isinstance(place, int) else f"{place} ") + _described(given, list(islice(texts, count(given))))
        for place, given in arguments(structure)
    )


def _described(given: Structure, texts: list[str]) -> str:
    """An argument as text."""
    try:
        return str(rebuild(given, texts))
    except (TypeError, ValueError, AttributeError, RuntimeError):  # raised by a class that accepts only tensors
        return f"{getattr(given.spec.context, '__name__', 'object')}({', '.join(texts)})"
