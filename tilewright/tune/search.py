"""The search for the best config of one problem on the current GPU: `tilewright tune OP dims...`.

    spaces -> certified configs -> the analytical model's order -> the first dozen compiled, in parallel, without the GPU ->
    spills and overflow dropped -> the first 8 measured and checked -> the best 3 measured alternately -> rows of the database

Every measurement is stored as a row at once, so a killed search loses only the measurement in progress, and the next search
continues from there. A problem that was measured is not searched again. If the driver, torch, triton or the kernel has changed
since, its best 3 configs are measured again, and a search follows only if none of them works any more.

Measurements run in another process (`tilewright.tune.measurer`), which a candidate may kill. A serving program uses none of
this: it only looks up rows (`tilewright.tune.lookup`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from tilewright.tune.candidates import Candidate, Key, Task, candidates, order
from tilewright.tune.database import Database
from tilewright.tune.measure import Timing
from tilewright.tune.measurer import Job, MeasureError, Measurer
from tilewright.tune.offline import compile_all
from tilewright.tune.ranking import Entry, Stack, Verdict, ranked, verdict
from tilewright.tune.record import Row, canonical, versions

__all__ = ["Plan", "Report", "planned", "search", "settled"]

_FINALISTS = 3
_SPARE = 4
"""Number of configs that are compiled in addition to those to be measured, because some spill despite their certificates."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The candidates that a search will measure."""

    task: Task
    first: list[Candidate]
    """Measured if they compile as certified: mandatory ones, the model's first, and the best of each implementation."""
    rest: list[Candidate]
    """Replacements, in this order, for those that do not compile."""
    dropped: Counter[str]
    """Reason -> number of configs that are excluded."""


@dataclass(kw_only=True)
class Report:
    """The result of tuning one problem."""

    task: Task
    how: str = "search"
    """"search", "verified again" (the best of earlier versions), or "known" (nothing was measured)."""
    dropped: Counter[str] = field(default_factory=Counter)
    considered: int = 0
    compiled: int = 0
    rows: list[Row] = field(default_factory=list)
    """Rows that this run has written, in order."""
    ranking: list[Entry] = field(default_factory=list)
    """All rows of the problem that count now, best first."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> tuple[Entry, Verdict] | None:
        """The best of another implementation, and how far the winner is ahead of it."""
        return verdict(self.ranking) if self.ranking else None


def planned(task: Task, *, top: int, exhaustive: bool = False) -> Plan:
    """The plan of a search; nothing is measured or compiled here."""
    found, dropped = candidates(task)
    ordered = order(task, found)
    kept = [c for c in ordered if c.kept]
    others = [c for c in ordered if not c.kept]
    # Include the best of every implementation: the record compares implementations, and the model may be wrong about one.
    best = {c.impl.name: c for c in reversed(others)}
    chosen, rest = [], []
    for place, c in enumerate(others):
        (chosen if exhaustive or place < top or best[c.impl.name] is c else rest).append(c)
    return Plan(task=task, first=kept + chosen, rest=rest, dropped=dropped)


def search(
    task: Task,
    database: Database,
    *,
    command: Sequence[str],
    workers: int,
    top: int = 8,
    exhaustive: bool = False,
    force: bool = False,
    limit_s: float = 20.0,
    progress: Callable[[str], None] = lambda words: None,
    compiler: Callable[..., Any] = compile_all,
    measurer: Measurer | None = None,
) -> Report:
    """Find the best config of a problem, and store all measurements.

    Args:
        command: the command that starts a measuring process, see `tilewright.tune.worker`.
        workers: number of processes that compile.
        top: how many configs of the model's order to measure, besides the default, the libraries, and the first of each
            implementation.
        exhaustive: measure every certified config.
        force: search even if the problem was measured before.
        limit_s: seconds for compiling one candidate, and for measuring one.
        compiler: `compile_all`, or a replacement.
        measurer: a running measuring process that is used for several problems; the caller ends it.

    Raises:
        DatabaseError: the database cannot be written; if possible raised before anything is measured.
        MeasureError: no process can measure here.
    """
    began = time.monotonic()
    database.require_room()
    past = _Past(task, database)
    plan = planned(task, top=top, exhaustive=exhaustive)
    report = Report(task=task, dropped=plan.dropped, considered=len(plan.first) + len(plan.rest))
    again = [] if force or exhaustive else past.again(plan)
    if past.compared and not (again or force or exhaustive):
        report.how = "known"
    else:
        with nullcontext(measurer) if measurer else Measurer(command, limit_s=limit_s) as process:
            run = _Run(report, database, process, compiler, workers, limit_s, progress)
            if again and run.measured(again, [], {}):
                report.how = "verified again"
            else:
                run.measured(plan.first, plan.rest, {} if force else past.fresh)
            run.finals()
            report.notes += process.notes
            process.notes.clear()
    report.ranking = past.ranking()
    report.seconds = time.monotonic() - began
    return report


def settled(task: Task, database: Database) -> bool:
    """Whether a search would measure nothing, because with today's versions the best configs were compared already."""
    past = _Past(task, database)
    return past.compared and not past.again(planned(task, top=0))


