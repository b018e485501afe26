"""What a fusion pass decided, fusion by fusion: the record that `optimize` and the torch.compile backend both keep.

A decision is about one node beside one anchor: it was pulled into the anchor's launch, or it was not, and why.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Decision", "table_of", "totals"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One fusion, taken or refused."""

    anchor: str
    """The layer whose launch it is about, by the user's name (`layer1.0.conv1`), else by its node's."""
    kind: str
    """What would be pulled in: anchor (the launch itself), bias, activation, residual, norm, layout, cast, quantise ..."""
    node: str
    """Name of the node that the decision is about."""
    taken: bool
    reason: str
    """A sentence: why it was refused, or what was done."""
    bytes_saved: int = 0
    """Bytes that need not be written and read again; 0 where refused."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def totals(decisions: Sequence[Decision]) -> dict[str, int]:
    """taken, refused, bytes_saved over all decisions."""
    taken = sum(d.taken for d in decisions)
    return {"taken": taken, "refused": len(decisions) - taken, "bytes_saved": sum(d.bytes_saved for d in decisions)}


def table_of(decisions: Sequence[Decision]) -> str:
    """A line a decision, anchors in order; equal refusals of one anchor once, with their number."""
    lines = []
    counts = Counter((d.anchor, d.kind, d.taken, d.reason) for d in decisions)
    seen = set()
    width = max((len(d.anchor) for d in decisions), default=0)
    for d in decisions:
        key = (d.anchor, d.kind, d.taken, d.reason)
        if key in seen:
            continue
        seen.add(key)
        times = f" x{counts[key]}" if counts[key] > 1 else ""
        saved = f", {sum(o.bytes_saved for o in decisions if (o.anchor, o.kind, o.taken, o.reason) == key):,} B saved"
        mark = "+" if d.taken else "-"
        lines.append(f"{mark} {d.anchor:<{width}}  {d.kind:<10} {d.reason}{times}{saved if d.bytes_saved else ''}")
    all_of = totals(decisions)
    lines.append(f"{all_of['taken']} taken, {all_of['refused']} refused, {all_of['bytes_saved']:,} bytes saved a call")
    return "\n".join(lines)
