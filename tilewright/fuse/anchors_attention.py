"""Recognises attention with masks and biases: torch's own call with `attn_mask`, or separate calls that compute it.

    softmax(scores, -1) v        scores: q k^T, then any of  * number,  + bias,  masked_fill(mask, number),
                                 where(mask, scores, number), in an order that one bias and one fill value can express

These calls may occur in between: casts to float32 around the softmax, dropout in evaluation mode, and views that split or join
the leading dims (batch and heads, or the windows of an image). No other call may read the values in between. `options`:

    scale, fill, empty_nan   as in kernels/attention/biased.py
    lead                     (batch, heads): all leading dims are reshaped to these two
    turned                   whether the keys are already transposed, k^T
    masks                    for each operand after keys and values: (kind of mask, its shape relative to `lead`)

If the mask is a constant causal mask, emit_attention.py uses the option `causal` instead.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse.anchors import Anchor, fit, same_sizes, symbolic, tensor_of
from tilewright.fuse.view_calls import is_view
from tilewright.kernels.attention.checks import LARGEST_HEAD_DIM

__all__ = ["MASKED", "read_product", "read_sdpa"]

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
_CASTS = (aten._to_copy.default, aten.to.dtype)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MASKED = "biased_attention"
"""The kind of anchors that this module recognises."""


def _called(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _number(value: Any) -> float | None:
    """A Python number that is not a bool; None otherwise."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shape(node: Any) -> tuple[int, ...]:
    value = tensor_of(node)
    return () if value is None else tuple(value.shape)


# ---- torch's own call


