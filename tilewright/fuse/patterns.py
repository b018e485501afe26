"""Which calls of an exported graph go into one launch: groups around anchors, found greedily, decided once.

Anchors are visited from the last to the first, so that of two products under one sum the later one takes it. From an anchor the
walk follows single readers, through views, and pulls in what the operator computes on its way out:

    conv         batch norm -> scale -> residual -> activation        (ops.conv2d adds before it activates)
    linear       batch norm -> scale -> activation -> residual        (ops.linear activates before it adds)

Then linears of one input become one: two under act(a) * b a gated product, those whose readers are one attention a product with
three views as result.

Not here: what a group becomes (lower.py).
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from tilewright.fuse.anchors import Anchor, read, tensor_of
from tilewright.fuse.naming import layer_name
from tilewright.fuse.report import Report

__all__ = ["VIEWS", "Gate", "Group", "activation_of", "batch_norm_of", "find_groups", "plain_source"]

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.transpose.int, aten.permute.default,
        aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default,
        aten.contiguous.default, aten.flatten.using_ints, aten.unflatten.int, aten.alias.default, aten.detach.default,
        aten.mT.default if hasattr(aten, "mT") else aten.t.default, aten.lift_fresh_copy.default, aten.dropout.default,
    }
)  # fmt: skip
"""Calls that only say where elements stand: each element of the input is one of the output, and nothing is computed."""


@dataclass
class Group:
    """An anchor and what was pulled into it."""

    anchor: Anchor
    norm: Node | None = None
    """The batch norm, whose first result is meant."""
    scales: list[Any] = field(default_factory=list)
    """Numbers and parameters [N] to multiply the weight's rows by, and the bias."""
    activation: str = "none"
    residual: Node | None = None
    """The other operand of the sum."""
    moved: bool = False
    """Whether the anchor's bias is added elsewhere (moved_bias.py)."""
    plus: list[Node] = field(default_factory=list)
    """Of a norm: biases of products that it adds to its own."""
    minus: list[Node] = field(default_factory=list)
    """Of a product: what its input has too much, by such biases."""
    chain: list[Node] = field(default_factory=list)
    """Calls behind the anchor, in order, views among them; the last one's value is the group's."""

    @property
    def last(self) -> Node:
        """Whose value the group computes."""
        return self.chain[-1] if self.chain else self.anchor.node

    @property
    def plain(self) -> bool:
        """Whether it is its anchor alone."""
        return not self.chain


@dataclass
class Gate:
    """act(gate) * up of two linears of one input, or of the halves of one linear's result."""

    node: Node
    """The product."""
    groups: tuple[Group, ...]
    """(gate, up), or the one linear whose halves they are."""
    activation: str
    """silu_mul or gelu_mul."""
    gate_first: bool = True
    """Of one linear: whether its first half is the gate."""
    inside: tuple[Node, ...] = ()


def activation_of(node: Node) -> str | None:
    """The name under which our operators know an activation."""
    if node.op != "call_function":
        return None
    if node.target in (aten.relu.default, aten.relu_.default):
        return "relu"
    if node.target is aten.silu.default:
        return "silu"
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" or "tanh" in node.args else "gelu"
    return None


_NORMS = (aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)


def batch_norm_of(node: Node) -> tuple[Any, ...] | None:
    """(weight, bias, mean, variance, eps) of a batch norm in evaluation, with nodes for tensors."""
    if node.op != "call_function" or node.target not in _NORMS:
        return None
    if node.target is aten.batch_norm.default:
        return None if node.args[5] else (*node.args[1:5], node.args[7])
    return (*node.args[1:5], node.args[6])


