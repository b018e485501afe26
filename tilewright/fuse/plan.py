"""The plan for a graph, as data: which calls go into one launch, and the decision about every call.

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
"""Kind of a decision about an anchor itself."""
LEFT = "torch"
"""Kind of a decision about a call that remains torch's and is not part of an epilogue."""
QUIET = ("view", "constant", "unread", "inside", "inductor")
"""Kinds of decisions that a summary omits: about calls that cost nothing, or belong to something else."""


class Unbuilt(ValueError):
    """A fusion that cannot be built as planned: these nodes must not be fused, for this reason."""

    def __init__(self, reason: str, *nodes: Node):
        super().__init__(reason)
        self.nodes = tuple(n.name for n in nodes)


def merge_name(linear: Node) -> str:
    """The name by which a plan refuses to merge a linear with others."""
    return f"{linear.name} with others"


@dataclass(frozen=True, kw_only=True)
class Fold:
    """An operation that is folded into the weight and the bias of a product or convolution."""

    kind: str
    """batch_norm, scale, bias."""
    operands: tuple[Any, ...]
    """batch_norm: (weight, bias, mean, variance); scale and bias: one operand. Nodes, numbers or None."""
    spread: Spread | None = None
    """How the operands' numbers map to the columns; None for a number."""
    eps: float = 0.0
    node: Node
    """The call whose value includes it."""


@dataclass
class Group:
    """An anchor and the calls fused with it."""

    anchor: Anchor
    folds: list[Fold] = field(default_factory=list)
    """In the order in which they apply."""
    activation: str = "none"
    residual: Node | None = None
    """The other operand of the sum."""
    moved: bool = False
    """Whether the anchor's bias is added elsewhere (moved_bias.py)."""
    plus: list[Node] = field(default_factory=list)
    """For a norm: biases of products that it adds to its own."""
    minus: list[Node] = field(default_factory=list)
    """For a product: biases that its input contains in addition, and that it has to subtract."""
    chain: list[Node] = field(default_factory=list)
    """Calls after the anchor, in order, including views; the last one's value is the group's."""

    @property
    def name(self) -> str:
        """The anchor's layer."""
        return layer_name(self.anchor.node)

    @property
    def last(self) -> Node:
        """The node whose value the group computes."""
        return self.chain[-1] if self.chain else self.anchor.node

    @property
    def plain(self) -> bool:
        """Whether it consists of its anchor alone."""
        return not self.chain

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All calls that belong to it, in the graph's order, except for calls inside of the anchor."""
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
    """(gate, up), or the one linear of which they are the halves."""
    activation: str
    """silu_mul or gelu_mul."""
    gate_first: bool = True
    """For one linear: whether its first half is the gate."""
    inside: tuple[Node, ...] = ()
    """For one linear: the calls between it and the multiplication, in the graph's order."""

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return {"output": self.node.name, "linears": [g.name for g in self.groups], "activation": self.activation}


@dataclass
class Plan:
    """The plan of a whole graph."""

    groups: list[Group] = field(default_factory=list)
    """In the order of their last calls, including those of gates and merges."""
    gates: list[Gate] = field(default_factory=list)
    merges: list[list[Group]] = field(default_factory=list)
    """Linears with the same input that become one product, in order."""
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
        """The decisions of a summary, in the graph's order, grouped by anchor."""
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
