"""Which implementation and config each launch of an optimised graph takes: measured on the GPU at hand, once, while optimising.

A running program never searches; `optimize` is the step before it. For each distinct problem of the graph the implementations
that take it are timed with their default configs, and the first few that the analytical model ranks: in turns, in CUDA graphs,
the weights of a launch taken from memory rather than L2 as they are in a model, its activations where they are. A measured row
of the tuning database decides without a measurement. What is found is written into the graph's calls; a process measures each
problem once.

Refuses: devices other than a CUDA GPU.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.asm.compile import CompileFailed, compile_only, stand_in
from tilewright.fuse import calls
from tilewright.hw.device import Device, device_of
from tilewright.kernels.conv import conv_op
from tilewright.kernels.matmul import linear_op
from tilewright.op import Choice, Impl, Op, on_card, scope
from tilewright.tune.measure import Stopwatch
from tilewright.tune.unmeasured import rank

__all__ = ["Launch", "candidates", "choose", "launches_of"]

_COLD_BYTES = 120_000_000
"""Of weights in a rotation, so that no launch finds its own in an L2 of 50 MB; at most `_SETS` copies."""
_SETS = 24
_JOBS = 8
"""Compiling threads: each is a ptxas most of its time."""
_LEAD = 0.98
"""What a candidate must take of the default's time to replace it: two timings of one kernel differ by about a per cent."""


@dataclass
class Launch:
    """A distinct problem of a graph."""

    op: Op
    args: tuple[Any, ...]
    """Of its first call: the real tensors, or meta ones."""
    nodes: list[Node] = field(default_factory=list)


def _linear_operands(x: Tensor, weight: Any, bias: Any, residual: Any, activation: str, *rest: Any) -> tuple[Any, ...]:
    return x, weight, bias, activation, residual


_OPERANDS: dict[Any, tuple[Op, Callable[..., tuple[Any, ...]]]] = {
    calls.conv: (conv_op, calls.conv_operands),
    calls.linear: (linear_op, _linear_operands),
}
"""Calls that take a choice -> their op, and its arguments from theirs."""
_FIXED = {calls.conv: 9, calls.linear: 6}
"""How many arguments stand before the choice."""


class _Recorder(fx.Interpreter):
    """Runs a graph and notes the distinct problems of its launches."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: dict[Any, Launch] = {}
        self.attention: dict[Any, tuple[tuple[Any, ...], list[Node]]] = {}

    def run_node(self, n: Node) -> Any:
        if n.target in _OPERANDS:
            args, _ = self.fetch_args_kwargs_from_env(n)
            op, operands = _OPERANDS[n.target]
            # The weights of other formats have products of their own.
            if all(isinstance(a, Tensor) for a in args[:2]):
                given = operands(*args[: _FIXED[n.target]])
                key = (op.name, op.problem(*given), given[0].shape)
                self.found.setdefault(key, Launch(op, given)).nodes.append(n)
        if n.target is calls.attention:
            args, _ = self.fetch_args_kwargs_from_env(n)
            key = tuple((a.shape, a.stride()) if isinstance(a, Tensor) else a for a in args[:5])
            self.attention.setdefault(key, (tuple(args[:5]), []))[1].append(n)
        return super().run_node(n)


def _recorded(fused: fx.GraphModule, inputs: list[Any]) -> _Recorder:
    with torch.no_grad():
        recorder = _Recorder(fused)
        recorder.run(*inputs)
    return recorder


def launches_of(fused: fx.GraphModule, inputs: list[Any]) -> list[Launch]:
    """The distinct problems of a graph, in order, with the arguments of their first call."""
    return list(_recorded(fused, inputs).found.values())


def candidates(launch: Launch, device: Device, ranked: int) -> list[tuple[Impl, Any]]:
    """(implementation, config) pairs worth a measurement.

    First what an untuned call takes; then every implementation's default; then as many as `ranked` that the model puts first.
    """
    op, problem = launch.op, launch.op.problem(*launch.args)
    now: Choice = op.choose(device, problem)
    found: list[tuple[Impl, Any]] = [(now.impl, now.config)]
    allowed = [impl for impl in op.impls if impl.refusal(device, problem, scope()) is None]
    for impl in allowed:
        if _hopeless(impl, op, problem, allowed):
            continue
        pair = (impl, impl.space.default(device, problem))
        if pair not in found:
            found.append(pair)
    extra = 0
    for best in rank(op.name, device, problem, launch.args, allowed):
        if extra >= ranked:
            break
        pair = (best.impl, best.config)
        if pair not in found and not best.spills:
            found.append(pair)
            extra += 1
    return found


def _hopeless(impl: Impl, op: Op, problem: Any, allowed: list[Impl]) -> bool:
    """Whether a default needs no measurement: another implementation of a product takes the same, and is faster."""
    names = {i.name for i in allowed}
    if op is not linear_op:
        return impl.name == "triton" and "sm90" in names
    if problem.m_bucket <= 16:
        return impl.name in ("invariant", "sm90", "triton", "triton_tma")
    return impl.name == "invariant" or (impl.name in ("triton", "triton_tma") and "sm90" in names)


def _sets(launch: Launch) -> list[tuple[Any, ...]]:
    weight = launch.args[1]
    count = max(2, min(_SETS, _COLD_BYTES // max(1, weight.nbytes)))
    return [launch.args] + [
        (launch.args[0], weight.clone(memory_format=torch.preserve_format), *launch.args[2:]) for _ in range(count - 1)
    ]


def _compile(wanted: list[tuple[Launch, Device, list[tuple[Impl, Any]]]]) -> None:
    """Compile what is to be measured, side by side, into Triton's cache."""
    if not wanted:
        return
    device = wanted[0][1]
    # CPython 3.11 may fail to parse in several threads ("AST constructor recursion depth mismatch"). What is not in the cache
    # then, the first launch compiles, and says what is wrong with it.
    with suppress(CompileFailed), torch.no_grad(), on_card(device), compile_only(device.arch, _JOBS):
        for launch, _, found in wanted:
            args = [stand_in(a) for a in launch.args]
            for impl, config in found:
                if impl.space.axes:
                    impl.launch(config, *args)


