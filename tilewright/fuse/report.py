"""The report of `optimize`: decisions, reasons, savings, and the calls it has served, as text and as JSON."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tilewright.fuse.decisions import Decision, table_of

__all__ = ["LAUNCH", "Report", "Shape"]

LAUNCH = "launch"
"""Key of a node's `meta`: its row in `Report.launches`. Code that removes the node must remove the row."""


class Shape:
    """Calls with inputs of certain shapes: what runs them, and their number.

    Args:
        inputs: as text, `[3, 8] float32`.
        optimised: whether our graph runs them; otherwise the original model does.
        reason: why the original model runs them; or how fast our graph is, if this was measured.
        report: report of the graph that was made for them, for all graphs after the first one; its own decisions.
    """

    def __init__(self, inputs: str, optimised: bool, reason: str, report: "Report | None" = None):
        self.inputs, self.optimised, self.reason, self.report = inputs, optimised, reason, report
        self.calls = 0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one more call, from any thread."""
        with self._lock:
            self.calls += 1

    def as_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        runs = "optimised" if self.optimised else "as given"
        return {"inputs": self.inputs, "runs": runs, "reason": self.reason, "calls": self.calls}


@dataclass(kw_only=True)
class Report:
    """All decisions of one `optimize`, and facts about the result."""

    decisions: list[Decision] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """The decision about every call of the graph (`plan.Plan.to_json`)."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """One for each call of the optimised graph that is not a view, in order: layer, op, and what is fused into it."""
    choices: list[dict[str, Any]] = field(default_factory=list)
    """Measurements for choosing implementations and configs, a row for each distinct problem (choose.py)."""
    tuned: list[dict[str, Any]] = field(default_factory=list)
    """Results of a thorough search, a row for each distinct problem (tuning.py)."""
    provenance: list[dict[str, Any]] = field(default_factory=list)
    """Where the implementations of the other launches come from (tuning.choices)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Precision, device, how inputs and outputs are copied, whether a CUDA graph is replayed, seconds spent."""
    error: dict[str, Any] | None = None
    """Errors of the outputs against the float model (`Check.to_json`), if they were measured."""
    own_shapes: list[Shape] = field(default_factory=list)
    """Shapes of calls, for a model that is one graph; in order of first use."""
    children: dict[str, "Report"] = field(default_factory=dict)
    """For a model that was taken apart: the reports of its children, whose shapes are still being counted."""

    def add(self, anchor: str, kind: str, node: str, taken: bool, reason: str, bytes_saved: int = 0) -> None:
        """Record a decision."""
        saved = bytes_saved if taken else 0
        self.decisions.append(
            Decision(anchor=anchor, kind=kind, node=node, taken=taken, reason=reason, bytes_saved=saved)
        )  # fmt: skip

    def count(self, kind: str, taken: bool = True) -> int:
        """How many decisions of a kind were to fuse, or not to fuse."""
        return sum(d.kind == kind and d.taken == taken for d in self.decisions)

    @property
    def shapes(self) -> list[Shape]:
        """All shapes of calls, of the model or of its optimised children."""
        return self.own_shapes + [shape for found in self.children.values() for shape in found.shapes]

    @property
    def calls(self) -> dict[str, int]:
        """The number of calls that our graphs ran ("optimised"), and that the original model ran ("as given")."""
        counts = [(shape.optimised, shape.calls) for shape in self.shapes]
        return {
            "optimised": sum(calls for ours, calls in counts if ours),
            "as given": sum(calls for ours, calls in counts if not ours),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "facts": self.facts,
            "shapes": [shape.as_dict() for shape in self.own_shapes]
            + [{"child": name, **s.as_dict()} for name, found in self.children.items() for s in found.shapes],
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
        lines += [
            f"torch's own model in that precision, output{row['name']}: RMS error {row['rms']:.2e}"
            for row in (self.error or {}).get("native", ())
        ]
        lines += self._shape_lines()
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

    def _shape_lines(self) -> list[str]:
        each = [("", shape) for shape in self.own_shapes]
        each += [(f"{name}: ", shape) for name, found in self.children.items() for shape in found.shapes]
        return [
            f"inputs {name}{s.inputs}: {_runs(s)}{f' ({s.reason})' if s.reason else ''}, {s.calls} calls" for name, s in each
        ]

    def __str__(self) -> str:
        return self.text()


def _runs(shape: Shape) -> str:
    return "optimised" if shape.optimised else "the model as given runs"
