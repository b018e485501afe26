"""The report of `optimize`: decisions, reasons, savings, and the number of calls, as text and as JSON."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tilewright.fuse.decisions import Decision, table_of

__all__ = ["LAUNCH", "Report", "Shape"]

LAUNCH = "launch"
"""Key in a node's `meta`: the node's row in `Report.launches`. Code that removes the node must also remove the row."""


class Shape:
    """Calls with one combination of input shapes: how they are run, and their number.

    Args:
        inputs: the inputs as text, such as `[3, 8] float32`.
        optimised: whether our graph runs these calls; otherwise the original model does.
        reason: why the original model runs them, or how fast our graph is, if this was measured.
        report: the report of the graph that was made for them, with its own decisions; None for the first graph of a model,
            and if there is no graph.
    """

    def __init__(self, inputs: str, optimised: bool, reason: str, report: "Report | None" = None):
        self.inputs, self.optimised, self.reason, self.report = inputs, optimised, reason, report
        self.calls = 0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count one more call. Threads may call this at the same time."""
        with self._lock:
            self.calls += 1

    def as_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        runs = "optimised" if self.optimised else "as given"
        return {"inputs": self.inputs, "runs": runs, "reason": self.reason, "calls": self.calls}


@dataclass(kw_only=True)
class Report:
    """All decisions of one call of `optimize`, and facts about the result."""

    decisions: list[Decision] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    """The decision about every call of the graph (`plan.Plan.to_json`)."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """One row for each call of the optimised graph that is not a view, in order: layer, op, and the fused operations."""
    choices: list[dict[str, Any]] = field(default_factory=list)
    """Measurements that decided between implementations and configs, one row for each distinct problem (choose.py)."""
    tuned: list[dict[str, Any]] = field(default_factory=list)
    """Results of a thorough search, one row for each distinct problem (tuning.py)."""
    provenance: list[dict[str, Any]] = field(default_factory=list)
    """How the implementations of the other launches were chosen (tuning.choices)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Precision, device, how inputs and outputs are copied, whether a CUDA graph is replayed, seconds spent."""
    error: dict[str, Any] | None = None
    """Errors of the outputs against the float model (`Check.to_json`), if they were measured."""
    own_shapes: list[Shape] = field(default_factory=list)
    """For a model that was optimised as a whole: the shapes of its calls, in order of first use."""
    children: dict[str, "Report"] = field(default_factory=dict)
    """For a model whose children were optimised: their reports, which continue to count calls."""

    def add(self, anchor: str, kind: str, node: str, taken: bool, reason: str, bytes_saved: int = 0) -> None:
        """Record a decision."""
        saved = bytes_saved if taken else 0
        self.decisions.append(
            Decision(anchor=anchor, kind=kind, node=node, taken=taken, reason=reason, bytes_saved=saved)
        )  # fmt: skip

    def count(self, kind: str, taken: bool = True) -> int:
        """The number of decisions of a kind in favour of a fusion, or against it with taken=False."""
        return sum(d.kind == kind and d.taken == taken for d in self.decisions)

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all calls, of the model or of its optimised children."""
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
        """The whole report as values for JSON."""
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
        """The whole report as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def text(self) -> str:
        """The report as text for a terminal: facts, the error, every fusion by layer, the calls."""
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        lines += [
            f"output{row['name']}: RMS error {row['rms']:.2e}, largest error {row['largest']:.2e}, relative to the float model"
            for row in (self.error or {}).get("outputs", ())
        ]
        lines += [
            f"torch's own model in the same precision, output{row['name']}: RMS error {row['rms']:.2e}"
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
    return "optimised" if shape.optimised else "the original model runs"