class _Past:
    """The rows that the database contains for a problem on this card."""

    def __init__(self, task: Task, database: Database):
        now = versions()
        self._task, self._database = task, database
        self._stack = Stack(now["driver"], now["torch"], now["triton"])
        self._where = {"op": task.op.name, "problem": task.problem_text, "card": task.device.name, "invariant": task.invariant}
        self._best = database.stale_best(n=_FINALISTS, **self._where)
        self.fresh: dict[Key, Row] = {
            (row.impl, canonical(dict(row.config))): row for row in database.rows(**self._where) if self._is_fresh(row)
        }
        """Measured with the present driver, torch, triton and sources: not measured again."""

    def _is_fresh(self, row: Row) -> bool:
        return row.stack == self._stack and self._task.sources.get(row.impl) == row.source

    @property
    def compared(self) -> bool:
        """Whether some configs were timed alternately with today's versions."""
        return any(row.verified for row in self.fresh.values())

    def again(self, plan: Plan) -> list[Candidate]:
        """The best three configs that are still candidates; empty if all of them were measured with today's versions."""
        by_key = {c.key: c for c in (*plan.first, *plan.rest)}
        keys = [key for row in self._best if (key := (row.impl, canonical(dict(row.config)))) in by_key]
        return [by_key[key] for key in keys] if any(key not in self.fresh for key in keys) else []

    def ranking(self) -> list[Entry]:
        """All rows of the problem that count, best first."""
        return ranked(self._database.entries(**self._where), self._stack, self._task.sources)