def read_sdpa(node: Node) -> Anchor | str:
    """The anchor for aten.scaled_dot_product_attention with a mask, or why there is none."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    a = {**dict.fromkeys(names), **dict(zip(names, node.args, strict=False)), **node.kwargs}
    q, k, v = (_shape(a[name]) for name in names[:3])
    if a["dropout_p"] or a["is_causal"]:
        return "attention with a mask and also with dropout or is_causal=True; the operator supports only the mask"
    if len(q) != 4 or len(k) != 4 or len(v) != 4 or q[0] != k[0] or k[:3] != v[:3] or not k[1] or q[1] % k[1]:
        return (
            f"attention with a mask, whose queries are {list(q)}, keys {list(k)} and values {list(v)}; wanted [B, H, S, D], "
            "[B, G, T, D] and [B, G, T, V], with H a multiple of G"
        )
    shape = _seen_from(_shape(a["attn_mask"]), q[:2], q[:2], (q[2], k[2]))
    if isinstance(shape, str):
        return shape
    scale = q[3] ** -0.5 if a["scale"] is None else _number(a["scale"])
    if scale is None or not math.isfinite(scale):
        return f"attention with a scale of {a['scale']}; the operator needs a finite number"
    masks = (("see" if _is_bool(a["attn_mask"]) else "add", shape),)
    options = {"scale": scale, "fill": -math.inf, "empty_nan": False, "lead": q[:2], "turned": False, "masks": masks}
    return _anchor(node, (a["query"], a["key"], a["value"]), (a["attn_mask"],), (), options)


def _is_bool(node: Any) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool


def _anchor(
    node: Node, operands: tuple[Any, Any, Any], masks: tuple[Node, ...], inside: tuple[Node, ...], options: dict[str, Any]
) -> Anchor | str:
    """The anchor if dtypes, sizes and head dims are supported; otherwise a sentence that states why not."""
    q, k, v = operands
    if symbolic(*(_shape(n) for n in (*operands, *masks))):
        return "attention with a mask, some of whose sizes are not known when it is compiled"
    if any(value is None or value.dtype not in (*_FLOATS, torch.bool) for value in map(tensor_of, masks)):
        return "attention with a mask that is neither bool, float16, bfloat16 nor float32"
    if max(_shape(q)[-1], _shape(v)[-1]) > LARGEST_HEAD_DIM:
        largest = max(_shape(q)[-1], _shape(v)[-1])
        return f"attention with a head dim of {largest}; the operator supports at most {LARGEST_HEAD_DIM}"
    found = fit(Anchor(kind=MASKED, node=node, x=q, others=(k, v), inside=inside, options=options))
    return found if isinstance(found, str) else replace(found, others=(k, v, *masks))


def _seen_from(
    shape: tuple[int, ...], here: tuple[int, ...], lead: tuple[int, int], last: tuple[int, int]
) -> tuple[int, ...] | str:
    """The shape of a mask as [N, H or 1, S or 1, T or 1]; a sentence with the reason if it has no such shape.

    The scores have the shape [*here, *last] in the graph, and [*lead, *last] in our operator. N is 1, the batch size, or the
    number of windows of an image. In the last case `here` is (images, windows, heads).
    """
    words = f"attention with a mask of shape {list(shape)} and scores of shape {[*here, *last]}"
    whole = (*(1,) * (len(here) + 2 - len(shape)), *shape)
    if len(whole) != len(here) + 2 or any(n not in (1, m) for n, m in zip(whole, (*here, *last), strict=True)):
        return f"{words}: the mask cannot be broadcast to the scores"
    ahead, rest = whole[:-2], whole[-2:]
    if here == lead:
        return whole
    if all(n == 1 for n in ahead):
        return (1, 1, *rest)
    if len(here) == 3 and here[2] == lead[1] and here[0] * here[1] == lead[0] and ahead[0] == 1:
        return (ahead[1], ahead[2], *rest)
    if here == (lead[0] * lead[1],):
        return (*lead, *rest)
    return f"{words}: the leading dims of the mask are neither batch and heads nor the windows of an image"


# ---- attention that consists of separate calls


@dataclass
class _Scores:
    """What has been found about the scores. The search goes back from the softmax to the product q k^T."""

    inside: list[Node] = field(default_factory=list)
    scale: float = 1.0
    masks: list[tuple[str, Node, tuple[int, ...]]] = field(default_factory=list)
    """(kind, operand, leading dims of the scores at that point). Kinds: add; see (True: attend); hide (True: do not attend)."""
    fill: float | None = None

    @property
    def finite(self) -> bool:
        """Whether masks set scores to a finite number."""
        return self.fill not in (None, -math.inf)

    def hide(self, what: str, mask: Any, value: Any, here: tuple[int, ...]) -> str | None:
        """Record a mask that replaces scores by a number.

        Returns the reason if it cannot be combined with the operations between it and the softmax, otherwise None.
        """
        fill = _number(value)
        if fill is None or not _is_bool(mask):
            return "a mask is not bool, or replaces scores by something other than a constant number"
        if self.scale != 1.0:
            return "the scores are multiplied after a mask is applied; the operator multiplies them before"
        biased = any(kind == "add" for kind, *_ in self.masks)
        if self.fill not in (None, fill):
            return f"masks replace scores by two numbers, {self.fill} and {fill}; the operator supports one"
        if biased and fill != -math.inf:
            return f"a bias is added after a mask has replaced scores by {fill}; the operator supports this only for -inf"
        self.fill = fill
        self.masks.append((what, mask, here))
        return None


def _is_softmax(node: Any) -> bool:
    last = node.args[1] if _called(node, _SOFTMAX) and len(node.args) > 1 else None
    return last is not None and last in (-1, len(_shape(node)) - 1)


def _behind_copies(node: Any, inside: list[Node]) -> Any:
    """The value before copies that have one reader each.

    Copies are casts between floating-point types, dropout in evaluation mode, and views that keep the last two dims.
    """
    while isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1:
        source = node.args[0] if node.args else None
        known, now = tensor_of(source), tensor_of(node)
        if known is None or now is None or known.dtype not in _FLOATS or now.dtype not in _FLOATS:
            break
        copies = node.target in _CASTS or node.target is aten.expand.default
        same = same_sizes(known.shape, now.shape)
        folds = is_view(node) and _leads_alone(known.shape, now.shape) and not _moves(node)
        if not ((copies and same) or folds):
            break
        inside.append(node)
        node = source
    return node


def _moves(node: Node) -> bool:
    return node.target in (aten.transpose.int, aten.permute.default, aten.t.default)


def _leads_alone(one: Any, two: Any) -> bool:
    """Whether two shapes with equally many elements differ in their leading dims only."""
    return len(one) > 2 and len(two) > 2 and same_sizes(list(one)[-2:], list(two)[-2:])


def _factor(node: Node) -> tuple[Any, float] | None:
    """(the other operand, the factor) if a call multiplies or divides by a finite number; otherwise None."""
    if node.op != "call_function" or len(node.args) < 2:
        return None
    target, (left, right) = node.target, node.args[:2]
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        left, right = (right, left) if isinstance(left, int | float) else (left, right)
        number = _number(right)
    elif target in (aten.div.Tensor, aten.div.Scalar) and "rounding_mode" not in node.kwargs:
        number = _number(right)
        number = None if not number else 1.0 / number
    else:
        return None
    return (left, number) if isinstance(left, Node) and number is not None and math.isfinite(number) else None


def _step(node: Node, found: _Scores) -> Any:
    """Go back by one call, from the scores towards the product q k^T, and record what the call does.

    Returns the value that the call reads, a sentence if the operator cannot compute the call, or None if it is the product.
    """
    here = _shape(node)[:-2]
    if _called(node, _PRODUCTS):
        return _biased_product(node, found, here) if node.target is aten.baddbmm.default else None
    if (factor := _factor(node)) is not None:
        found.scale *= factor[1]
        return factor[0]
    if _called(node, (aten.add.Tensor,)) and node.kwargs.get("alpha", 1) == 1:
        return _sum(node, found, here)
    if _called(node, (aten.masked_fill.Scalar,)):
        return found.hide("hide", node.args[1], node.args[2], here) or node.args[0]
    if _called(node, (aten.where.ScalarOther,)):
        return found.hide("see", node.args[0], node.args[2], here) or node.args[1]
    if _called(node, (aten.where.ScalarSelf,)):
        return found.hide("hide", node.args[0], node.args[1], here) or node.args[2]
    return f"there is a call of {node.target} between q k^T and the softmax"


def _biased_product(node: Node, found: _Scores, here: tuple[int, ...]) -> str | None:
    """For aten.baddbmm, as in BLOOM: its first operand is an additive mask, and alpha is the scale."""
    alpha = _number(node.kwargs.get("alpha", 1))
    if node.kwargs.get("beta", 1) != 1 or alpha is None or len(node.args) != 3:
        return "baddbmm with a beta other than 1, or with an alpha that is not a number"
    if found.scale != 1.0 or found.finite:
        return "after a bias is added, the scores are multiplied, or masked with a finite number"
    found.scale = alpha
    found.masks.append(("add", node.args[0], here))  # pyright: ignore[reportArgumentType]
    return None


def _sum(node: Node, found: _Scores, here: tuple[int, ...]) -> Any:
    """The operand of a sum that comes from the product q k^T. The other operand is recorded as a bias."""
    left, right = node.args[:2]
    for scores, bias in ((left, right), (right, left)):
        if not isinstance(scores, Node) or not isinstance(bias, Node) or not _leads_to_product(scores):
            continue
        if _shape(scores) != _shape(node) or len(_shape(bias)) > len(_shape(node)):
            return "the shape of the bias is larger than that of the scores"
        if _is_bool(bias):
            return "a bool tensor is added to the scores"
        if found.scale != 1.0 or found.finite:
            return "after a bias is added, the scores are multiplied, or masked with a finite number"
        found.masks.append(("add", bias, here))
        return scores
    return "a sum before the softmax has no operand that comes from q k^T"


def _leads_to_product(node: Any) -> bool:
    """Whether a value comes from q k^T through calls that are allowed in between."""
    for _ in range(12):
        node = _behind_copies(node, [])
        if _called(node, _PRODUCTS):
            return len(node.users) == 1
        if not isinstance(node, Node) or node.op != "call_function" or len(node.users) != 1:
            return False
        found = _Scores()
        if node.target is aten.add.Tensor:
            return any(_leads_to_product(n) for n in node.args[:2])
        node = _step(node, found)
    return False


def read_product(node: Node, otherwise: str) -> Anchor | str:
    """For a product of two batches of matrices: the anchor if it is the last product of attention, otherwise a sentence.

    `otherwise` is the sentence for products that are unrelated to attention.
    """
    found = _Scores()
    weights = _behind_copies(node.args[0], found.inside)
    if not isinstance(weights, Node) or not _is_softmax(weights) or len(weights.users) != 1:
        return otherwise
    if not _float_softmax(weights):
        return "attention in separate calls: the softmax is neither float16, bfloat16 nor float32"
    found.inside.append(weights)
    shapes, scores = [_shape(node), _shape(weights)], weights.args[0]
    while True:
        scores = _behind_copies(scores, found.inside)
        if not isinstance(scores, Node) or len(scores.users) != 1 or scores.op != "call_function":
            return "attention in separate calls: the scores are read by other calls too, or no call computes them"
        shapes.append(_shape(scores))
        before = _step(scores, found)
        found.inside.append(scores)
        if before is None:
            break
        if isinstance(before, str):
            return f"attention in separate calls: {before}"
        scores = before
    return _assembled(node, scores, shapes, found, weights.target is not aten._safe_softmax.default)


def _float_softmax(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype in _FLOATS


def _assembled(node: Node, product: Node, shapes: list[tuple[int, ...]], found: _Scores, empty_nan: bool) -> Anchor | str:
    """The anchor for attention with the masks and factors that were found, or a sentence that states why there is none."""
    (q, turned), v = product.args[1:3] if product.target is aten.baddbmm.default else product.args[:2], node.args[1]
    last = _shape(product)[-2:]
    leads = [shape[:-2] for shape in shapes if len(shape) == 4]
    lead = leads[0] if leads else (math.prod(shapes[0][:-2]), 1)
    count = math.prod(lead)
    if any(math.prod(_shape(n)[:-2]) != count for n in (q, turned, v)) or any(
        len(_shape(n)) not in (3, 4) for n in (q, turned)
    ):
        return "attention in separate calls: the leading dims of queries, keys and values do not match"
    masks = []
    for kind, mask, here in found.masks:
        shape = _seen_from(_shape(mask), here, lead, last)  # pyright: ignore[reportArgumentType]
        if isinstance(shape, str):
            return shape
        masks.append((kind, shape))
    leading = {shape[0] for _, shape in masks} - {1}
    if len(leading) > 1:
        return f"attention in separate calls: the masks have the batch sizes {sorted(leading)}; the operator supports one"
    fill = -math.inf if found.fill is None else found.fill
    options = {
        "scale": found.scale, "fill": fill, "empty_nan": empty_nan, "lead": lead, "turned": True, "masks": tuple(masks)
    }  # fmt: skip
    operands, inside = tuple(mask for _, mask, _ in found.masks), tuple(found.inside)
    plain = _anchor(node, (q, turned, v), operands, inside, options)
    factor = _factor(q) if isinstance(q, Node) and len(q.users) == 1 else None
    if factor is None or isinstance(plain, str):
        return plain
    before, number = factor  # a factor of q changes the scores before any mask
    options = options | {"scale": found.scale * number}
    scaled = _anchor(node, (before, turned, v), operands, (*inside, q), options)  # pyright: ignore[reportArgumentType]
    return plain if isinstance(scaled, str) else replace(scaled, without=plain)
