"""Recognises further calls that one of our operators computes as a whole.

These are norms over channels, RMS norm, pools, resizing, transposed convolutions, softmax and single activations. For a similar
call that our operators cannot compute, the result is a sentence that states the reason.

RMS norm is recognised as torch's call, and as the separate calls that many models use:

    w * (x.float() * rsqrt(mean(x.float()^2, -1, keepdim) + eps)).to(dtype)

`read` first tries the anchors of anchors.py. Options have the names of the arguments in op_calls.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from tilewright.fuse import anchors
from tilewright.fuse.anchors import Anchor, fit, same_sizes, tensor_of
from tilewright.fuse.anchors_attention import read_product, read_sdpa
from tilewright.fuse.anchors_rms import read_rms_written
from tilewright.fuse.normal import BATCH_NORMS, Step, step_behind
from tilewright.fuse.view_calls import is_view, plain_source
from tilewright.kernels.elementwise.activation import KINDS

__all__ = ["read"]

aten = torch.ops.aten


def _given(node: Node, **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name. `defaults` contains their names, in order, and their default values."""
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _dims(x: Any) -> int:
    value = tensor_of(x)
    return 0 if value is None else value.dim()


def _spread(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


# ---- norms


def _rms_norm(node: Node) -> Anchor | str:
    a = _given(node, input=None, normalized_shape=(), weight=None, eps=None)
    x = tensor_of(a["input"])
    if x is None or len(a["normalized_shape"]) != 1:
        return f"an RMS norm over the last {len(a['normalized_shape'])} dims; the operator supports only one dim"
    eps = torch.finfo(x.dtype).eps if a["eps"] is None else a["eps"]
    return fit(Anchor(kind="rms_norm", node=node, x=a["input"], weight=a["weight"], options={"eps": float(eps)}))


def _group_norm(node: Node) -> Anchor | str:
    a = _given(node, input=None, groups=1, weight=None, bias=None, eps=1e-5)
    if _dims(a["input"]) < 3:
        return f"a group norm of an input with {_dims(a['input'])} dims; the operator needs [N, C, ...] with at least 3"
    options = {"groups": a.get("num_groups", a["groups"]), "eps": a["eps"]}
    anchor = Anchor(kind="group_norm", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options=options)
    plain, found = fit(anchor), fit(_behind_sum(anchor))
    return replace(found, without=plain) if isinstance(found, Anchor) and isinstance(plain, Anchor) else plain


def _behind_sum(norm: Anchor) -> Anchor:
    """Extend a group norm by the addition before it, of one number for each channel of each image.

    This is possible only if no other call reads the sum.
    """
    node = norm.x
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.users) != 1:
        return norm
    whole = tensor_of(node)
    for x, other in (node.args[:2], node.args[1::-1]):
        image, added = tensor_of(x), tensor_of(other)
        if whole is None or image is None or added is None or not same_sizes(image.shape, whole.shape):
            continue
        if same_sizes(added.shape, (*whole.shape[:2], *(1,) * (whole.dim() - 2))) and whole.shape[2:].numel() > 1:
            return replace(norm, x=x, others=(other,), inside=(node,))
    return norm


def _instance_norm(node: Node) -> Anchor | str:
    a = _given(node, input=None, weight=None, bias=None, mean=None, variance=None, use_input_stats=True, momentum=0.1, eps=1e-5)
    if not a["use_input_stats"] or _dims(a["input"]) < 3:
        return "an instance norm that uses running statistics, or whose input has fewer than 3 dims"
    return fit(
        Anchor(kind="instance_norm", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options={"eps": a["eps"]})
    )  # fmt: skip


def _softmax(node: Node) -> Anchor | str:
    a = _given(node, input=None, dim=-1, dtype=None)
    x, out = tensor_of(a["input"]), tensor_of(node)
    if x is None or out is None or x.dtype != out.dtype:
        return "a softmax that changes the dtype, which the operator does not do"
    if x.dim() == 0 or a["dim"] not in (-1, x.dim() - 1):
        return f"a softmax over dim {a['dim']} of {x.dim()} dims; the operator supports only the last one"
    if any(_reads_product(user) for user in node.users):
        return "a softmax that belongs to attention in separate calls, which could not be fused as a whole"
    log = node.target in (aten.log_softmax.int, aten._log_softmax.default)
    return fit(Anchor(kind="softmax", node=node, x=a["input"], options={"log": log}))


