"""The pass of the torch.compile backend. It inserts our operators into a graph after autograd and Inductor's decompositions.

The rules for planning are the same as for all graphs (walk.py, rules.py), with three differences. Activations are decomposed
(activations.py). Weights are inputs, so nothing can be folded into them. The only views allowed between an anchor and its
epilogue are reshapes. Each group of the plan becomes a call of its operator, if that is faster.

These are left to Inductor, with the reason: values that other calls read too, especially values kept for the backward pass;
calls that the operator would pass to the vendor's library, as Inductor does; on a GPU, calls that were measured to be slower
than what Inductor runs (race.py); convolutions with unknown sizes; and everything on a CPU, unless `cpu` is set. Inductor fuses
the rest as usual.

The graph stays functional and keeps its inputs, outputs and their order. Values may become channels-last; Inductor restores the
strides of the outputs.

Not here: batch norm. Weights are inputs of such a graph, so only Inductor with `config.freezing` can fold it.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node, map_arg

from tilewright.fuse.activations import find_activation
from tilewright.fuse.anchors import Anchor, fit, read, symbolic, tensor_of
from tilewright.fuse.chosen import chosen, spelled
from tilewright.fuse.decisions import Decision
from tilewright.fuse.plan import QUIET, Group, Plan
from tilewright.fuse.race import race
from tilewright.fuse.rules import Dialect
from tilewright.fuse.walk import plan
from tilewright.hw.device import device_of
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.checks import side_by_side
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import Choice, Op, Refused, scope

__all__ = ["fuse_graph"]

aten = torch.ops.aten
_KEPT_META = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "source_fn_stack", "seq_nr")


def fuse_graph(graph: Graph, *, cpu: bool = False) -> list[Decision]:
    """Insert our operators into a graph, in place.

    Args:
        graph: a functional ATen graph after Inductor's decompositions, with `val` in the nodes' meta.
        cpu: also replace calls on CPU tensors, where the operators run torch's own calls.

    Returns:
        Every fusion that was done or refused, in the graph's order.
    """
    nodes = list(graph.nodes)
    found = plan(
        graph, dialect=Dialect(read=partial(_read, cpu=cpu), activation=find_activation, view=_reshape, parameters=False)
    )
    groups = {group.last: group for group in found.groups}
    moved: dict[Node, tuple[int, ...]] = {}
    """Node whose strides have changed since tracing -> the strides with which it was traced."""
    now: dict[Node, Node] = {}
    """Replaced value -> its replacement."""
    for node in nodes:
        _restride(node, moved)
        if node in groups:
            _put(groups[node], found, cpu, moved, now)
    decisions = found.listed(nodes)
    graph.eliminate_dead_code()
    graph.lint()
    return decisions


_READ = ("linear", "conv", "attention")
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def _reshape(node: Node) -> bool:
    return node.target in _RESHAPES


def _read(node: Node, cpu: bool) -> Anchor | str | None:
    """The anchor for a node if it can be replaced here; otherwise the reason. None for nodes that are never replaced."""
    if node.target is aten.baddbmm.default:
        return "baddbmm adds a bias for each matrix of a batch, which the operator does not do"
    if node.target is aten.bmm.default:
        left, right = node.args
        assert isinstance(left, Node), "bmm must have two operands"
        assert isinstance(right, Node), "bmm must have two operands"
        found: Anchor | str | None = fit(Anchor(kind="linear", node=node, x=left, weight=right, options={"kn": True}))
    else:
        found = read(node)
    if not isinstance(found, Anchor):
        return found
    return (_refusal(found, cpu) or found) if found.kind in _READ else None


def _refusal(anchor: Anchor, cpu: bool) -> str | None:
    """The reason why the operator cannot be used here, before its implementation is considered; None if it can be used."""
    x, weight, out = (tensor_of(n) for n in (anchor.x, anchor.weight, anchor.node))
    assert x is not None, "an anchor must have operands"
    if x.device.type == "cpu" and not cpu:
        return "on a CPU the operator is torch's own call; Inductor compiles that together with the calls after it"
    if anchor.kind == "conv" and (weight is None or out is None or symbolic(weight.shape, out.shape[2:], x.shape[1:])):
        return "the number of pixels or channels is not known when it is compiled; the operator needs it as a number"
    if anchor.kind == "linear" and (weight is None or symbolic(weight.shape)):
        return "the weight's sizes are not known when it is compiled"
    return None


def _put(group: Group, found: Plan, cpu: bool, moved: dict[Node, tuple[int, ...]], now: dict[Node, Node]) -> None:
    """Replace a group's calls, or its anchor alone, or nothing, depending on which is faster. The decisions are updated."""
    emit = {"linear": _linear, "conv": _conv, "attention": _attention}[group.anchor.kind]
    launch = _Launch(group, now)
    reason, value = emit(launch, cpu)
    lost = group.chain
    if value is None and group.chain:
        # Even if the operator is slower with the whole epilogue, it may be faster for the anchor alone.
        launch = _Launch(Group(group.anchor), now)
        alone, value = emit(launch, cpu)
        reason, why = (reason, reason) if value is None else (alone, reason)
    elif value is None:
        why = reason
    else:
        lost, why = [], ""
    anchor = group.anchor.node
    decided = found.decisions
    decided[anchor] = replace(decided[anchor], taken=value is not None, reason=reason)
    steps = [n for n in group.chain if decided[n].kind not in QUIET]
    for i, node in enumerate(steps):
        if lost:
            decided[node] = replace(decided[node], taken=False, reason=why, bytes_saved=0)
        elif i:
            # The first step avoids storing the product and reading it again. Inductor would fuse the other steps anyway.
            decided[node] = replace(decided[node], bytes_saved=0)
    if value is not None:
        now[launch.last] = value
        _replace(launch, value, moved)
        for node in lost:
            _restride(node, moved)


