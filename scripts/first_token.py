"""Measure the time from the start of a process to the first token of a model with random weights, and count compiled kernels.

    tilewright warmup llama-1b --arch 90 --out bundle
    TRITON_CACHE_DIR=$(mktemp -d) python scripts/first_token.py llama-1b --bundle bundle --requests 500 --out first_token.json

The clock starts when the operating system starts the process. With a bundle the engine is strict: compiling a kernel after the
start is an error. `--requests N` then serves N random requests, some of them with penalties, biases or log-probabilities.
Needs a GPU.
"""

import argparse
import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path


def started_s() -> float:
    """When the system started this process, on the clock of `time.time`."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start an engine, generate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="model shape, such as llama-1b (a name in tilewright.models.SHAPES)")
    parser.add_argument(
        "--bundle", help="bundle written by `tilewright warmup`; default: kernels are compiled, or read from Triton's cache"
    )
    parser.add_argument("--requests", type=int, default=0, help="number of random requests to serve afterwards")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    a = parser.parse_args()
    began_s = started_s()

    from tilewright.asm.jit import CompileCounter

    counter = CompileCounter().start()
    import torch

    from tilewright.bench.engine import any_params
    from tilewright.bench.results import Results
    from tilewright.engine.config import EngineConfig
    from tilewright.engine.llm import load_engine
    from tilewright.engine.request import SamplingParams
    from tilewright.models import SHAPES

    options = EngineConfig(bundle=a.bundle, strict=a.bundle is not None)
    config = replace(SHAPES[a.shape], dtype=torch.bfloat16)
    engine = load_engine(config, options)
    ready_s = time.time() - began_s
    engine.submit(list(range(1, 100)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    first_s = None
    while engine.has_work:
        if any(delta.token_ids for delta in engine.step()) and first_s is None:
            first_s = time.time() - began_s
    assert first_s is not None
    row = {
        "shape": a.shape,
        "bundle": a.bundle is not None,
        "start_to_ready_s": round(ready_s, 2),
        "start_to_first_token_s": round(first_s, 2),
        "kernels": len(counter.compiled),
        "compiled": sum(not event.from_disk for event in counter.compiled),
    }
    rng, failed = random.Random(1), 0
    for _ in range(a.requests):
        prompt = [rng.randrange(config.vocab_size) for _ in range(rng.randint(1, 2048))]
        engine.submit(prompt, any_params(rng, rng.randint(1, 32)))
    while engine.has_work:
        failed += sum(delta.finish_reason == "error" for delta in engine.step())
    row |= {"requests": a.requests, "failed": failed}
    row["compiled_after_requests"] = sum(not event.from_disk for event in counter.compiled)
    print(json.dumps(row))
    results = Results(a.out, "start of a process to the first token")
    results.keep([row])
    results.finish()


if __name__ == "__main__":
    main()