class _Run:
    """One run with a measuring process: compiles and measures candidates, writes rows."""

    def __init__(
        self, report: Report, database: Database, measurer: Measurer, compiler: Callable[..., Any], workers: int,
        limit_s: float, progress: Callable[[str], None],
    ):  # fmt: skip
        self.report, self.task, self.database, self.measurer = report, report.task, database, measurer
        self.compiler, self.workers, self.limit_s, self.progress = compiler, workers, limit_s, progress
        self.job = Job(self.task.op.name, self.task.words, self.task.problem_text)
        self.resources: dict[Key, dict[str, Any]] = {}
        self.times: dict[Key, float] = {}
        self.by_key: dict[Key, Candidate] = {}

    def measured(self, first: list[Candidate], rest: list[Candidate], known: dict[Key, Row]) -> bool:
        """Compile and measure `first`, with `rest` replacing those that do not compile. Returns whether any has a time.

        Candidates in `known` are not measured again.
        """
        for candidate in (*first, *rest):
            self.by_key[candidate.key] = candidate
            row = known.get(candidate.key)
            if row is not None and row.us is not None:
                self.times[candidate.key] = row.us
        queue = [c for c in (*first, *rest) if c.key not in known and c.key not in self.resources]
        wanted = len(first) - len(self.times)
        ready: list[Candidate] = []
        while queue and len(ready) < wanted:
            size = wanted - len(ready) + _SPARE
            ready += self._compiled(queue[:size])
            queue = queue[size:]
        self._measure(ready[:wanted])
        return bool(self.times)

    def _compiled(self, wanted: list[Candidate]) -> list[Candidate]:
        """The candidates that compile without spilling, in the given order. For the others a row is written."""
        ready: list[int] = []
        inputs = [(c.impl, c.config, self.task.args) for c in wanted]
        for done, (place, found) in enumerate(
            self.compiler(inputs, self.task.device, workers=self.workers, limit_s=self.limit_s)
        ):
            self.progress(f"{self.task.op.name}: compiled {done + 1} of {len(wanted)}")
            candidate = wanted[place]
            self.resources[candidate.key] = {} if isinstance(found, str) else dict(found)
            if isinstance(found, str):
                self._keep(candidate, "timeout" if "took longer" in found else "compile", error=found)
            elif found.get("spill_bytes") and not candidate.kept:
                self._keep(candidate, "spills", error=f"{found['spill_bytes']} bytes per thread")
            else:
                ready.append(place)
        self.report.compiled += len(wanted)
        return [wanted[place] for place in sorted(ready)]

    def _measure(self, wanted: list[Candidate]) -> None:
        best = min(self.times.values(), default=None)
        asked = [_spelled(c) for c in wanted]
        self.progress(f"{self.task.op.name}: measuring")
        late = 0
        for done, (place, answer) in enumerate(self.measurer.measure(self.job, asked, best) if asked else ()):
            candidate = wanted[place]
            self._keep(candidate, answer.status, answer.timing, error=answer.error)
            if answer.timing is not None:
                self.times[candidate.key] = answer.timing.us
            late += answer.compiled
            self.progress(f"{self.task.op.name}: measured {done + 1} of {len(wanted)}")
        if late:
            self.report.notes.append(f"the measuring process had to compile {late} kernels that should have been in the cache")

    def finals(self) -> None:
        """Time alternately the best candidates and the best one of every other implementation, to compare implementations."""
        ordered = sorted(self.times, key=lambda key: self.times[key])
        last = ordered[:_FINALISTS]
        for key in ordered:
            if key[0] not in {impl for impl, _ in last}:
                last.append(key)
        if not last:
            return
        self.progress(f"{self.task.op.name}: timing the best {len(last)} in turns")
        finalists = [self.by_key[key] for key in last]
        try:
            times = self.measurer.in_turns(self.job, [_spelled(c) for c in finalists])
        except MeasureError as error:
            self.report.notes.append(f"the best were not compared in turns: {error}")
            return
        rows = [self._row(c, "ok", t, verified=True) for c, t in zip(finalists, times, strict=True)]
        self.database.add_all(rows)
        self.report.rows += rows

    def _keep(self, candidate: Candidate, status: str, timing: Timing | None = None, *, error: str = "") -> None:
        row = self._row(candidate, status, timing, error=error)
        self.database.add(row)
        self.report.rows.append(row)

    def _row(self, candidate: Candidate, status: str, timing: Timing | None, *, error: str = "", verified: bool = False) -> Row:
        predicted = {} if candidate.predicted_us is None else {"predicted_us": round(candidate.predicted_us, 3)}
        return Row(
            op=self.task.op.name,
            problem=self.task.problem_text,
            dims=self.task.plain_dims,
            invariant=self.task.invariant,
            impl=candidate.impl.name,
            config=dict(candidate.config),
            status=status,
            environment=self.measurer.environment(),
            source=self.task.sources[candidate.impl.name],
            us=timing.us if timing else None,
            us_spread=timing.spread if timing else None,
            verified=verified,
            error=error,
            resources={**self.resources.get(candidate.key, {}), **predicted},
        )


def _spelled(candidate: Candidate) -> dict[str, Any]:
    return {"impl": candidate.impl.name, "config": dict(candidate.config)}