@dataclass
class _Launch:
    """A group to insert into the graph, with its operands as they are in the graph now."""

    group: Group
    now: dict[Node, Node]

    def __post_init__(self) -> None:
        self.anchor, self.last = self.group.anchor, self.group.last
        self.before = self.last
        """The node before which the group's new calls are inserted."""
        self.x = self._now(self.anchor.x)
        self.residual = None if self.group.residual is None else self._now(self.group.residual)
        bias = self.group.folds[0].operands[0] if self.group.folds else self.anchor.bias
        self.bias: Node | None = None if bias is None else self._now(bias)
        self.views = [n for n in self.group.chain if _reshape(n)]

    def _now(self, node: Node) -> Node:
        return self.now.get(node, node)

    @property
    def weight(self) -> Node:
        """The weight of a product or convolution."""
        assert self.anchor.weight is not None, "a product or convolution must have a weight"
        return self._now(self.anchor.weight)

    @property
    def others(self) -> list[Node]:
        """The keys and values of attention."""
        return [self._now(n) for n in self.anchor.others]


# ---- operators


def _call(before: Node, target: Callable[..., Any], *args: Any, like: Node) -> Node:
    """Insert a call before the node `before`. Its `val` is computed, and other meta data come from the node `like`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    values = map_arg(args, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)  # pyright: ignore[reportArgumentType]
    # Without this, Inductor may pass tensors with any strides to an operator that a pass has inserted.
    node.meta["eager_input_vals"] = (values, {})
    return node


def _choice(op: Op, args: list[Any]) -> Choice | str | None:
    """The implementation that the operator will run; a sentence if it refuses; None if sizes are not known yet."""
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
    """A meta tensor like t, which has no memory; its address counts as aligned."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


_CHOSEN = {op.name: chosen(op) for op in (linear_op, conv_op, attention_op)}


