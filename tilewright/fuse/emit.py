"""Emits groups as calls of our operators, with one function for each kind of anchor.

Each function receives the graph under construction and a group whose operands have already been emitted. It emits one launch
and returns the value of the group's last call.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.fuse import calls
from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.buffers import Buffers, Value
from tilewright.fuse.check import ANCHOR_NODE, FLOAT_NODE
from tilewright.fuse.naming import layer_name
from tilewright.fuse.parts import FLOAT_PARTS, Part
from tilewright.fuse.plan import Gate, Group, Unbuilt
from tilewright.fuse.views import View, channels_last, dense

__all__ = ["COPIED", "EMIT", "channel_rows", "dtype_of", "emit_gate", "emit_merged", "finish"]


COPIED = "an operand is copied, because the operator cannot read its memory layout"


def _what(group: Group, shape: Any) -> str:
    parts = ["bias"] * (group.anchor.bias is not None and not group.moved)
    parts += [fold.kind for fold in group.folds] + [group.activation] * (group.activation != "none")
    parts += ["residual"] * (group.residual is not None)
    parts += ["a sum before it"] * (group.anchor.kind == "group_norm" and bool(group.anchor.others))
    return f"{list(shape)}" + (" + " + ", ".join(parts) if parts else "")


def dtype_of(node: Node) -> torch.dtype:
    value = tensor_of(node)
    assert value is not None, "the value of an anchor must be a tensor"
    return value.dtype


def finish(b: Buffers, group: Group, op: str, value: Value) -> Value:
    """Apply the views of the group's chain, add the launch to the report, and record which value it computes.

    The check compares this value with the float model's later (layer_errors.py).
    """
    end = b.behind(group, value)
    b.launched(group, op, value, _what(group, end.shape))
    return end if group.plus else _compared(b, end, group.last, group.anchor.node)


def _compared(b: Buffers, end: Value, node: Node, anchor: Node) -> Value:
    """Record in a call's `meta` which value of the old graph it computes: its whole result, or a view of its result."""
    assert end.node is not None, "a launch must have a buffer"
    strides = end.view.strides
    if b.memory[end.node] == end.view:
        end.node.meta.update({FLOAT_NODE: node.name, ANCHOR_NODE: anchor.name})
    elif strides is not None:
        part = Part(node.name, anchor.name, end.shape, strides, end.view.offset)
        end.node.meta.setdefault(FLOAT_PARTS, []).append(part)
    return end


# ---- weights


