"""Show where the time of the engine's decoding steps goes on a GPU: the kernels of some steps of a workload, and their gaps.

    python scripts/profile_steps.py qwen3-0.6b --out steps.json

All requests of the workload are submitted at once, with random tokens, to an engine with random weights. At the steps given by
`--at`, six steps are profiled. For each place it prints the running rows and the tokens that they hold in the cache after these
steps, and the means per step in milliseconds:

    wall   from the first to the last, by the host's clock, with the profiler's own cost
    span   from the start of the first kernel to the end of the last one
    busy   the time in which any kernel runs

and then the kernels that take longest: milliseconds per step, launches per step, microseconds per launch. `--out` writes the
same as JSON.
"""

import argparse
import json
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.engine import WORKLOADS
from tilewright.bench.provenance import environment
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import load_engine
from tilewright.engine.request import SamplingParams
from tilewright.models import SHAPES

STEPS = 6


def kernels_of(profile: Any) -> tuple[list[tuple[int, int]], Counter[str], Counter[str]]:
    """(begin and end of each kernel, nanoseconds by name, launches by name)"""
    spans, took, count = list[tuple[int, int]](), Counter[str](), Counter[str]()
    for event in profile.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0:
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            took[event.name()] += event.duration_ns()
            count[event.name()] += 1
    return sorted(spans), took, count


def profiled(engine: Any, step: int, most: int) -> dict[str, Any]:
    """The means of some steps, from step number `step` on."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    spans, took, count = kernels_of(profile)
    busy = end = 0
    for first, last in spans:
        busy += max(0, last - max(first, end))
        end = max(end, last)
    rows = engine.scheduler.running
    kernels = [
        {"ms": round(ns / STEPS / 1e6, 4), "launches": round(count[name] / STEPS, 1), "us": round(ns / count[name] / 1e3, 2)}
        | {"name": name}
        for name, ns in took.most_common(most)
    ]
    return {
        "step": step, "rows": len(rows), "tokens": sum(len(row) for row in rows), "wall_ms": round(wall / STEPS * 1e3, 3),
        "span_ms": round((end - spans[0][0]) / STEPS / 1e6, 3), "busy_ms": round(busy / STEPS / 1e6, 3),
        "kernels": kernels,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES), help="the model's shape")
    parser.add_argument("-w", "--workload", choices=tuple(WORKLOADS), default="W1", help="as in `tilewright bench engine`")
    parser.add_argument(
        "--at", type=int, nargs="+", default=[80, 200, 330, 460, 600, 750, 900, 990], help="numbers of the steps"
    )
    parser.add_argument("--most", type=int, default=12, help="kernels to name (default: 12)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    if any(later - step < STEPS for step, later in pairwise(sorted(args.at))):
        parser.error(f"--at must name steps that are at least {STEPS} apart")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    engine = load_engine(SHAPES[args.shape], EngineConfig(max_model_len=4096), print)
    draw = random.Random(5)
    for given, asked in WORKLOADS[args.workload].lengths(draw):
        prompt = [draw.randrange(SHAPES[args.shape].vocab_size) for _ in range(given)]
        engine.submit(prompt, SamplingParams(max_tokens=asked, temperature=0.0, ignore_eos=True), whole=True)
    found, step = list[dict[str, Any]](), 0
    while engine.has_work:
        if step in args.at:
            row = profiled(engine, step, args.most)
            found.append(row)
            numbers = ", ".join(f"{name.removesuffix('_ms')} {row[name]} ms" for name in ("wall_ms", "span_ms", "busy_ms"))
            print(f"step {step}: {row['rows']} rows, {row['tokens']:,} tokens; {numbers}")
            for kernel in row["kernels"]:
                print(f"  {kernel['ms']:8.4f} ms {kernel['launches']:7.1f} x {kernel['us']:8.2f} us {kernel['name'][:90]}")
            if args.out is not None:
                content = {"shape": args.shape, "workload": args.workload, "environment": environment(), "rows": found}
                args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            step += STEPS
        else:
            engine.step()
            step += 1


if __name__ == "__main__":
    main()
