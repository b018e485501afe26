"""The reference for an optimised graph: outputs and time of the model as the user calls it. Also finds wrong fusions.

The reference outputs are those of `model(*args)` in evaluation mode, without TF32. The exported graph's outputs may differ from
them. One accepted cause is torch's fast path of nn.TransformerEncoder, which writes zeros at padded positions. In this case the
graph computes the same as the layers without the fast path, and the report states the difference. Any other difference means
that the module cannot be represented as a graph.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from tilewright.fuse.captured import plainly
from tilewright.fuse.check import RANDOM, LayerError, compare_outputs, layer_errors
from tilewright.fuse.differences import TOLERANCES, Difference
from tilewright.fuse.layer_errors import FLOAT_NODE
from tilewright.fuse.naming import source_line
from tilewright.fuse.state import attributes, changed, other_values, with_own_state
from tilewright.fuse.structure import Structure, flatten, rebuild
from tilewright.fuse.trace import Traced, Untraceable, line_of, without_fast_path
from tilewright.hw.tf32 import exact_float32

__all__ = [
    "Right",
    "apart_from",
    "called",
    "called_on_copies",
    "faults_of",
    "right_outputs",
    "same_as_graph",
    "timed_us",
    "torchs_own",
]

_SECONDS = 0.5
"""Time limit for a measurement in seconds, in addition to one call of each candidate."""
_ROUNDS = 30
_NAMES = 4
"""The maximum number of attributes that a message names."""


class Right(NamedTuple):
    """The reference outputs."""

    outputs: Any
    tensors: list[Tensor]
    structure: Structure
    layers_only: bool = False
    """Whether the outputs were computed without torch's fast path."""
    words: str = ""
    """A sentence that states how much the outputs of the fast path differ from them."""