def _parameters(b: Buffers, group: Group, transposed: bool) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) in float64 with everything folded in; None if weight or bias is computed in each call."""
    a = group.anchor
    if not b.weights.known(a.weight) or (a.bias is not None and not b.weights.known(a.bias)):
        return None
    assert a.weight is not None, "a convolution or product must have a weight"
    weight, bias = b.weights.folded(a.weight, a.bias, group.folds, transposed)
    bias = None if group.moved else bias
    for extra in group.minus:
        taken = weight @ b.weights.double(extra)
        bias = -taken if bias is None else bias - taken
    return weight, bias


_LOST = 4e-3
"""Limit for the rounding error of a folded weight, as a share of the weight's RMS. The rounding error is 1.6e-3 in bfloat16,
and 2e-4 in float16 for values in its range."""


def _stored(b: Buffers, group: Group, pair: tuple[Tensor, Tensor | None]) -> tuple[Node, Node | None]:
    dtype, name = dtype_of(group.anchor.node), layer_name(group.anchor.node)
    exact, bias = pair
    weight = exact.to(dtype)
    if group.folds and not (weight - exact).norm() <= _LOST * exact.norm():
        reason = f"folding it would make weights that {str(dtype).removeprefix('torch.')} cannot represent"
        raise Unbuilt(reason, *(fold.node for fold in group.folds))
    if weight.dim() > 2:
        weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
    return b.attribute(weight.contiguous() if weight.dim() == 2 else weight, f"{name}_weight"), (
        None if bias is None else b.attribute(bias.to(dtype), f"{name}_bias")
    )


# ---- convolutions


def _conv(b: Buffers, group: Group) -> Value:
    a, out = group.anchor, tensor_of(group.anchor.node)
    assert out is not None, "a convolution must have a result"
    assert a.weight is not None, "a convolution must have a weight"
    pair = _parameters(b, group, False)
    single = out.dim() == len(a.options["stride"]) + 1
    x = b.values[a.x]
    residual = None if group.residual is None else b.values[group.residual]
    if single:
        x = Value(x.node, x.view.unsqueeze(0), x.constant)
        residual = None if residual is None else Value(residual.node, residual.view.unsqueeze(0), residual.constant)
    shape = (1, *out.shape) if single else tuple(out.shape)
    if pair is not None and not single and _is_product(group, pair[0]):
        return _pointwise(b, group, pair, shape)
    if pair is not None and not single and _is_patches(group, pair[0], b.values[a.x].shape):
        return _patches(b, group, pair, shape)
    before = len(b.graph.nodes)
    x = b.arranged(x, True)
    operand = None if residual is None else b.tensor(b.arranged(residual, True))
    if any(n.target is calls.as_dense for n in list(b.graph.nodes)[before:]):
        b.report.add(layer_name(a.node), "layout", a.node.name, False, "an operand is copied, because it is not channels-last")
    if pair is None:
        weight, bias = b.tensor(b.arranged(b.values[a.weight], True)), _computed_bias(b, group)
    else:
        weight, bias = _stored(b, group, pair)
    o = a.options
    args = (b.tensor(x), weight, bias, operand, group.activation, o["stride"], o["padding"], o["dilation"], o["groups"])
    value = b.buffer(calls.conv, args, channels_last(shape), a.node)
    if single:
        value = Value(value.node, value.view.squeeze((0,)))
    return finish(b, group, "conv", value)


def _is_product(group: Group, weight: Tensor) -> bool:
    """Whether `linear` can compute a convolution as a matrix product over pixels.

    `linear` adds a residual after the activation, a convolution before it. So there must not be both.
    """
    o, plain = group.anchor.options, group.residual is None or group.activation == "none"
    ones = all(n == 1 for n in (*weight.shape[2:], *o["stride"])) and o["groups"] == 1
    return plain and ones and (o["padding"] in ("same", "valid") or not any(o["padding"]))


def channel_rows(b: Buffers, value: Value) -> Node:
    """A value [N, C, *S] as rows of channels [N * S, C]."""
    value = b.arranged(value, True)
    width = value.shape[1]
    view = value.view.permute((0, *range(2, len(value.shape)), 1)).reshape((_count(value.shape) // max(1, width), width))
    assert view is not None, "channels-last memory must be viewable as rows of channels"
    return b.tensor(Value(value.node, view))


def _pointwise(
    b: Buffers, group: Group, pair: tuple[Tensor, Tensor | None], shape: tuple[int, ...]
) -> Value:  # fmt: skip
    """Emit a 1 x 1 convolution with stride 1 as a matrix product of rows of channels."""

    weight, bias = _stored(b, group, (pair[0].flatten(1), pair[1]))
    x = channel_rows(b, b.values[group.anchor.x])
    residual = None if group.residual is None else channel_rows(b, b.values[group.residual])
    flat = (_count(shape) // shape[1], shape[1])
    new = b.buffer(calls.linear, (x, weight, bias, residual, group.activation, list(flat)), dense(flat), group.anchor.node)
    return finish(b, group, "linear", Value(new.node, channels_last(shape)))


def _is_patches(group: Group, weight: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the filter's positions cover the image without overlap.

    If so, the patches can be copied to rows, and the convolution becomes a matrix product.
    """
    o, kernel = group.anchor.options, tuple(weight.shape[2:])
    plain = group.residual is None and o["groups"] == 1 and tuple(o["stride"]) == kernel and set(o["dilation"]) == {1}
    whole = all(size % k == 0 for size, k in zip(shape[2:], kernel, strict=True))
    # Only with few channels: with many channels, the convolution operator needs no copy.
    return plain and whole and math.prod(kernel) > 1 and shape[1] <= 16 and not any(_sides(o["padding"]))


def _sides(padding: Any) -> list[int]:
    return [0 if padding == "valid" else 1] if isinstance(padding, str) else list(padding)