def _reads_product(user: Node) -> bool:
    """Whether a reader of a softmax is a product of two batches of matrices, possibly after casts, dropout and views."""
    if user.target in (aten.matmul.default, aten.bmm.default):
        return _dims(user.args[1]) > 2
    behind = is_view(user) or user.target in (aten._to_copy.default, aten.to.dtype, aten.expand.default)
    return behind and any(map(_reads_product, user.users))


# ---- pools and resizing


def _avg_pool(dims: int) -> Callable[[Node], Anchor | str]:
    def reader(node: Node) -> Anchor | str:
        names = {
            "input": None,
            "kernel_size": (),
            "stride": (),
            "padding": 0,
            "ceil_mode": False,
            "include": True,
            "divisor": None,
        }
        a = _given(node, **names)
        if _dims(a["input"]) != dims + 2:
            return f"average pooling of an input with {_dims(a['input'])} dims; wanted {dims + 2}, with a batch"
        kernel = _spread(a["kernel_size"], dims)
        options = {
            "kernel_size": kernel, "stride": _spread(a["stride"], dims) if a["stride"] else kernel,
            "padding": _spread(a["padding"], dims), "ceil_mode": bool(a["ceil_mode"]),
            "count_include_pad": bool(a.get("count_include_pad", a["include"])),
            "divisor": a.get("divisor_override", a["divisor"]),
        }  # fmt: skip
        return fit(Anchor(kind="avg_pool", node=node, x=a["input"], options=options))

    return reader


def _adaptive(dims: int) -> Callable[[Node], Anchor | str]:
    def reader(node: Node) -> Anchor | str:
        x, size = node.args[0], _spread(node.args[1], dims)
        if _dims(x) != dims + 2:
            return f"adaptive pooling of an input with {_dims(x)} dims; wanted {dims + 2}, with a batch"
        return fit(Anchor(kind="adaptive_avg_pool", node=node, x=x, options={"size": size}))  # pyright: ignore[reportArgumentType]

    return reader


_MODES = {
    aten.upsample_nearest1d.vec: "nearest", aten.upsample_nearest2d.vec: "nearest", aten.upsample_nearest3d.vec: "nearest",
    aten.upsample_linear1d.vec: "linear", aten.upsample_bilinear2d.vec: "bilinear", aten.upsample_bicubic2d.vec: "bicubic",
    aten.upsample_trilinear3d.vec: "trilinear",
}  # fmt: skip


def _upsample(node: Node) -> Anchor | str:
    mode, out = _MODES[node.target], tensor_of(node)  # pyright: ignore[reportArgumentType]
    if mode == "nearest":
        a = {**_given(node, input=None, output_size=None, scale_factors=None), "align_corners": None}
    else:
        a = _given(node, input=None, output_size=None, align_corners=False, scale_factors=None)
    x = tensor_of(a["input"])
    if x is None or out is None:
        return "an operand's shape is not known"
    options = {"size": list(out.shape[2:]), "factors": a["scale_factors"], "mode": mode, "corners": a["align_corners"]}
    return fit(Anchor(kind="upsample", node=node, x=a["input"], options=options))


# ---- transposed convolutions


def _transposed(dims: int) -> Callable[[Node], Anchor | str]:
    def reader(node: Node) -> Anchor | str:
        names = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1}
        a = _given(node, **names, dilation=1)
        if _dims(a["input"]) != dims + 2:
            return f"a transposed convolution of an input with {_dims(a['input'])} dims; wanted {dims + 2}, with a batch"
        each = {name: _spread(a[name], dims) for name in ("stride", "padding", "output_padding", "dilation")}
        options = {**each, "groups": a["groups"]}
        return fit(
            Anchor(kind="conv_transpose", node=node, x=a["input"], weight=a["weight"], bias=a["bias"], options=options)
        )  # fmt: skip

    return reader


# ---- batch norms that are not folded into the weight before them


def _batch_norm(node: Node) -> Anchor | str:
    step = step_behind(node.args[0], node)  # pyright: ignore[reportArgumentType]
    if not isinstance(step, Step):
        return step or "it is not a batch norm"
    weight, bias, mean, variance = step.operand
    anchor = Anchor(
        kind="batch_norm", node=step.node, x=node.args[0], weight=weight, bias=bias, others=(mean, variance),  # pyright: ignore[reportArgumentType]
        inside=step.inside, options={"eps": step.eps},
    )  # fmt: skip
    return fit(anchor)


