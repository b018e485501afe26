"""Makes an int8 version of an optimised graph, if it is accurate and faster, and records the decisions.

quantise.py finds the candidates and makes the plan, int8_graph.py makes the graph. Times decide which products run in int8: the
time of each product in 16 bits and in int8, and the estimated time of the conversions that a set of products needs. Starting
with all candidates, products are removed from the set, alone or with others that share their input, as long as this saves time.
Then the whole graphs are timed in turns.

If the outputs differ too much from those of the float model, the limit for the error of a single product is lowered in steps,
so that the products with the largest errors stay in 16 bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from tilewright.fuse.check import TOLERANCES, Tolerance, compare_outputs
from tilewright.fuse.choose import choose, times_of
from tilewright.fuse.int8_graph import int8_graph
from tilewright.fuse.naming import layer_name
from tilewright.fuse.quantise import LARGEST_ERROR, Found, Plan, candidates_of, planned
from tilewright.fuse.report import Report
from tilewright.fuse.settings import Settings
from tilewright.fuse.tuning import tune
from tilewright.tune.measure import Stopwatch

__all__ = ["in_int8"]

_LIMITS = (LARGEST_ERROR, 0.012, 0.008)
"""Limits for the errors of single products, tried in this order until the outputs are accurate."""
_MARGIN = 0.9
"""The error on the example inputs must be within this share of the tolerance, because it may be a little larger in other
calls."""
_LAUNCH_US, _BYTES_A_US = 1.5, 2.2e6
"""To estimate the time of a conversion on an H100: microseconds per launch, and bytes per microsecond. A conversion reads
2 bytes and writes 1 byte per element, or vice versa."""


def _conversions_us(found: Found, plan: Plan) -> float:
    each = (found.bytes[n] for n in (*plan.quantised, *plan.dequantised))
    return sum(_LAUNCH_US + 1.5 * size / _BYTES_A_US for size in each)


def _takes_us(found: Found, products: frozenset[Node], sixteen: dict[Node, float], eight: dict[Node, float]) -> float:
    own = sum(eight[n] if n in products else sixteen[n] for n in eight)
    return own + _conversions_us(found, planned(found, products))


def _paying(found: Found, sixteen: dict[Node, float], eight: dict[Node, float]) -> frozenset[Node]:
    """The products that save time in int8 if the conversions that they need are included."""
    products = frozenset(found.candidates)
    known = {n: us for n, us in eight.items() if n in sixteen}
    best = _takes_us(found, products, sixteen, known)
    while True:
        before = products
        ordered = _in_order(products)
        sources = dict.fromkeys(found.candidates[n].source for n in ordered)
        sets = [frozenset(n for n in products if found.candidates[n].source is source) for source in sources]
        for less in (*(frozenset((n,)) for n in ordered), *sets, products):
            us = _takes_us(found, products - less, sixteen, known)
            if less & products and us < best:
                products, best = products - less, us
        if products == before:
            return products


def _in_order(nodes: frozenset[Node]) -> list[Node]:
    """The nodes sorted by name, because the order of a set of nodes differs between processes."""
    return sorted(nodes, key=lambda n: n.name)


def _written(n: Node, plan: Plan, found: Found) -> str:
    """A text that states which call quantises the input of a product."""
    source = found.candidates[n].source
    if source in plan.quantised:
        return "a separate launch"
    return f"{layer_name(source)}, one scale per row" if source in plan.norms else layer_name(source)


def _decided(report: Report, found: Found, plan: Plan, why_not: dict[Node, str]) -> None:
    for n, c in found.candidates.items():
        if n in plan.products:
            reason = f"int8, with an own error of {c.error:.1e}; its input is quantised by {_written(n, plan, found)}"
            report.add(layer_name(n), "quantise", n.name, True, reason, c.codes.numel() + found.bytes[c.source] // 2)
        else:
            reason = why_not.get(n, "not faster in int8 if the conversions that it needs are included")
            report.add(layer_name(n), "quantise", n.name, False, reason)
    for n in _in_order(plan.quantised):
        report.launches.append({"layer": layer_name(n), "op": "quantize", "what": f"{found.bytes[n] // 2} values"})
    for n in _in_order(plan.dequantised):
        report.launches.append({"layer": layer_name(n), "op": "dequantize", "what": f"{found.bytes[n] // 2} values"})


def _whole_us(graphs: Sequence[fx.GraphModule], inputs: Sequence[Any]) -> list[float]:
    def call(graph: fx.GraphModule) -> Any:
        return lambda i: graph(*inputs)

    with torch.no_grad():
        return [t.us for t in Stopwatch().in_turns([call(g) for g in graphs], 1, rounds=9)]


def in_int8(
    plain: fx.GraphModule, fused: fx.GraphModule, inputs: list[Any], want: Sequence[Any], report: Report, settings: Settings
) -> fx.GraphModule:
    """The graph with int8 for all products that are accurate and faster in int8. If there are none, `fused`.

    Args:
        plain: the graph in 16 bits, as it was lowered.
        fused: the same graph after implementations were chosen.
        inputs: flat example inputs.
        want: the float model's outputs, flat.
        report: records decisions, and on a GPU the measurements.
        settings: contain the allowed error, and whether to measure.
    """
    allowed = TOLERANCES["int8"] if settings.tolerance is None else Tolerance.given(settings.tolerance)
    for limit in _LIMITS:
        notes = Report()
        found = candidates_of(plain, inputs, notes, limit)
        graph, plan, why_not = _built(plain, found, inputs, settings, notes)
        report.tuned += [row for row in notes.tuned if row["how"] != "known" or row not in report.tuned]
        if not plan.products:
            break
        with torch.no_grad():
            apart = compare_outputs(list(want), list(graph(*inputs)))
        if all(allowed.allows(d, _MARGIN) for d in apart):
            break
        error, largest = (max((getattr(d, name) for d in apart), default=0.0) for name in ("rms", "largest"))
        reason = (
            f"with all products in int8 whose own error is up to {limit:.1e}, the outputs have an RMS error of {error:.1e} and "
            f"a largest error of {largest:.1e}, which is too much"
        )
        reason += "".join(f"; {d.words}" for d in apart if d.discrete and d.words)
        report.add("the model", "quantise", "output", False, reason)
    else:
        return fused
    report.decisions += notes.decisions
    if settings.search is not None and plan.products:
        eight, sixteen = _whole_us((graph, fused), inputs)
        dtype = str(settings.dtype).removeprefix("torch.")
        report.facts["int8"] = f"the whole graph takes {eight:.1f} us in int8, {sixteen:.1f} us in {dtype}"
        if eight >= sixteen:
            plan = planned(found, frozenset())
            why_not = dict.fromkeys(found.candidates, f"not used: {report.facts['int8']}")
    _decided(report, found, plan, why_not)
    if not plan.products:
        return fused
    report.choices = notes.choices or report.choices
    return graph


def _built(
    fused: fx.GraphModule, found: Found, inputs: list[Any], settings: Settings, notes: Report
) -> tuple[fx.GraphModule, Plan, dict[Node, str]]:
    """(the graph in int8, its plan, the reasons why candidates are not in the plan)."""
    plan, why_not = planned(found, frozenset(found.candidates)), dict[Node, str]()
    dtype, ranked = settings.dtype, settings.search
    graph, made = int8_graph(fused, found, plan, dtype)
    if settings.tune and plan.products:
        notes.tuned = tune(lambda: graph(*inputs), progress=settings.progress)
    if ranked is None or not plan.products:
        return graph, plan, why_not
    choose(graph, inputs, ranked)
    sixteen, new = times_of(fused, inputs, ranked), times_of(graph, inputs, ranked)
    eight = {n: new[made[n]] for n in found.candidates if made[n] in new}
    products = _paying(found, sixteen, eight)
    if products != plan.products:
        why_not = {
            n: f"{eight[n]:.1f} us in int8 without conversions, {sixteen[n]:.1f} us in 16 bits: not faster with them"
            for n in eight
            if n in sixteen
        }
        plan = planned(found, products)
        graph, _ = int8_graph(fused, found, plan, dtype)
    notes.choices = choose(graph, inputs, ranked)
    return graph, plan, why_not
