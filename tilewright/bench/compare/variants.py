"""Programs made of a model's layers: beginnings, pieces, layers left out or repeated. Their times tell the layers' apart.

    whole            the user's module itself
    prefix           the first layers, up to a cut
    without          one layer, or a run of identical blocks down to 1, 2, 4 or 8 of them, replaced by the identity
    repeated         one layer or block several times in a row, where its output looks like its input
    only             one layer alone, once or repeated, fed with what it reads inside the model

A cut program answers with the values that are live at the cut, less those that another of them is computed from: each operation
before the cut leads to one of these, so that an engine which removes dead code removes nothing, and no copy is made of a value
that is there anyway. What engines do with inputs and outputs (layout, copies) is in `border`, which the fit takes into account.
A layer is left out or repeated only where nothing else dies with it.

Weights are the model's own, except those of second and later copies of a repeated layer: with one set of weights a cache would
serve them, which it does not in the model. Copies are scaled so that numbers neither vanish nor overflow on the way.
"""

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from tilewright.bench.compare.layers import Chain, trace

__all__ = ["Edit", "Spec", "Variant", "candidates", "variants"]

Key = tuple[fx.Node, int]
"""A value: what a node makes, in which copy of its layer."""

_REPEATS = (2, 4, 8, 16)
_DEPTHS = (1, 2, 4, 8)
_SAME_GROUP = 2  # layers of one group that are left out or repeated: a second one tests what the first says of all


@dataclass(frozen=True)
class Edit:
    """Layers [start, stop) run `times` times in a row; 0: not at all."""

    start: int
    stop: int
    times: int


@dataclass(frozen=True)
class Spec:
    """Layers [start, stop) with at most one edit."""

    name: str
    start: int
    stop: int
    edit: Edit | None = None


@dataclass(frozen=True)
class _Step:
    key: Key
    reads: dict[fx.Node, Key]


@dataclass(frozen=True)
class _Program:
    steps: list[_Step]
    inputs: list[fx.Node]
    outputs: list[Key]
    part: tuple[int, ...]


class Variant:
    """A program for an engine. `module` and `inputs` are made when they are first asked for."""

    def __init__(self, chain: Chain, spec: Spec, program: _Program):
        self.name = spec.name
        self.spec = spec
        self.part = program.part
        """Numbers of its layers, in order, with repetitions."""
        self.counts = {layer.name: program.part.count(i) for i, layer in enumerate(chain.layers)}
        """Layer -> how often it runs."""
        self.border = (
            float(sum(chain.size(n) for n in program.inputs if n in chain.shapes)),
            float(sum(chain.size(n) for n, _ in program.outputs if n in chain.shapes)),
        )
        """Bytes of inputs and of outputs."""
        self._chain, self._program = chain, program

    @cached_property
    def module(self) -> nn.Module:
        """The program. Of the whole model it is the user's own module."""
        if self.name == "whole":
            return self._chain.model
        return _built(self._chain, self._program, self.inputs)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """What it is called with: the example inputs, or what these become up to the cut."""
        if self.name == "whole":
            return self._chain.inputs
        return _values(self._chain, self._program.inputs)

    def release(self) -> None:
        """Forget module and inputs; they are made again when asked for."""
        self.__dict__.pop("module", None)
        self.__dict__.pop("inputs", None)


def variants(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Variant]:
    """Every candidate, the whole model first. Untraceable: see layers.py."""
    return candidates(trace(model, inputs))


def candidates(chain: Chain) -> list[Variant]:
    """Every variant of the chain that can be built."""
    found: dict[str, Variant] = {}
    seen: set[tuple[Any, ...]] = set()
    for spec in _specs(chain):
        program = _program(chain, spec)
        if program is None or not program.part or not program.inputs:
            continue
        made = (spec.start, spec.stop, program.part)
        if made not in seen and spec.name not in found:
            seen.add(made)
            found[spec.name] = Variant(chain, spec, program)
    return list(found.values())


