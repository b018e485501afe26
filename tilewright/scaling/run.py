"""Executes the runs of a plan, one or several at a time. Each run is a command; when it succeeds, `runs.csv` gets a row.

A run that is in the table is not repeated, so a series that was stopped can be continued. Every run has its own folder within
the folder of the series, with its log in `log.txt`; the training command may resume from files there.
"""

import csv
import fcntl
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from tilewright.scaling.plan import Plan, PlannedRun

__all__ = ["COLUMNS", "TABLE", "done", "run_plan"]

TABLE = "runs.csv"
COLUMNS = ("name", "params", "tokens", "flops", "loss", "seconds")
_TAIL_BYTES = 2000


def run_plan(
    plan: Plan,
    folder: Path,
    command: Callable[[PlannedRun, Path], list[str]],
    loss: Callable[[Path], float],
    say: Callable[[str], None],
    jobs: int = 1,
) -> Path:
    """Execute every run of `plan` that has no row in the table of `folder`; returns the path of the table.

    command: (run, its folder) -> the command that trains it. loss: reads the final loss from a run's folder.
    jobs: how many runs are executed at the same time. With several, the largest begin first, so that no large run is left for
    the end.

    Raises:
        ValueError: jobs is below 1, or a run failed or has no loss. For a failed run the message contains the end of its log.
            Results of finished runs are kept, and the other runs are stopped.
        BlockingIOError: another process executes runs in this folder.
        OSError: the folder cannot be written.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, wanted 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / TABLE
    with _alone(folder) as held:
        rows = done(table)
        left = []
        for place, run in enumerate(plan.runs, 1):
            label = f"run {place} of {len(plan.runs)}, {run.name}"
            if run.name in rows:
                say(f"{label}: already done, loss {rows[run.name]:.4f}")
            else:
                left.append((run, label))
        if jobs > 1:
            left.sort(key=lambda pair: -pair[0].flops)
        series = _Series(folder, command, loss, say, held)
        with ThreadPoolExecutor(jobs) as pool, series.stopped_at_the_end():
            made = [pool.submit(series.make, run, label) for run, label in left]
            wait(made, return_when=FIRST_EXCEPTION)
            for one in made:
                if one.done():
                    one.result()
    return table


class _Series:
    """The runs of a folder. Several threads call `make`."""

    def __init__(
        self,
        folder: Path,
        command: Callable[[PlannedRun, Path], list[str]],
        loss: Callable[[Path], float],
        say: Callable[[str], None],
        held: int,
    ):
        self.folder, self.command, self.loss, self.say, self.held = folder, command, loss, say, held
        self.lock = Lock()
        self.ended = False
        self.processes: set[subprocess.Popen[bytes]] = set()

    def make(self, run: PlannedRun, label: str) -> None:
        """Execute one run and add its row to the table."""
        here = self.folder / run.name
        with self.lock:
            if self.ended:
                return
            self.say(f"{label}: {run.params:,} parameters, {run.tokens:,} tokens")
        began = time.monotonic()
        here.mkdir(exist_ok=True)
        if not self._train(self.command(run, here), here / "log.txt", run.name):
            return
        final = self.loss(here)
        if not 0 < final < math.inf:
            raise ValueError(
                f"{run.name} ended with a loss of {final}, which is not finite or not above 0; see {here / 'log.txt'}"
            )
        seconds = time.monotonic() - began
        with self.lock:
            _append(self.folder / TABLE, [run.name, run.params, run.tokens, repr(run.flops), repr(final), f"{seconds:.1f}"])
            self.say(f"{label}: loss {final:.4f} after {seconds:,.0f} s")

    def _train(self, command: list[str], log: Path, name: str) -> bool:
        """Run the training command; False if the series was stopped. Raises ValueError if the command failed."""
        with log.open("ab") as out:
            with self.lock:
                if self.ended:
                    return False
                # The trainer is in the terminal's process group, so Ctrl-C reaches it as well, and it can save its state.
                # It also holds the lock of the folder: if only this process is killed, no other process repeats the run.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, pass_fds=(self.held,)
                )
                self.processes.add(process)
            code = process.wait()
            with self.lock:
                self.processes.remove(process)
                if self.ended:
                    return False
        if code:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
                last = file.read().decode("utf-8", "replace").strip().splitlines()[-3:]
            raise ValueError(f"{name} failed with exit code {code}; the end of {log}: {' / '.join(last) or '(empty)'}")
        return True

    @contextmanager
    def stopped_at_the_end(self) -> Iterator[None]:
        """When the block ends for any reason, running commands are stopped, and no new one starts."""
        try:
            yield
        finally:
            with self.lock:
                self.ended = True
                for process in self.processes:
                    process.terminate()


def done(table: Path) -> dict[str, float]:
    """Name -> loss of the runs in a table. An incomplete last line, left by a crash, is ignored.

    Raises:
        ValueError: the table was not written by this module.
    """
    if not table.exists():
        return {}
    text = table.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    if not whole or tuple(whole[0].split(",")) != COLUMNS:
        raise ValueError(f"{table} does not have the columns {', '.join(COLUMNS)}; use another folder for this series")
    return {row["name"]: float(row["loss"]) for row in csv.DictReader(whole)}


def _append(table: Path, row: list[object]) -> None:
    """Add a row and flush it to disk; an incomplete line at the end is removed first."""
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    kept = text[: text.rfind("\n") + 1] or ",".join(COLUMNS) + "\n"
    new = table.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(kept + ",".join(map(str, row)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(table)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """A lock, so that only one process (and its trainers) executes runs in a folder. Yields the lock's file descriptor.

    The operating system releases the lock when all these processes have ended.
    """
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another process executes runs in {folder}; wait for it, or use another folder") from None
        yield lock.fileno()
