"""Programs made of a model's layers (prefixes, pieces, layers left out or repeated), whose times determine those of the layers.

    whole            the user's module itself; and all its layers, also returning the values at one cut
    prefix           the first layers, up to a cut
    end              the last layers, from a cut on, with the inputs that they have in the model
    without          one layer, or a run of identical blocks down to 1, 2, 4 or 8 of them, replaced by the identity
    repeated         one layer or block several times in a row, if its output has the form of its input
    only             one layer alone, once or repeated, with the inputs that it has in the model
    with ballast     the same, with one layer repeated so often that the layers, and not the start of a call,
                     determine its time: ballast.py

A program that ends at a cut returns the values that are live there, except those from which another of them is computed. Each
operation before the cut leads to one of these, so an engine that removes dead code removes nothing, and no existing value is
copied. The cost of inputs and outputs (layout, copies) is described by `border`, which the fit takes into account. A layer is
left out or repeated only if this makes no other layer dead code.

Weights are the model's own, except in second and later copies of a repeated layer: with a single set of weights a cache would
hold them, which is not so in the model. Copies are scaled so that numbers neither vanish nor overflow.
"""

import copy
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from tilewright.bench.compare.attribution import Border
from tilewright.bench.compare.layers import Chain, trace
from tilewright.bench.compare.specs import Edit, Spec, heavy_specs, span_of, specs

__all__ = ["Key", "Program", "Variant", "candidates", "copy_of", "variants", "variants_of"]

Key = tuple[fx.Node, int]
"""A value: its node, and the copy of its layer."""


@dataclass(frozen=True)
class _Step:
    """A node of the chain, in a copy of its layer."""

    key: Key
    reads: dict[fx.Node, Key]


@dataclass(frozen=True)
class Program:
    """The steps and outputs of a spec."""

    steps: list[_Step]
    inputs: list[fx.Node]
    outputs: list[Key]
    part: tuple[int, ...]


class Variant:
    """A program for an engine. `module` and `inputs` are made when they are first asked for."""

    def __init__(self, chain: Chain, spec: Spec, program: Program):
        self.name = spec.name
        self.spec = spec
        self.part = program.part
        """Indices of its layers, in order, with repetitions."""
        self.counts = {layer.name: program.part.count(i) for i, layer in enumerate(chain.layers)}
        """Layer -> number of times that it runs."""
        inputs, outputs = program.inputs, [n for n, _ in program.outputs]
        moved = (sum(chain.size(n) for n in nodes if n in chain.shapes) for nodes in (inputs, outputs))
        self.border = Border(*map(float, (*moved, len(inputs), len(outputs))))
        self.chain, self.program = chain, program

    @cached_property
    def module(self) -> nn.Module:
        """The program as a module. For the whole model it is the user's own module."""
        if self.name == "whole":
            return self.chain.model
        return _built(self.chain, self.program, self.inputs)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs: the example inputs, or for a later part the values at its cut."""
        if self.name == "whole":
            return self.chain.inputs
        return _values(self.chain, self.program.inputs)

    def release(self) -> None:
        """Free module and inputs; they are made again when needed."""
        self.__dict__.pop("module", None)
        self.__dict__.pop("inputs", None)


def variants(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Variant]:
    """All candidates, the whole model first. Raises Untraceable: see layers.py."""
    return candidates(trace(model, inputs))


def candidates(chain: Chain, ballast: Edit | None = None, near: Sequence[Edit] = ()) -> list[Variant]:
    """All variants of the chain that can be built, the whole model first; with `ballast` also those that contain it or one of
    `near`."""
    return variants_of(chain, specs(chain) if ballast is None else (*specs(chain), *heavy_specs(chain, ballast, near)))


def variants_of(chain: Chain, wanted: Iterable[Spec]) -> list[Variant]:
    """The wanted variants that can be built, without duplicates."""
    found: dict[str, Variant] = {}
    seen: set[tuple[Any, ...]] = set()
    for spec in wanted:
        program = _program(chain, spec)
        if program is None or not program.part or not program.inputs:
            continue
        made = (spec.start, spec.stop, program.part, spec.giving)
        if made not in seen and spec.name not in found:
            seen.add(made)
            found[spec.name] = Variant(chain, spec, program)
    return list(found.values())


# ---- a spec as a list of steps


def _program(chain: Chain, spec: Spec) -> Program | None:
    """The steps of a spec; None if its edit is not possible, or would leave a value without a reader."""
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

    at, copies = spec.start, count(1)
    for edit in spec.edits:
        span = span_of(chain, edit.start, edit.stop)
        if span is None:
            return None
        taken, made = span
        run(range(at, edit.start))
        last = value(taken)
        for again in range(edit.times):
            local = {taken: last}
            run(range(edit.start, edit.stop), next(copies) if again else 0, local)
            last = local[made]
        env[made], at = last, edit.stop
    run(range(at, spec.stop))
    outputs = _outputs(chain, spec, env, steps)
    return Program(steps, inputs, outputs, tuple(part)) if outputs and _all_alive(steps, outputs) else None


def _outputs(chain: Chain, spec: Spec, env: dict[fx.Node, Key], steps: list[_Step]) -> list[Key]:
    made = {step.key for step in steps}
    if spec.stop < len(chain.layers):
        return _live(chain, spec.start, spec.stop, env, steps)
    final = [env[n] for n in chain.outputs if n in env and env[n] in made]
    return final + [key for key in (_live(chain, 0, spec.giving, env, steps) if spec.giving else []) if key not in final]


def _live(chain: Chain, start: int, stop: int, env: dict[fx.Node, Key], steps: list[_Step]) -> list[Key]:
    """Values that layers [start, stop) have produced and others read, except those from which another one is computed."""
    made = {step.key for step in steps}
    own = {node for layer in chain.layers[start:stop] for node in layer.nodes}
    live = [env[n] for n in chain.live(stop) if n in own and env[n] in made]
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
    """The values of these nodes for the example inputs."""
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


def _built(chain: Chain, program: Program, inputs: tuple[Tensor, ...]) -> nn.Module:
    graph, parts = fx.Graph(), {}
    env: dict[Key, fx.Node] = {(n, 0): graph.placeholder(f"input_{i}") for i, n in enumerate(program.inputs)}

    def own(target: str, number: int) -> str:
        """The name of a part of the model in this program. Second and later copies have their own weights."""
        name = target if not number else _copied(target, number)
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
    """Scale the matrices of each copy of a layer so that its outputs are as large as its inputs."""
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


def copy_of(module: nn.Module, target: str, number: int) -> Tensor | None:
    """The weight of copy `number` for `target` of the model; None if the copies of a program share it."""
    words = target.split(".")
    for cut in range(len(words), 0, -1):
        name = ".".join([_copied(".".join(words[:cut]), number), *words[cut:]])
        try:
            found = operator.attrgetter(name)(module)
        except AttributeError:
            continue
        return found if isinstance(found, Tensor) else None
    return None


def _copied(target: str, number: int) -> str:
    return f"copy_{number}_{target.replace('.', '_')}"


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _matrices(module: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Weights of more than one dimension that a node of a copy owns."""
    found = list(module.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    for x in node.all_input_nodes:
        if x.op == "get_attr" and str(x.target).startswith("copy_"):
            found.append(operator.attrgetter(str(x.target))(module))
    return [w.data for w in found if w.dim() > 1 and w.is_floating_point()]