def _specs(chain: Chain) -> Iterator[Spec]:
    layers, count = chain.layers, len(chain.layers)
    yield Spec("whole", 0, count)
    for stop in range(1, count):
        yield Spec(f"prefix to {layers[stop - 1].name}", 0, stop)
    for start, period, times in _phased(chain, _periodic([layer.signature for layer in layers])):
        label = f"{layers[start].name} ... {layers[start + period - 1].name}"
        for depth in _DEPTHS:
            if depth < times:
                edit = Edit(start + depth * period, start + times * period, 0)
                yield Spec(f"{depth} of {times} blocks {label}", 0, count, edit)
        for repeats in _REPEATS[:2]:
            yield Spec(f"{label} x{repeats}", 0, count, Edit(start, start + period, repeats))
    members: dict[int, int] = {}
    for i, (layer, group) in enumerate(zip(layers, chain.groups, strict=True)):
        members[group] = members.get(group, 0) + 1
        if members[group] > _SAME_GROUP:
            continue
        yield Spec(f"without {layer.name}", 0, count, Edit(i, i + 1, 0))
        for times in _REPEATS:
            yield Spec(f"{layer.name} x{times}", 0, count, Edit(i, i + 1, times))
        if members[group] == 1:
            yield Spec(f"only {layer.name}", i, i + 1)
            yield Spec(f"only {layer.name} x{_REPEATS[-1]}", i, i + 1, Edit(i, i + 1, _REPEATS[-1]))
            if i + 2 <= count:
                yield Spec(f"only {layer.name} and {layers[i + 1].name}", i, i + 2)


