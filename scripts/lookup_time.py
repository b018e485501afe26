"""What a choice costs a running program: `python scripts/lookup_time.py`, on any machine.

A process of its own, with a frozen table of 500 problems and a database of 4,500 rows of an H100 that need not be there:

    first     the first choice of the process: both places are opened, versions asked, sources hashed
    exact     a new problem with a row of its own
    bucket    a new problem with a row nearby
    default   a new problem without either: the analytical model is asked, where the op lets it choose (linear does)
    repeated  a problem that the process has chosen for: what `Op.run` adds to the summary of the arguments and the launch
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewright.hw.device import Device
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import Problem
from tilewright.op import Scope
from tilewright.tune import lookup
from tilewright.tune.database import Database
from tilewright.tune.frozen import freeze, write_table
from tilewright.tune.record import Environment, Row, now, problem_json, versions
from tilewright.tune.source import source_hash

H100 = Device(
    kind="cuda", name="NVIDIA H100 80GB HBM3", arch=90, sms=132, smem_bytes=232448, l2_bytes=50 << 20, memory_bytes=80 << 30
)


def problem(m: int, n: int, k: int) -> Problem:
    return Problem(torch.bfloat16, m, n, k, "none", False, False, False, "k", "k", True, True)


MEASURED = [problem(m, 512 * n, 512 * k) for m in (1, 16, 64, 256, 4096) for n in range(1, 11) for k in range(1, 11)]


def rows() -> list[Row]:
    environment = Environment(card=H100.name, sms=H100.sms, clocks="", policy="", **versions())
    found = []
    for place in MEASURED:
        text = problem_json(place)
        for impl in linear_op.impls:
            if impl.refusal(H100, place) is None:
                configs = [dict(config) for _, config in zip(range(3), impl.space.configs(H100, place))]
                found += [
                    Row(
                        op="linear", problem=text, dims={"M": place.m_bucket}, invariant=False, impl=impl.name, config=config,
                        status="ok", us=10.0 + i, us_spread=0.1, environment=environment,
                        source=source_hash(impl.launch.__module__), date=now(),
                    )
                    for i, config in enumerate(configs)
                ]  # fmt: skip
    return found


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lookup.TABLES, path = Path(folder), Path(folder) / "tune.sqlite"
        lookup.database_path = lambda: path
        with Database(path) as database:
            count = database.add_all(rows())
            write_table(lookup.TABLES / "h100.json", freeze(database.entries()))
        versions.cache_clear()
        source_hash.cache_clear()
        new = {
            "exact": MEASURED[1::10],
            "bucket": [p._replace(n=p.n + 64) for p in MEASURED[1::10]],
            "default": [p._replace(dtype=torch.float16) for p in MEASURED[1::10]],
        }
        times = {"rows": float(count), "first_ms": 1e3 * seconds(lambda: linear_op.choose(H100, MEASURED[0]))}
        linear_op.choose(H100, MEASURED[0]._replace(k=7))  # sorts the neighbours, once
        for source, problems in new.items():
            sources = {linear_op.choose(H100, p).source for p in problems}
            assert sources <= ({"default", "model"} if source == "default" else {source}), sources
            times[f"{source}_ms"] = 1e3 * statistics.median(seconds(lambda p=p: linear_op.choose(H100, p)) for p in problems)
    choices = {(p, 0, Scope()): p for p in MEASURED}
    key = (MEASURED[250], 0, Scope())
    times["repeated_us"] = 1e6 * min(seconds(lambda: [choices.get(key) for _ in range(1000)]) for _ in range(50)) / 1000
    print(json.dumps({name: round(value, 3) for name, value in times.items()}))


if __name__ == "__main__":
    main()
