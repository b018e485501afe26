"""`optimize` on the models of zoo_models.py: is it right, what does it take, and how fast is it beside torch.

    python -m tests.fuse.zoo --out cpu.json --batch 1,4
    python -m tests.fuse.zoo --out h200.json --device cuda --batch 1,32 --jobs 8 --minutes 8

A row is written as soon as it is measured, and a second run with the same file makes the rows that are missing. With `--jobs`
several processes prepare their rows side by side, which is compiling for the most part; then they measure one after the other,
while the others wait. `--minutes` stops the preparing in time.

On a CPU: fp32, the operators one by one (`--compiled`: through Inductor, minutes a model), beside eager. On a GPU: fp16 beside
eager, a CUDA graph of eager, and torch.compile with max-autotune and freezing, all of them in fp16 and images channels-last.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from tests.fuse.zoo_models import MODELS, missing
from tests.fuse.zoo_row import Prepared

READY = "ready"
"""What a worker prints when its rows are prepared; it then waits for a line before it measures."""
PREPARING = 0.75
"""Share of `--minutes` after which no further row is begun."""


def main(given: list[str] | None = None) -> int:
    """Make the rows that are missing. Returns the exit code: 1 where a row is wrong."""
    options = _options(given)
    warnings.simplefilter("ignore")
    wanted = _wanted(options)
    stop = time.time() + 60 * options.minutes * PREPARING if options.minutes else None
    if options.worker:
        return _worker(options, wanted, stop)
    for name in dict.fromkeys(name for name, _ in wanted):
        if reason := missing(name):
            print(f"left out: {reason}", flush=True)
    wanted = [(name, batch) for name, batch in wanted if not missing(name)]
    print(f"{len(wanted)} rows to make in {options.out}", flush=True)
    new = _side_by_side(options, wanted) if options.jobs > 1 else _alone(options, wanted, stop)
    for row in new:
        _keep(options.out, row)
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
    parser.add_argument("--minutes", type=float, help="begin no row after three quarters of them")
    parser.add_argument("--compiled", action="store_true", help="on a CPU: through Inductor, as optimize does by itself")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    options.batches = [int(batch) for batch in options.batch.split(",")]
    options.names = options.models.split(",")
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(MODELS)}")
    return options


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def _keep(path: Path, row: dict[str, Any]) -> None:
    rows = sorted([*_rows(path), row], key=lambda r: (list(MODELS).index(r["model"]), r["batch"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def _wanted(options: argparse.Namespace) -> list[tuple[str, int]]:
    """(model, batch) of the rows that the file has not."""
    there = {(row["model"], row["batch"]) for row in _rows(options.out)}
    every = [(name, batch) for batch in options.batches for name in options.names]
    return [one for one in every if one not in there]


def _alone(options: argparse.Namespace, wanted: list[tuple[str, int]], stop: float | None) -> Iterator[dict[str, Any]]:
    """Row by row in this process."""
    for name, batch in wanted:
        if stop is None or time.time() < stop:
            yield Prepared(name, batch, options.device, options.compiled).measure() | {"jobs": 1}


def _side_by_side(options: argparse.Namespace, wanted: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """Workers prepare their rows at the same time, then each measures while the others wait."""
    count = min(options.jobs, len(wanted))
    workers = []
    for at in range(count):
        mine = ",".join(f"{name}@{batch}" for name, batch in wanted[at::count])
        words = [
            sys.executable,
            "-m",
            "tests.fuse.zoo",
            "--worker",
            mine,
            "--out",
            str(options.out),
            "--device",
            options.device,
        ]
        words += ["--minutes", str(options.minutes)] if options.minutes else []
        workers.append(Popen([*words, *["--compiled"] * options.compiled], stdin=PIPE, stdout=PIPE, text=True))
    for worker in workers:
        _until_ready(worker)
    for worker in workers:
        if worker.poll() is None and worker.stdin and worker.stdout:
            worker.stdin.write("go\n")
            worker.stdin.close()
            yield from (json.loads(line) | {"jobs": count} for line in worker.stdout if line.startswith("{"))
        if code := worker.wait():
            print(f"a worker ended with code {code}; its remaining rows are missing", flush=True)


def _until_ready(worker: Popen[str]) -> None:
    """Pass on what it says, until it is ready or has ended."""
    for line in worker.stdout or ():
        if line.strip() == READY:
            return
        print(line, end="", flush=True)


def _worker(options: argparse.Namespace, wanted: list[tuple[str, int]], stop: float | None) -> int:
    pairs = [one.split("@") for one in options.worker.split(",")]
    prepared = []
    for name, batch in pairs:
        if stop is not None and time.time() > stop:
            print(f"{name}@{batch}: not begun, the time is over", flush=True)
            continue
        start = time.perf_counter()
        prepared.append(Prepared(name, int(batch), options.device, options.compiled))
        print(f"{name}@{batch}: prepared in {time.perf_counter() - start:.0f} s", flush=True)
    print(READY, flush=True)
    sys.stdin.readline()
    for one in prepared:
        print(json.dumps(one.measure()), flush=True)
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
