"""Assembles the tokens of a vision transformer (patches, class token, positions) in the launches of one matrix product.

    cat([class, product(patches)], 1) + positions      becomes      product(rows, residual)

`rows` contains the patches. Before the patches of each image it has rows of zeros, for the class token. These rows are set to
zero only once, and the copy that gathers patches does not write to them. The product adds `residual`, which depends on
parameters alone: it is the positions, plus in the first rows the class token minus the product's bias. So concatenation needs
no copy, and there is no separate addition.

Not supported: graphs in which other calls read the values in between. Not for graphs that Inductor compiles, because the copy
writes to `rows` in place.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.check import ANCHOR_NODE, FLOAT_NODE
from tilewright.fuse.parts import FLOAT_PARTS
from tilewright.fuse.report import LAUNCH, Report

__all__ = ["assemble"]

aten = torch.ops.aten


def _one(node: Any, target: Any) -> bool:
    """Whether a node is a call of this target, and exactly one call reads it."""
    return isinstance(node, Node) and node.target is target and len(node.users) == 1


def _constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    found = getattr(module, str(node.target), None) if isinstance(node, Node) and node.op == "get_attr" else None
    return found if isinstance(found, Tensor) else None


def _summands(module: fx.GraphModule, node: Node) -> tuple[Any, Tensor] | None:
    """(the cat, the constant) if a node is the dense sum of a cat and a constant; otherwise None."""
    if node.target is not calls.as_dense or not _one(node.args[0], aten.add.Tensor):
        return None
    total: Any = node.args[0]
    if len(total.args) != 2 or total.kwargs:
        return None
    for cat, constant in (total.args, total.args[::-1]):
        known = _constant(module, constant)
        if known is not None and _one(cat, calls.as_dense) and _one(cat.args[0], aten.cat.default):
            return cat.args[0], known
    return None


def _parts(module: fx.GraphModule, cat: Any) -> tuple[Tensor, Any, Any] | None:
    """(the first rows, the product, the view from which its patches are copied) if a cat joins tokens; otherwise None."""
    given, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if dim != 1 or not isinstance(given, list | tuple) or len(given) != 2:
        return None
    lead, seen = _constant(module, given[0]), given[1]
    if lead is None or lead.dim() != 3 or not _one(seen, calls.strided):
        return None
    product: Any = seen.args[0]
    if not _one(product, calls.linear) or product.args[3] is not None or product.args[4] != "none":
        return None
    rows = product.args[0]
    gathered: Any = rows.args[0] if _one(rows, calls.strided) else None
    if not _one(gathered, calls.as_dense) or gathered.args[1] or not _one(gathered.args[0], calls.strided):
        return None
    count, k = rows.args[1]
    size, (batch, _, width) = gathered.args[0].args[1], lead.shape
    patches = count // batch
    whole = list(seen.args[1]) == [batch, patches, width] and list(seen.args[2]) == [patches * width, width, 1]
    whole = whole and list(rows.args[2]) == [k, 1] and size[0] == batch and prod(size) == count * k
    return (lead, product, gathered.args[0]) if whole else None


def assemble(module: fx.GraphModule, report: Report) -> None:
    """Rewrite all such calls of a graph, in place, and record this in the report."""
    done = False
    for node in list(module.graph.nodes):
        found = _summands(module, node)
        parts = None if found is None else _parts(module, found[0])
        if found is None or parts is None:
            continue
        lead, product, view = parts
        weight, bias = (_constant(module, a) for a in product.args[1:3])
        if weight is None or (product.args[2] is not None and bias is None):
            continue
        (batch, first, width), k = lead.shape, weight.shape[1]
        tokens = first + prod(view.args[1]) // (batch * k)
        wide = found[1].double().expand(batch, tokens, width).clone()
        wide[:, :first] += lead.double() if bias is None else lead.double() - bias.double()
        module.register_buffer(f"{product.name}_positions", wide.to(lead.dtype).view(-1, width), persistent=False)
        module.register_buffer(f"{product.name}_rows", lead.new_zeros(batch, tokens, k), persistent=False)
        with module.graph.inserting_before(product):
            positions, rows = (module.graph.get_attr(f"{product.name}_{name}") for name in ("positions", "rows"))
            gathered = module.graph.call_function(calls.gathered, (view, rows, first))
            new = module.graph.call_function(
                calls.linear, (gathered, *product.args[1:3], positions, "none", [batch, tokens, width])
            )
        new.meta = {
            **{k: v for k, v in product.meta.items() if k != FLOAT_PARTS},
            **{key: node.meta[key] for key in (FLOAT_NODE, ANCHOR_NODE) if key in node.meta},
        }
        node.replace_all_uses_with(new)
        total: Any = node.args[0]
        for gone in (found[0], total):
            report.launches.remove(gone.meta[LAUNCH])
        reason = "the matrix product of the patches also adds the class token and the positions"
        report.add(product.name, "tokens", node.name, True, reason, 4 * batch * tokens * width * lead.element_size())
        done = True
    if done:
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
