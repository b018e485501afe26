"""The decisions of a fusion pass, as records. `optimize` and the torch.compile backend share them.

A decision is about one node and one anchor: whether the node was fused into the anchor's launch, and why.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Decision", "table_of", "totals"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One possible fusion, and whether it was done."""

    anchor: str
    """The layer of the launch, with the user's name (`layer1.0.conv1`). If it has none: the name of the anchor's node."""
    kind: str
    """The operation to fuse: anchor (the launch itself), bias, activation, residual, norm, layout, cast, quantise ..."""
    node: str
    """The name of the node to fuse."""
    taken: bool
    reason: str
    """A sentence that states what was done, or why it was not done."""
    bytes_saved: int = 0
    """Number of bytes that the fusion avoids writing and reading again; 0 if not fused."""

    def to_json(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)


def totals(decisions: Sequence[Decision]) -> dict[str, int]:
    """The totals over all decisions: taken, refused, bytes_saved."""
    taken = sum(d.taken for d in decisions)
    return {"taken": taken, "refused": len(decisions) - taken, "bytes_saved": sum(d.bytes_saved for d in decisions)}


def table_of(decisions: Sequence[Decision]) -> str:
    """The decisions as text, by anchor, with one line each. Refused ones of the same kind with the same reason share a line."""
    rows: dict[tuple[Any, ...], list[Decision]] = {}
    for d in decisions:
        rows.setdefault((d.anchor if d.taken else None, d.kind, d.taken, d.reason), []).append(d)
    names = {key: _names(list(dict.fromkeys(d.anchor for d in same))) for key, same in rows.items()}
    width = max(map(len, names.values()), default=0)
    lines = []
    for key, same in rows.items():
        _, kind, taken, reason = key
        times = f" x{len(same)}" if len(same) > 1 else ""
        saved = sum(d.bytes_saved for d in same)
        bytes_saved = f", {saved:,} B saved" if saved else ""
        lines.append(f"{'+' if taken else '-'} {names[key]:<{width}}  {kind:<10} {reason}{times}{bytes_saved}")
    all_of = totals(decisions)
    lines.append(f"{all_of['taken']} taken, {all_of['refused']} refused, {all_of['bytes_saved']:,} bytes saved a call")
    return "\n".join(lines)


def _names(anchors: Sequence[str]) -> str:
    return anchors[0] if len(anchors) == 1 else f"{anchors[0]} and {len(anchors) - 1} more"
