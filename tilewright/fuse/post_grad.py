"""Operators put into a graph behind autograd, as Inductor has it after its decompositions: what the torch.compile backend does.

Anchors (products, convolutions, attention: anchors.py) are visited in topological order; what follows one goes into its launch
as far as the operator's epilogue takes it (pull.py).

Left to Inductor, with the reason: a value that something else reads too, above all one that is kept for the backward pass; what
the operator would hand to the vendor's library, as Inductor does; on a GPU what is measured to be slower than that (race.py);
convolutions over sizes that are not known; anything on a CPU unless asked for. What is left is fused by Inductor as ever.

The graph stays functional and keeps its inputs, outputs and their order. Values' strides may change to channels-last; Inductor
restores those of the outputs.

Not here: batch norm, which only an Inductor with `config.freezing` folds, since weights are inputs of such a graph.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node, map_arg

from tilewright.fuse.anchors import READERS, Anchor, read, tensor_of
from tilewright.fuse.chosen import chosen, spelled
from tilewright.fuse.decisions import Decision
from tilewright.fuse.naming import layer_name
from tilewright.fuse.pull import Launch, pull, symbolic
from tilewright.fuse.race import race
from tilewright.hw.device import device_of
from tilewright.kernels.attention import attention_op
from tilewright.kernels.attention_common import LARGEST_HEAD_DIM, side_by_side
from tilewright.kernels.conv import conv_op
from tilewright.kernels.matmul import linear_op
from tilewright.op import Choice, Op, Refused, scope

__all__ = ["fuse_graph"]

aten = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_KEPT_META = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr")


def fuse_graph(graph: Graph, *, cpu: bool = False) -> list[Decision]:
    """Put the operators into a graph, in place.

    Args:
        graph: functional ATen, decomposed as Inductor does, with `val` in the nodes' meta.
        cpu: also where tensors are on a CPU, on which the operators are torch's own calls.

    Returns:
        Every fusion taken or refused, in the graph's order.
    """
    decisions: list[Decision] = []
    moved: set[Node] = set()
    """Nodes whose strides are others than they were traced with."""
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.users and (node.target in READERS or node.target in _PRODUCTS):
            continue
        _restride(node, moved)
        anchor = _read(node)
        if anchor is None:
            if node.op == "call_function" and node.target in _PRODUCTS:
                decisions.append(_anchor(layer_name(node), node, False, _UNREAD))
            continue
        name = layer_name(node)
        refused = _refusal(anchor, cpu)
        if refused is not None:
            decisions.append(_anchor(name, node, False, refused))
            continue
        launch = Launch(anchor, name, node, anchor.bias)
        if anchor.kind != "attention":
            pull(launch)
        emit = {"linear": _linear, "conv": _conv, "attention": _attention}[anchor.kind]
        reason, value = emit(launch, cpu)
        if value is None and launch.pulled:
            # What loses with all that follows may win without.
            bare = Launch(anchor, name, node, anchor.bias)
            alone, value = emit(bare, cpu)
            if value is not None:
                bare.refused += [replace(d, taken=False, reason=reason, bytes_saved=0) for d in launch.pulled]
                reason, launch = alone, bare
        if value is None:
            decisions += [_anchor(name, node, False, reason), *launch.refused]
            continue
        _replace(launch, value, moved)
        decisions += [_anchor(name, node, True, reason), *launch.pulled, *launch.refused]
    graph.eliminate_dead_code()
    graph.lint()
    return decisions


_PRODUCTS = (
    aten.convolution.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)  # fmt: skip
_UNREAD = "no form that the operators take: transposed, masked, with dropout, or scaled"


def _anchor(name: str, node: Node, taken: bool, reason: str) -> Decision:
    return Decision(anchor=name, kind="anchor", node=node.name, taken=taken, reason=reason)


def _read(node: Node) -> Anchor | None:
    """The anchor that a node is, of those that are put in here."""
    if node.op == "call_function" and node.target is aten.bmm.default:
        left, right = node.args
        assert isinstance(left, Node), "a call of bmm"
        assert isinstance(right, Node), "a call of bmm"
        return Anchor(kind="linear", node=node, x=left, weight=right, options={"kn": True})
    anchor = read(node)
    return anchor if anchor is not None and anchor.kind in ("linear", "conv", "attention") else None


def _refusal(anchor: Anchor, cpu: bool) -> str | None:
    """Why the operator cannot take the anchor, before it is asked how it would."""
    nodes = [n for n in (anchor.x, anchor.weight, anchor.bias, *anchor.others) if n is not None]
    tensors = [tensor_of(n) for n in nodes]
    if any(t is None for t in tensors):
        return "an operand's shape is not known"
    known = [t for t in tensors if t is not None]
    first = known[0]
    if first.dtype not in _FLOATS or any(t.dtype != first.dtype for t in known):
        found = sorted({str(t.dtype).removeprefix("torch.") for t in known})
        return f"operands of {', '.join(found)}; wanted one type of 16 or 32 bits"
    if first.device.type == "cpu" and not cpu:
        return "on a CPU the operator is torch's own call, and Inductor compiles that with what follows"
    if any(t.device != first.device for t in known):
        return "operands on several devices"
    if any(isinstance(size, int) and size == 0 for t in known for size in t.shape):
        return "nothing to compute"
    if anchor.kind == "conv":
        out = tensor_of(anchor.node)
        assert out is not None, "a call of convolution"
        if symbolic(known[1].shape, out.shape[2:], first.shape[1:]):
            return "sizes of pixels or channels are not known when it is compiled; the operator takes them as numbers"
    if anchor.kind == "linear" and symbolic(known[1].shape):
        return "the weight's sizes are not known when it is compiled"
    return None


# ---- operators


def _call(before: Node, target: Callable[..., Any], *args: Any, like: Node) -> Node:
    """A call put before a node, with its value's shape and strides."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    values = map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)  # pyright: ignore[reportArgumentType]
    # Without these Inductor may hand an operator that a pass has put in memory of any strides.
    node.meta["eager_input_vals"] = (values, {})
    return node