def plain_source(node: Any) -> Any:
    """What stands before views."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    return node


class _Walk:
    """From one anchor through what follows it."""

    def __init__(self, group: Group, report: Report, taken: set[Node]):
        self.group, self.report, self.taken = group, report, taken
        self.name = layer_name(group.anchor.node)
        self.views: list[Node] = []
        self.here = group.anchor.node

    def run(self) -> None:
        """Pull in all that may be."""
        if self.group.anchor.kind not in ("conv", "linear"):
            return
        while True:
            readers = list(self.here.users)
            if len(readers) != 1:
                self._refuse(readers)
                return
            node = readers[0]
            if node in self.taken:
                return
            if node.op == "call_function" and node.target in VIEWS:
                self.views.append(node)
                self.here = node
            elif not self._pull(node):
                return

    def _refuse(self, readers: list[Node]) -> None:
        for node in readers:
            kind = self._kind(node)
            if kind is not None and len(readers) > 1 and node not in self.taken:
                self._note(kind, node, False, f"its operand has {len(readers)} readers, and is stored all the same")

    def _kind(self, node: Node) -> str | None:
        if activation_of(node):
            return "activation"
        if batch_norm_of(node):
            return "batch_norm"
        return "residual" if node.target is aten.add.Tensor and _other(node, self.here) is not None else None

    def _note(self, kind: str, node: Node, taken: bool, reason: str) -> None:
        value = tensor_of(node)
        saved = 2 * value.numel() * value.element_size() if value is not None else 0
        self.report.add(self.name, kind, node.name, taken, reason, saved)

    def _take(self, kind: str, node: Node, reason: str, *more: Node) -> bool:
        self._note(kind, more[-1] if more else node, True, reason)
        self.group.chain += [*self.views, node, *more]
        self.views, self.here = [], self.group.chain[-1]
        return True

    def _pull(self, node: Node) -> bool:
        group = self.group
        fresh = group.activation == "none" and group.residual is None
        if batch_norm_of(node) is not None:
            return self._norm(node, fresh)
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and fresh and (scale := self._scale(node)) is not None:
            group.scales.append(scale)
            return self._take("scale", node, "multiplied into the weight")
        if (name := activation_of(node)) is not None:
            if group.activation != "none":
                self._note("activation", node, False, "the operator applies one activation")
                return False
            if group.residual is not None and group.anchor.kind == "linear":
                self._note("activation", node, False, "linear adds the residual after its activation, and this follows the sum")
                return False
            group.activation = name
            return self._take("activation", node, f"{name} in the epilogue")
        if node.target is aten.add.Tensor:
            return self._residual(node)
        return False

    def _norm(self, node: Node, fresh: bool) -> bool:
        group, value = self.group, tensor_of(self.here)
        first = [user for user in node.users if user.target is operator.getitem] if "native" in str(node.target) else [node]
        if not fresh or self.views or value is None or len(first) != 1 or group.norm is not None or group.scales:
            self._note("batch_norm", node, False, "it does not follow the product itself: its factors are none of rows")
            return False
        if group.anchor.kind == "linear" and value.dim() != 2:
            self._note("batch_norm", node, False, f"its channels are not the columns of {list(value.shape)}")
            return False
        if any(isinstance(n, Node) and n.op != "get_attr" for n in (group.anchor.weight, group.anchor.bias)):
            self._note("batch_norm", node, False, "the weight is computed, not a parameter")
            return False
        group.norm = node
        more = () if first[0] is node else (first[0],)
        return self._take("batch_norm", node, "folded into weight and bias", *more)

    def _scale(self, node: Node) -> Any:
        """A factor that belongs to the weight's rows: a number, or a parameter of one for each column."""
        other, value = node.args[1], tensor_of(self.here)
        if self.group.anchor.weight is None or self.group.anchor.weight.op != "get_attr":
            return None
        if node.args[0] is not self.here:
            other = node.args[0] if node.target is aten.mul.Tensor else None
        if isinstance(other, int | float):
            if node.target is aten.mul.Tensor:
                return other
            return 1.0 / other if other else None  # a division by zero is the user's, and stays one
        known = tensor_of(other)
        if known is None or value is None or node.target is not aten.mul.Tensor or other.op != "get_attr":  # pyright: ignore
            return None
        columns = self.group.anchor.kind == "linear" and not self.views and known.shape == value.shape[-1:]
        return other if columns else None

    def _residual(self, node: Node) -> bool:
        other, group = _other(node, self.here), self.group
        if other is None:
            self._note("residual", node, False, "the other operand has another shape or dtype, or is a number")
            return False
        if group.residual is not None:
            self._note("residual", node, False, "the operator adds one tensor")
            return False
        if group.anchor.kind == "conv" and group.activation != "none":
            self._note("residual", node, False, "conv adds the residual before its activation, and this follows it")
            return False
        if group.anchor.kind == "conv" and (self.views or any(n.target in VIEWS for n in group.chain)):
            self._note("residual", node, False, "views stand between the convolution and the sum")
            return False
        group.residual = other
        return self._take("residual", node, "added in the epilogue")


def _other(node: Node, here: Node) -> Node | None:
    """The second operand of a plain sum of two tensors of one shape."""
    if len(node.args) < 2 or node.kwargs.get("alpha", 1) != 1 or node.args[0] is node.args[1]:
        return None
    other = node.args[1] if node.args[0] is here else node.args[0]
    a, b = tensor_of(here), tensor_of(other)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return None
    return other  # pyright: ignore[reportReturnType]


# ---- linears of one input


def _gates(groups: dict[Node, Group], graph: Graph, report: Report) -> list[Gate]:
    """act(a) * b, where a and b are linears of one input, or the halves of one."""
    found = []
    for node in graph.nodes:
        if node.target is not aten.mul.Tensor or not all(isinstance(a, Node) for a in node.args[:2]):
            continue
        for one, two in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
            gate = _two_linears(node, groups.get(one), groups.get(two)) or _halves(node, one, two, groups)
            if gate is not None:
                value = tensor_of(node)
                saved = 4 * value.numel() * value.element_size() if value is not None else 0
                report.add(
                    layer_name(gate.groups[0].anchor.node), "gate", node.name, True, f"{gate.activation} in one product", saved
                )
                found.append(gate)
                break
    return found