def _free(launch: _Launch) -> bool:
    """Whether Inductor could compute the epilogue in a kernel that it launches anyway, to compute a reader of the result."""
    readers, seen = list(launch.last.users), set[Node]()
    while readers:
        reader = readers.pop()
        if reader in seen or reader.op == "output":
            continue
        seen.add(reader)
        if reader.target in _VIEWS:
            readers += reader.users
        elif not isinstance(_read(reader, True), Anchor):
            return True
    return False


_VIEWS = (
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.clone.default,
)  # fmt: skip


def _why(op: Op, launch: _Launch, cpu: bool, *args: Any) -> tuple[str, Callable[..., Any] | None, tuple[str, ...]]:
    """(the reason; the function to call, or None if the operator is not used; arguments to insert before the others)."""
    tensors = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    # Inside `with invariant():` or `prefer(...)` the user has requested the operator, so it is not timed.
    wanted = scope().invariant or scope().preferred is not None
    with unset_fake_temporarily():
        choice = _choice(op, tensors)
        raced = isinstance(choice, Choice) and choice.impl.name != "reference" and not wanted
        timed = race(op, choice, tuple(tensors), free=_free(launch)) if raced else None  # pyright: ignore[reportArgumentType]
    if choice is None:
        return f"{op.name}, which chooses its implementation in each call, by the sizes", op.dispatched, ()
    if isinstance(choice, str):
        return choice, None, ()
    if choice.impl.name == "reference":
        return f"{op.name}, whose implementation here is torch's own call", op.dispatched if cpu else None, ()
    if timed is not None and timed.choice is not None:
        reason = f"{op.name}, {timed.choice.impl.name}: {timed}"
        return (reason, _CHOSEN[op.name], (spelled(timed.choice),)) if timed.won else (reason, None, ())
    if choice.impl.library:
        return f"{op.name} would use the vendor's library here, as Inductor does", None, ()
    if choice.impl.name == "linear" and launch.group.plain:
        return "a matrix product over pixels with nothing to fuse, which Inductor can compute too", None, ()
    return f"{op.name}, {choice.impl.name}", op.dispatched, ()


def _linear(launch: _Launch, cpu: bool) -> tuple[str, Node | None]:
    before, like, weight, x, residual = launch.before, launch.anchor.node, launch.weight, launch.x, launch.residual
    out = like.meta["val"]
    if 1 not in x.meta["val"].stride()[-2:]:
        x = _call(before, aten.clone.default, x, like=like)
    flipped = [0, 2, 1] if x.meta["val"].dim() == 3 and weight.meta["val"].dim() == 3 else [1, 0]
    if weight.target is aten.permute.default and list(weight.args[1]) == flipped:  # pyright: ignore[reportArgumentType]
        assert isinstance(weight.args[0], Node), "permute must have an operand"
        weight = weight.args[0]
    elif launch.anchor.options["kn"]:
        weight = _call(before, aten.permute.default, weight, flipped, like=like)
    if residual is not None:
        if launch.views:
            sizes = [*out.shape[:-2], -1, out.shape[-1]]
            if symbolic(sizes):
                return "a residual whose batch size is not known when it is compiled", None
            residual = _call(before, aten.reshape.default, residual, sizes, like=like)
        residual = _contiguous(before, residual, like)
    args = (x, weight, _bias(launch, out.shape[-1]), launch.group.activation, residual)
    reason, target, choice = _why(linear_op, launch, cpu, *args)
    if target is None:
        return reason, None
    value = _call(before, target, *choice, *args, like=like)
    return reason, _behind(launch, value)


def _behind(launch: _Launch, value: Node) -> Node:
    """The value, reshaped to its shape after the reshapes of the group's chain."""
    if not launch.views:
        return value
    return _call(launch.before, aten.reshape.default, value, launch.views[-1].args[1], like=launch.anchor.node)


def _bias(launch: _Launch, count: int) -> Node | None:
    """The bias as a contiguous vector [N]; None if there is no bias."""
    if launch.bias is None:
        return None
    bias, like = launch.bias, launch.anchor.node
    if bias.meta["val"].dim() != 1:
        bias = _call(launch.before, aten.reshape.default, bias, [count], like=like)
    return _contiguous(launch.before, bias, like)


