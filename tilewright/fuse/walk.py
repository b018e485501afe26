"""Makes a plan from a graph. It visits all calls once, in the graph's order, and decides about each of them.

An anchor starts a group. The anchor's value is the group's first tip: a value where the group can grow. If exactly one call
reads a tip, that call is a step. The step goes into the anchor's epilogue if the rules have a slot for it (rules.py), and its
value becomes the new tip. A view of a tip is a tip as well. If two groups could accept the same sum, the group with the later
anchor gets it. If operands of an attention are linears with the same input, they become one matrix product. act(a) * b of two
linears, or of the halves of one, becomes a gated product (gates.py).

For each call there is a decision with a reason: fused, part of a view, a constant, or left to torch.
"""

import math
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from tilewright.fuse.anchors import Anchor, symbolic, tensor_of
from tilewright.fuse.anchors_ops import read
from tilewright.fuse.columns import columns_of
from tilewright.fuse.decisions import Decision
from tilewright.fuse.gates import gate_of
from tilewright.fuse.growing import share_buffers
from tilewright.fuse.naming import layer_name
from tilewright.fuse.normal import BATCH_NORMS, Activation, Step, activation_behind, activation_of, step_behind
from tilewright.fuse.plan import FUSED, LEFT, Gate, Group, Plan, merge_name
from tilewright.fuse.rules import ACTIVATIONS, EPILOGUES, MERGED, Dialect, Tip, slot_of
from tilewright.fuse.view_calls import is_part, is_view, plain_source

__all__ = ["EXPORTED", "plan"]

aten = torch.ops.aten

EXPORTED = Dialect(read=read, activation=activation_behind, view=is_view, parameters=True)
"""Graphs of torch.export: activations are one call each, weights are known."""

_VIEW = "it only selects or rearranges elements, and computes nothing"
"""The reason for views, and for calls that take a part of a value."""
_CONSTANT_BYTES = 1 << 26
"""Limit in bytes. Constants with larger results are computed in every call, because they may be expanded tensors."""


def plan(graph: Graph, refused: Mapping[str, str] | None = None, dialect: Dialect = EXPORTED) -> Plan:
    """Plan which calls of a graph are computed in one launch, and decide about every call.

    Args:
        graph: a functional ATen graph with `val` in the nodes' meta; it is not changed.
        refused: names of layers or nodes that must not be fused, with the reason. An anchor with such a name is left to torch;
            a step with such a name is not fused.
        dialect: the kind of graph.
    """
    walk = _Walk(graph, refused or {}, dialect)
    for node in graph.nodes:
        if node.op == "call_function" and node not in walk.plan.decisions:
            walk.visit(node)
    walk.finish()
    return walk.plan


