"""`optimize` on the models of zoo_models.py: is it right, what does it take, and how fast is it beside torch.

    python -m tests.fuse.zoo --out cpu.json --batch 1,4
    python -m tests.fuse.zoo --out h200.json --device cuda --batch 1,32 --jobs 8 --minutes 9

A row is written as soon as it is measured, and a second run with the same file makes the rows that are missing. With `--jobs`
several processes prepare their rows side by side, which is compiling for the most part; what they time while they compile they
time alone (zoo_alone.py). Rows are measured one after another when all are prepared. `--minutes` bounds the whole run: a row
whose torch.compile takes longer is measured without it, and one that is not prepared is left to the next run.

On a CPU: fp32, the operators one by one (`--compiled`: through Inductor, minutes a model), beside eager. On a GPU: fp16 beside
eager, a CUDA graph of eager, and torch.compile with max-autotune and freezing, all of them in fp16 and images channels-last.
With `--no-search` torch.compile runs without max-autotune, with freezing and in a CUDA graph all the same: for models whose
search does not end in the time. The rows say so.
"""

import argparse
import json
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuse.zoo_alone import measure_alone
from tests.fuse.zoo_models import MODELS, missing
from tests.fuse.zoo_row import Prepared
from tilewright.bench.provenance import environment

_MEASURING_S = 5.0
"""What measuring a prepared row takes."""
_GRACE_S = 15.0
"""How long after the end of its time a process may take to give torch.compile up."""


def main(given: list[str] | None = None) -> int:
    """Make the rows that are missing. Returns the exit code: 1 where a row is wrong."""
    options = _options(given)
    warnings.simplefilter("ignore")
    wanted = _wanted(options)
    if options.worker:
        return _worker(options)
    for name in dict.fromkeys(name for name, _ in wanted):
        if reason := missing(name):
            print(f"left out: {reason}", flush=True)
    wanted = [(name, batch) for name, batch in wanted if not missing(name)]
    print(f"{len(wanted)} rows to make in {options.out}", flush=True)
    new = _side_by_side(options, wanted) if options.jobs > 1 else _one_by_one(options, wanted)
    typed = ["python", "-m", "tests.fuse.zoo", *(given or sys.argv[1:])]
    run = environment(card=options.device == "cuda") | {"command": shlex.join(typed)}
    for row in new:
        _keep(options.out, row, run)
        print(said(row), flush=True)
    rows = _rows(options.out)
    left = len(_wanted(options))
    print(f"{len(rows)} rows in {options.out}" + (f", {left} not made yet: run the same command again" if left else ""))
    return int(
        any(row.get(key, "").startswith(("wrong", "raised", "as given")) for row in rows for key in ("right", "other_batch"))
    )


def _options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuse.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON; its rows are kept")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", default="1", help="comma-separated")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes that prepare side by side")
    parser.add_argument("--minutes", type=float, help="with --jobs: the whole run takes no longer")
    parser.add_argument("--compiled", action="store_true", help="on a CPU: through Inductor, as optimize does by itself")
    parser.add_argument("--no-search", action="store_true", help="torch.compile runs without max-autotune")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--over", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.batches = [int(batch) for batch in options.batch.split(",")]
    options.names = options.models.split(",")
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(MODELS)}")
    return options


def _rows(path: Path) -> list[dict[str, Any]]:
    return _read(path)["rows"]


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "rows": []}


