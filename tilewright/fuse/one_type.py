"""Casts operands of a call to one dtype, for modules that were cast to 16 bits but create float32 values themselves.

A float32 model may call `x.to(torch.float32)` on an image of bytes, on positions or on scores, and pass the result to a layer.
After the model is cast to float16, this layer has 16-bit weights and a 32-bit input. Tracing accepts this, but at run time
torch raises an error. So the input is cast, directly before the layer and not where the module creates it: in this way the
computation in between keeps the intended precision.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx import Node

__all__ = ["one_type"]

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.linear.default, aten.matmul.default, aten.mm.default,
        aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
        aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten.conv_transpose1d.default,
        aten.conv_transpose2d.input, aten.conv_transpose3d.input, aten.scaled_dot_product_attention.default,
        aten.lstm.input, aten.gru.input,
    }
)  # fmt: skip
"""Calls for which torch raises an error unless all floating-point operands have the same dtype."""
_NORMS = frozenset(
    {
        aten.layer_norm.default, aten.native_layer_norm.default, aten.group_norm.default, aten.batch_norm.default,
        aten._native_batch_norm_legit_no_training.default, aten.instance_norm.default,
    }
)  # fmt: skip
"""Calls whose weights may have a wider dtype than their input, but not a narrower one."""


def one_type(graph: fx.Graph) -> int:
    """Cast operands whose dtype is too wide. Returns the number of casts.

    Args:
        graph: a functional ATen graph with `val` in the nodes' meta; it is changed in place.
    """
    count = 0
    for node in list(graph.nodes):
        if count and node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # it asserts a dtype that may have changed
            continue
        for wide, dtype in _too_wide(node).items():
            with graph.inserting_before(node):
                cast = graph.call_function(aten.to.dtype, (wide, dtype))
            cast.meta.update({**node.meta, "val": wide.meta["val"].to(dtype)})
            node.replace_input_with(wide, cast)
            count += 1
        if count:
            _propagate(node)
    return count


def _floats(node: Node) -> dict[Node, torch.dtype]:
    values = {n: n.meta.get("val") for n in node.all_input_nodes}
    return {n: v.dtype for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}


def _too_wide(node: Node) -> dict[Node, torch.dtype]:
    """Operand of a call that must be cast to a narrower dtype -> that dtype."""
    if node.target not in _PRODUCTS | _NORMS:
        return {}
    found = _floats(node)
    if len({*found.values()}) < 2:
        return {}
    least = min(found.values(), key=lambda dtype: dtype.itemsize)
    given = found if node.target in _PRODUCTS else {n: t for n, t in found.items() if n is node.args[0]}
    return {n: least for n, dtype in given.items() if dtype.itemsize > least.itemsize}


def _propagate(node: Node) -> None:
    """Compute a call's fake value again, because the dtypes of its operands may have changed."""
    if node.op != "call_function":
        return

    def value(n: Node) -> Any:
        return n.meta.get("val")

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    mode = detect_fake_mode([value(n) for n in node.all_input_nodes])
    if mode is not None:
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
