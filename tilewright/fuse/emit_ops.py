"""Emits groups whose anchors come from anchors_ops.py, as calls of op_calls.py."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.fuse import calls, emit, op_calls
from tilewright.fuse.anchors import tensor_of
from tilewright.fuse.anchors_attention import MASKED
from tilewright.fuse.buffers import Buffers, Value
from tilewright.fuse.emit_attention import emit_attention
from tilewright.fuse.growing import GROWING, Growth
from tilewright.fuse.plan import Group, Unbuilt
from tilewright.fuse.views import channels_last, dense

__all__ = ["EMIT", "IMAGES"]


def _vector(b: Buffers, node: Node | None) -> Node | None:
    """A contiguous weight or bias [C], or a contiguous vector that is added to the channels."""
    return None if node is None else b.tensor(b.arranged(b.values[node], False))


def _out(group: Group) -> tuple[int, ...]:
    value = tensor_of(group.anchor.node)
    assert value is not None, "an anchor must have a result"
    return tuple(value.shape)


def _image(b: Buffers, group: Group, target: Callable[..., Any], *args: Any) -> Value:
    """Emit a call on [N, C, *S] whose result is channels-last."""
    x = b.tensor(b.arranged(b.values[group.anchor.x], True))
    value = b.buffer(target, (x, *args), channels_last(_out(group)), group.anchor.node)
    return emit.finish(b, group, group.anchor.kind, value)


def _channel_norm(b: Buffers, group: Group) -> Value:
    a = group.anchor
    vectors = _vector(b, a.weight), _vector(b, a.bias), a.options["eps"]
    if a.kind == "instance_norm":
        return _image(b, group, op_calls.instance_norm, *vectors)
    added = _vector(b, a.others[0]) if a.others else None
    return _image(b, group, op_calls.group_norm, a.options["groups"], *vectors, added, group.activation)


def _statistics(b: Buffers, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean, variance, weight, bias) of a batch norm, in float64. Raises Unbuilt if one of them is computed in each call."""
    a = group.anchor
    if not all(b.weights.known(node) for node in (a.weight, a.bias, *a.others) if node is not None):
        raise Unbuilt(
            "its statistics or parameters are computed in every call; the operator needs constants", *a.inside, a.node
        )
    mean, variance = map(b.weights.double, a.others)
    weight = torch.ones_like(mean) if a.weight is None else b.weights.double(a.weight)
    return mean, variance, weight, torch.zeros_like(mean) if a.bias is None else b.weights.double(a.bias)


def _vectors(b: Buffers, group: Group, *values: Tensor) -> list[Node]:
    return [b.attribute(value.float(), f"{group.name}_channels") for value in values]


def _batch_norm(b: Buffers, group: Group) -> Value:
    """Emit a batch norm in evaluation mode that is not folded into a weight, with its activation."""
    a, shape = group.anchor, _out(group)
    vectors = _vectors(b, group, *_statistics(b, group))
    x = b.opened(b.values[a.x])
    last = x.view.strides != dense(shape).strides
    args = (b.tensor(b.arranged(x, last)), *vectors, a.options["eps"], group.activation, last)
    value = b.buffer(op_calls.batch_norm, args, channels_last(shape) if last else dense(shape), a.node)
    return emit.finish(b, group, "batch_norm", value)


