"""Chooses the implementation and config of each launch of an optimised graph, by measurements on the current GPU.

For each distinct problem of the graph, all implementations that accept it are timed with their default configs. A few more
configs are timed too: the ones that the analytical performance model ranks first. All candidates are timed in turns, in CUDA
graphs. As in a real model, weights come from memory and activations may be in L2. The fastest candidate is written into the
graph's calls.

If the tuning database has a measured row for a matrix product or convolution, this row decides, and nothing is measured. A
process measures each such problem only once. Attention is measured for each graph.

Not supported: devices other than a CUDA GPU.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.asm.compile import CompileFailed, compile_only, stand_in
from tilewright.fuse import calls, int8_calls, op_calls
from tilewright.fuse.op_race import race
from tilewright.fuse.sums import Sum, in_place, note_sum, rewrite, streams, ways
from tilewright.hw.device import Device, device_of
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.biased import biased_attention_op
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.int8 import conv_codes_op
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.op import Choice, Impl, Op, on_card, scope
from tilewright.tune.measure import Stopwatch
from tilewright.tune.unmeasured import rank

__all__ = ["Launch", "candidates", "choose", "launches_of", "recorded", "sets_of", "times_of"]

_COLD_BYTES = 120_000_000
"""Total bytes of the copies of a weight, which successive launches use in turn, so that no launch finds its weight in an L2 of
50 MB. There are at most `_SETS` copies."""
_SETS = 24
_JOBS = 8
"""Number of threads that compile; each mostly waits for ptxas."""
_LEAD = 0.98
"""A candidate replaces the default if its time is at most this share of the default's. Two timings of the same kernel differ by
about 1 %."""


@dataclass
class Launch:
    """A distinct problem of a graph."""

    op: Op
    args: tuple[Any, ...]
    """Arguments of the first call: real tensors, or meta tensors."""
    nodes: list[Node] = field(default_factory=list)


def _linear_operands(x: Tensor, weight: Any, bias: Any, residual: Any, activation: str, *rest: Any) -> tuple[Any, ...]:
    return x, weight, bias, activation, residual


_OPERANDS: dict[Any, tuple[Op, Callable[..., tuple[Any, ...]]]] = {
    calls.conv: (conv_op, calls.conv_operands),
    calls.linear: (linear_op, _linear_operands),
    int8_calls.conv_int8_to_float: (conv_op, int8_calls.conv_int8_to_float_operands),
    int8_calls.conv_int8_to_int8: (conv_codes_op, int8_calls.conv_int8_to_int8_operands),
    int8_calls.linear_int8_to_float: (scaled_linear_op, int8_calls.linear_int8_to_float_operands),
    int8_calls.linear_int8_to_int8: (cast_linear_op, int8_calls.linear_int8_to_int8_operands),
    op_calls.biased_attention: (biased_attention_op, lambda *args: args),
}
"""Call that accepts a choice -> (its op, a function that converts the call's arguments to the op's)."""
_FIXED = {
    calls.conv: 9, calls.linear: 6, int8_calls.conv_int8_to_float: 11, int8_calls.conv_int8_to_int8: 10,
    int8_calls.linear_int8_to_float: 10, int8_calls.linear_int8_to_int8: 8, op_calls.biased_attention: 7,
}  # fmt: skip
"""The position of the choice among the arguments."""


class _Recorder(fx.Interpreter):
    """Runs a graph and records the distinct problems of its launches."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: dict[Any, Launch] = {}
        self.attention: dict[Any, tuple[tuple[Any, ...], list[Node]]] = {}
        self.sums: dict[Any, Sum] = {}

    def run_node(self, n: Node) -> Any:
        if n.target in _OPERANDS:
            args, _ = self.fetch_args_kwargs_from_env(n)
            op, operands = _OPERANDS[n.target]
            # Quantised weights are no tensors; other operators multiply by them.
            if all(isinstance(a, Tensor) for a in args[:2]):
                given = operands(*args[: _FIXED[n.target]])
                key = (op.name, op.problem(*given), given[0].shape)
                self.found.setdefault(key, Launch(op, given)).nodes.append(n)
                note_sum(self.sums, n, given, lambda a: self.env[a] if isinstance(a, Node) else a)
        if n.target is calls.attention:
            args, _ = self.fetch_args_kwargs_from_env(n)
            key = tuple((a.shape, a.stride()) if isinstance(a, Tensor) else a for a in args[:5])
            self.attention.setdefault(key, (tuple(args[:5]), []))[1].append(n)
        return super().run_node(n)


def recorded(fused: fx.GraphModule, inputs: list[Any]) -> _Recorder:
    """Run a graph and record its distinct launches, attentions and sums."""
    with torch.no_grad():
        recorder = _Recorder(fused)
        recorder.run(*inputs)
    return recorder


def launches_of(fused: fx.GraphModule, inputs: list[Any]) -> list[Launch]:
    """The distinct problems of a graph, in order, with the arguments of their first call."""
    return list(recorded(fused, inputs).found.values())