def called_on_copies(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the model on copies of the inputs. Its buffers and attributes do not change."""
    return called(with_own_state(model), args, kwargs)


def called(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the model on copies of the inputs. Random numbers are the same in every such call."""
    tensors, structure = flatten((tuple(args), dict(kwargs)))
    device = _device_of(tensors)
    given, named = rebuild(structure, [t.clone() for t in tensors])
    with plainly(device), exact_float32(), _seeded(device, 0):
        return model(*given, **named)


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The device of the first tensor; the CPU if there is none."""
    return tensors[0].device if tensors else torch.device("cpu")


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """A scope in which torch's random generators start from a seed. Their state is restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def right_outputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Right:
    """The outputs of the model as the user calls it.

    Raises:
        ValueError: the model fails; the message contains the user's source line.
        Untraceable: the outputs depend on earlier calls.
    """
    own = with_own_state(model)
    before = attributes(own)
    try:
        outputs = called(own, args, kwargs)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f"{type(error).__name__} at {line_of(error)}"
        raise ValueError(f"optimize: {type(model).__name__} itself fails on the example inputs: {words} ({line})") from error
    right = Right(outputs, *flatten(outputs))
    written = changed(before, attributes(own))
    if written:
        _no_state(model, own, right, args, kwargs, written)
    return right


def _no_state(
    model: nn.Module, own: nn.Module, right: Right, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[str]
) -> None:
    """Check that the attributes which a call has written do not change the outputs of later calls.

    If they do not, they are a table, and the model is called once to fill it.

    Args:
        model: the model as it was before the call.
        own: a copy of it, after the call.
        right: outputs of the call.
        args: arguments of the call.
        kwargs: arguments of the call, by name.
        written: attributes that the call has written.

    Raises:
        Untraceable: they change the outputs of later calls.
    """
    with suppress(Exception):  # not every model accepts all values
        called(own, *other_values((tuple(args), dict(kwargs))))
    again = called(own, args, kwargs)
    if (
        apart_from(right.outputs, again) is not None
        and apart_from(right.outputs, called_on_copies(model, args, kwargs)) is None
    ):
        names = ", ".join(written[:_NAMES]) + (f" and {len(written) - _NAMES} more" if len(written) > _NAMES else "")
        raise Untraceable(f"{type(model).__name__} keeps state between calls (in {names}), which a graph cannot do")
    called(model, args, kwargs)


def same_as_graph(model: nn.Module, right: Right, exact: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Right:
    """The reference outputs, after checking that the exported graph computes the same.

    Raises:
        Untraceable: the graph computes other outputs, or draws random numbers.
        ValueError: the model returns other outputs in every call, although torch's random numbers are the same.
    """
    tensors, _ = flatten((tuple(args), dict(kwargs)))
    # A different seed than for the model's own call, so that a graph with random numbers gives other outputs.
    with torch.no_grad(), exact_float32(), _seeded(_device_of(tensors), 1):
        found = list(exact.module(*tensors))
    if len(found) != len(right.tensors):
        raise Untraceable(
            f"{type(model).__name__} returns {len(found)} tensors as a graph, but {len(right.tensors)} when called"
        )
    found = rebuild(right.structure, found)
    apart = apart_from(right.outputs, found)
    if apart is None:
        return right
    if apart_from(right.outputs, called_on_copies(model, args, kwargs)) is not None:
        raise ValueError(RANDOM)
    if (drawn := next((n for n in exact.graph.nodes if _draws(n)), None)) is not None:
        where = f"{type(model).__name__} cannot be traced at {source_line(drawn) or drawn.name}"
        raise Untraceable(f"{where}: it draws random numbers, so the outputs of a graph cannot be compared with its own")
    with without_fast_path():
        layers = called_on_copies(model, args, kwargs)
    if apart_from(layers, found) is not None:
        raise Untraceable(
            f"{type(model).__name__} as a graph gives other outputs than its own call (output{apart.name}: {_words(apart)}): "
            "they depend on something that the graph does not contain"
        )
    words = (
        f"torch's fast path of nn.TransformerEncoder gives other values for output{apart.name} ({_words(apart)}"
        f"{_where(layers, right)}); the optimised model gives those of the layers, as torch does after "
        "torch.backends.mha.set_fastpath_enabled(False)"
    )
    return Right(layers, *flatten(layers), layers_only=True, words=words)


def apart_from(want: Any, got: Any) -> Difference | None:
    """The first output that differs by more than rounding errors of its dtype; None if there is none."""
    narrow = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    kinds = {narrow[t.dtype] for t in flatten(want)[0] if t.dtype in narrow}
    allowed = TOLERANCES["bf16" if "bf16" in kinds else "fp16" if kinds else "fp32"]
    return next((d for d in compare_outputs(want, got) if not allowed.allows(d)), None)


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers. Attention without dropout, for example, does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = node.target._schema.arguments
    given = {a.name: a.default_value for a in arguments} | dict(zip([a.name for a in arguments], node.args)) | node.kwargs
    return all(given.get(name, True) for name in ("dropout_p", "p", "train", "training"))


def _words(apart: Difference) -> str:
    return apart.words or f"relative RMS error {apart.rms:.2e}"


def _where(layers: Any, right: Right) -> str:
    """A text that states which share of the values differs, and where the first one is."""
    for want, got in zip(flatten(layers)[0], right.tensors, strict=True):
        if want.shape == got.shape and want.is_floating_point():
            far = (want - got).abs() > 1e-3 * want.double().square().mean().sqrt()
            if bool(far.any()):
                first = far.nonzero()[0].tolist()
                return f", {float(far.double().mean()):.1%} of its values, the first at {first}"
    return ""


# ---- wrong fusions


def faults_of(float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Tensor]) -> list[LayerError]:
    """The fusions whose results differ from the float model's by more than rounding.

    Args:
        float_graph: the model in float32.
        fused: the graph lowered in float32 too, so that a low precision cannot be the reason.
        inputs: inputs of both.
    """
    allowed = TOLERANCES["fp32"]
    errors = layer_errors(float_graph, fused, inputs)
    return [e for e in errors if not (e.own <= allowed.rms and e.largest <= allowed.largest)]


def torchs_own(
    float_graph: fx.GraphModule, traced: Traced, inputs: Sequence[Tensor], given: Sequence[Tensor]
) -> dict[str, float]:
    """Node of the float graph -> the error that torch's own layer has in a precision.

    Args:
        float_graph: the float model.
        traced: the same model in the precision.
        inputs: inputs of the float model.
        given: the same inputs in the precision.
    """
    names = {n.name for n in float_graph.graph.nodes if n.op == "call_function"}
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.name in names:
            node.meta[FLOAT_NODE] = node.name
    return {e.computes: e.own for e in layer_errors(float_graph, traced.module, inputs, given)}


# ---- time


def timed_us(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """The time of each call in microseconds, as the median of several rounds. Each round times every call once.

    A time includes the wait until the GPU has finished.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing

    def once(call: Callable[[], Any]) -> float:
        wait()
        began = time.perf_counter()
        call()
        wait()
        return 1e6 * (time.perf_counter() - began)

    scope: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with scope:
        first = sum(once(call) for call in calls)  # a first call may include preparations, so it does not count
        rounds = max(3, min(_ROUNDS, int(_SECONDS * 1e6 / max(first, 1.0))))
        taken = [[once(call) for call in calls] for _ in range(rounds)]
    return [median(each) for each in zip(*taken, strict=True)]


def _nothing() -> None:
    """For a CPU: a call has finished when it returns, so there is no need to wait."""