def _growing_batch_norm(b: Buffers, group: Group) -> Value:
    """Emit a batch norm of a growing concatenation. The same launch appends the new operand to the buffer.

    If there are several new operands, the others are appended before, by a copy each.
    """
    a, shape = group.anchor, _out(group)
    growth: Growth = a.options["growth"]
    mean, variance, weight, bias = _statistics(b, group)
    scale = weight * (variance + a.options["eps"]).rsqrt()
    vectors = _vectors(b, group, scale, bias - mean * scale)
    *copied, new = (emit.channel_rows(b, b.values[piece]) for piece in growth.pieces)
    flat = (math.prod(shape) // shape[1], shape[1])
    wide, start = dense((flat[0], growth.width)), growth.start
    if start and growth.buffer not in b.grown:
        raise Unbuilt("the concatenation that it extends could not be built")
    rows = b.grown.get(growth.buffer) or b.buffer(op_calls.room, (new, *wide.shape), wide, None).node
    for piece, node in zip(copied, growth.pieces, strict=False):
        rows = b.buffer(op_calls.append, (rows, piece, start), wide, None).node
        start += b.values[node].shape[1]
    both = b.graph.call_function(op_calls.append_affine, (rows, new, *vectors, group.activation))
    b.grown[growth.buffer] = b.buffer(calls.part, (both, 1), wide, None).node  # pyright: ignore[reportArgumentType]
    value = b.buffer(calls.part, (both, 0), dense(flat), a.node)
    return emit.finish(b, group, "append, batch_norm", Value(value.node, channels_last(shape)))


def _by_options(target: Callable[..., Any], *names: str) -> Callable[[Buffers, Group], Value]:
    def one(b: Buffers, group: Group) -> Value:
        return _image(b, group, target, *(group.anchor.options[name] for name in names))

    return one


def _conv_transpose(b: Buffers, group: Group) -> Value:
    a, o = group.anchor, group.anchor.options
    assert a.weight is not None, "a convolution must have a weight"
    if b.weights.known(a.weight) and (a.bias is None or b.weights.known(a.bias)):
        # [O, C, *K] during folding; columns.py allows folding only if the convolution has a single group.
        weight, bias = b.weights.folded(a.weight, a.bias, group.folds, True)
        dtype = emit.dtype_of(a.node)
        weight = weight.transpose(0, 1).to(dtype).movedim(1, -1).contiguous().movedim(-1, 1)
        operands = (
            b.attribute(weight, f"{group.name}_weight"),
            None if bias is None else b.attribute(bias.to(dtype), f"{group.name}_bias"),
        )
    else:
        operands = (b.tensor(b.arranged(b.values[a.weight], True)), _vector(b, a.bias))
    window = (o[name] for name in ("stride", "padding", "output_padding", "groups", "dilation"))
    return _image(b, group, op_calls.conv_transpose, *operands, group.activation, *window)


def _rms_norm(b: Buffers, group: Group) -> Value:
    a = group.anchor
    x, lead, in_order = b.rows(b.values[a.x])
    width = b.values[a.x].shape[-1]
    count = tensor_of(a.node).numel() // width  # pyright: ignore[reportOptionalMemberAccess]
    shape = (*lead.shape, width) if in_order else (count, width)
    ones = torch.ones(width, dtype=emit.dtype_of(a.node))
    weight = b.attribute(ones, "ones") if a.weight is None else _vector(b, a.weight)
    value = b.buffer(op_calls.rms_norm, (x, weight, a.options["eps"], list(shape)), dense(shape), a.node)
    if not in_order:
        assert value.node is not None, "a value that is computed must have a buffer"
        value = Value(value.node, lead.with_columns(width, width))
    return emit.finish(b, group, "rms_norm", value)


def _softmax(b: Buffers, group: Group) -> Value:
    a = group.anchor
    x = b.tensor(b.arranged(b.values[a.x], False))
    value = b.buffer(op_calls.softmax, (x, a.options["log"]), dense(_out(group)), a.node)
    return emit.finish(b, group, "log_softmax" if a.options["log"] else "softmax", value)


def _activation(b: Buffers, group: Group) -> Value:
    """Emit an activation of a dense tensor, channels-last or contiguous."""
    a, shape = group.anchor, _out(group)
    x = b.opened(b.values[a.x])
    last = len(shape) > 2 and x.view.strides == channels_last(shape).strides != dense(shape).strides
    args = (b.tensor(b.arranged(x, last)), a.options["kind"], a.options["alpha"], last)
    value = b.buffer(op_calls.activation, args, channels_last(shape) if last else dense(shape), a.node)
    return emit.finish(b, group, a.options["kind"], value)


_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor")
EMIT: dict[str, Callable[[Buffers, Group], Value]] = {
    MASKED: emit_attention,
    "activation": _activation,
    "adaptive_avg_pool": _by_options(op_calls.adaptive_avg_pool, "size"),
    "avg_pool": _by_options(op_calls.avg_pool, *_POOL),
    "batch_norm": _batch_norm,
    "conv_transpose": _conv_transpose,
    "group_norm": _channel_norm,
    GROWING: _growing_batch_norm,
    "instance_norm": _channel_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
    "upsample": _by_options(op_calls.upsample, "size", "factors", "mode", "corners"),
}
"""Kind of anchor -> function that emits such a group."""
IMAGES = ("adaptive_avg_pool", "avg_pool", "conv_transpose", "group_norm", "instance_norm", "upsample")
"""Kinds of anchors that need channels-last inputs [N, C, *S]."""