def _choice(op: Op, args: list[Any]) -> Choice | str | None:
    """What the operator will run; a sentence where it refuses, None where sizes are not known yet."""
    if symbolic(*(t.shape for t in args if isinstance(t, Tensor))):
        return None
    device = args[0].device
    card = scope().card or device_of(-1 if device.type == "cpu" else device.index or 0)
    given = [_empty(t) if isinstance(t, Tensor) else t for t in args]
    try:
        return op.choose(card, op.problem(*given))
    except Refused as refused:
        return str(refused).splitlines()[-1].strip()


def _empty(t: Tensor) -> Tensor:
    """A tensor like it without memory, whose address counts as aligned."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


_CHOSEN = {op.name: chosen(op) for op in (linear_op, conv_op, attention_op)}


def _free(launch: Launch) -> bool:
    """Whether Inductor computes what follows an anchor in a kernel that it launches anyway: somebody but an anchor reads it."""
    readers, seen = list(launch.last.users), set[Node]()
    while readers:
        reader = readers.pop()
        if reader in seen or reader.op == "output":
            continue
        seen.add(reader)
        if reader.target in _VIEWS:
            readers += reader.users
        elif _read(reader) is None:
            return True
    return False


_VIEWS = (
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.clone.default,
)  # fmt: skip


def _why(op: Op, launch: Launch, cpu: bool, *args: Any) -> tuple[str, Callable[..., Any] | None, tuple[str, ...]]:
    """(the reason, what takes the anchor, None where the operator does not; what it is given before the arguments)."""
    tensors = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    # Inside `with invariant():` or `prefer(...)` the user wants the operator, whatever it costs.
    wanted = scope().invariant or scope().preferred is not None
    with unset_fake_temporarily():
        choice = _choice(op, tensors)
        raced = isinstance(choice, Choice) and choice.impl.name != "reference" and not wanted
        timed = race(op, choice, tuple(tensors), free=_free(launch)) if raced else None  # pyright: ignore[reportArgumentType]
    if choice is None:
        return f"{op.name}, which chooses by the sizes of each call", op.dispatched, ()
    if isinstance(choice, str):
        return choice, None, ()
    if choice.impl.name == "reference":
        return f"{op.name} as torch computes it", op.dispatched if cpu else None, ()
    if timed is not None and timed.choice is not None:
        reason = f"{op.name}, {timed.choice.impl.name}: {timed}"
        return (reason, _CHOSEN[op.name], (spelled(timed.choice),)) if timed.won else (reason, None, ())
    if choice.impl.name == "vendor":
        return f"{op.name} would take the vendor's library here, as Inductor does", None, ()
    if choice.impl.name == "linear" and not launch.pulled:
        return "a product of the pixels without anything to fuse, which Inductor does as well", None, ()
    return f"{op.name}, {choice.impl.name}", op.dispatched, ()


def _linear(launch: Launch, cpu: bool) -> tuple[str, Node | None]:
    anchor, last = launch.anchor, launch.last
    assert anchor.weight is not None, "a product has two operands"
    weight, x, residual = anchor.weight, anchor.x, launch.residual
    x_value, out = x.meta["val"], anchor.node.meta["val"]
    batched = x_value.dim() == 3
    if batched and launch.bias is not None and launch.bias.meta["val"].dim() != 1:
        return "a bias for each entry of a batch", None
    if 1 not in x_value.stride()[-2:]:
        x = _call(last, aten.clone.default, x, like=anchor.node)
    flipped = [0, 2, 1] if batched else [1, 0]
    if weight.target is aten.permute.default and list(weight.args[1]) == flipped:  # pyright: ignore[reportArgumentType]
        assert isinstance(weight.args[0], Node), "a call of permute"
        weight = weight.args[0]
    else:
        weight = _call(last, aten.permute.default, weight, flipped, like=anchor.node)
    if residual is not None:
        if launch.shape is not None:
            sizes = [*out.shape[:-2], -1, out.shape[-1]]
            if symbolic(sizes):
                return "a residual over a batch whose size is not known", None
            residual = _call(last, aten.reshape.default, residual, sizes, like=anchor.node)
        residual = _contiguous(last, residual, anchor.node)
    bias = None if launch.bias is None else _contiguous(last, launch.bias, anchor.node)
    args = (x, weight, bias, launch.activation, residual)
    reason, target, choice = _why(linear_op, launch, cpu, *args)
    if target is None:
        return reason, None
    value = _call(last, target, *choice, *args, like=anchor.node)
    if launch.shape is not None:
        value = _call(last, aten.reshape.default, value, launch.shape, like=anchor.node)
    return reason, value


def _contiguous(before: Node, node: Node, like: Node) -> Node:
    """The value in row-major order, copied where it is not."""
    if node.meta["val"].is_contiguous():
        return node
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    copy.meta["val"] = aten.clone.default(node.meta["val"], memory_format=torch.contiguous_format)
    return copy


def _conv(launch: Launch, cpu: bool) -> tuple[str, Node | None]:
    anchor, last, options = launch.anchor, launch.last, launch.anchor.options
    assert anchor.weight is not None, "a convolution has a filter"
    out = anchor.node.meta["val"]
    to_last = [0, *range(2, out.dim()), 1]

    def channels_last(node: Node) -> Node:
        return _contiguous(last, _call(last, aten.permute.default, node, to_last, like=anchor.node), anchor.node)

    x, weight = channels_last(anchor.x), channels_last(anchor.weight)
    residual = None if launch.residual is None else channels_last(launch.residual)
    window = (options["stride"], options["padding"], options["dilation"], options["groups"], list(out.shape[2:]))
    bias = launch.bias
    if bias is not None and bias.meta["val"].dim() > 1:
        bias = _call(last, aten.reshape.default, bias, [out.shape[1]], like=anchor.node)
    args = (x, weight, bias, residual, launch.activation, *window, None, None, out.dtype)
    reason, target, choice = _why(conv_op, launch, cpu, *args)
    if target is None:
        return reason, None
    value = _call(last, target, *choice, *args, like=anchor.node)
    return reason, _call(last, aten.permute.default, value, [0, out.dim() - 1, *range(1, out.dim() - 1)], like=anchor.node)


def _attention(launch: Launch, cpu: bool) -> tuple[str, Node | None]:
    anchor, options, node = launch.anchor, launch.anchor.options, launch.anchor.node
    shapes = [n.meta["val"].shape for n in (anchor.x, *anchor.others)]
    if symbolic(*(shape[1:] for shape in shapes)):
        return "lengths or heads are not known when it is compiled; the operator takes them as numbers", None
    if options["causal"] and shapes[0][2] != shapes[1][2]:
        return "a causal mask over lengths that differ, which torch aligns at the first key", None
    if max(shapes[0][3], shapes[2][3]) > LARGEST_HEAD_DIM or (options["scale"] is not None and not options["scale"] > 0):
        return f"a head dim above {LARGEST_HEAD_DIM}, or a scale that is not above 0", None
    read_too = [user for user in node.users if user.target is operator.getitem and user.args[1] != 0 and user.users]
    if read_too:
        return "its softmax's sums are kept for the backward pass", None
    first = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)
    if first is None:
        return "nothing reads its result", None
    operands = []
    for n in (anchor.x, *anchor.others):
        turned = _call(first, aten.permute.default, n, [0, 2, 1, 3], like=node)
        operands.append(turned if side_by_side(turned.meta["val"]) else _contiguous(first, turned, node))
    scale = shapes[0][3] ** -0.5 if options["scale"] is None else float(options["scale"])
    args = (*operands, None, None, shapes[0][2], shapes[1][2], scale, options["causal"], False)
    reason, target, choice = _why(attention_op, launch, cpu, *args)
    if target is None:
        return reason, None
    launch.last = first
    both = _call(first, target, *choice, *args, like=node)
    value = _call(first, operator.getitem, both, 0, like=node)
    return reason, _call(first, aten.permute.default, value, [0, 2, 1, 3], like=node)


# ---- the graph


def _replace(launch: Launch, value: Node, moved: set[Node]) -> None:
    """The launch's value in place of what it computes. What nobody reads then is erased at the end."""
    before = launch.last.meta.get("val")
    launch.last.replace_all_uses_with(value)
    if launch.anchor.kind == "attention":
        # torch's counts as impure, for it may draw random numbers: as dead code it would stay.
        node = launch.anchor.node
        for one in (*node.users, node):
            node.graph.erase_node(one)
    if before is None or before.stride() != value.meta["val"].stride():
        moved.add(value)


def _restride(node: Node, moved: set[Node]) -> None:
    """Of a pointwise call behind something that is channels-last now: the strides that it will have."""
    if node.op != "call_function" or moved.isdisjoint(node.all_input_nodes):
        return
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # pyright: ignore[reportArgumentType]
    node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    moved.add(node)
