"""The two processes that `regret.py` leads: one compiles and never touches the GPU, one measures and should compile nothing.

Both say what they do in lines of JSON on stdout.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import regret_cases as cases

__all__ = ["compile_all", "measure_jobs"]

Json = dict[str, Any]

_COMPILE_S = 25.0  # for one config, all its variants; what takes longer spills


def _say(value: Json) -> None:
    print(json.dumps(value), flush=True)


# ---- the compiling process


Task = tuple[str, Any, Json, dict[str, tuple[Json, bool]]]
"""Batch, implementation, config; label -> (a case that it is valid for, whether it is the default there)."""


def _tasks(card: str, only: str) -> Iterator[Task]:
    """All there is to compile, batch after batch, each in random order."""
    from tilewright.hw.device import device_named
    from tilewright.ops import ALL

    device, ops = device_named(card), {op.name: op for op in ALL}
    for batch, members in cases.BATCHES.items():
        if not batch.startswith(only):
            continue
        found: dict[str, Task] = {}
        for case in members:
            op = ops[case["op"]]
            problem = op.problem(*cases.arguments(case, "meta"))
            for impl in op.impls:
                if impl.refusal(device, problem) is None:
                    default = dict(impl.space.default(device, problem))
                    # Without axes there is the default and nothing else: `configs` gives the empty combination.
                    others = impl.space.configs(device, problem) if impl.space.axes else ()
                    for config in [default, *(c for c in others if c != default)]:
                        key = json.dumps([impl.name, dict(config)], sort_keys=True)
                        found.setdefault(key, (batch, impl, dict(config), {}))[3][cases.label(case)] = (case, config is default)
        tasks = list(found.values())
        random.Random(batch).shuffle(tasks)
        yield from tasks


def compile_all(options: argparse.Namespace) -> None:
    """Compile every task; say first how many there are of each batch, then what came of each."""
    from tilewright.asm.compile import CompileFailed, record
    from tilewright.asm.facts import facts
    from tilewright.asm.pool import run_limited
    from tilewright.hw.device import device_named

    arch, tasks, known = device_named(options.card).arch, list(_tasks(options.card, options.only)), {}
    counts: dict[str, int] = {}
    for batch, _, _, members in tasks:
        counts[batch] = counts.get(batch, 0) + len(members)
    tasks_of = {batch: sum(task[0] == batch for task in tasks) for batch in counts}
    _say({"candidates": counts, "tasks": tasks_of})

    def work(number: int) -> Json:
        _, impl, config, members = tasks[number]
        found = {}
        for label, (case, _) in members.items():
            try:
                binaries = record(impl, config, cases.arguments(case, "meta"), arch)
            except CompileFailed as error:
                found[label] = {"error": str(error)[:500]}
                continue
            for binary in binaries:
                if binary.key not in known:
                    f = facts(binary)
                    known[binary.key] = {
                        "key": binary.key[:12], "warps": f.warps, "registers": f.registers, "spill_bytes": f.spill_bytes,
                        "shared_bytes": f.shared_bytes, "blocks_per_sm": f.blocks_per_sm, "wgmma": f.wgmma, "mma": f.mma,
                        "wgmma_serialised": f.wgmma_serialised, "tma_loads": f.tma_loads,
                    }  # fmt: skip
            found[label] = known[binaries[0].key] if binaries else {}
        return found

    for outcome in run_limited(work, len(tasks), workers=options.workers, limit_s=_COMPILE_S):
        batch, impl, config, members = tasks[outcome.task]
        found = outcome.value or {label: {"error": outcome.error} for label in members}
        defaults = [label for label, (_, default) in members.items() if default]
        _say({"batch": batch, "impl": impl.name, "config": config, "found": found, "defaults": defaults})


# ---- the measuring process


def measure_jobs(options: argparse.Namespace) -> None:
    """Jobs come as names of files on stdin; a line is said before each candidate and after it."""
    import torch

    from tilewright.asm.jit import CompileCounter
    from tilewright.hw.device import device_of
    from tilewright.tune.measure import POLICY, Stopwatch
    from tilewright.tune.record import versions

    device = device_of(0)
    watch, counter = Stopwatch(), CompileCounter().start()
    _say({"environment": {"card": device.name, "sms": device.sms, "policy": POLICY, **versions()}})
    for line in sys.stdin:
        job = json.loads(Path(line.strip()).read_text())
        until, left = time.monotonic() + job["seconds"], sum(len(entry["candidates"]) for entry in job["cases"])
        for entry in job["cases"]:
            now = time.monotonic()
            share = max(0.0, until - now) * len(entry["candidates"]) / left
            left -= len(entry["candidates"])
            _say({"begin": [entry["case"], None]})
            with torch.inference_mode():
                _measure_case(entry, now + share, watch, counter, device.l2_bytes)
            torch.cuda.empty_cache()
        _say({"done": True})


def _measure_case(entry: Json, until: float, watch: Any, counter: Any, l2_bytes: int) -> None:
    from tilewright.ops import ALL
    from tilewright.tune.measure import sets_for

    case = entry["case"]
    op = next(op for op in ALL if op.name == case["op"])
    first = cases.arguments(case, "cuda")
    sets = sets_for(op.cost(*first).bytes, l2_bytes)
    args = [first, *(cases.arguments(case, "cuda") for _ in range(sets - 1))]
    launchers = {impl.name: impl.launch for impl in op.impls}
    if (call := cases.torch_call(case["op"])) is not None:
        launchers["torch"] = lambda config, *args: call(*args)
    wanted, best = None, float("inf")
    for order, candidate in enumerate(entry["candidates"]):
        # A library's kernel and the defaults are measured however short the time is.
        if time.monotonic() > until and not candidate["default"]:
            return
        _say({"begin": [case, candidate]})
        launch, config, compiled = launchers[candidate["impl"]], candidate["config"], _compiles(counter)
        row = {"order": order, "sets": sets}
        row |= _candidate(lambda i, launch=launch, config=config: launch(config, *args[i]), sets, watch, wanted, best)
        result = row.pop("result", None)
        wanted = result if wanted is None else wanted
        best = min(best, row.get("us", best))
        _say({"row": {**candidate, **row, "compiled": _compiles(counter) - compiled}})
        if row["status"] == "crash":
            os._exit(3)


def _compiles(counter: Any) -> int:
    """Kernels that this process compiled itself; all should come from the cache."""
    return sum(not event.from_disk for event in counter.compiled)


def _candidate(call: Any, sets: int, watch: Any, wanted: Any, best: float) -> Json:
    import torch
    from triton.errors import TritonError

    try:
        result, _ = watch.once(call)
        timing = watch.time(call, sets, hopeless_us=4 * best)
    except (TritonError, RuntimeError, ValueError) as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return {"status": "crash", "error": str(error)[:500]}
        return {"status": "compile", "error": f"{type(error).__name__}: {error}"[:500]}
    off = 0.0 if wanted is None else float((result - wanted).float().norm() / wanted.float().norm())
    row = {"status": "ok", "us": round(timing.us, 3), "us_spread": round(timing.spread, 3), "off": off if off < 1e9 else 1e9}
    return row | {"result": result}
