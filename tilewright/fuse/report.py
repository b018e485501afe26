"""What `optimize` decided, why, and what it saved: as text and as JSON."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tilewright.fuse.decisions import Decision, table_of

__all__ = ["LAUNCH", "Report"]

LAUNCH = "launch"
"""Key of a node's `meta`: the row of `Report.launches` that says it. Whoever takes the node out takes that out."""


@dataclass(kw_only=True)
class Report:
    """All decisions of one `optimize`, and facts about the result."""

    decisions: list[Decision] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """What became of every call of the graph (`plan.Plan.to_json`)."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """One for each call of the optimised graph that is no view, in order: layer, op, what is inside of it."""
    choices: list[dict[str, Any]] = field(default_factory=list)
    """What was measured to choose implementations and configs, a row for each distinct problem (choose.py)."""
    tuned: list[dict[str, Any]] = field(default_factory=list)
    """What a thorough search found, a row for each distinct problem (tuning.py)."""
    provenance: list[dict[str, Any]] = field(default_factory=list)
    """What says which implementation the other launches take (tuning.choices)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Precision, device, how inputs and outputs are copied, whether a CUDA graph is replayed, seconds spent."""
    error: dict[str, Any] | None = None
    """The distance of the outputs to those of the float model (`Check.to_json`), where it was measured."""

    def add(self, anchor: str, kind: str, node: str, taken: bool, reason: str, bytes_saved: int = 0) -> None:
        """Note a decision."""
        saved = bytes_saved if taken else 0
        self.decisions.append(
            Decision(anchor=anchor, kind=kind, node=node, taken=taken, reason=reason, bytes_saved=saved)
        )  # fmt: skip

    def count(self, kind: str, taken: bool = True) -> int:
        """How many decisions of a kind were taken, or refused."""
        return sum(d.kind == kind and d.taken == taken for d in self.decisions)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "facts": self.facts,
            "error": self.error,
            "bytes_saved": sum(d.bytes_saved for d in self.decisions),
            "decisions": [d.to_json() for d in self.decisions],
            "plan": self.plan,
            "launches": self.launches,
            "choices": self.choices,
            "tuned": self.tuned,
            "provenance": self.provenance,
        }

    def json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def text(self) -> str:
        """For a terminal: facts, the error, every fusion by layer, the calls."""
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += [
            f"output{row['name']}: RMS error {row['rms']:.2e}, largest {row['largest']:.2e}, of the float model's RMS"
            for row in (self.error or {}).get("outputs", ())
        ]
        kinds = Counter(d.kind for d in self.decisions if d.taken)
        lines += ["", "taken: " + (", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "nothing")]
        lines += [table_of(self.decisions), "", f"{len(self.launches)} calls:"]
        lines += [f"  {c['layer']:32s} {c['op']:12s} {c['what']}" for c in self.launches]
        if self.choices:
            lines += ["", "measured, microseconds:"]
        for row in self.choices:
            times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
            lines.append(f"  {row['times']} x {row['op']}: {row['taken']} ({times})")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()