class _Walk:
    """The state of the walk."""

    def __init__(self, graph: Graph, refused: Mapping[str, str], dialect: Dialect):
        self.refused, self.dialect, self.plan = refused, dialect, Plan()
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.tips: dict[Node, Tip] = {}
        self.left = LEFT if dialect.parameters else "inductor"
        """Kind of decisions about calls to which no rule applies. Summaries of Inductor's graphs do not list them."""

    # ---- calls

    def visit(self, node: Node) -> None:
        """Decide about a call."""
        if not node.users:
            return self._decide(node, "unread", False, "nothing reads its result")
        if self.dialect.parameters and self._constant(node):
            return self._decide(node, "constant", True, "it depends only on parameters, so it is computed once")
        if self.dialect.view(node):
            return self._view(node)
        if node.target in BATCH_NORMS and self._offered(node) is None:
            return None  # folded into the product or convolution before it
        found = self.dialect.read(node)
        if isinstance(found, Anchor):
            found = self.refused.get(node.name) or self.refused.get(layer_name(node)) or found
        if isinstance(found, Anchor) and found.without and any(map(self._taken, {*found.inside} - {*found.without.inside})):
            found = found.without
        if found is not None:
            return self._open(found) if isinstance(found, Anchor) else self._decide(node, FUSED, False, found)
        if self.dialect.parameters and node.name not in self.refused:
            gate = gate_of(node, self.tips, self.parameter)
            if gate is not None:
                return self._gate(gate)
        return self._step(node)

    def parameter(self, node: Any) -> bool:
        """Whether a value is known before the model is called: a parameter, or a value that depends on parameters alone."""
        return self.dialect.parameters and isinstance(node, Node) and tensor_of(node) is not None and self.plan.constant(node)

    def _taken(self, node: Node) -> bool:
        """Whether a call has already been fused into a group."""
        return node in self.plan.decisions and self.plan.decisions[node].taken

    def _constant(self, node: Node) -> bool:
        value = tensor_of(node)
        tags = getattr(node.target, "tags", ())
        if value is None or torch.Tag.nondeterministic_seeded in tags or not all(map(self.parameter, node.all_input_nodes)):
            return False
        return value.numel() * value.element_size() <= _CONSTANT_BYTES

    def _view(self, node: Node) -> None:
        self._decide(node, "view", True, _VIEW)
        source = node.args[0]
        tip = self.tips.get(source) if isinstance(source, Node) else None
        if tip is None:
            return
        columns = None if tip.columns is None else tip.columns.behind(node)
        kept = tip.kept or _kept(tip.here, {node})
        self._grow(Tip(tip.group, node, columns, (*tip.views, node), kept))

    def _open(self, anchor: Anchor) -> None:
        group = Group(anchor)
        self.plan.groups.append(group)
        self._decide(anchor.node, FUSED, True, f"one launch of {anchor.kind}")
        for node in anchor.inside:
            self._decide(node, "inside", True, f"it is computed within {group.name}")
        if anchor.kind in MERGED and self.dialect.parameters:
            self._merge(MERGED[anchor.kind](anchor))
        if anchor.kind in EPILOGUES:
            self._grow(Tip(group, anchor.node, columns_of(anchor)))

    # ---- growth of groups

    def _grow(self, tip: Tip) -> None:
        """Add a tip. If an activation reads it, decide about it immediately, because no other group could fuse it."""
        self.tips[tip.here] = tip
        found = self.dialect.activation(tip.here)
        if found is None or found.node in self.plan.decisions:
            return
        step = Step(kind="activation", node=found.node, inside=tuple(found.inside - {found.node}), name=found.name)
        reason = self._offer(tip, step, found)
        alone = found.name not in ACTIVATIONS and isinstance(self.dialect.read(found.node), Anchor)
        if reason is not None and not alone:  # if alone, it becomes a launch by itself when it is visited
            self._refuse(step, tip, reason)

    def _offer(self, tip: Tip, step: Step, found: Activation | None = None) -> str | None:
        """Try to add a step to a group's epilogue. Returns the reason if that is impossible, otherwise None."""
        if step.node.name in self.refused:
            return self.refused[step.node.name]
        slot = slot_of(tip, step, self.parameter)
        if isinstance(slot, str):
            return slot if found is None or found.name in slot else f"{found.name}: {slot}"
        inside = {step.node, *step.inside}
        between = () if found is None else found.inside - {found.node}
        kept = tip.kept or next((why for n in (tip.here, *between) if (why := _kept(n, inside))), None)
        if kept is not None:
            return kept if found is None else f"{found.name}: {kept}"
        kind, words = slot.apply(tip, step)
        ordered = sorted(inside, key=self.place.__getitem__)
        tip.group.chain += [*tip.views, *ordered]
        for node in ordered[:-1]:
            self._decide(node, "inside", True, f"it is a part of an operation that is fused: {words}", tip.group)
        self._decide(step.node, kind, True, words, tip.group, 2 * _bytes(step.node))
        self._grow(Tip(tip.group, step.node, tip.columns))
        return None

    def _step(self, node: Node) -> None:
        """Decide about a call that may go into the epilogue of a group; otherwise it is left to torch."""
        first = self._offered(node)
        if first is None:
            return
        step, tip, reason = first
        if tip is None:
            self._leave(node)
        elif isinstance(step, Step):
            self._refuse(step, tip, reason)
        else:
            self._decide(node, self.left, False, f"{node.target}: {reason}", tip.group)

    def _offered(self, node: Node) -> tuple[Step | str, Tip | None, str] | None:
        """Offer a call to the groups whose tips it reads, starting with the group of the last anchor.

        Returns None if a group accepts the call. Otherwise returns three values: the step, or a sentence that states why the
        call is no step; the tip of the first group, or None if the call reads no tip; and the reason.
        """
        tips = [self.tips[n] for n in node.all_input_nodes if n in self.tips]
        tips.sort(key=lambda tip: self.place[tip.group.anchor.node], reverse=True)
        first: tuple[Step | str, Tip | None, str] | None = None
        for tip in tips:
            step = step_behind(tip.here, node)
            if step is None:
                continue
            reason = step if isinstance(step, str) else self._offer(tip, step)
            if reason is None:
                return None
            first = first or (step, tip, reason)
        return first or ("", None, "")

    def _refuse(self, step: Step, tip: Tip, reason: str) -> None:
        kind = {"factor": "scale" if self.dialect.parameters else self.left, "sum": "residual"}.get(step.kind, step.kind)
        for node in step.inside:
            self._decide(node, "inside", False, f"it is a part of {step.node.name}", tip.group)
        self._decide(step.node, kind, False, reason, tip.group)

    def _leave(self, node: Node) -> None:
        if is_part(node) or is_view(node) or node.target is operator.getitem:
            return self._decide(node, "view", True, _VIEW)
        known = activation_of(node) is not None or node.target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)
        why = (
            "there is no product or convolution before it that could fuse it"
            if known
            else "no operator of tilewright computes it"
        )
        self._decide(node, self.left, False, f"{node.target}: {why}")

    # ---- linears with the same input

    def _gate(self, gate: Gate) -> None:
        self.plan.gates.append(gate)
        for node in gate.inside:
            self._decide(node, "inside", True, f"it is a part of the gated product {gate.groups[0].name}")
        words = f"one matrix product that also computes {gate.activation}"
        self._decide(gate.node, "gate", True, words, gate.groups[0], 4 * _bytes(gate.node))

    def _merge(self, operands: tuple[Node, ...]) -> None:
        """Among the operands of an anchor, merge plain linears with the same input into one matrix product."""
        inputs: dict[Node, list[Group]] = {}
        for source in map(plain_source, operands):
            tip = self.tips.get(source)
            if tip is None or tip.group.anchor.kind != "linear" or not tip.group.plain or tip.group.anchor.options["kn"]:
                continue
            anchor = tip.group.anchor
            if (why := self.refused.get(merge_name(anchor.node))) is not None:
                self.plan.notes.append(_decision(tip.group.name, "merge", anchor.node, False, why, 0))
            elif self.parameter(anchor.weight) and (anchor.bias is None or self.parameter(anchor.bias)):
                inputs.setdefault(anchor.x, []).append(tip.group)
        for found in inputs.values():
            members = {g.anchor.node: g for g in found}
            joined = [batch for batch in self.plan.merges if any(g.anchor.node in members for g in batch)]
            members.update({g.anchor.node: g for batch in joined for g in batch})
            if len(members) > 1:
                batch = sorted(members.values(), key=lambda g: self.place[g.anchor.node])
                self.plan.merges = [b for b in self.plan.merges if b not in joined] + [batch]

    def finish(self) -> None:
        """Sort groups by their last calls, assign a shared buffer to growing concatenations, and record merges."""
        self.plan.groups.sort(key=lambda g: self.place[g.last])
        if self.dialect.parameters:
            share_buffers(self.plan)
        for first, *others in self.plan.merges:
            names = ", ".join(g.name for g in others)
            saved = len(others) * _bytes(first.anchor.x)
            self.plan.notes.append(
                _decision(first.name, "merge", others[-1].last, True, f"one matrix product together with {names}", saved)
            )

    def _decide(
        self, node: Node, kind: str, taken: bool, reason: str, group: Group | None = None, saved: int = 0
    ) -> None:  # fmt: skip
        name = layer_name(node) if group is None else group.name
        self.plan.decisions[node] = _decision(name, kind, node, taken, reason, saved)
        if group is not None:
            self.plan.under[node] = group.anchor.node


def _decision(anchor: str, kind: str, node: Node, taken: bool, reason: str, saved: int) -> Decision:
    return Decision(anchor=anchor, kind=kind, node=node.name, taken=taken, reason=reason, bytes_saved=saved)


def _bytes(node: Node) -> int:
    """Size of a value; 0 if its size is unknown."""
    value = tensor_of(node)
    return 0 if value is None or symbolic(value.shape) else math.prod(value.shape) * value.element_size()


def _kept(node: Node, inside: Collection[Node]) -> str | None:
    """Why a value must be stored even if it is fused: other calls read it. None if no other call does."""
    readers = [user for user in node.users if user not in inside]
    if not readers:
        return None
    if any(reader.op == "output" for reader in readers):
        return f"{node.name} is a result of this graph, or kept for the backward pass: it must be stored anyway"
    return f"{node.name} is also read by {', '.join(reader.name for reader in readers[:3])}: it must be stored anyway"