def _phased(chain: Chain, runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first layer, layers of a block, blocks) of runs, from the first layer on at which a block takes and makes one value."""
    for start, stop, period in runs:
        for first in range(start, start + period):
            times = (stop - first) // period
            if times >= 2 and _span(chain, first, first + period) is not None:
                yield first, period, times
                break


def _periodic(signs: Sequence[str]) -> list[tuple[int, int, int]]:
    """(start, stop, period): runs of two or more equal blocks of at least two layers, the longest first, none overlapping."""
    found = []
    for period in range(2, len(signs) // 2 + 1):
        start = 0
        while start + 2 * period <= len(signs):
            stop = start + period
            while stop < len(signs) and signs[stop] == signs[stop - period]:
                stop += 1
            if stop - start >= 2 * period:
                found.append((start, stop, period))
            start = max(start + 1, stop - period + 1)
    chosen: list[tuple[int, int, int]] = []
    for start, stop, period in sorted(found, key=lambda run: (run[0] - run[1], run[2], run[0])):
        if all(start >= b or stop <= a for a, b, _ in chosen):
            chosen.append((start, stop, period))
    return chosen


# ---- a spec as a list of steps


def _span(chain: Chain, start: int, stop: int) -> tuple[fx.Node, fx.Node] | None:
    """(what layers [start, stop) take, what they make) where these look alike and they make nothing else; None where not."""
    inside = [node for layer in chain.layers[start:stop] for node in layer.nodes]
    own, final, anchors = set(inside), set(chain.outputs), {layer.anchor for layer in chain.layers[start:stop]}
    made = [n for n in inside if n in final or any(u not in own for u in n.users)]
    if len(made) != 1 or made[0] not in chain.shapes:
        return None
    order = {node: i for i, node in enumerate(chain.root.graph.nodes)}
    # Only what leads to an anchor: copies that were chained by a shortcut alone would not wait for each other's products.
    above: set[fx.Node] = set()
    for node in reversed(inside):
        if node in anchors or any(user in above for user in node.users):
            above.add(node)
    taken = {x for n in above for x in n.all_input_nodes if x not in own and chain.shapes.get(x) == chain.shapes[made[0]]}
    taken = {x for x in taken if x.op != "get_attr"}
    # Of several the latest: what the layer before made.
    return (max(taken, key=order.__getitem__), made[0]) if taken else None


def _program(chain: Chain, spec: Spec) -> _Program | None:
    """Steps of a spec; None where its edit is not possible, or would leave something without a reader."""
    env: dict[fx.Node, Key] = {}
    inputs: list[fx.Node] = []
    steps: list[_Step] = []
    part: list[int] = []

    def value(x: fx.Node) -> Key:
        if x not in env:
            inputs.append(x)
            env[x] = (x, 0)
        return env[x]

    def run(layers: range, number: int = 0, local: dict[fx.Node, Key] = env) -> None:
        for i in layers:
            part.append(i)
            for node in chain.layers[i].nodes:
                reads = {x: (x, number) if x.op == "get_attr" else local.get(x) or value(x) for x in node.all_input_nodes}
                local[node] = (node, number)
                steps.append(_Step((node, number), reads))

    edit = spec.edit
    if edit is None:
        run(range(spec.start, spec.stop))
    else:
        span = _span(chain, edit.start, edit.stop)
        if span is None:
            return None
        taken, made = span
        run(range(spec.start, edit.start))
        last = value(taken)
        for number in range(edit.times):
            local = {taken: last}
            run(range(edit.start, edit.stop), number, local)
            last = local[made]
        env[made] = last
        run(range(edit.stop, spec.stop))
    outputs = _outputs(chain, spec, env, steps)
    return _Program(steps, inputs, outputs, tuple(part)) if outputs and _all_alive(steps, outputs) else None


def _outputs(chain: Chain, spec: Spec, env: dict[fx.Node, Key], steps: list[_Step]) -> list[Key]:
    made = {step.key for step in steps}
    if spec.stop == len(chain.layers):
        return [env[n] for n in chain.outputs if n in env and env[n] in made]
    own = {node for layer in chain.layers[spec.start : spec.stop] for node in layer.nodes}
    live = [env[n] for n in chain.live(spec.stop) if n in own and env[n] in made]
    below: dict[Key, set[Key]] = {}
    for step in steps:
        below[step.key] = set(step.reads.values()).union(*(below.get(k, set()) for k in step.reads.values()))
    return [key for key in dict.fromkeys(live) if not any(key in below[other] for other in live)]


def _all_alive(steps: list[_Step], outputs: list[Key]) -> bool:
    alive = set(outputs)
    for step in reversed(steps):
        if step.key not in alive:
            return False
        alive.update(step.reads.values())
    return True


# ---- steps as a module


def _values(chain: Chain, nodes: Sequence[fx.Node]) -> tuple[Tensor, ...]:
    """What the example inputs become at these nodes."""
    keep: dict[fx.Node, Tensor] = {}

    class _Keeper(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n in wanted:
                keep[n] = value.clone()
            return value

    wanted = set(nodes)
    if all(n.op == "placeholder" for n in nodes):
        given = dict(zip(chain.root.graph.find_nodes(op="placeholder"), chain.inputs, strict=True))
        return tuple(given[n] for n in nodes)
    with torch.no_grad():
        _Keeper(chain.root).run(*(x.clone() for x in chain.inputs))
    return tuple(keep[n] for n in nodes)


def _built(chain: Chain, program: _Program, inputs: tuple[Tensor, ...]) -> nn.Module:
    graph, parts = fx.Graph(), {}
    env: dict[Key, fx.Node] = {(n, 0): graph.placeholder(f"input_{i}") for i, n in enumerate(program.inputs)}

    def own(target: str, number: int) -> str:
        """The name of a part of the model in this program; a second copy has its own weights."""
        name = target if not number else f"copy_{number}_{target.replace('.', '_')}"
        if name not in parts:
            part = operator.attrgetter(target)(chain.root)
            parts[name] = copy.deepcopy(part) if number else part
        return name

    copies: dict[int, list[fx.Node]] = {}
    for step in program.steps:
        node, number = step.key
        for x, key in step.reads.items():
            if x.op == "get_attr" and key not in env:
                env[key] = graph.create_node("get_attr", own(str(x.target), number))
        new = graph.node_copy(node, lambda x, step=step: env[step.reads[x]])
        if node.op == "call_module":
            new.target = own(str(node.target), number)
        env[step.key] = new
        if number:
            copies.setdefault(number, []).append(new)
    graph.output(tuple(env[key] for key in program.outputs))
    module = fx.GraphModule(parts, graph).eval()
    if copies:
        _settle(module, copies, inputs)
    return module


@torch.no_grad()
def _settle(module: fx.GraphModule, copies: dict[int, list[fx.Node]], inputs: tuple[Tensor, ...]) -> None:
    """Scale the matrices of each copy of a layer so that it gives out numbers as large as it is given."""
    last = {nodes[-1]: number for number, nodes in copies.items()}

    class _Settler(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n not in last or not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            nodes = copies[last[n]]
            given = next(self.env[x] for node in nodes for x in node.all_input_nodes if x not in nodes and x.op != "get_attr")
            factor = float(_size(given) / _size(value))
            if not 0 < factor < float("inf"):
                return value
            for node in nodes:
                for weight in _matrices(module, node):
                    weight.mul_(factor)
            for node in nodes:
                self.env[node] = super().run_node(node)
            return self.env[n]

    _Settler(module, garbage_collect_values=False).run(*(x.clone() for x in inputs))


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _matrices(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Weights of more than one dimension that a node of a copy owns."""
    found = list(module.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    for x in node.all_input_nodes:
        if x.op == "get_attr" and str(x.target).startswith("copy_"):
            found.append(operator.attrgetter(str(x.target))(module))
    return [w.data for w in found if w.dim() > 1 and w.is_floating_point()]
