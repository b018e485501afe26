"""What counts as an anchor: an ATen call that one of our operators computes, read into one form.

The table is keyed by ATen target, and reads both spellings: that of an exported program (`aten.linear`, `aten.conv2d`,
`aten.layer_norm`, `aten.scaled_dot_product_attention`) and that of Inductor's graphs after autograd (`aten.addmm`, `aten.mm`,
`aten.convolution`, the flash and cuDNN attentions). A reader says None for a call that is of the right name and of no use, such
as a transposed convolution.

Attention that is written out, softmax(q k^T * scale) v, is read from its last product.

Not here: what is pulled into an anchor (patterns.py), and any decision.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

__all__ = ["READERS", "Anchor", "read", "tensor_of"]

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A call that one of our operators computes."""

    kind: str
    """conv, linear, attention, layer_norm, max_pool, global_mean."""
    node: Node
    """Whose value the operator computes: for a call with several results the getitem of the first is in `users`."""
    x: Node
    weight: Node | None = None
    """Parameter or computed: [O, C / groups, *K] of a conv, [N, K] of a linear unless `options["kn"]`."""
    bias: Node | None = None
    others: tuple[Node, ...] = ()
    """Attention: keys and values."""
    inside: tuple[Node, ...] = ()
    """Nodes between x and node that the anchor stands for: of attention that is written out."""
    options: dict[str, Any] = field(default_factory=dict)
    """conv: stride, padding (numbers or "same"), dilation, groups. linear: kn (the weight is [K, N]). attention: causal, scale,
    gqa. layer_norm: eps. max_pool: kernel_size, stride, padding, dilation, ceil_mode."""


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that tracing left at a node: shape, dtype, device; None where it is no single tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _given(node: Node, names: tuple[str, ...], defaults: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of a call by name."""
    found = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found.update(zip(names, node.args, strict=False))
    found.update(node.kwargs)
    return found


# ---- convolutions and products


def _conv(node: Node) -> Anchor | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return _read_conv(node, _given(node, names, (None, [1], [0], [1], 1)))


def _convolution(node: Node) -> Anchor | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    a = _given(node, names, (None, [1], [0], [1], False, [0], 1))
    return None if a["transposed"] else _read_conv(node, a)


def _read_conv(node: Node, a: dict[str, Any]) -> Anchor | None:
    if tensor_of(a["input"]) is None or not isinstance(a["weight"], Node):
        return None
    dims = _spatial(a["weight"])
    each = {name: _spread(a[name], dims) for name in ("stride", "padding", "dilation")}
    return Anchor(
        kind="conv", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={**each, "groups": a["groups"]}
    )  # fmt: skip


def _spatial(weight: Node) -> int:
    known = tensor_of(weight)
    return 2 if known is None else known.dim() - 2


def _spread(value: Any, dims: int) -> Any:
    if isinstance(value, str):
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _linear(node: Node) -> Anchor | None:
    a = _given(node, ("input", "weight", "bias"), (None,))
    return Anchor(kind="linear", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={"kn": False})


def _addmm(node: Node) -> Anchor | None:
    a = _given(node, ("input", "mat1", "mat2", "beta", "alpha"), (1, 1))
    bias, weight = tensor_of(a["input"]), tensor_of(a["mat2"])
    if a["beta"] != 1 or a["alpha"] != 1 or bias is None or weight is None or bias.dim() != 1 or bias.shape != weight.shape[1:]:
        return None
    return Anchor(kind="linear", node=node, x=a["mat1"], weight=a["mat2"], bias=a["input"], options={"kn": True})


def _mm(node: Node) -> Anchor | None:
    left, right = node.args[:2]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    return Anchor(kind="linear", node=node, x=left, weight=right, options={"kn": True})


# ---- attention


def _sdpa(node: Node) -> Anchor | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    a = _given(node, names, (None, 0.0, False, None, False))
    if a["attn_mask"] is not None or a["dropout_p"] != 0.0:
        return None
    return _attention(node, a["query"], a["key"], a["value"], a["is_causal"], a["scale"], a["enable_gqa"])


def _flash(node: Node) -> Anchor | None:
    """_scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, return_debug_mask, *, scale)."""
    names = ("query", "key", "value", "dropout_p", "is_causal", "return_debug_mask")
    a = _given(node, names, (0.0, False, False))
    if a["dropout_p"] != 0.0 or a["return_debug_mask"]:
        return None
    return _attention(node, a["query"], a["key"], a["value"], a["is_causal"], a.get("scale"), False)


def _efficient(node: Node) -> Anchor | None:
    """The memory-efficient and the cuDNN one: q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal."""
    names = ("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal")
    a = _given(node, names, (None, False, 0.0, False))
    if a["attn_bias"] is not None or a["dropout_p"] != 0.0:
        return None
    return _attention(node, a["query"], a["key"], a["value"], a["is_causal"], a.get("scale"), False)


def _attention(
    node: Node, q: Node, k: Node, v: Node, causal: bool, scale: float | None, gqa: bool, inside: tuple[Node, ...] = ()
) -> Anchor | None:
    shapes = [tensor_of(t) for t in (q, k, v)]
    if any(t is None or t.dim() != 4 for t in shapes):
        return None
    options = {"causal": bool(causal), "scale": scale, "gqa": bool(gqa)}
    return Anchor(kind="attention", node=node, x=q, others=(k, v), inside=inside, options=options)


_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_COPIES = (aten.clone.default, aten.expand.default, aten.contiguous.default)


def _called(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _through(node: Any, inside: list[Node]) -> Any:
    """What stands behind copies that have one reader (dropout in evaluation is one)."""
    while _called(node, _COPIES) and len(node.users) == 1:
        inside.append(node)
        node = node.args[0]
    return node


def _written_out(node: Node) -> Anchor | None:
    """softmax(q @ k^T * scale, -1) @ v, of [B, H, S, D] operands. No mask, and nothing else may read what lies between."""
    inside: list[Node] = []
    weights = _through(node.args[0], inside)
    if not _called(weights, _SOFTMAX) or len(weights.users) > 1:
        return None
    logits, last = tensor_of(weights.args[0]), weights.args[1]
    if logits is None or logits.dim() != 4 or last not in (-1, 3):
        return None
    inside.append(weights)
    scale, scores = 1.0, weights.args[0]
    while _called(scores, (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)) and len(scores.users) == 1:
        factor = scores.args[1]
        if not isinstance(factor, int | float) or factor <= 0:
            return None
        scale = scale * factor if "mul" in str(scores.target) else scale / factor
        inside.append(scores)
        scores = scores.args[0]
    if not _called(scores, _PRODUCTS) or len(scores.users) > 1:
        return None
    inside.append(scores)
    q, transposed = scores.args[:2]
    if not _called(transposed, (aten.transpose.int, aten.permute.default)):
        return None
    order = transposed.args[1:] if transposed.target is aten.transpose.int else tuple(transposed.args[1])
    if order not in ((-1, -2), (-2, -1), (2, 3), (3, 2), (0, 1, 3, 2)):
        return None
    shapes = [tensor_of(t) for t in (q, transposed.args[0], node.args[1])]
    if any(t is None or t.dim() != 4 for t in shapes) or shapes[0].shape[:2] != shapes[1].shape[:2]:  # pyright: ignore
        return None
    return _attention(node, q, transposed.args[0], node.args[1], False, scale, False, tuple(inside))  # pyright: ignore


def _matmul(node: Node) -> Anchor | None:
    """Attention that is written out, or x [..., K] @ w [K, N]."""
    x, weight = (tensor_of(n) for n in node.args[:2])
    if x is None or weight is None:
        return None
    return _mm(node) if weight.dim() == 2 and x.dim() >= 2 else _written_out(node)


# ---- norms, pools, means


def _layer_norm(node: Node) -> Anchor | None:
    a = _given(node, ("input", "normalized_shape", "weight", "bias", "eps"), (None, None, 1e-5))
    if len(a["normalized_shape"]) != 1:
        return None
    return Anchor(
        kind="layer_norm", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={"eps": a["eps"]}
    )  # fmt: skip


def _max_pool(node: Node) -> Anchor | None:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    a = _given(node, names, ([], 0, 1, False))
    options = {name: a[name] for name in names[1:]}
    return Anchor(kind="max_pool", node=node, x=a["input"], options=options)


def _adaptive(node: Node) -> Anchor | None:
    size = node.args[1]
    one = size == 1 if isinstance(size, int) else all(s == 1 for s in size)  # pyright: ignore
    return Anchor(kind="global_mean", node=node, x=node.args[0], options={"keepdim": True}) if one else None  # pyright: ignore


def _mean(node: Node) -> Anchor | None:
    a = _given(node, ("input", "dim", "keepdim"), (False,))
    x = tensor_of(a["input"])
    if x is None or x.dim() != 4 or a.get("dim") is None or {d % 4 for d in a["dim"]} != {2, 3} or "dtype" in node.kwargs:
        return None
    return Anchor(kind="global_mean", node=node, x=a["input"], options={"keepdim": bool(a["keepdim"])})


READERS: dict[Any, Callable[[Node], Anchor | None]] = {
    aten.conv1d.default: _conv,
    aten.conv2d.default: _conv,
    aten.conv1d.padding: _conv,
    aten.conv2d.padding: _conv,
    aten.conv3d.padding: _conv,
    aten.conv3d.default: _conv,
    aten.convolution.default: _convolution,
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.matmul.default: _matmul,
    aten.scaled_dot_product_attention.default: _sdpa,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_cudnn_attention.default: _efficient,
    aten.layer_norm.default: _layer_norm,
    aten.max_pool2d.default: _max_pool,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _mean,
}
"""ATen target -> what reads a call of it."""


def read(node: Node) -> Anchor | None:
    """The anchor that a call is, or None."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    reader = READERS.get(node.target)
    return None if reader is None else reader(node)
