"""The fusion plan of a graph, as data: which calls are computed in one launch, and the decision about every call.

walk.py makes a plan; lower.py and post_grad.py build it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from tilewright.fuse.anchors import Anchor
from tilewright.fuse.columns import Spread
from tilewright.fuse.decisions import Decision
from tilewright.fuse.naming import layer_name

__all__ = ["FUSED", "LEFT", "QUIET", "Fold", "Gate", "Group", "Plan", "Unbuilt", "merge_name"]

FUSED = "anchor"
"""Kind of a decision about an anchor."""
LEFT = "torch"
"""Kind of a decision about a call that torch computes, and that is not part of an epilogue."""
QUIET = ("view", "constant", "unread", "inside", "inductor")
"""Kinds of decisions that a summary omits: the calls cost nothing, or belong to another decision."""


class Unbuilt(ValueError):
    """A fusion cannot be built as planned. Contains the reason, and the nodes that must not be fused."""

    def __init__(self, reason: str, *nodes: Node):
        super().__init__(reason)
        self.nodes = tuple(n.name for n in nodes)


def merge_name(linear: Node) -> str:
    """The name of the decision to merge a linear with others, for the names that `walk.plan` must not fuse."""
    return f"{linear.name} with others"


@dataclass(frozen=True, kw_only=True)
class Fold:
    """An operation that is folded into the weight and the bias of a product or convolution."""

    kind: str
    """batch_norm, scale, bias."""
    operands: tuple[Any, ...]
    """batch_norm: (weight, bias, mean, variance); scale and bias: one operand. Nodes, numbers or None."""
    spread: Spread | None = None
    """How the operands' elements map to the columns of the result; None if the operand is a number."""
    eps: float = 0.0
    node: Node
    """The call whose result includes this operation."""


@dataclass
class Group:
    """An anchor and the calls fused with it."""

    anchor: Anchor
    folds: list[Fold] = field(default_factory=list)
    """In the order in which they are applied."""
    activation: str = "none"
    residual: Node | None = None
    """The other operand of the residual addition."""
    moved: bool = False
    """Whether the anchor's bias is added elsewhere (moved_bias.py)."""
    plus: list[Node] = field(default_factory=list)
    """For a norm: biases of matrix products that the norm adds to its own bias (moved_bias.py)."""
    minus: list[Node] = field(default_factory=list)
    """For a matrix product: moved biases that its input contains, and that it has to subtract."""
    chain: list[Node] = field(default_factory=list)
    """Calls after the anchor, in order, including views. The group computes the value of the last one."""

    @property
    def name(self) -> str:
        """The name of the anchor's layer."""
        return layer_name(self.anchor.node)

    @property
    def last(self) -> Node:
        """The node whose value the group computes."""
        return self.chain[-1] if self.chain else self.anchor.node

    @property
    def plain(self) -> bool:
        """Whether the group consists of its anchor alone."""
        return not self.chain

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All calls of the group in the graph's order, except those inside the anchor."""
        return (*reversed(self.anchor.inside), self.anchor.node, *self.chain)

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        a = self.anchor
        folds = [{"kind": f.kind, "operands": [str(o) for o in f.operands]} for f in self.folds]
        return {
            "anchor": self.name, "kind": a.kind, "output": self.last.name, "nodes": [n.name for n in self.nodes],
            "operands": [n.name for n in a.operands], "options": {key: str(value) for key, value in a.options.items()},
            "folds": folds, "activation": self.activation, "residual": self.residual and self.residual.name,
        }  # fmt: skip


@dataclass
class Gate:
    """act(gate) * up of two linears with the same input, or of the halves of one linear's result."""

    node: Node
    """The multiplication."""
    groups: tuple[Group, ...]
    """(gate, up), or the single linear whose result has both as its halves."""
    activation: str
    """silu_mul or gelu_mul."""
    gate_first: bool = True
    """For a single linear: whether the first half of its result is the gate."""
    inside: tuple[Node, ...] = ()
    """For a single linear: the calls between it and the multiplication, in the graph's order."""

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return {"output": self.node.name, "linears": [g.name for g in self.groups], "activation": self.activation}


@dataclass
class Plan:
    """The plan of a whole graph."""

    groups: list[Group] = field(default_factory=list)
    """In the order of their last calls, including groups that belong to gates and merges."""
    gates: list[Gate] = field(default_factory=list)
    merges: list[list[Group]] = field(default_factory=list)
    """Lists of linears with the same input, in order. Each list becomes one matrix product."""
    decisions: dict[Node, Decision] = field(default_factory=dict)
    """A decision about every call of the graph."""
    under: dict[Node, Node] = field(default_factory=dict)
    """Call -> the anchor under which its decision is listed."""
    notes: list[Decision] = field(default_factory=list)
    """Decisions about several calls at once (merges)."""

    def constant(self, node: Node) -> bool:
        """Whether a value depends on parameters alone."""
        return node.op == "get_attr" or (node in self.decisions and self.decisions[node].kind == "constant")

    def listed(self, nodes: Sequence[Node]) -> list[Decision]:
        """The decisions that a summary shows, in the graph's order, grouped by anchor."""
        place = {node: i for i, node in enumerate(nodes)}
        found = [n for n in self.decisions if self.decisions[n].kind not in QUIET]
        found.sort(key=lambda n: (place[self.under.get(n, n)], place[n]))
        return [self.decisions[n] for n in found] + self.notes

    def to_json(self) -> dict[str, Any]:
        """The fusions and the decisions about every call, as values for JSON."""
        about = {"kind", "taken", "reason", "anchor"}
        return {
            "fusions": [g.to_json() for g in self.groups],
            "gates": [g.to_json() for g in self.gates],
            "merges": [[g.name for g in batch] for batch in self.merges],
            "calls": {n.name: {k: v for k, v in d.to_json().items() if k in about} for n, d in self.decisions.items()},
        }