def _keep(path: Path, row: dict[str, Any], run: dict[str, Any]) -> None:
    """Add a row, and the run that made it: code, card, versions, date, command."""
    kept = _read(path)
    if run not in kept["runs"]:
        kept["runs"].append(run)
    row |= {"run": kept["runs"].index(run)}
    kept["rows"] = sorted([*kept["rows"], row], key=lambda r: (list(MODELS).index(r["model"]), r["batch"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def _wanted(options: argparse.Namespace) -> list[tuple[str, int]]:
    """(model, batch) of the rows that the file has not."""
    there = {(row["model"], row["batch"]) for row in _rows(options.out)}
    every = [(name, batch) for batch in options.batches for name in options.names]
    return [one for one in every if one not in there]


def _one_by_one(options: argparse.Namespace, wanted: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Row by row in this process."""
    for name, batch in wanted:
        yield Prepared(name, batch, options.device, options.compiled, search=not options.no_search).measure() | {"jobs": 1}


def _side_by_side(options: argparse.Namespace, wanted: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """A process for each row: `--jobs` of them prepare at a time, then each measures while the others wait."""
    over = time.time() + 60 * options.minutes - _MEASURING_S * len(wanted) if options.minutes else None
    with TemporaryDirectory() as folder:
        rows = [_Row(pair, options, over, Path(folder)) for pair in wanted]
        waiting, prepared, preparing = list(rows), [], []
        while waiting or preparing:
            if over and time.time() > over + _GRACE_S:
                break
            while waiting and len(preparing) < options.jobs and not (over and time.time() > over):
                preparing.append(waiting.pop(0).begin())
            for row in [row for row in preparing if row.ended_preparing()]:
                preparing.remove(row)
                prepared.append(row)
            if not preparing:
                break
            time.sleep(0.2)
        for row in [*preparing, *waiting]:
            row.drop()
        for row in prepared:
            yield from row.measured(options.jobs)


class _Row:
    """A row in a process of its own. What that prints goes to a file, whose end is shown where it fails."""

    def __init__(self, pair: tuple[str, int], options: argparse.Namespace, over: float | None, folder: Path):
        self.name = "@".join(map(str, pair))
        self.log, self.ready = folder / f"{self.name}.log", folder / f"{self.name}.ready"
        self.words = [sys.executable, "-m", "tests.fuse.zoo", "--worker", self.name, "--out", str(options.out)]
        self.words += ["--device", options.device, "--folder", str(folder)]
        self.words += ["--no-search"] * options.no_search
        self.words += ["--compiled"] * options.compiled + (["--over", str(over)] if over else [])
        self.process: Popen[str] | None = None

    def begin(self) -> "_Row":
        """Start preparing."""
        with self.log.open("w") as log:
            self.process = Popen(self.words, stdin=PIPE, stdout=PIPE, stderr=log, text=True)
        return self

    def ended_preparing(self) -> bool:
        """Whether it waits to measure, or has ended."""
        return self.ready.exists() or (self.process is not None and self.process.poll() is not None)

    def drop(self) -> None:
        """Give the row up."""
        print(f"{self.name}: not prepared in time", flush=True)
        if self.process:
            self.process.kill()

    def measured(self, jobs: int) -> Iterator[dict[str, Any]]:
        """The row, if the process gives one."""
        process = self.process
        if process and process.poll() is None and process.stdin and process.stdout:
            process.stdin.write("go\n")
            process.stdin.close()
            yield from (json.loads(line) | {"jobs": jobs} for line in process.stdout if line.startswith("{"))
        if process and (code := process.wait()):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            named = [line for line in lines if "Error" in line][-3:]  # advice on debugging stands behind it
            print(f"{self.name}: its process ended with code {code}: {' | '.join([*named, *lines[-3:]])}", flush=True)


def _worker(options: argparse.Namespace) -> int:
    name, batch = options.worker.split("@")
    measure_alone(options.folder / "measuring")
    row = Prepared(name, int(batch), options.device, options.compiled, options.over, not options.no_search)
    (options.folder / f"{options.worker}.ready").touch()
    sys.stdin.readline()
    print(json.dumps(row.measure()), flush=True)
    return 0


def said(row: dict[str, Any]) -> str:
    """A row in a line."""
    us = row.get("us", {})
    numbers = ", ".join(f"{name} {value / 1e3:.2f} ms" for name, value in us.items())
    share = (
        ""
        if row.get("flops_ours") is None
        else f", {row['flops_ours']:.0%} of FLOPs, {row['launches_ours']} of {row['launches']} launches"
    )
    return f"{row['model']}@{row['batch']}: {row['right']}, other batch: {row.get('other_batch', '-')}{share}; {numbers}"


if __name__ == "__main__":
    sys.exit(main())
