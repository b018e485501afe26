"""Engines' own counters: requested once after all measurements, checked, and assigned to our layers by name.

A profiler's figures are the engine's claim: a second opinion, not a measurement. They change no interval, no verdict and
nothing on the fairness card, and an engine that cannot provide them has failed nothing.

How a counter is assigned to a layer: an engine is given a program whose operations have names, and which records the module
that each operation was exported from (`Operation`). An operation belongs to the layer that has nodes of that module; if several
do (a ReLU that is called three times), to the first one that does not run before the operation's inputs exist. A counter
belongs to the layers of the operations that occur as words in its name: "conv_7 + relu_3", "node_MatMul_9/MatMulAddFusion". If
these are in several layers, only layers that it begins count: a convolution that also adds a shortcut's sum does not become
part of the next layer. A counter whose name contains no operation (a copy that the engine has added) has no layer. Nothing is
guessed from kinds, sizes or order.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from tilewright.bench.compare.engine import Counting, EngineError, Operation
from tilewright.bench.compare.layers import Chain
from tilewright.bench.compare.measure import Contender
from tilewright.bench.compare.results import MOST_COUNTERS, MOST_KIND, MOST_NAME, Comparison, Counter

__all__ = ["attributed", "counted", "looked_over"]


def counted(
    found: Comparison, sides: Sequence[Contender], chain: Chain, progress: Callable[[str], None] = lambda words: None
) -> Comparison:
    """`found` with the counters of each engine's profiler for the whole model, or the reason why there are none.

    Ctrl-C ends the counting; the interruption is then the reason.
    """
    told = []
    for side, was in zip(sides, (found.ours, found.baseline), strict=True):
        progress(f"reading the counters of {side.name}")
        built = side.built["whole"]
        try:
            counters = looked_over(side.counters(), side.name)
            operations = built.operations if isinstance(built, Counting) else ()
            exact = bool(getattr(built, "exact", False))
            told.append(replace(was, counters=attributed(counters, operations, chain), counters_exact=exact))
        except EngineError as error:
            told.append(replace(was, counters_note=str(error)[:600]))
        except KeyboardInterrupt:
            told.append(replace(was, counters_note=f"{side.name} was interrupted while reading its counters"))
    return replace(found, ours=told[0], baseline=told[1])


def looked_over(counters: Sequence[Counter], engine: str) -> list[Counter]:
    """The counters, with unprintable characters as "?". Raises EngineError with the reason if they are not plausible."""
    if not counters:
        raise EngineError(f"{engine} has no counters to report")
    if len(counters) > MOST_COUNTERS:
        raise EngineError(f"{engine} reports {len(counters)} counters, wanted at most {MOST_COUNTERS}")
    for i, counter in enumerate(counters):
        if len(counter.name) > MOST_NAME or len(counter.kind) > MOST_KIND:
            size = f"{len(counter.name)} and {len(counter.kind)}"
            raise EngineError(
                f"{engine}: name and kind of counter {i} have {size} characters, but at most {MOST_NAME} and {MOST_KIND} "
                "are allowed"
            )
        if not (math.isfinite(counter.seconds) and counter.seconds >= 0):
            raise EngineError(
                f"{engine}: counter {counter.name[:80]!r} reports {counter.seconds!r} seconds, wanted a finite number of "
                "0 or more"
            )
    return [replace(counter, name=_printable(counter.name), kind=_printable(counter.kind)) for counter in counters]


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


# ---- whose layers


def attributed(counters: Sequence[Counter], operations: Sequence[Operation], chain: Chain) -> list[Counter]:
    """`counters` with the names of the layers that they run. A counter with the name of a layer belongs to that layer."""
    places = _places(operations, chain)
    named: dict[str, list[int]] = defaultdict(list)
    for i, operation in enumerate(operations):
        for name in operation.names:
            named[name].append(i)
    first: dict[int, int] = {}
    for i, place in enumerate(places):
        if place is not None:
            first.setdefault(place, i)
    begins = set(first.values())
    own = {layer.name: i for i, layer in enumerate(chain.layers)}
    found = []
    for counter in counters:
        words = {counter.name, *re.split(r"[^\w.]+", counter.name)}
        held = {i: place for word in words for i in named.get(word, ()) if (place := places[i]) is not None}
        layers = set(held.values())
        if len(layers) > 1:
            layers = {place for i, place in held.items() if i in begins} or layers
        elif not layers and counter.name in own:
            layers = {own[counter.name]}
        found.append(replace(counter, layers=[chain.layers[i].name for i in sorted(layers)]))
    return found


def _places(operations: Sequence[Operation], chain: Chain) -> list[int | None]:
    """The layer of each operation; None if its module is in no layer, or only in layers before the operation's inputs."""
    of_module: dict[str, set[int]] = defaultdict(set)
    of_op: dict[tuple[str, str], set[int]] = defaultdict(set)
    for i, layer in enumerate(chain.layers):
        for node in layer.nodes:
            of_module[_scope(node)].add(i)
            of_op[_scope(node), _op(node)].add(i)
    found: list[int | None] = []
    reached: list[int] = []  # the last layer that each has waited for
    for operation in operations:
        candidates = of_op.get((operation.scope, operation.op)) or of_module.get(operation.scope, set())
        before = max((reached[i] for i in operation.reads), default=0)
        place = min(candidates) if len(candidates) == 1 else min((i for i in candidates if i >= before), default=None)
        found.append(place)
        reached.append(before if place is None else max(before, place))
    return found


def _scope(node: fx.Node) -> str:
    """Path of the module that a node of a chain stands for, or stands in."""
    stack = [str(where[0]) for where in (node.meta.get("nn_module_stack") or {}).values()]
    return stack[-1] if stack else str(node.target) if node.op == "call_module" else ""


def _op(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(getattr(node.target, "__name__", node.target))