def choose(fused: fx.GraphModule, inputs: list[Any], ranked: int) -> list[dict[str, Any]]:
    """Measure every launch's candidates and write the fastest into the graph.

    Args:
        fused: on a GPU; its calls are changed in place.
        inputs: flat examples.
        ranked: how many of the model's configs to try beside the defaults; each is a kernel to compile.

    Returns:
        One row a distinct problem: op, problem, how often, every candidate's microseconds, and which was taken.
    """
    watch, rows = Stopwatch(), []
    wanted, recorder = [], _recorded(fused, inputs)
    for launch in recorder.found.values():
        device = device_of(launch.args[0].get_device())
        known = _KNOWN.get(_key(launch, device, ranked))
        if known is not None:
            _write(launch, known.pair)
            rows.append({**known.row, "times": len(launch.nodes)})
        elif launch.op.choose(device, launch.op.problem(*launch.args)).source != "exact":
            wanted.append((launch, device, candidates(launch, device, ranked)))
    _compile(wanted)
    for launch, device, found in wanted:
        problem, sets = launch.op.problem(*launch.args), _sets(launch)
        timed = watch.in_turns([_call(impl, config, sets) for impl, config in found], len(sets), rounds=7)
        times = [t.us for t in timed]
        best = min(range(len(found)), key=lambda i: times[i])
        if times[best] > _LEAD * times[0]:
            best = 0
        _write(launch, found[best] if best else None)
        measured = {_named(pair): round(us, 2) for pair, us in zip(found, times, strict=True)}
        taken = _named(found[best])
        row = {"op": launch.op.name, "problem": str(problem), "times": len(launch.nodes), "taken": taken, "us": measured}
        _KNOWN[_key(launch, device, ranked)] = _Known(found[best] if best else None, row)
        rows.append(row)
    rows += [_attention(args, nodes, watch) for args, nodes in recorder.attention.values()]
    fused.recompile()
    return rows


_ATTENTION = ("sm90", "vendor", "triton")
"""Implementations of attention that a call may prefer; one that refuses leaves the call to the next."""


def _attention(args: tuple[Any, ...], nodes: list[Node], watch: Stopwatch) -> dict[str, Any]:
    """Measure attention's implementations on one call, and write the fastest into the graph's."""

    def call(choice: calls.Choice | None) -> Callable[[int], Any]:
        q, k, v, causal, scale = args
        return lambda i: calls.attention(q, k, v, causal, scale, choice)

    found: list[calls.Choice | None] = [None, *((name, {}) for name in _ATTENTION)]
    device = device_of(args[0].get_device())
    with suppress(CompileFailed), torch.no_grad(), on_card(device), compile_only(device.arch, _JOBS):
        q, k, v, causal, scale = (stand_in(a) for a in args)
        for choice in found:
            calls.attention(q, k, v, causal, scale, choice)
    times = [t.us for t in watch.in_turns([call(choice) for choice in found], 2, rounds=7)]
    best = min(range(len(found)), key=lambda i: times[i])
    best = best if times[best] <= _LEAD * times[0] else 0
    for node in nodes:
        node.args = (*node.args[:5], found[best])
    names = ["untuned", *_ATTENTION]
    measured = {name: round(us, 2) for name, us in zip(names, times, strict=True)}
    problem = f"{list(args[0].shape)} queries, {list(args[1].shape)} keys"
    return {"op": "attention", "problem": problem, "times": len(nodes), "taken": names[best], "us": measured}


@dataclass(frozen=True)
class _Known:
    """What was measured of a problem in this process: None where the default stays."""

    pair: tuple[Impl, Any] | None
    row: dict[str, Any]


_KNOWN: dict[Any, _Known] = {}
"""So a second model with the same launches takes the same kernels, at no cost; and so do parts of a model, timed beside it."""


def _key(launch: Launch, device: Device, ranked: int) -> Any:
    return device.name, launch.op.name, launch.op.problem(*launch.args), launch.args[0].shape, ranked, scope()


def _write(launch: Launch, pair: tuple[Impl, Any] | None) -> None:
    if pair is not None:
        for node in launch.nodes:
            node.args = (*node.args[: _FIXED[node.target]], (pair[0].name, pair[1]))


def _named(pair: tuple[Impl, Any]) -> str:
    impl, config = pair
    return impl.name + (" " + ",".join(f"{k}={v}" for k, v in config.items()) if config else "")


def _call(impl: Impl, config: Any, sets: list[tuple[Any, ...]]) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        return impl.launch(config, *sets[i])

    return call
