"""Rivals of an optimised graph: torch's own calls in the same precision, captured in the same way.

There are two rivals. The first is the traced calls in a CUDA graph, with channels-last images. The second is the same calls
compiled by Inductor, with frozen weights. If a rival is faster than our graph, and its outputs are within the same tolerance,
the user's calls run the rival.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tilewright.fuse import calls
from tilewright.fuse.anchors import aten, tensor_of
from tilewright.fuse.captured import Captured, Turns
from tilewright.fuse.check import NOISE_WORDS, Check, compare_outputs
from tilewright.fuse.judge import Right, timed_us
from tilewright.fuse.report import Report
from tilewright.fuse.trace import Traced

__all__ = ["NOISE", "Rivals", "fastest", "torchs_calls"]

NOISE = 1.03
"""A rival replaces the graph if the graph's time is more than this many times the rival's. Smaller differences are noise."""
_CLEAR = 1.5
"""Compiling with Inductor takes half a minute. It is skipped if the graph is this many times as fast as torch's own calls."""
_GRAPH, _INDUCTOR = "a CUDA graph of torch's own calls", "Inductor on torch's own calls"
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Rivals(NamedTuple):
    """Makes the rivals of a captured graph, on a GPU."""

    traced: Traced
    """The model, traced in the precision."""
    dtype: torch.dtype
    inputs: Sequence[Tensor]
    """The tensors of the example inputs, in their own dtypes."""
    right: Right
    """The float model's outputs for these inputs."""
    check: Check
    """The optimised graph's errors, and the tolerance."""
    device: torch.device
    copies: bool
    """Whether results are copied out."""

    def graph(self) -> Captured:
        """Capture the traced calls in a CUDA graph. Raises RuntimeError if the outputs are not within the tolerance."""
        plain = torchs_calls(self.traced, self.dtype)
        return self._captured(plain, plain)

    def compiled(self, compiler: Compiler) -> Captured:
        """Compile the traced calls and capture them. Raises RuntimeError if this fails or the outputs are inaccurate."""
        plain = torchs_calls(self.traced, self.dtype)
        return self._captured(plain, compiler(plain, self.inputs))

    def _captured(self, plain: fx.GraphModule, called: Callable[..., Any]) -> Captured:
        # Each rival has its own `Turns`, and so its own memory pool. The memory of a slower rival is then freed.
        turns, dtypes = Turns(self.device, self.copies), [t.dtype for t in self.right.tensors]
        rival = Captured(plain, called, self.inputs, dtypes, self.right.structure, self.device, turns)
        self.verify(rival(self.inputs))
        return rival

    def verify(self, outputs: Any) -> None:
        """Raises RuntimeError if a rival's outputs are not within the tolerance."""
        noise = {d.name for d in self.check.outputs if d.words == NOISE_WORDS}
        for d in compare_outputs(self.right.outputs, outputs):
            if d.name not in noise and not self.check.tolerance.allows(d):
                raise RuntimeError(f"its output{d.name} is too far from the float model's: {d.words or f'{d.rms:.2e}'}")


def fastest(
    captured: Captured, tensors: Sequence[Tensor], rivals: Rivals, found: Report, compiler: Compiler
) -> tuple[Captured, str]:
    """(the fastest of the optimised graph and its rivals, the rival's name or "" for the graph).

    The times are added to the report.

    Args:
        captured: the optimised graph.
        tensors: the tensors of the example inputs.
        rivals: makes the rivals.
        found: the report of the model.
        compiler: a function that compiles a graph with Inductor, given the graph and its inputs.
    """
    made = {"": captured}
    try:
        made[_GRAPH] = rivals.graph()
    except RuntimeError as error:  # for example, there is too little memory for a second graph
        found.facts["no rival"] = f"{_GRAPH} fails: {_first_line(error)}"
        return captured, ""
    ours, graph = timed_us([partial(each, tensors) for each in made.values()], rivals.device)
    if ours > graph / _CLEAR:
        try:
            made[_INDUCTOR] = rivals.compiled(compiler)
        except RuntimeError as error:  # includes errors of Dynamo and Inductor
            found.facts["no rival"] = f"{_INDUCTOR} fails: {_first_line(error)}"
    us = dict(zip(made, timed_us([partial(each, tensors) for each in made.values()], rivals.device), strict=True))
    best = min(us, key=lambda name: us[name])
    words = [f"{name or 'this graph'} {taken / 1e3:.3f} ms" for name, taken in us.items()]
    found.facts["rivals"] = ", ".join(words)
    return (made[best], best) if us[""] > NOISE * us[best] else (captured, "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def torchs_calls(traced: Traced, dtype: torch.dtype) -> fx.GraphModule:
    """A graph of the traced calls that accepts inputs of any floating-point dtype.

    If there are convolutions, images and filters are channels-last. Parameters are shared with the traced model, except for the
    filters.
    """
    graph = _calls_alone(traced.graph)
    copied = fx.GraphModule(traced.module, graph)
    convolutions = [n for n in graph.nodes if n.target in (aten.conv2d.default, aten.conv_transpose2d.input)]
    for path in {n.args[1].target for n in convolutions if n.args[1].op == "get_attr"}:
        holder, _, name = path.rpartition(".")
        owner = copied.get_submodule(holder)
        filters = getattr(owner, name).detach().to(memory_format=torch.channels_last)
        delattr(owner, name)
        owner.register_buffer(name, filters)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        value = tensor_of(node)
        if value is None:
            continue
        with graph.inserting_after(node):
            kind = dtype if value.is_floating_point() else None
            entered = graph.call_function(calls.enter, (node, kind, bool(convolutions) and value.dim() == 4))
        node.replace_all_uses_with(entered, lambda user, entered=entered: user is not entered)
    copied.recompile()
    return copied


def _calls_alone(traced: fx.Graph) -> fx.Graph:
    """A copy of a traced graph without export's checks of inputs. Views become reshapes, which copy channels-last memory if
    necessary."""
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.nodes:
        if node.op == "call_module":
            continue
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: values[n]))
            continue
        values[node] = graph.node_copy(node, lambda n: values[n])
        if node.target in (aten.view.default, aten._unsafe_view.default):
            values[node].target = aten.reshape.default
    return graph