def candidates(launch: Launch, device: Device, ranked: int) -> list[tuple[Impl, Any]]:
    """The (implementation, config) pairs to measure.

    In order: the choice of an untuned call, the default config of every implementation, and the `ranked` best pairs according
    to the analytical performance model.
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
    """Whether a default need not be measured, because another implementation accepts the same problem and is always faster."""
    names = {i.name for i in allowed}
    if op is not linear_op:
        return impl.name in ("triton", "invariant") and "sm90" in names
    if problem.m_bucket <= 16:
        return impl.name in ("invariant", "sm90", "sm90_invariant", "triton", "triton_tma")
    return impl.name in ("invariant", "sm90_invariant") or (impl.name in ("triton", "triton_tma") and "sm90" in names)


def sets_of(launch: Launch) -> list[tuple[Any, ...]]:
    """Arguments for several launches of the same problem, each with its own copy of the weight."""
    weight = launch.args[1]
    count = max(2, min(_SETS, _COLD_BYTES // max(1, weight.nbytes)))
    return [launch.args] + [
        (launch.args[0], weight.clone(memory_format=torch.preserve_format), *launch.args[2:]) for _ in range(count - 1)
    ]


def _compile(wanted: list[tuple[Launch, Device, list[tuple[Impl, Any]]]]) -> None:
    """Compile all candidates in parallel, into Triton's cache."""
    if not wanted:
        return
    device = wanted[0][1]
    # CPython 3.11 may fail to parse in several threads ("AST constructor recursion depth mismatch"). If a kernel is missing in
    # the cache for this reason, its first launch compiles it, and also reports errors.
    with suppress(CompileFailed), torch.no_grad(), on_card(device), compile_only(device.arch, _JOBS):
        for launch, _, found in wanted:
            args = [stand_in(a) for a in launch.args]
            for impl, config in found:
                if impl.space.axes:
                    impl.launch(config, *args)


def choose(fused: fx.GraphModule, inputs: list[Any], ranked: int) -> list[dict[str, Any]]:
    """Measure the candidates of every launch and write the fastest into the graph.

    Args:
        fused: a graph on a GPU; its calls are changed in place.
        inputs: flat example inputs.
        ranked: how many configs to measure in addition to the defaults: the best according to the analytical performance
            model. Each must be compiled.

    Returns:
        One row for each distinct problem: op, problem, number of calls, microseconds of every candidate, and the choice.
    """
    watch, rows = Stopwatch(), []
    wanted, recorder = [], recorded(fused, inputs)
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
        problem, sets = launch.op.problem(*launch.args), sets_of(launch)
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
    rows += _sums(fused, list(recorder.sums.values()), watch)
    rows += race(fused, inputs)
    fused.recompile()
    return rows


_EVERY_CONFIG = ("short",)
"""Implementations of attention with few configs. All of them are measured, because the best depends on the number of keys."""
_INVARIANT = "sm90_invariant"


def _attention(args: tuple[Any, ...], nodes: list[Node], watch: Stopwatch) -> dict[str, Any]:
    """Measure the implementations of attention for one problem, and write the fastest into the graph's calls."""

    def call(choice: calls.Choice | None) -> Callable[[int], Any]:
        q, k, v, causal, scale = args
        return lambda i: calls.attention(q, k, v, causal, scale, choice)

    device, problem = device_of(args[0].get_device()), attention_op.problem(*calls.attention_operands(*args))
    found: list[calls.Choice | None] = [None]
    for impl in attention_op.impls:
        if impl.name == _INVARIANT or impl.refusal(device, problem, scope()) is not None:
            continue
        every = impl.space.configs(device, problem) if impl.name in _EVERY_CONFIG else [impl.space.default(device, problem)]
        found += [(impl.name, config) for config in every]
    with suppress(CompileFailed), torch.no_grad(), on_card(device), compile_only(device.arch, _JOBS):
        q, k, v, causal, scale = (stand_in(a) for a in args)
        for choice in found:
            calls.attention(q, k, v, causal, scale, choice)
    times = [t.us for t in watch.in_turns([call(choice) for choice in found], 2, rounds=7)]
    best = min(range(len(found)), key=lambda i: times[i])
    best = best if times[best] <= _LEAD * times[0] else 0
    for node in nodes:
        node.args = (*node.args[:5], found[best])
    names = ["untuned" if choice is None else _spelled(*choice) for choice in found]
    measured = {name: round(us, 2) for name, us in zip(names, times, strict=True)}
    shapes = f"{list(args[0].shape)} queries, {list(args[1].shape)} keys"
    return {"op": "attention", "problem": shapes, "times": len(nodes), "taken": names[best], "us": measured}


@dataclass(frozen=True)
class _Summed:
    """Times of a matrix product, a residual sum and the norm after it, in the order of `sums.ways`.

    The sum is computed by the product, in place, or by the norm. The last way has one entry for each choice in `pairs`, with
    which the product is computed.
    """

    pairs: list[tuple[Impl, Any]]
    us: list[float]
    names: list[str]

    @property
    def best(self) -> int:
        """The index of the fastest way, without "in place"."""
        apart = [i for i in range(len(self.us)) if i != 1]
        best = min(apart, key=lambda i: self.us[i])
        return best if self.us[best] <= _LEAD * self.us[0] else 0