def _patches(
    b: Buffers, group: Group, pair: tuple[Tensor, Tensor | None], shape: tuple[int, ...]
) -> Value:  # fmt: skip
    """Emit a convolution of non-overlapping patches: one copy that gathers the patches, and one matrix product."""
    a, dims = group.anchor, len(shape) - 2
    x = b.opened(b.values[a.x])
    kernel = list(pair[0].shape[2:])
    split = [n for size, k in zip(x.shape[2:], kernel, strict=True) for n in (size // k, k)]
    view = x.view.reshape((*x.shape[:2], *split))
    assert view is not None, "the image size must be a multiple of the filter size"
    order = (0, *range(2, 2 * dims + 2, 2), 1, *range(3, 2 * dims + 3, 2))
    gathered = b.copied(Value(x.node, view.permute(order)), False)
    rows, k = _count(shape) // shape[1], pair[0][0].numel()
    weight, bias = _stored(b, group, (pair[0].flatten(1), pair[1]))
    flat = b.tensor(Value(gathered.node, dense((rows, k))))
    new = b.buffer(
        calls.linear, (flat, weight, bias, None, group.activation, [rows, shape[1]]), dense((rows, shape[1])), a.node
    )
    reason = "a matrix product over patches, because the patches do not overlap"
    b.report.add(layer_name(a.node), "patches", a.node.name, True, reason)
    return finish(b, group, "linear", Value(new.node, channels_last(shape)))


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


# ---- matrix products


def _linear(b: Buffers, group: Group) -> Value:
    a = group.anchor
    transposed = a.options["kn"]
    pair = _parameters(b, group, transposed)
    if pair is None:
        weight, bias = _computed(b, group)
        n = tensor_of(a.node).shape[-1]  # pyright: ignore[reportOptionalMemberAccess]
    else:
        n = pair[0].shape[0]
        weight, bias = _stored(b, group, pair)
    return finish(b, group, "linear", _product(b, group, weight, bias, n, n, group.activation))


def _computed(b: Buffers, group: Group) -> tuple[Node, Node | None]:
    """Weight [N, K] and bias that are not parameters, but computed in each call."""
    a = group.anchor
    assert a.weight is not None, "a product must have a weight"
    value = b.opened(b.values[a.weight])
    view = value.view.permute((1, 0)) if a.options["kn"] else value.view
    return b.tensor(Value(value.node, view)), _computed_bias(b, group)


def _computed_bias(b: Buffers, group: Group) -> Node | None:
    """The bias that belongs to a computed weight: the anchor's own, or a sum after the anchor that the plan lists as a fold."""
    node = group.folds[0].operands[0] if group.folds else group.anchor.bias
    if node is None:
        return None
    value = b.opened(b.values[node])
    view = value.view.reshape((_count(value.shape),))
    assert view is not None, "a bias must have one number for each column"
    return b.tensor(Value(value.node, view))


def _product(
    b: Buffers, group: Group, weight: Node, bias: Node | None, n: int, width: int, activation: str
) -> Value:  # fmt: skip
    """Emit one launch of ops.linear. It computes rows in memory order; the returned value views them in their logical order."""
    value = b.values[group.anchor.x]
    x, lead, in_order = b.rows(value)
    count = 1
    for size in lead.shape:
        count *= size
    shape = (*lead.shape, width) if in_order else (count, width)
    residual = None
    if group.residual is not None:
        residual = _residual(b, group, lead, count, width)
    new = b.buffer(calls.linear, (x, weight, bias, residual, activation, list(shape)), dense(shape), group.anchor.node)
    return new if in_order else Value(new.node, lead.with_columns(width, width))


def _residual(b: Buffers, group: Group, lead: View, count: int, width: int) -> Node:
    """The other operand of the sum as rows, in the same order as the product's rows, and without a copy.

    Raises Unbuilt if that is impossible.
    """
    assert group.residual is not None, "the group must have a residual"
    other = b.opened(b.values[group.residual])
    # The position of each element of the sum in the product's buffer.
    probe = b.behind(group, Value(other.node, lead.with_columns(width, width)))
    if probe.node is other.node and _steps(probe.view) is not None and _steps(probe.view) == _steps(other.view):
        return b.tensor(Value(other.node, View((((count, width),), ((width, 1),)), other.view.offset)))
    if probe.node is other.node and probe.view.is_dense():
        view = other.view.reshape((count, width))
        if view is not None and view.strides is not None and view.strides[1] == 1:
            return b.tensor(Value(other.node, view))
    raise Unbuilt("the other operand of the sum has its rows in another order than the product", group.last)


def _steps(view: View) -> list[int] | None:
    """Strides of all dims with a size other than 1."""
    strides = view.strides
    return None if strides is None else [step for step, size in zip(strides, view.shape, strict=True) if size != 1]


def emit_gate(b: Buffers, gate: Gate) -> Value:
    """Emit act(gate) * up as one matrix product, with the weights stacked."""
    group = gate.groups[0]
    pairs = [_parameters(b, g, False) for g in gate.groups]
    weight, bias = b.weights.joined([p for p in pairs if p is not None])
    if not gate.gate_first:
        half = weight.shape[0] // 2
        weight, bias = weight.roll(half, 0), None if bias is None else bias.roll(half, 0)
    n = weight.shape[0]
    value = _product(b, group, *_stored(b, group, (weight, bias)), n, n // 2, gate.activation)
    b.launched(group, "linear", value, f"{list(value.shape)} + {gate.activation}")
    return _compared(b, value, gate.node, group.anchor.node)


def emit_merged(b: Buffers, batch: list[Group], group: Group) -> Value:
    """The columns of one group in a matrix product that several groups share. The product is emitted with the first group."""
    sizes = [tensor_of(g.anchor.node).shape[-1] for g in batch]  # pyright: ignore[reportOptionalMemberAccess]
    whole = next((b.merged[g.anchor.node] for g in batch if g.anchor.node in b.merged), None)
    if whole is None:
        pairs = [_parameters(b, g, False) for g in batch]
        weight, bias = b.weights.joined([p for p in pairs if p is not None])
        n = sum(sizes)
        whole = _product(b, batch[0], *_stored(b, batch[0], (weight, bias)), n, n, "none")
        b.launched(batch[0], "linear", whole, f"{list(whole.shape)}: {len(batch)} linears with the same input")
    b.merged[group.anchor.node] = whole
    start = sum(sizes[: batch.index(group)])
    view = whole.view.narrow(len(whole.view.dims) - 1, start, sizes[batch.index(group)])
    assert view is not None, "the columns of merged products must be next to each other"
    return _compared(b, Value(whole.node, view), group.last, group.anchor.node)


# ---- attention, norms, pools


def _attention(b: Buffers, group: Group) -> Value:
    a = group.anchor
    operands = []
    for node in (a.x, *a.others):
        value = b.opened(b.values[node])
        value = Value(value.node, value.view.permute((0, 2, 1, 3)))
        strides = value.view.strides
        if strides is None or (strides[-1] != 1 and value.shape[-1] != 1) or 0 in strides:
            b.report.add(layer_name(a.node), "layout", node.name, False, COPIED)
            value = b.copied(value, False)
        operands.append(value)
    q, v = operands[0], operands[2]
    shape = (*q.shape[:3], v.shape[-1])
    args = (*(b.tensor(o) for o in operands), a.options["causal"], a.options["scale"])
    value = b.buffer(calls.attention, args, dense(shape), a.node)
    return finish(b, group, "attention", Value(value.node, value.view.permute((0, 2, 1, 3))))


def _layer_norm(b: Buffers, group: Group) -> Value:
    a = group.anchor
    x, lead, in_order = b.rows(b.values[a.x])
    width = b.values[a.x].shape[-1]
    count = 1
    for size in lead.shape:
        count *= size
    shape = (*lead.shape, width) if in_order else (count, width)
    dtype = dtype_of(a.node)
    weight = b.attribute(torch.ones(width, dtype=dtype), "ones") if a.weight is None else b.tensor(b.values[a.weight])
    bias = None if a.bias is None else b.tensor(b.values[a.bias])
    if a.bias is not None and group.plus:
        whole = b.weights.double(a.bias)
        for extra in group.plus:
            whole = whole + b.weights.double(extra)
        bias = b.attribute(whole.to(dtype), f"{layer_name(a.node)}_bias")
    value = b.buffer(calls.layer_norm, (x, weight, bias, a.options["eps"], list(shape)), dense(shape), a.node)
    if not in_order:
        value = Value(value.node, lead.with_columns(width, width))
    return finish(b, group, "layer_norm", value)


def _max_pool(b: Buffers, group: Group) -> Value:
    a, out = group.anchor, tensor_of(group.anchor.node)
    assert out is not None, "a pool must have a result"
    o = a.options
    args = (b.tensor(b.arranged(b.values[a.x], True)), *(o[k] for k in ("kernel_size", "stride", "padding", "dilation")))
    value = b.buffer(calls.max_pool, (*args, o["ceil_mode"]), channels_last(tuple(out.shape)), a.node)
    return finish(b, group, "max_pool", value)


def _global_mean(b: Buffers, group: Group) -> Value:
    a = group.anchor
    x = b.values[a.x]
    value = b.buffer(calls.global_mean, (b.tensor(b.arranged(x, True)),), dense(x.shape[:2]), a.node)
    if a.options["keepdim"]:
        view = value.view
        for _ in x.shape[2:]:
            view = view.unsqueeze(2)
        value = Value(value.node, view)
    return finish(b, group, "mean", value)


EMIT: dict[str, Callable[[Buffers, Group], Value]] = {
    "conv": _conv,
    "linear": _linear,
    "attention": _attention,
    "layer_norm": _layer_norm,
    "max_pool": _max_pool,
    "global_mean": _global_mean,
}
"""Kind of anchor -> function that emits such a group."""
