"""Measure how accurately layers are timed without opening an engine, on any CPU.

    python scripts/attribution.py [--seeds N] [--out FILE]

The script runs engines whose layer times are known: simulated ones (lognormal noise, a drifting clock, disturbed runs, a fused
pair), and the tests' fake engine, which runs as a process behind `cmd:`. It prints and writes the mean relative error of a
layer's time, the share of intervals that contain the true value (for each ratio, and for all ratios together), and how often
a fused pair was detected. The machine must be quiet enough for the fake engine to keep its own times.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

# The simulation is the tests' own: what they hold the method to is what is reported here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.bench.compare.simulated import chain_design, judge, own_ways, runs_of, truth_of
from tests.bench.compare.test_fake_engine import judged, measured
from tilewright.bench.compare.segments import attribute
from tilewright.bench.results import Results

# layers, rounds, noise of a run, drift, share of disturbed runs, fused pair, a byte out over a byte in, error of each program
CASES = [
    (12, 60, 0.02, 0.05, 0.05, None, 1.0, 0.0),
    (12, 60, 0.05, 0.05, 0.05, None, 1.0, 0.0),
    (12, 60, 0.03, 0.05, 0.05, 5, 1.0, 0.0),
    (20, 60, 0.03, 0.05, 0.05, None, 1.0, 0.0),
    (20, 60, 0.03, 0.05, 0.05, 5, 1.0, 0.0),
    (20, 15, 0.03, 0.05, 0.05, None, 1.0, 0.0),
    (20, 60, 0.03, 0.3, 0.05, None, 1.0, 0.0),
    (20, 60, 0.03, 0.05, 0.4, None, 1.0, 0.0),
    (20, 60, 0.03, 0.05, 0.05, None, 2.0, 0.0),
    (20, 60, 0.03, 0.05, 0.05, None, 1.0, 0.01),
    (20, 60, 0.03, 0.05, 0.05, 5, 1.0, 0.01),
    (20, 60, 0.03, 0.05, 0.05, None, 1.0, 0.03),
]


def simulated(case: tuple[int, int, float, float, float, int | None, float, float], seeds: int) -> dict[str, Any]:
    layers, rounds, noise, drift, spikes, fused, uneven, own = case
    design = chain_design(layers)
    found: dict[str, list[np.ndarray]] = {}
    together, pairs, additive, seconds = [], [], [], 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        ours = truth_of(design, rng, speed=1.7, uneven=uneven)
        baseline = replace(ours, layers=ours.layers * 1.7, overhead=2 * ours.overhead, own=own_ways(design, rng, own))
        ours.own = own_ways(design, rng, own)
        if fused is not None:
            baseline.saved = {fused: 0.4 * float(baseline.layers[fused] + baseline.layers[fused + 1])}
        sides = [runs_of(design, t, rng, rounds=rounds, noise=noise, drift=drift, spikes=spikes) for t in (ours, baseline)]
        began = time.perf_counter()
        answer = attribute(*sides, design, 1.5, seed=seed)
        seconds += time.perf_counter() - began
        for name, values in judge(answer, design, ours, baseline).items():
            found.setdefault(name, []).append(values)
        together.append(bool(found["ratio_inside"][-1].all()))
        joined = [segment.layers for segment in answer.segments if len(segment.layers) > 1]
        pairs.append(joined == ([list(design.layers[fused : fused + 2])] if fused is not None else []))
        additive.append(answer.ours.additive and answer.baseline.additive)
    every = {name: np.concatenate(values) for name, values in found.items()}
    return {
        "engine": "simulated", "layers": layers, "rounds": rounds, "noise": noise, "drift": drift, "disturbed": spikes,
        "byte out over byte in": uneven, "each program's own error": own,
        "fused pair": fused is not None, "seeds": seeds, "variants": len(design.parts),
        "mean error": float(every["errors"].mean()), "largest error": float(every["errors"].max()),
        "intervals that hold the truth": float(every["inside"].mean()), "ratios that do": float(every["ratio_inside"].mean()),
        "all ratios at once": float(np.mean(together)), "half width": float(np.median(every["half_widths"])),
        "segments right": float(np.mean(pairs)), "additive": float(np.mean(additive)), "seconds a fit": seconds / seeds,
    }  # fmt: skip


def process(seeds: int) -> dict[str, Any]:
    errors, inside, right = [], [], []
    for seed in range(seeds):
        sides, design = measured(64, 20, seed)
        found = attribute(*sides, design, 1.3, seed=seed)
        off, held = judged(found)
        errors += off
        inside += held
        right.append([segment.layers for segment in found.segments] == [["0"], ["2"], ["3"], ["5", "6"]])
    return {
        "engine": "a process behind cmd:", "layers": 5, "rounds": 64, "noise": 0.03, "drift": 0.03, "disturbed": 0.03,
        "fused pair": True, "seeds": seeds, "mean error": float(np.mean(errors)), "largest error": float(np.max(errors)),
        "intervals that hold the truth": float(np.mean(inside)), "segments right": float(np.mean(right)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2, help="number of runs of the fake engine, a minute each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/attribution.json"))
    options = parser.parse_args()
    results = Results(options.out, "times of layers found without opening an engine, against the known ones")
    for case in CASES:
        row = results.keep([simulated(case, options.seeds)])[-1]
        print({name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
    if options.processes:
        print(results.keep([process(options.processes)])[-1], flush=True)
    results.finish()


if __name__ == "__main__":
    main()
