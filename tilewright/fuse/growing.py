"""Growing concatenations: each has the operands of the previous one and a few more, as in DenseNet. They share one buffer.

    b = norm(cat(x, a)),   c = norm(cat(x, a, b')),   d = norm(cat(x, a, b', c')) ...

If every concatenation copied all its operands, the number of copied bytes would be quadratic in the number of layers. Here all
concatenations share one buffer that is as wide as the last one. The launch that normalises all channels so far also appends the
new channels of its layer to the buffer (kernels/norm/channel/append_affine.py). A channel is never written twice, so the order
of later reads does not matter.

This applies to concatenations of channels that only a batch norm reads. For other readers torch makes a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from tilewright.fuse.anchors import symbolic, tensor_of
from tilewright.fuse.decisions import Decision
from tilewright.fuse.plan import Group, Plan

__all__ = ["GROWING", "Growth", "share_buffers"]

aten = torch.ops.aten

GROWING = "growing_batch_norm"
"""The kind of an anchor that is a batch norm of a growing concatenation."""


@dataclass(frozen=True)
class Growth:
    """A concatenation in a shared buffer."""

    buffer: Node
    """The last concatenation of the chain; it identifies the buffer."""
    width: int
    """Channels of the last concatenation."""
    start: int
    """Number of channels that are already in the buffer."""
    pieces: tuple[Node, ...]
    """The operands that are appended to the buffer."""


def share_buffers(plan: Plan) -> None:
    """In a plan, change batch norms of growing concatenations into anchors of the kind `GROWING`.

    The plan's groups must already be in order.
    """
    norms = {group.anchor.x: group for group in plan.groups if group.anchor.kind == "batch_norm"}
    chains: list[list[Node]] = []
    for cat in filter(_joins_channels, norms):
        found = [chain for chain in chains if _extends(cat, chain[-1])]
        if found:
            max(found, key=lambda chain: len(_operands(chain[-1]))).append(cat)
        else:
            chains.append([cat])
    for chain in chains:
        if len(chain) > 1:
            _share(plan, norms, chain)


def _share(plan: Plan, norms: Mapping[Node, Group], chain: Sequence[Node]) -> None:
    order, first = list(norms), _operands(chain[0])[0]
    if first in norms and order.index(first) < order.index(chain[0]):
        chain = (first, *chain)  # the first operand has its own, earlier norm, which appends it to the buffer
    old: tuple[Node, ...] = ()
    for value in chain:
        group, operands = norms[value], (first,) if value is first else _operands(value)
        growth = Growth(chain[-1], _channels(chain[-1]), sum(map(_channels, old)), operands[len(old) :])
        options = {**group.anchor.options, "growth": growth}
        inside = group.anchor.inside if value is first else (*group.anchor.inside, value)
        group.anchor, old = replace(group.anchor, kind=GROWING, inside=inside, options=options), operands
        if value is not first:
            copied = 2 * value.meta["val"].nbytes * growth.start // _channels(value)
            reason = f"its new channels are appended to a buffer in the launch of {group.name}"
            plan.decisions[value] = Decision(
                anchor=group.name, kind="inside", node=value.name, taken=True, reason=reason, bytes_saved=copied
            )  # fmt: skip
            plan.under[value] = group.anchor.node


def _operands(cat: Node) -> tuple[Node, ...]:
    return tuple(cat.args[0])  # pyright: ignore[reportArgumentType]


def _channels(node: Node) -> int:
    value = tensor_of(node)
    assert value is not None, "a concatenation must have a tensor as its result"
    return value.shape[1]


def _joins_channels(cat: Node) -> bool:
    """Whether a value is a concatenation of channels that one call reads."""
    if cat.target is not aten.cat.default or len(cat.users) != 1:
        return False
    whole, operands = tensor_of(cat), cat.args[0]
    if whole is None or whole.dim() < 2 or symbolic(whole.shape) or not isinstance(operands, Sequence):
        return False
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    each = [tensor_of(node) for node in operands]
    alike = all(t is not None and t.dim() == whole.dim() and t.dtype == whole.dtype and t.shape[1] for t in each)
    return alike and dim in (1, 1 - whole.dim())


def _extends(cat: Node, before: Node) -> bool:
    old = _operands(before)
    return len(_operands(cat)) > len(old) and _operands(cat)[: len(old)] == old