# ---- single activations


_NAMES = {
    aten.relu.default: "relu", aten.silu.default: "silu", aten.hardswish.default: "hardswish", aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid", aten.leaky_relu.default: "leaky_relu", aten.elu.default: "elu", aten.mish.default: "mish",
}  # fmt: skip
_MOVES = (aten._to_copy.default, aten.to.dtype, aten.cat.default, aten.expand.default)


def _activation(node: Node) -> Anchor | str | None:
    """The anchor for an activation outside an epilogue, if Inductor could not fuse it with neighbouring calls."""
    found = _form(node)
    if found is None:
        return None
    if _pointwise(plain_source(node.args[0])) or any(map(_pointwise, _readers(node))):
        return "an activation next to other pointwise calls, which torch's compiler can compute in one pass"
    return fit(Anchor(kind="activation", node=node, x=node.args[0], options=found))  # pyright: ignore[reportArgumentType]


def _form(node: Node) -> dict[str, Any] | None:
    kind, alpha = _NAMES.get(node.target), 1.0  # pyright: ignore[reportArgumentType]
    if node.target is aten.gelu.default:
        kind = {"none": "gelu", "tanh": "gelu_tanh"}[_given(node, input=None, approximate="none")["approximate"]]
    elif kind == "leaky_relu":
        alpha = _given(node, input=None, slope=0.01)["slope"]
        alpha = node.kwargs.get("negative_slope", alpha)
    elif kind == "elu":
        a = _given(node, input=None, alpha=1.0, scale=1.0, input_scale=1.0)
        if a["scale"] != 1 or a["input_scale"] != 1:
            return None
        alpha = a["alpha"]
    return None if kind not in KINDS else {"kind": kind, "alpha": float(alpha)}  # pyright: ignore[reportArgumentType]


def _readers(node: Node) -> list[Node]:
    """The calls that read a value, directly or through views."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [user])]


def _pointwise(node: Any) -> bool:
    """Whether a call is elementwise arithmetic."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _MOVES


# ---- the table

_REFUSED = {
    aten.lstm.input: "an LSTM: no operator of tilewright computes its recurrence, so torch's library does",
    aten.gru.input: "a GRU: no operator of tilewright computes its recurrence, so torch's library does",
    aten.embedding.default: "a gather of rows: every operator of tilewright uses torch's own kernel for it",
    aten.cat.default: "a concatenation: torch's own kernel copies its operands next to each other",
}

_READERS: dict[Any, Callable[[Node], Anchor | str | None]] = {
    aten.rms_norm.default: _rms_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
    aten._log_softmax.default: _softmax,
    aten.avg_pool1d.default: _avg_pool(1),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.adaptive_avg_pool1d.default: _adaptive(1),
    aten.adaptive_avg_pool2d.default: _adaptive(2),
    aten.adaptive_avg_pool3d.default: _adaptive(3),
    aten.conv_transpose1d.default: _transposed(1),
    aten.conv_transpose2d.input: _transposed(2),
    aten.conv_transpose3d.input: _transposed(3),
    aten.gelu.default: _activation,
    aten.mul.Tensor: read_rms_written,
    **dict.fromkeys(_MODES, _upsample),
    **dict.fromkeys(_NAMES, _activation),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
}


def read(node: Node) -> Anchor | str | None:
    """The anchor for a call of an exported graph, or a sentence that states why there is none.

    Returns None for calls unrelated to our operators.
    """
    found = anchors.read(node)
    if isinstance(found, Anchor) or node.op != "call_function":
        return found
    if node.target is aten.scaled_dot_product_attention.default:
        masked = (len(node.args) > 3 and node.args[3] is not None) or node.kwargs.get("attn_mask") is not None
        return read_sdpa(node) if masked else found
    if node.target is aten.bmm.default or (isinstance(found, str) and node.target is aten.matmul.default):
        return read_product(node, found or anchors.BATCHES)
    if isinstance(found, str) and node.target is not aten.adaptive_avg_pool2d.default:
        return found
    reader = _READERS.get(node.target)
    return _REFUSED.get(node.target) if reader is None else reader(node)  # pyright: ignore[reportArgumentType]
