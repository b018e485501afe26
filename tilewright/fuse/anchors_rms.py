"""Recognises RMS norm that a model computes by separate calls. The last multiplication identifies it.

    w * (x.float() * rsqrt(mean(x.float()^2, -1, keepdim) + eps)).to(dtype)

The factors may be in any order. The casts may be missing if x is float32. The weight may be (1 + w).
"""

from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse.anchors import Anchor, fit, tensor_of

__all__ = ["read_rms_written"]

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, aten.to.dtype, aten.type_as.default)


def _called(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _uncast(node: Any, inside: list[Node]) -> Any:
    """The value before casts between floating-point types."""
    while _called(node, *_CASTS) and _floats(node, node.args[0]):
        inside.append(node)
        node = node.args[0]
    return node


def _floats(*nodes: Any) -> bool:
    return all((value := tensor_of(n)) is not None and value.is_floating_point() for n in nodes)


def read_rms_written(node: Node) -> Anchor | None:
    """The anchor of the norm whose last multiplication is this call; None for any other multiplication."""
    for weight, normed in (node.args[:2], node.args[1::-1]):
        w, out = tensor_of(weight), tensor_of(node)
        if w is None or out is None or w.dim() != 1 or w.shape != out.shape[-1:] or w.dtype != out.dtype:
            continue
        inside: list[Node] = []
        product = _uncast(normed, inside)
        if not _called(product, aten.mul.Tensor):
            continue
        inside.append(product)
        for wide, root in (product.args[:2], product.args[1::-1]):
            found = _of_root(wide, root, list(inside), out)
            if found is None:
                continue
            x, eps, between = found
            if not _closed(between, node):
                return None
            anchor = fit(Anchor(kind="rms_norm", node=node, x=x, weight=weight, inside=tuple(between), options={"eps": eps}))  # pyright: ignore[reportArgumentType]
            return anchor if isinstance(anchor, Anchor) else None
    return None


def _of_root(wide: Any, root: Any, inside: list[Node], out: torch.Tensor) -> tuple[Node, float, list[Node]] | None:
    """(x, eps, the calls in between) if the two factors form x * rsqrt(mean(x^2) + eps); otherwise None."""
    x = _uncast(wide, inside)
    if not _called(root, aten.rsqrt.default) or tensor_of(x) is None or tensor_of(x).shape != out.shape:  # pyright: ignore
        return None
    inside.append(root)
    total = root.args[0]
    if not _called(total, aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], int | float) or total.kwargs:
        return None
    mean = total.args[0]
    if not _called(mean, aten.mean.dim) or len(mean.args) < 3 or mean.args[2] is not True or mean.kwargs:
        return None
    if [d % out.dim() for d in mean.args[1]] != [out.dim() - 1]:
        return None
    inside += [total, mean]
    square = mean.args[0]
    power = _called(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
    if not power and not (_called(square, aten.mul.Tensor) and square.args[0] is square.args[1]):
        return None
    inside.append(square)
    if _uncast(square.args[0], inside) is not x:
        return None
    return x, float(total.args[1]), list(dict.fromkeys(inside))


def _closed(between: list[Node], last: Node) -> bool:
    """Whether no other call reads the values in between."""
    allowed = {*between, last}
    return all(user in allowed for node in between for user in node.users)
