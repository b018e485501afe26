"""Recognises activations that Inductor has decomposed into several nodes of a graph.

Inductor decomposes GELU into seven nodes and SiLU into four. In 16 bits it adds casts to float32 around them. The form depends
on torch's version, so it is not hard-coded. Instead, each activation is traced with the current decompositions, and the result
is a small graph that is then searched for in the large one.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.normal import Activation
from tilewright.fuse.rules import ACTIVATIONS
from tilewright.kernels.device.activations import ACTIVATION_FORMS

__all__ = ["find_activation"]


@lru_cache(maxsize=64)
def _template(name: str, dtype: torch.dtype) -> fx.Graph:
    """The activation's graph, as Inductor decomposes it."""
    from torch._inductor.decomposition import select_decomp_table

    activation = ACTIVATION_FORMS[name]
    with unset_fake_temporarily(), torch.no_grad():
        # A lambda, because make_fx reads the signature, and F.relu has further parameters.
        return make_fx(lambda x: activation(x), decomposition_table=select_decomp_table())(torch.zeros(2, 2, dtype=dtype)).graph


def _same(wanted: Any, found: Any, x: fx.Node, seen: dict[fx.Node, fx.Node]) -> bool:
    """Whether `found` computes the same from x as `wanted` computes from the template's input.

    Fills `seen`: wanted -> found.
    """
    if not isinstance(wanted, fx.Node):
        if isinstance(wanted, list | tuple):
            return (
                isinstance(found, list | tuple)
                and len(wanted) == len(found)
                and all(_same(w, f, x, seen) for w, f in zip(wanted, found))
            )
        return not isinstance(found, fx.Node) and wanted == found
    if wanted.op == "placeholder":
        return found is x
    if wanted in seen:
        return seen[wanted] is found
    if not isinstance(found, fx.Node) or found.op != "call_function" or found.target != wanted.target:
        return False
    if len(wanted.args) != len(found.args) or wanted.kwargs.keys() != found.kwargs.keys():
        return False
    if not all(_same(w, f, x, seen) for w, f in zip(wanted.args, found.args)):
        return False
    if not all(_same(w, found.kwargs[key], x, seen) for key, w in wanted.kwargs.items()):
        return False
    seen[wanted] = found
    return True


def _below(x: fx.Node, depth: int) -> list[fx.Node]:
    """The nodes computed from x in at most `depth` steps, nearest first."""
    level, found = [x], dict[fx.Node, None]()
    for _ in range(depth):
        level = [user for node in level for user in node.users if user.op == "call_function" and user not in found]
        found.update(dict.fromkeys(level))
    return list(found)


def find_activation(x: fx.Node) -> Activation | None:
    """The activation applied to x, if no other call reads x; None if there is none.

    Other calls may read values inside the activation (a backward pass keeps them); see `inside`.
    """
    value = tensor_of(x)
    if value is None or not value.is_floating_point():
        return None
    for name in sorted(ACTIVATIONS):
        graph = _template(name, value.dtype)
        last = next(n for n in graph.nodes if n.op == "output").args[0]
        if not isinstance(last, fx.Node):
            continue
        steps = sum(n.op == "call_function" for n in graph.nodes)
        for candidate in _below(x, steps):
            seen: dict[fx.Node, fx.Node] = {}
            if candidate.target == last.target and _same(last, candidate, x, seen):
                return Activation(name, candidate, frozenset(seen.values()))
    return None
