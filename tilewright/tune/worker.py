"""The measuring process. It measures candidates, any of which may kill it. `tune.measurer` is the leader, which controls it.

They exchange lines of JSON. A job arrives on stdin: an op, its dimensions as words, candidates, and whether to time them one
after the other or alternately ("turns"). This process writes a line before and after each candidate, so that the leader knows
which one killed it:

    {"ready": {"card": ..., "sms": ...}}                 once: it is ready for jobs
    {"begin": 3}   {"end": 3, "status": "ok", "us": 12.4, "us_spread": 0.1, "error": "", "compiled": 0, "alive": true}
    {"turns": [[12.3, 0.1], ...]}                        for a job with "turns", in the order of the candidates
    {"note": "..."}  {"failed": "..."}  {"done": true}

When stdin ends, the leader has ended, and this process exits at once, whatever it is doing. All other output goes to stderr.

A `Ground` contains the ops, their arguments and a stopwatch. `tilewright.bench.measuring` has the one for a GPU. Tests use
another: a few ops on the CPU, and a `Timer` that reads a clock or returns given times.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.errors import TritonError

from tilewright.asm.jit import CompileCounter
from tilewright.tune.measure import Timing, sets_for
from tilewright.tune.record import Environment, problem_json
from tilewright.tune.tolerance import Poisoned, bits, flat, oracle, written, wrong

__all__ = ["Ground", "Timer", "serve"]

Call = Callable[[int], Any]


class Timer(Protocol):
    """Times calls; on a GPU this is `tilewright.tune.measure.Stopwatch`."""

    def once(self, call: Call) -> tuple[Any, float]:
        """(the result of `call(0)`, microseconds)."""
        ...

    def time(self, call: Call, sets: int, *, replays: int = ..., hopeless_us: float = ...) -> Timing:
        """Time `call(i)`, i from 0 to `sets - 1` in turn."""
        ...

    def in_turns(self, calls: Sequence[Call], sets: int, *, rounds: int = ...) -> list[Timing]:
        """Time several calls alternately."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What a measuring process needs: ops, arguments, a timer, and the properties of the machine."""

    op: Callable[[str], Any]
    """Name -> op."""
    arguments: Callable[[Any, Sequence[str], int], tuple[Any, ...]]
    """(op, dimensions as words, seed) -> arguments on the device; ValueError if they are impossible."""
    timer: Timer
    environment: Environment
    l2_bytes: int
    synchronise: Callable[[], None]
    """Wait for the device. Raises RuntimeError if its context is lost."""


