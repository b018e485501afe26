"""Recognises anchors: ATen calls that one of our operators can compute. All of them are described by an `Anchor`.

The table READERS is keyed by ATen target and covers both kinds of graphs: exported programs (`aten.linear`, `aten.conv2d`,
`aten.layer_norm`, `aten.scaled_dot_product_attention`) and Inductor's graphs after autograd (`aten.addmm`, `aten.mm`,
`aten.convolution`, the flash and cuDNN attentions). A model may also compute attention by separate calls,
softmax(q k^T * scale) v. This is recognised at the last matrix product.

Every argument that changes the result is checked. If a call is of a known kind, but the operator cannot compute it (a
transposed convolution, attention with a mask), the result is a sentence that states the reason.

Not here: what is fused with an anchor (rules.py, walk.py), and any choice of implementation.
"""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tilewright.kernels.attention.checks import LARGEST_HEAD_DIM

__all__ = ["BATCHES", "READERS", "Anchor", "fit", "read", "same_sizes", "symbolic", "tensor_of"]

aten = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A call that one of our operators computes."""

    kind: str
    """conv, linear, attention, layer_norm, max_pool, global_mean."""
    node: Node
    """The node whose value the operator computes. If the call has several results, a getitem among its users reads the
    first."""
    x: Node
    weight: Node | None = None
    """A parameter or a computed value. conv: [O, C / groups, *K]; linear: [N, K], or [K, N] with `options["kn"]`."""
    bias: Node | None = None
    others: tuple[Node, ...] = ()
    """Further operands. For attention: keys, values and masks."""
    inside: tuple[Node, ...] = ()
    """Nodes between x and node that are part of the anchor, for example in attention that consists of separate calls."""
    without: "Anchor | None" = None
    """An alternative anchor that excludes the operation before the call, in case another group has already fused it."""
    options: dict[str, Any] = field(default_factory=dict)
    """conv: stride, padding (numbers or "same"), dilation, groups. linear: kn (the weight is [K, N]). attention: causal, scale.
    layer_norm: eps. max_pool: kernel_size, stride, padding, dilation, ceil_mode."""

    @property
    def operands(self) -> tuple[Node, ...]:
        """The tensors that the anchor reads."""
        return tuple(n for n in (self.x, self.weight, self.bias, *self.others) if n is not None)


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that tracing has stored at a node (shape, dtype, device); None if the value is not a single tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def symbolic(*shapes: Iterable[Any]) -> bool:
    """Whether any size is symbolic, that is, unknown when the graph is compiled."""
    return any(not isinstance(size, int) for shape in shapes for size in shape)


def same_sizes(one: Iterable[Any], two: Iterable[Any]) -> bool:
    """Whether two shapes are equal. Symbolic sizes are compared without adding a guard."""
    a, b = list(one), list(two)
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b))


def fit(anchor: Anchor) -> Anchor | str:
    """The anchor if the operators accept its operands, otherwise the reason why they do not.

    The operands must be non-empty tensors of one floating-point dtype on one device.
    """
    found = [tensor_of(n) for n in anchor.operands]
    known = [t for t in found if t is not None]
    if len(known) != len(found):
        return "an operand's shape is not known"
    if known[0].dtype not in _FLOATS or any(t.dtype != known[0].dtype for t in known):
        types = sorted({str(t.dtype).removeprefix("torch.") for t in known})
        return (
            f"the operands are {', '.join(types)}; the operator needs one dtype for all of them: float16, bfloat16 or float32"
        )
    if any(t.device != known[0].device for t in known):
        return "the operands are on different devices"
    if any(isinstance(size, int) and size == 0 for t in known for size in t.shape):
        return "an operand is empty: nothing to compute"
    result = tensor_of(anchor.node)
    if result is not None and result.dtype != known[0].dtype:
        return f"the result is {result.dtype}, but the operands are {known[0].dtype}; the operator needs the same dtype"
    return anchor


def _given(node: Node, names: tuple[str, ...], defaults: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    found = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found.update(zip(names, node.args, strict=False))
    found.update(node.kwargs)
    return found


# ---- convolutions and matrix products


def _conv(node: Node) -> Anchor | str:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return _read_conv(node, _given(node, names, (None, [1], [0], [1], 1)))


def _convolution(node: Node) -> Anchor | str:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    a = _given(node, names, (None, [1], [0], [1], False, [0], 1))
    return "a transposed convolution, which the operator does not compute" if a["transposed"] else _read_conv(node, a)


def _read_conv(node: Node, a: dict[str, Any]) -> Anchor | str:
    weight = tensor_of(a["weight"])
    if weight is None:
        return "the filter's shape is not known"
    each = {name: _spread(a[name], weight.dim() - 2) for name in ("stride", "padding", "dilation")}
    return fit(
        Anchor(
            kind="conv", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={**each, "groups": a["groups"]}
        )
    )


def _spread(value: Any, dims: int) -> Any:
    if isinstance(value, str):
        return value
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _linear(node: Node) -> Anchor | str:
    a = _given(node, ("input", "weight", "bias"), (None,))
    return _product(node, a["input"], a["weight"], a["bias"], False)


def _addmm(node: Node) -> Anchor | str:
    a = _given(node, ("input", "mat1", "mat2", "beta", "alpha"), (1, 1))
    if a["beta"] != 1 or a["alpha"] != 1:
        return f"addmm with alpha={a['alpha']} and beta={a['beta']}; the operator needs 1 for both"
    return _product(node, a["mat1"], a["mat2"], a["input"], True)


def _mm(node: Node) -> Anchor | str:
    return _product(node, node.args[0], node.args[1], None, True)


def _product(node: Node, x: Any, weight: Any, bias: Any, kn: bool) -> Anchor | str:
    """The anchor for x [..., K] times a weight [N, K], or [K, N] if `kn`."""
    left, right, added = tensor_of(x), tensor_of(weight), tensor_of(bias)
    if left is None or right is None:
        return "an operand's shape is not known"
    if right.dim() != 2 or left.dim() == 0:
        return BATCHES if right.dim() > 2 else "the second operand is a vector; the operator needs a matrix"
    if bias is not None and (added is None or not same_sizes(added.shape, [right.shape[1 if kn else 0]])):
        return "the bias is not a vector with one number for each column of the product"
    return fit(Anchor(kind="linear", node=node, x=x, weight=weight, bias=bias, options={"kn": kn}))


# ---- attention


def _sdpa(node: Node) -> Anchor | str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    a = _given(node, names, (None, 0.0, False, None, False))
    return _read_attention(node, a, a["attn_mask"], a["scale"])


def _flash(node: Node) -> Anchor | str:
    """For _scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, return_debug_mask, *, scale)."""
    names = ("query", "key", "value", "dropout_p", "is_causal", "return_debug_mask")
    a = _given(node, names, (0.0, False, False))
    return _read_attention(node, a, None, a.get("scale"))


def _efficient(node: Node) -> Anchor | str:
    """For the memory-efficient and cuDNN calls: q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal."""
    names = ("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal")
    a = _given(node, names, (None, False, 0.0, False))
    return _read_attention(node, a, a["attn_bias"], a.get("scale"))


def _read_attention(node: Node, a: dict[str, Any], mask: Any, scale: Any) -> Anchor | str:
    if mask is not None:
        return "attention with a mask, which the operator for plain attention does not accept"
    if a["dropout_p"] != 0.0 or a.get("return_debug_mask"):
        return "attention with dropout, which the operator does not compute"
    return _attention(node, (a["query"], a["key"], a["value"]), a["is_causal"], scale)


def _attention(
    node: Node, operands: tuple[Node, Node, Node], causal: bool, scale: float | None, inside: tuple[Node, ...] = ()
) -> Anchor | str:
    """The anchor for attention of q [B, H, S, D], k [B, G, T, D] and v [B, G, T, V]. H must be a multiple of G."""
    tensors = [t for t in map(tensor_of, operands) if t is not None]
    if len(tensors) < 3 or any(t.dim() != 4 for t in tensors):
        return "the queries, keys and values of attention do not have four dims [B, H, S, D]"
    q, k, v = (t.shape for t in tensors)
    if not same_sizes(q[:1], k[:1]) or not same_sizes(k[:3], v[:3]):
        return f"attention that must broadcast its queries {list(q)}, keys {list(k)} or values {list(v)}"
    if not symbolic(q[1:], k[1:], v[1:]):
        if not k[1] or q[1] % k[1]:
            return f"attention with {q[1]} query heads, which is not a multiple of its {k[1]} key heads"
        if causal and q[2] != k[2]:
            words = f"causal attention of {q[2]} queries to {k[2]} keys"
            return f"{words}: torch aligns the mask with the first key, the operator with the last"
        if max(q[3], v[3]) > LARGEST_HEAD_DIM:
            return f"attention with a head dim of {max(q[3], v[3])}; the operator supports at most {LARGEST_HEAD_DIM}"
    if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
        return f"attention with a scale of {scale}; the operator needs a finite number above 0"
    options = {"causal": bool(causal), "scale": scale}
    return fit(Anchor(kind="attention", node=node, x=operands[0], others=operands[1:], inside=inside, options=options))


BATCHES = "both operands are batches of matrices; the operator needs one weight matrix"
"""The reason for a product that is no linear layer and no part of attention."""
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_COPIES = (aten.clone.default, aten.expand.default, aten.contiguous.default)
_FACTORS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def _called(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _through(node: Any, inside: list[Node]) -> Any:
    """The value before copies that have one reader. Dropout in evaluation mode is such a copy."""
    while _called(node, _COPIES) and len(node.users) == 1 and _alike(node, node.args[0]):
        inside.append(node)
        node = node.args[0]
    return node


def _alike(one: Any, two: Any) -> bool:
    """Whether two values have the same shape and dtype."""
    a, b = tensor_of(one), tensor_of(two)
    return a is not None and b is not None and a.dtype == b.dtype and same_sizes(a.shape, b.shape)


def _scores(scores: Any, inside: list[Node]) -> tuple[Any, float] | None:
    """(q k^T, the total factor by which it is multiplied); None if a factor is not a positive number."""
    scale = 1.0
    while _called(scores, _FACTORS) and len(scores.users) == 1:
        value, factor = scores.args[:2]
        if isinstance(value, int | float) and scores.target is aten.mul.Tensor:
            value, factor = factor, value
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < math.inf:
            return None
        scale = scale * factor if scores.target in (aten.mul.Tensor, aten.mul.Scalar) else scale / factor
        inside.append(scores)
        scores = value
    return scores, scale


def _written_out(node: Node) -> Anchor | str:
    """The anchor for softmax(q @ k^T * scale, -1) @ v, without a mask. `node` is the last product.

    The operands are [B, H, S, D]. No other call may read the values in between.
    """
    inside: list[Node] = []
    weights = _through(node.args[0], inside)
    if not _called(weights, _SOFTMAX) or len(weights.users) > 1 or weights.args[1] not in (-1, 3):
        return BATCHES
    if not _alike(weights, weights.args[0]) or tensor_of(weights).dim() != 4:  # pyright: ignore[reportOptionalMemberAccess]
        return "attention in separate calls: the softmax changes the dtype, or its input is not [B, H, S, T]"
    inside.append(weights)
    found = _scores(weights.args[0], inside)
    if found is None or not _called(found[0], _PRODUCTS) or len(found[0].users) > 1:
        return "attention in separate calls: q k^T and the softmax are separated by more than a positive factor"
    scores, scale = found
    inside.append(scores)
    q, transposed = scores.args[:2]
    if not _called(transposed, (aten.transpose.int, aten.permute.default)):
        return "attention in separate calls: the second operand of q k^T is not the result of a transpose"
    order = transposed.args[1:] if transposed.target is aten.transpose.int else tuple(transposed.args[1])
    if order not in ((-1, -2), (-2, -1), (2, 3), (3, 2), (0, 1, 3, 2)):
        return "attention in separate calls: the keys are not transposed in their last two dims"
    keys, values = transposed.args[0], node.args[1]
    shapes = [tensor_of(t) for t in (q, keys)]
    if any(t is None for t in shapes) or not same_sizes(shapes[0].shape[:2], shapes[1].shape[:2]):  # pyright: ignore
        return "attention in separate calls: queries and keys differ in their batch size or number of heads"
    return _attention(node, (q, keys, values), False, scale, tuple(inside))  # pyright: ignore[reportArgumentType]


def _matmul(node: Node) -> Anchor | str:
    """The anchor for attention that consists of separate calls, or for x [..., K] @ w [K, N]."""
    x, weight = (tensor_of(n) for n in node.args[:2])
    if x is None or weight is None:
        return "an operand's shape is not known"
    return _mm(node) if min(x.dim(), weight.dim()) < 3 else _written_out(node)


# ---- norms, pools, means


def _layer_norm(node: Node) -> Anchor | str:
    a = _given(node, ("input", "normalized_shape", "weight", "bias", "eps"), (None, None, 1e-5))
    if len(a["normalized_shape"]) != 1:
        return f"a layer norm over the last {len(a['normalized_shape'])} dims; the operator supports only one dim"
    return fit(
        Anchor(kind="layer_norm", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={"eps": a["eps"]})
    )  # fmt: skip


def _max_pool(node: Node) -> Anchor | str:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    a = _given(node, names, ([], 0, 1, False))
    if (refused := _images(a["input"])) is not None:
        return refused
    return fit(Anchor(kind="max_pool", node=node, x=a["input"], options={name: a[name] for name in names[1:]}))


def _images(x: Any) -> str | None:
    """A reason if x is not [N, C, H, W]; None if it is."""
    known = tensor_of(x)
    return None if known is not None and known.dim() == 4 else "pooling of an input that is not [N, C, H, W]"


def _adaptive(node: Node) -> Anchor | str:
    size = node.args[1]
    sizes = [size] if isinstance(size, int) else list(size)  # pyright: ignore[reportArgumentType]
    if any(s != 1 for s in sizes):
        return f"adaptive pooling to {sizes} pixels; the operator computes only the mean of all pixels"
    if (refused := _images(node.args[0])) is not None:
        return refused
    return fit(Anchor(kind="global_mean", node=node, x=node.args[0], options={"keepdim": True}))  # pyright: ignore


def _mean(node: Node) -> Anchor | str:
    a = _given(node, ("input", "dim", "keepdim"), (False,))
    x = tensor_of(a["input"])
    whole = x is not None and x.dim() == 4 and a.get("dim") is not None and {d % 4 for d in a["dim"]} == {2, 3}
    if not whole or a.get("dtype") is not None:
        return "a mean over other dims than H and W of [N, C, H, W], or with a change of dtype"
    return fit(Anchor(kind="global_mean", node=node, x=a["input"], options={"keepdim": bool(a["keepdim"])}))


READERS: dict[Any, Callable[[Node], Anchor | str | None]] = {
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
"""ATen target -> function that reads such a call. It returns an anchor, or a sentence that states why there is none."""


def read(node: Node) -> Anchor | str | None:
    """The anchor for a call, or a sentence that states why there is none; None for calls unrelated to our operators."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    reader = READERS.get(node.target)
    return None if reader is None else reader(node)
