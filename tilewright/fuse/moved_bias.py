"""Moves a bias from a matrix product to the layer norm before it, so that one library launch can add the residual.

    r = norm(x) * g + s;  y = W z + b + r;  u = V r + c        becomes
    r' = norm(x) * g + (s + b);  y = W z + r';  u = V r' + (c - V b)

This occurs in post-norm transformers. cuBLAS can add either a bias or a matrix to its product, but not both (our own kernels
can). The bias is moved only if every call that reads r is a matrix product with a parameter, or this one sum.
"""

from torch.fx import Node

from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.naming import layer_name
from tilewright.fuse.plan import Group
from tilewright.fuse.report import Report
from tilewright.fuse.view_calls import is_view

__all__ = ["move_biases"]


def _readers(node: Node) -> list[tuple[Node, Node]]:
    """(the value that is read, the reading call) for all calls that read a node's value, directly or through views."""
    found = []
    for user in node.users:
        found += _readers(user) if is_view(user) else [(node, user)]
    return found


def _parameter(node: Node | None) -> bool:
    return node is not None and node.op == "get_attr"


def _movable(group: Group) -> bool:
    """Whether a group is a matrix product with a bias, and no operation comes between the product and its residual."""
    plain = group.activation == "none" and not group.folds and not group.minus
    return group.anchor.kind == "linear" and plain and _parameter(group.anchor.bias) and _parameter(group.anchor.weight)


def move_biases(groups: list[Group], report: Report) -> None:
    """Move biases where possible: record in the groups which norm adds a bias, and which products subtract it again."""
    norms = {group.last: group for group in groups if group.anchor.kind == "layer_norm"}
    products = {group.anchor.node: group for group in groups if group.anchor.kind == "linear"}
    for group in groups:
        norm = norms.get(group.residual) if group.residual is not None else None
        if norm is None or norm.plus or not _movable(group) or not _parameter(norm.anchor.bias):
            continue
        readers = _readers(norm.last)
        sums = [call for _, call in readers if call in group.chain]
        others = [products.get(call) for read, call in readers if call not in group.chain and call.args[0] is read]
        known = [p for p in others if p is not None and _parameter(p.anchor.weight) and p is not group and not p.moved]
        bias = group.anchor.bias
        if bias is None or len(sums) != 1 or len(sums) + len(known) != len(readers):
            continue
        if any(p.anchor.bias is not None and not _parameter(p.anchor.bias) for p in known):
            continue
        group.moved = True
        norm.plus.append(bias)
        for product in known:
            product.minus.append(bias)
        value = tensor_of(group.last)
        saved = 0 if value is None else 2 * value.numel() * value.element_size()
        words = f"added by the layer norm {layer_name(norm.anchor.node)} instead"
        report.add(layer_name(group.anchor.node), "bias", bias.name, True, words, saved)
