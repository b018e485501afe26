"""Compare MinHash on a GPU and on the machine's cores: `python scripts/minhash_speed.py [--processes 16]`. Half a minute.

Prints shingles per second of both, with and without the copies to the GPU and back, and whether all results are bit-identical.
`--out FILE` stores them as JSON, with the card, versions, commit and date.
The cores run the package's numpy implementation on the same documents, one process per core.
"""

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tilewright.bench.provenance import environment
from tilewright.data.minhash import parameters, signatures
from tilewright.data.near import band_keys
from tilewright.data.on_gpu import signatures_on
from tilewright.ops import band_keys as band_keys_op
from tilewright.ops import minhash

LENGTH = 1000
PLACES, BANDS = 112, 14


def part(seed: int, documents: int) -> list[np.ndarray]:
    """Documents of about a thousand shingles."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 2**32, draw.integers(1, 2 * LENGTH), dtype=np.uint32) for _ in range(documents)]


def on_a_core(seed: int, documents: int) -> tuple[int, float]:
    """(shingles, seconds) of one process, making them not counted."""
    sets = part(seed, documents)
    begun = time.perf_counter()
    signatures(sets, *parameters(PLACES))
    return sum(map(len, sets)), time.perf_counter() - begun


def seconds(call, times: int = 20) -> float:
    """Of one call on the GPU, the median."""
    call()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return sorted(found)[times // 2]


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--documents", type=int, default=60_000, help="number of documents for the GPU; each core gets 3,000")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(on_a_core, range(given.processes), [50] * given.processes))  # imports
        rows = list(pool.map(on_a_core, range(given.processes), [3000] * given.processes))
    cores = sum(count / took for count, took in rows)
    a, b = parameters(PLACES)
    sets = part(99, given.documents)
    total = sum(map(len, sets))
    flat = torch.from_numpy(np.concatenate(sets).view(np.int32)).cuda()
    ends = torch.from_numpy(np.cumsum([len(s) for s in sets])).cuda()
    factors, summands = (torch.from_numpy(numbers.view(np.int64)).cuda() for numbers in (a, b))
    found = minhash(flat, ends, factors, summands)
    few = sets[:2000]
    equal = np.array_equal(signatures(few, a, b), found[: len(few)].cpu().numpy())
    keys = band_keys_op(found, BANDS).cpu().numpy().view(np.uint64)
    kernel = seconds(lambda: minhash(flat, ends, factors, summands))
    with_copies = seconds(lambda: signatures_on("cuda")(sets, a, b), 5)
    value = {
        "card": torch.cuda.get_device_name(), "cores": given.processes, "shingles": total, "places": PLACES,
        "cores, M shingles/s": cores / 1e6, "GPU, M shingles/s": total / kernel / 1e6,
        "GPU with copies, M shingles/s": total / with_copies / 1e6, "times the cores": total / kernel / cores,
        "times the cores with copies": total / with_copies / cores, "signatures equal": equal,
        "keys equal": bool(np.array_equal(band_keys(found.cpu().numpy(), BANDS), keys)),
    }  # fmt: skip
    rounded = {key: round(x, 2) if isinstance(x, float) else x for key, x in value.items()}
    print(json.dumps(rounded))
    if given.out:
        given.out.write_text(json.dumps({"environment": environment(), "rows": [rounded]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
