"""Measure how far quick choices of a config are from the best one: the exhaustive study behind docs/regret.md.

    python scripts/regret.py --out data.jsonl --budget-s 360     on a GPU: measure every valid config of every case
    python scripts/regret.py --from data.jsonl --small regret.json  anywhere: the same data, a tenth of the size
    python scripts/regret.py --from regret.json                  anywhere: the tables of docs/regret.md

Measuring. Configs are compiled ahead on all cores, in processes that never touch the GPU, into a cache that the measuring
process reads; the GPU works on the first cases while the rest compiles. The measuring process is replaced when a candidate
kills it or makes it hang. Each result is written at once. When the time budget ends, the results so far are kept. Within a case
configs are measured in a random order with a fixed seed, and every case has its share of the time, so the results are a fair
sample even if the study is cut short.

The first line of the file is the environment. Each other line is one candidate: op, label and dims of the case, impl, config,
status, microseconds and spread, resources, and `off`, the RMS difference to the case's first result relative to its RMS. Where
torch has a kernel for the op, it is the implementation "torch": it is shown for comparison and cannot be chosen.

The regret of a choice is its time divided by the least time of all candidates of that case, minus 1.
"""

import argparse
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import regret_cases as cases

Json = dict[str, Any]

_SILENCE_S = 25.0  # a candidate that says nothing for so long hangs
_START_S = 180.0  # to import torch and start CUDA
_SPILL_BYTES = 1024  # a thread's; a config with more is not worth a measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="measure, and append the results to this file")
    parser.add_argument("--from", dest="data", type=Path, help="print the tables from this data file")
    parser.add_argument("--small", type=Path, help="with --from: write the data to this small file instead of printing tables")
    parser.add_argument(
        "--folds", type=int, default=4, help="with --from: number of parts for the held-out fits; 0: no held-out fits"
    )
    parser.add_argument("--budget-s", type=float, default=360.0, help="wall-clock seconds, including compilation")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="number of processes that compile"
    )
    parser.add_argument("--card", default="h100", help="GPU whose config spaces are measured")
    parser.add_argument("--only", default="", help="only batches whose name begins with this text")
    parser.add_argument("--dry", action="store_true", help="compile only, measure nothing")
    parser.add_argument("--role", choices=["compile", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        import regret_workers
        from triton import knobs

        knobs.cache.dir = str(options.cache)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        with suppress(KeyboardInterrupt):
            (regret_workers.compile_all if options.role == "compile" else regret_workers.measure_jobs)(options)
    elif options.data:
        import regret_store
        import regret_tables

        try:
            if options.small:
                regret_store.write(options.small, regret_store.compact(*regret_store.read(options.data)))
            else:
                regret_tables.show(options.data, options.folds)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--from: {error}") from error
    elif options.out:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            _Study(options, Path(folder)).run()
    else:
        parser.error("give --out to measure, or --from to read")


# ---- the process that leads both


class _Child:
    """A process of this script that speaks in lines of JSON."""

    def __init__(self, options: argparse.Namespace, role: str, cache: Path):
        command = [sys.executable, sys.argv[0], "--role", role, "--cache", str(cache), "--card", options.card]
        command += ["--workers", str(options.workers), "--only", options.only]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.out, self.into = self.process.stdout, self.process.stdin
        self._rest = b""

    def lines(self) -> list[Json] | None:
        """What it said since; None when it is gone. Waits until it says something."""
        read = os.read(self.out.fileno(), 1 << 20)
        if not read:
            return None
        *whole, self._rest = (self._rest + read).split(b"\n")
        return [json.loads(line) for line in whole if line.startswith(b"{")]

    def end(self) -> None:
        self.process.terminate()  # upon which the compiling one ends its workers
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Study:
    """One run: compiles, hands complete batches to the measuring process, writes what comes back."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder, self.began = options, folder, time.monotonic()
        self.until = self.began + options.budget_s - 4
        self.file = options.out.open("a")
        self.candidates: dict[str, int] = {}
        self.tasks: dict[str, int] = {}
        self.entries: dict[str, dict[str, Json]] = {}
        self.ready: list[str] = []
        self.job: list[Json] = []
        self.job_until = 0.0
        self.current: tuple[Json, Json | None] | None = None
        self.heard, self.patience = time.monotonic(), _START_S
        self.idle, self.rows, self.late, self.total = False, 0, 0, 0

    def run(self) -> None:
        compiler = _Child(self.options, "compile", self.folder / "cache")
        self.measurer = None if self.options.dry else _Child(self.options, "measure", self.folder / "cache")
        selector = selectors.DefaultSelector()
        selector.register(compiler.out, selectors.EVENT_READ, compiler)
        self._listen(selector)
        try:
            self._lead(selector, compiler)
        finally:
            for child in (compiler, self.measurer):
                if child is not None:
                    child.end()
        self.file.close()
        late = f"; {self.late} kernels were compiled by the measuring process" if self.late else ""
        self._log(f"{self.rows} of {self.total} candidates in {self.options.out}{late}")

    def _lead(self, selector: selectors.BaseSelector, compiler: _Child) -> None:
        compiling = True
        while time.monotonic() < self.until and (compiling or self.ready or self.job):
            for key, _ in selector.select(timeout=0.5):
                lines = key.data.lines()
                if key.data is compiler:
                    compiling = lines is not None
                    if lines is None:
                        selector.unregister(compiler.out)
                    for line in lines or ():
                        self._compiled(line)
                elif lines is None:
                    self._replace(selector, "crash", f"its process ended with {key.data.process.wait()}")
                else:
                    for line in lines:
                        self._measured(line)
            if self.measurer and time.monotonic() - self.heard > self.patience and not self.idle:
                self._replace(selector, "timeout", f"said nothing for {self.patience:g} s")
            self._send()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        if self.measurer:
            selector.register(self.measurer.out, selectors.EVENT_READ, self.measurer)
            self.heard, self.patience, self.idle = time.monotonic(), _START_S, False

    def _log(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _write(self, row: Json) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def _row(self, case: Json, row: Json) -> None:
        self.rows += 1
        self.late += row.get("compiled", 0)
        self._write({"op": case["op"], "label": cases.label(case), "dims": {k: v for k, v in case.items() if k != "op"}, **row})

    def _compiled(self, line: Json) -> None:
        if "tasks" in line:
            self.candidates, self.tasks = line["candidates"], line["tasks"]
            self.total = sum(self.candidates.values())
            return
        batch, candidate = line["batch"], {"impl": line["impl"], "config": line["config"]}
        by_label = {cases.label(case): case for case in cases.BATCHES[batch]}
        entries = self.entries.setdefault(batch, {})
        for label, found in line["found"].items():
            candidate["default"] = label in line["defaults"]
            if found.get("error") or found.get("spill_bytes", 0) > _SPILL_BYTES:
                status = "timeout" if "took longer" in found.get("error", "") else "compile" if "error" in found else "spills"
                self._row(by_label[label], {**candidate, "resources": found, "status": status})
            else:
                entry = entries.setdefault(label, {"case": by_label[label], "candidates": []})
                entry["candidates"].append({**candidate, "resources": found})
        self.tasks[batch] -= 1
        if not self.tasks[batch]:
            self._log(f"compiled {batch}")
            self.ready += [] if self.options.dry else [batch]

    def _send(self) -> None:
        """Hand the next batch over, with its share of the time, when the last one is done."""
        if self.job or not self.ready or not self.idle:
            return
        left = sum(self.candidates.values())
        batch = self.ready.pop(0)
        self.job = list(self.entries.pop(batch).values())
        for entry in self.job:
            # A library's kernel first: it is the yardstick of `off`. Then the defaults, then the rest in random order.
            entry["candidates"].sort(key=lambda c: json.dumps(c, sort_keys=True))
            random.Random(cases.label(entry["case"])).shuffle(entry["candidates"])
            entry["candidates"].sort(key=lambda c: (c["impl"] != "vendor", not c["default"]))
            if cases.torch_call(entry["case"]["op"]) is not None:
                entry["candidates"].insert(0, {"impl": "torch", "config": {}, "default": True, "resources": {}})
        share = self.candidates.pop(batch) / left
        self.candidates[f"{batch}, sent"] = 0
        self.job_until = time.monotonic() + share * (self.until - time.monotonic())
        self._hand_over()
        self._log(f"measuring {batch}, {self.job_until - time.monotonic():.0f} s at most")

    def _hand_over(self) -> None:
        assert self.measurer
        path = self.folder / f"{time.monotonic_ns()}.json"
        self.heard = time.monotonic()
        path.write_text(json.dumps({"seconds": self.job_until - time.monotonic(), "cases": self.job}))
        self.measurer.into.write(f"{path}\n".encode())
        self.measurer.into.flush()
        self.idle = False

    def _measured(self, line: Json) -> None:
        self.heard, self.patience = time.monotonic(), _SILENCE_S
        if "environment" in line:
            self._write(line)
            self.idle = True
            if self.job:
                self._hand_over()
        elif "begin" in line:
            self.current = (line["begin"][0], line["begin"][1])
        elif "row" in line:
            assert self.current
            self._row(self.current[0], line["row"])
            self._drop(self.current[0], line["row"])
            self.current = None
        else:
            self.job, self.idle, self.current = [], True, None

    def _drop(self, case: Json, candidate: Json | None) -> None:
        """Take one candidate, or without one the whole case, from what is still to do."""
        for entry in self.job:
            if entry["case"] == case:
                entry["candidates"] = [
                    c
                    for c in entry["candidates"]
                    if candidate and (c["impl"], c["config"]) != (candidate["impl"], candidate["config"])
                ]
        self.job = [entry for entry in self.job if entry["candidates"]]

    def _replace(self, selector: selectors.BaseSelector, status: str, error: str) -> None:
        """A new measuring process for what is left of the job; the candidate at which the old one ended is recorded."""
        assert self.measurer
        if self.patience == _START_S:
            raise SystemExit(f"the measuring process does not start: it {error}; wanted a GPU that torch can use")
        self._log(f"{status} at {self.current}: {error}")
        if self.current:
            case, candidate = self.current
            if candidate:
                self._row(case, {**candidate, "status": status, "error": error})
            self._drop(case, candidate)
        selector.unregister(self.measurer.out)
        self.measurer.end()
        self.current = None
        self.measurer = _Child(self.options, "measure", self.folder / "cache")
        self._listen(selector)


if __name__ == "__main__":
    main()