_SUMMED: dict[Any, _Summed] = {}
"""Results of this process."""


def _summed(problem: Sum, watch: Stopwatch) -> _Summed:
    """Measure which operator should compute a residual's sum (sums.py)."""
    *product, _ = problem.linear
    apart, device = Launch(linear_op, (*product, None)), device_of(product[0].get_device())
    before = problem.places[0][0].args[_FIXED[calls.linear] :]
    first: Any = before[0] if before else None
    key = device.name, problem.key, str(first), scope()
    if key not in _SUMMED:
        pairs = candidates(apart, device, 0)
        _compile([(apart, device, pairs)])
        sets = sets_of(Launch(linear_op, problem.linear))
        found = ways(problem, sets, first, [(impl.name, config) for impl, config in pairs])
        us = [t.us for t in watch.in_turns(found, len(sets), rounds=7)]
        names = ["product", "in place", *(f"norm (product: {_named(pair)})" for pair in pairs)]
        _SUMMED[key] = _Summed(pairs, us, names)
    return _SUMMED[key]


def _sums(fused: fx.GraphModule, sums: list[Sum], watch: Stopwatch) -> list[dict[str, Any]]:
    """Measure which operator should compute each residual's sum, and rewrite the graph if it is not the product."""
    found = {id(problem): _summed(problem, watch) for problem in sums}
    of = {product: found[id(problem)] for problem in sums for product, _ in problem.places}
    whole, rows = set[Node](), []
    # "In place" uses the library. This is not allowed if the result of a row must not depend on the other rows of a batch.
    places = [] if scope().invariant else [place for problem in sums for place in problem.places]
    for run in streams(fused.graph, places):
        each = [of[product] for product, _ in run]
        if sum(m.us[1] for m in each) <= _LEAD * sum(m.us[m.best] for m in each):
            whole.update(product for product, _ in run)
            in_place(fused, run)
    for problem in sums:
        measured = found[id(problem)]
        rest = [place for place in problem.places if place[0] not in whole]
        for place in rest if measured.best else ():
            impl, config = measured.pairs[measured.best - 2]
            rewrite(fused.graph, *place, (impl.name, config))
        count, apart = len(problem.places) - len(rest), measured.names[measured.best]
        taken = f"{count} in place, {len(rest)} {apart}" if count and rest else apart if rest else "in place"
        us = {name: round(us, 2) for name, us in zip(measured.names, measured.us, strict=True)}
        row = {"op": "sum and layer_norm", "problem": str(problem.key[0]), "taken": taken, "us": us}
        rows.append({**row, "times": len(problem.places), "in place": count})
    return rows


@dataclass(frozen=True)
class _Known:
    """The result of this process's measurement for a problem."""

    pair: tuple[Impl, Any] | None
    """The choice; None: keep the default."""
    row: dict[str, Any]


_KNOWN: dict[Any, _Known] = {}
"""Results of this process. A second model with the same launches gets the same kernels without new measurements. So does a part
of a model that is timed separately."""


def times_of(fused: fx.GraphModule, inputs: list[Any], ranked: int) -> dict[Node, float]:
    """Call -> microseconds of its chosen implementation. All are timed in the same way."""
    found = dict[Node, float]()
    for launch in launches_of(fused, inputs):
        device = device_of(launch.args[0].get_device())
        known = _KNOWN.get(_key(launch, device, ranked))
        us: float = _alone_us(launch, device) if known is None else known.row["us"][known.row["taken"]]
        found.update((node, us) for node in launch.nodes)
    return found


def _alone_us(launch: Launch, device: Device) -> float:
    """The time in microseconds of a launch whose choice came from a row of the database.

    It is measured here, because the time in the row was measured between other launches.
    """
    choice, sets = launch.op.choose(device, launch.op.problem(*launch.args)), sets_of(launch)
    return Stopwatch().in_turns([_call(choice.impl, choice.config, sets)], len(sets), rounds=7)[0].us


def _key(launch: Launch, device: Device, ranked: int) -> Any:
    return device.name, launch.op.name, launch.op.problem(*launch.args), launch.args[0].shape, ranked, scope()


def _write(launch: Launch, pair: tuple[Impl, Any] | None) -> None:
    if pair is not None:
        for node in launch.nodes:
            node.args = (*node.args[: _FIXED[node.target]], (pair[0].name, pair[1]))


def _named(pair: tuple[Impl, Any]) -> str:
    return _spelled(pair[0].name, pair[1])


def _spelled(name: str, config: Any) -> str:
    return name + (" " + ",".join(f"{k}={v}" for k, v in config.items()) if config else "")


def _call(impl: Impl, config: Any, sets: list[tuple[Any, ...]]) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        return impl.launch(config, *sets[i])

    return call