def serve(ground: Callable[[], Ground]) -> None:
    """Run jobs until stdin ends.

    Args:
        ground: creates the `Ground`; a ValueError, RuntimeError or OSError is reported to the leader.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(jobs,), daemon=True).start()
    try:
        stands = ground()
    except (RuntimeError, ValueError, OSError) as error:
        say(failed=f"{type(error).__name__}: {error}")
        return
    say(ready=asdict(stands.environment))
    counter = CompileCounter().start()
    while True:
        job = json.loads(jobs.get())
        with torch.inference_mode():
            try:
                _run(job, stands, counter, say)
            except (torch.OutOfMemoryError, ValueError) as error:
                say(failed=f"{type(error).__name__}: {error}"[:1000])
        say(done=True)


def _read(jobs: "SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)  # the leader has ended, and a candidate that hangs must not outlive it


def _run(job: Mapping[str, Any], ground: Ground, counter: CompileCounter, say: Callable[..., None]) -> None:
    bench = _Bench(job, ground, say)
    if job["turns"]:
        bench.restore()
        calls = [bench.call(candidate) for candidate in job["candidates"]]
        say(turns=[list(timing) for timing in ground.timer.in_turns(calls, bench.sets)])
        return
    best = job["best_us"] or float("inf")
    for number, candidate in enumerate(job["candidates"]):
        say(begin=number)
        before = _compiles(counter)
        row = bench.measured(candidate, best)
        best = min(best, row["us"] or best)
        say(end=number, compiled=_compiles(counter) - before, **row)
        if not row["alive"]:
            os._exit(3)


def _compiles(counter: CompileCounter) -> int:
    """The number of kernels that this process compiled itself; all should come from the cache."""
    return sum(not event.from_disk for event in counter.compiled)


def _row(status: str, error: str = "", timing: Timing | None = None, *, alive: bool = True) -> dict[str, Any]:
    us, spread = (timing.us, timing.spread) if timing else (None, None)
    return {"status": status, "error": error[:1000], "us": us, "us_spread": spread, "alive": alive}


class _Bench:
    """One problem, prepared: sets of arguments for timing, the expected result, and copies of what may be overwritten."""

    def __init__(self, job: Mapping[str, Any], ground: Ground, say: Callable[..., None]):
        self.op, self.ground = ground.op(job["op"]), ground
        self.launch = {impl.name: impl for impl in self.op.impls}
        self.written = written(self.op)
        first = ground.arguments(self.op, job["words"], 0)
        if (problem := problem_json(self.op.problem(*first))) != job["problem"]:
            raise ValueError(f"the arguments give the problem {problem}, but the job is for {job['problem']}")
        cost = self.op.cost(*first)
        self.flops = cost.flops
        self.sets = sets_for(cost.bytes, ground.l2_bytes)
        self.args = [first, *(ground.arguments(self.op, job["words"], seed) for seed in range(1, self.sets))]
        self.kept = [[args[i].clone() for i in self.written] for args in self.args]
        if job["turns"]:
            return
        # Arguments that the op declares to write are restored before every run; the others must not change, which is checked.
        self.untouched = {i: a.clone() for i, a in enumerate(first) if isinstance(a, Tensor) and i not in self.written}
        try:
            self.wanted, self.doubt = oracle(self.op, first), 1
        except torch.OutOfMemoryError:
            say(note="the reference does not fit in float64: results are compared with it in the arguments' own dtype")
            self.wanted, self.doubt = oracle(self.op, first, wide=False), 2

    def call(self, candidate: Mapping[str, Any]) -> Call:
        """`i` -> a launch with set i."""
        launch, config, args = self.launch[candidate["impl"]].launch, candidate["config"], self.args
        return lambda i: launch(config, *args[i])

    def restore(self) -> None:
        """Restore the original values of the arguments that the op writes."""
        for args, kept in zip(self.args, self.kept, strict=True):
            for i, value in zip(self.written, kept, strict=True):
                args[i].copy_(value)

    def measured(self, candidate: Mapping[str, Any], best_us: float) -> dict[str, Any]:
        """Check and time a candidate; returns the output line."""
        try:
            if (fault := self._fault(candidate)) is not None:
                return _row("wrong", fault)
            self.restore()
            call = self.call(candidate)
            self.ground.timer.once(call)
            return _row("ok", timing=self.ground.timer.time(call, self.sets, hopeless_us=4 * best_us))
        except (TritonError, RuntimeError, ValueError) as error:
            words = f"{type(error).__name__}: {error}"
            try:
                self.ground.synchronise()
            except RuntimeError:
                return _row("crash", words, alive=False)
            return _row("compile" if isinstance(error, TritonError) else "crash", words)

    def _fault(self, candidate: Mapping[str, Any]) -> str | None:
        """What is wrong with the result of one run, or None."""
        impl, first = self.launch[candidate["impl"]], self.args[0]
        self.restore()
        with Poisoned():
            result = impl.launch(candidate["config"], *first)
        self.ground.synchronise()
        for i, before in self.untouched.items():
            if not torch.equal(bits(first[i]), bits(before)):
                first[i].copy_(before)
                return f"it writes argument {i}, which {self.op.name} does not declare as written"
        got = flat(result) + [first[i] for i in self.written]
        return wrong(self.op, impl, got, self.wanted, self.flops, self.doubt)