def _contiguous(before: Node, node: Node, like: Node) -> Node:
    """The value in row-major order; it is copied if necessary."""
    if node.meta["val"].is_contiguous():
        return node
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
    copy.meta["val"] = aten.clone.default(node.meta["val"], memory_format=torch.contiguous_format)
    return copy


def _laid(before: Node, node: Node, strides: tuple[int, ...]) -> Node:
    """A copy of a value with the given strides, which must have no gaps."""
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    inside = _contiguous(before, _call(before, aten.permute.default, node, order, like=node), node)
    return _call(before, aten.permute.default, inside, [order.index(d) for d in range(len(order))], like=node)


def _conv(launch: _Launch, cpu: bool) -> tuple[str, Node | None]:
    anchor, last, options = launch.anchor, launch.before, launch.anchor.options
    out = anchor.node.meta["val"]
    to_last = [0, *range(2, out.dim()), 1]

    def channels_last(node: Node) -> Node:
        return _contiguous(last, _call(last, aten.permute.default, node, to_last, like=anchor.node), anchor.node)

    x, weight = channels_last(launch.x), channels_last(launch.weight)
    residual = None if launch.residual is None else channels_last(launch.residual)
    window = (options["stride"], options["padding"], options["dilation"], options["groups"], list(out.shape[2:]))
    args = (x, weight, _bias(launch, out.shape[1]), residual, launch.group.activation, *window, None, None, out.dtype)
    reason, target, choice = _why(conv_op, launch, cpu, *args)
    if target is None:
        return reason, None
    value = _call(last, target, *choice, *args, like=anchor.node)
    value = _call(last, aten.permute.default, value, [0, out.dim() - 1, *range(1, out.dim() - 1)], like=anchor.node)
    return reason, _behind(launch, value)


def _attention(launch: _Launch, cpu: bool) -> tuple[str, Node | None]:
    options, node = launch.anchor.options, launch.anchor.node
    given = [launch.x, *launch.others]
    shapes = [n.meta["val"].shape for n in given]
    if symbolic(*(shape[1:] for shape in shapes)):
        return "lengths or the number of heads are not known when it is compiled; the operator needs them as numbers", None
    read_too = [user for user in node.users if user.target is operator.getitem and user.args[1] != 0 and user.users]
    if read_too:
        return "the backward pass reads the sums of its softmax", None
    first = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)
    if first is None:
        return "nothing reads its result", None
    operands = []
    for n in given:
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


def _replace(launch: _Launch, value: Node, moved: dict[Node, tuple[int, ...]]) -> None:
    """Replace the value of a group by the value of its launch. Nodes without readers are erased at the end."""
    before = launch.last.meta.get("val")
    launch.last.replace_all_uses_with(value)
    if launch.anchor.kind == "attention":
        # torch's call may draw random numbers, so it counts as impure, and dead-code elimination would keep it.
        node = launch.anchor.node
        for one in (*node.users, node):
            node.graph.erase_node(one)
    if before is None or before.stride() != value.meta["val"].stride():
        moved[value] = value.meta["val"].stride() if before is None else before.stride()


def _restride(node: Node, moved: dict[Node, tuple[int, ...]]) -> None:
    """Update the strides of a pointwise call on a value that has become channels-last. as_strided gets a copy instead."""
    if node.op != "call_function" or not any(n in moved for n in node.all_input_nodes):
        return
    if node.target is aten.as_strided.default:
        # as_strided addresses memory directly, so it needs the strides with which its input was traced.
        source: Any = node.args[0]
        node.replace_input_with(source, _laid(node, source, moved[source]))
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # pyright: ignore[reportArgumentType]
    value = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    moved[node] = node.meta.get("val", value).stride()
    node.meta["val"] = value
