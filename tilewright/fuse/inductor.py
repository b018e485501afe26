"""Compiles a graph with Inductor. If Inductor fails or its code is wrong, the graph is used without it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.fuse.captured import Captured
from tilewright.fuse.check import Check, Inaccurate
from tilewright.fuse.report import Report

__all__ = ["compiled", "compiled_if_right", "copied"]


def compiled(fused: fx.GraphModule, flat: Sequence[Any], found: Report, packed: bool = True) -> Any:
    """The graph compiled by Inductor, with weights packed as constants.

    `freezing` is set in Inductor's config, because torch.compile loses it if it is passed as an option. If Inductor fails to
    pack the weights, the graph is compiled without packing, and the report states this. (In torch 2.13 this happens with 16-bit
    convolutions of single pixels, which are matrix products.) Guards are disabled. They are not needed, because all inputs have
    the layout of the examples. And if a caller is in another mode, they would trigger a second compilation, without packing.

    Raises RuntimeError if Inductor cannot compile the graph.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor import config  # imported here, because it takes seconds and is needed on CPUs only

    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    called = torch.compile(fused, fullgraph=True, options=options)
    try:
        with config.patch(freezing=packed), torch.no_grad():
            called(*flat)
    except BackendCompilerFailed as error:
        if not packed:
            raise
        reason = str(error.inner_exception).strip().split("\n")[0]
        found.facts["compiled"] = f"by Inductor, without packed weights, because packing them fails: {reason}"
        called = torch.compile(fused, fullgraph=True, options=options)
        with torch.no_grad():
            called(*flat)
    return called


def compiled_if_right(
    fused: fx.GraphModule, flat: Sequence[Any], found: Report, checked: Callable[[Callable[..., Any]], tuple[Captured, Check]]
) -> tuple[Captured, Check]:
    """The graph compiled by Inductor; if Inductor fails or its code is wrong, the graph itself, which runs call by call.

    Raises Inaccurate if the graph itself is wrong too.
    """
    try:
        return checked(compiled(fused, flat, found))
    except Inaccurate as error:
        off = error.check.failed[0]
        reason = off.words or f"relative RMS error {off.rms:.2e}"
    except RuntimeError as error:  # includes errors of Dynamo and Inductor
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        found.facts["compiled"] = f"no, operators run one by one, because Inductor fails: {reason}"
        return checked(fused)
    plain = checked(fused)
    try:
        unpacked = checked(compiled(copied(fused), flat, found, packed=False))
    except (Inaccurate, RuntimeError):
        found.facts["compiled"] = f"no, operators run one by one, because Inductor's code gives wrong outputs ({reason})"
        return plain
    found.facts["compiled"] = f"by Inductor, without packed weights, because with them its code gives wrong outputs ({reason})"
    return unpacked


def copied(fused: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with the same calls. It shares the parameters."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(fused.graph, {}))
    return fx.GraphModule(fused, graph)