def _two_linears(node: Node, gate: Group | None, up: Group | None) -> Gate | None:
    if gate is None or up is None or gate is up or gate.anchor.kind != "linear" or up.anchor.kind != "linear":
        return None
    if gate.activation not in ("silu", "gelu") or gate.residual is not None or not up.plain or len(gate.last.users) != 1:
        return None
    if len(up.last.users) != 1 or gate.anchor.x is not up.anchor.x or not _alike(gate, up):
        return None
    if any(n.target in VIEWS for n in gate.chain):
        return None
    return Gate(node, (gate, up), f"{gate.activation}_mul")


def _halves(node: Node, gate: Node, up: Node, groups: dict[Node, Group]) -> Gate | None:
    act = activation_of(gate)
    if act not in ("silu", "gelu") or len(gate.users) != 1 or not isinstance(gate.args[0], Node):
        return None
    first, second = _half(gate.args[0]), _half(up)
    if first is None or second is None or first[0] is not second[0] or {first[1], second[1]} != {0, 1}:
        return None
    group = groups.get(first[0])
    if group is None or group.anchor.kind != "linear" or not group.plain or group.anchor.options["kn"]:
        return None
    readers = [reader for user in group.last.users for reader in (user.users if user.target in _SPLITS else [user])]
    if len(readers) != 2 or len(gate.args[0].users) != 1 or len(up.users) != 1 or group.anchor.weight.op != "get_attr":  # pyright: ignore
        return None
    inside = (*group.last.users, *readers, gate)
    return Gate(node, (group,), f"{act}_mul", first[1] == 0, tuple(dict.fromkeys(inside)))


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def _half(node: Any) -> tuple[Node, int] | None:
    """(what it is half of, which half along the last dimension)."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target is operator.getitem and node.args[0].target in _SPLITS:  # pyright: ignore
        split, index = node.args
        whole, dim = split.args[0], split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)  # pyright: ignore
    elif node.target is aten.slice.Tensor and len(node.args) == 4:
        whole, dim, start, _ = node.args
        index = 0 if start == 0 else 1
    else:
        return None
    a, b = tensor_of(whole), tensor_of(node)
    if a is None or b is None or dim not in (-1, a.dim() - 1) or 2 * b.shape[-1] != a.shape[-1] or index not in (0, 1):
        return None
    return whole, index  # pyright: ignore[reportReturnType]


def _alike(one: Group, two: Group) -> bool:
    """Whether two linears may be one: parameters, of one K, laid out alike."""
    a, b = one.anchor, two.anchor
    if a.weight is None or b.weight is None or a.options["kn"] or b.options["kn"]:
        return False
    if any(n is not None and n.op != "get_attr" for n in (a.weight, b.weight, a.bias, b.bias)):
        return False
    return not one.scales and not two.scales and one.norm is None and two.norm is None


def _merges(groups: dict[Node, Group], report: Report, gated: set[Node]) -> list[list[Group]]:
    """Plain linears of one input whose results one attention reads."""
    sources: dict[Any, list[Group]] = {}
    for group in groups.values():
        if group.anchor.kind != "attention":
            continue
        parts = [groups.get(plain_source(n)) for n in (group.anchor.x, *group.anchor.others)]
        for part in parts:
            if part is None or part.anchor.kind != "linear" or part.anchor.node in gated:
                continue
            if any(n.target not in VIEWS for n in part.chain) or not _alike(part, part):
                continue
            batch = sources.setdefault((group.anchor.node, part.anchor.x), [])
            if part not in batch:
                batch.append(part)
    found = [batch for batch in sources.values() if len(batch) > 1]
    for batch in found:
        x = tensor_of(batch[0].anchor.x)
        saved = (len(batch) - 1) * x.numel() * x.element_size() if x is not None else 0
        names = ", ".join(layer_name(g.anchor.node) for g in batch[1:])
        first, last = layer_name(batch[0].anchor.node), batch[-1].anchor.node.name
        report.add(first, "merge", last, True, f"one product with {names}", saved)
    return found


def find_groups(
    graph: Graph, report: Report, refused: frozenset[str] = frozenset()
) -> tuple[list[Group], list[Gate], list[list[Group]]]:
    """All groups of a graph, gated products among them, and linears to be merged. Decisions go into the report.

    Anchors whose nodes have the names in `refused` are left to torch.
    """
    groups, taken, notes = dict[Node, Group](), set[Node](), list[Report]()
    for node in reversed(list(graph.nodes)):
        anchor = read(node)
        if anchor is None or node in taken or node.name in refused:
            continue
        group = Group(anchor)
        taken.update(anchor.inside)
        notes.append(Report())
        _Walk(group, notes[-1], taken).run()
        taken.update(group.chain)
        groups[group.last] = group
    for note in reversed(notes):
        report.decisions += note.decisions
    ordered = {last: groups[last] for last in graph.nodes if last in groups}
    gates = _gates(ordered, graph, report)
    gated = {group.anchor.node for gate in gates for group in gate.groups}
    return list(ordered.values()), gates, _merges(ordered, report, gated)
