"""Emits attention with masks and biases as one launch. Masks are combined into one operand; a causal mask becomes `causal`."""

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.fuse import calls, op_calls
from tilewright.fuse.anchors_attention import MASKED
from tilewright.fuse.buffers import Buffers, Value
from tilewright.fuse.emit import COPIED, finish
from tilewright.fuse.naming import layer_name
from tilewright.fuse.plan import Group
from tilewright.fuse.views import dense

__all__ = ["emit_attention"]

aten = torch.ops.aten


def emit_attention(b: Buffers, group: Group) -> Value:
    """Emit one launch of `biased_attention`; without a mask or with a causal one, of `attention`."""
    a, o = group.anchor, group.anchor.options
    q, k, v = (_operand(b, group, b.values[n], turned) for n, turned in zip((a.x, *a.others[:2]), (False, o["turned"], False)))
    shape = (*q.shape[:3], v.shape[-1])
    operands = [b.tensor(t) for t in (q, k, v)]
    masks = [_seen(b.values[n], seen) for n, (_, seen) in zip(a.others[2:], o["masks"], strict=True)]
    kinds = [kind for kind, _ in o["masks"]]
    known = [value.constant for value in masks]
    constant = _combined(known, kinds, o["fill"]) if None not in known else None  # pyright: ignore[reportArgumentType]
    if not masks or (constant is not None and _is_causal(constant, o["fill"], q.shape[1], k.shape[1])):
        value = b.buffer(calls.attention, (*operands, bool(masks), o["scale"]), dense(shape), a.node)
        op = "attention"
    else:
        bias = _bias(b, masks, kinds, o["fill"]) if constant is None else b.attribute(constant, f"{group.name}_mask")
        fill = -math.inf if "add" in kinds else o["fill"]
        empty_nan = o["empty_nan"] and (constant is None or _hides_all(constant, fill))
        value = b.buffer(op_calls.biased_attention, (*operands, bias, o["scale"], fill, empty_nan), dense(shape), a.node)
        op = MASKED
    view = value.view.permute((0, 2, 1, 3)).reshape(tuple(a.node.meta["val"].shape))
    if view is None:
        raise ValueError(f"its result of shape {list(shape)} cannot be viewed as {list(a.node.meta['val'].shape)}")
    return finish(b, group, op, Value(value.node, view))


def _operand(b: Buffers, group: Group, value: Value, turned: bool) -> Value:
    """An operand [.., S, D] or [.., D, S] as [B, S, H, D]; copied if strides cannot express it."""
    value, lead = b.opened(value), group.anchor.options["lead"]
    if len(lead) == 2 and value.shape[:-2] != tuple(lead):
        heads = lead if math.prod(value.shape[:-2]) == math.prod(lead) else (lead[0], value.shape[-3])
        view = value.view.reshape((*heads, *value.shape[-2:]))
        value = b.copied(value, False) if view is None else Value(value.node, view)
        if view is None:
            value = Value(value.node, dense((*heads, *value.shape[-2:])))
    value = Value(value.node, value.view.permute((0, 3, 1, 2) if turned else (0, 2, 1, 3)))
    strides = value.view.strides
    if strides is None or (strides[-1] != 1 and value.shape[-1] != 1) or 0 in strides:
        b.report.add(layer_name(group.anchor.node), "layout", group.anchor.node.name, False, COPIED)
        return b.copied(value, False)
    return value


def _seen(value: Value, shape: tuple[int, ...]) -> Value:
    """A mask as [N, H or 1, S or 1, T or 1]."""
    if value.constant is not None:
        constant = value.constant.reshape(shape)
        return Value(None, dense(shape), constant)
    view = value.view.reshape(shape)
    if view is None:
        raise ValueError(f"a mask of shape {list(value.shape)} cannot be viewed as {list(shape)}")
    return Value(value.node, view)


def _combined(masks: list[Tensor], kinds: list[str], fill: float) -> Tensor | None:
    """Constant masks combined into one: either bool, True if a query attends to a key, or numbers to add to the scores."""
    seen: Tensor | None = None
    added: Tensor | None = None
    for mask, kind in zip(masks, kinds, strict=True):
        if kind == "add":
            added = mask if added is None else added + mask
        else:
            mask = ~mask if kind == "hide" else mask
            seen = mask if seen is None else seen & mask
    if added is None or seen is None:
        return seen if added is None else added
    return torch.where(seen, added, fill)


def _bias(b: Buffers, masks: list[Value], kinds: list[str], fill: float) -> Any:
    """The same as `_combined`, for masks that are computed in each call."""
    nodes = [b.tensor(mask) for mask in masks]
    seen: Any = None
    added: Any = None
    for node, kind in zip(nodes, kinds, strict=True):
        if kind == "add":
            added = node if added is None else b.graph.call_function(aten.add.Tensor, (added, node))
        else:
            node = b.graph.call_function(aten.logical_not.default, (node,)) if kind == "hide" else node
            seen = node if seen is None else b.graph.call_function(aten.logical_and.default, (seen, node))
    if added is None or seen is None:
        return seen if added is None else added
    return b.graph.call_function(aten.where.ScalarOther, (seen, added, fill))


def _is_causal(mask: Tensor, fill: float, queries: int, keys: int) -> bool:
    """Whether a constant mask is causal: each query attends to the keys up to its own, and the last query to all keys."""
    if queries > keys:
        return False  # the first queries would attend to no key, and the two operators differ for such queries
    lower = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    if mask.dtype == torch.bool:
        hidden = fill == -math.inf or fill <= _LEAST
        return hidden and bool((mask.expand(*mask.shape[:2], queries, keys) == lower).all())
    whole = mask.expand(*mask.shape[:2], queries, keys)
    return bool((whole.masked_select(lower.expand(whole.shape)) == 0).all()) and bool(
        (whole.masked_select(~lower.expand(whole.shape)) <= _LEAST).all()
    )


_LEAST = -1e30
"""A mask value up to this one, or -inf, hides a key: the sum of score and mask equals the mask value in float32, whatever the
score, and the weight of the key is 0."""


def _hides_all(mask: Tensor, fill: float) -> bool:
    """Whether a constant mask sets all scores of some query to -inf."""
    if mask.dtype == torch.bool:
        return fill == -math.inf and bool((~mask).all(-1).any())
    return bool((mask == -math.inf).all(-1).any())
