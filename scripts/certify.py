"""Rewrite the certificates of the named operators, or of all: `python scripts/certify.py [op ...] [--jobs N]`. Needs no GPU.

Each result that got worse is printed; committing the files accepts it. All operators take a few minutes on two cores. Sources
that did not change are read from Triton's disk cache and not compiled again.

    --jobs N          number of processes; default: the number of cores
    --out FOLDER      write the certificates to FOLDER instead, and print what is worse there than in the repository
    --cases           compile only the examples, not the config spaces
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tilewright.asm.certificate import FOLDER, load, save
from tilewright.asm.certify import certify
from tilewright.asm.regressions import regressions
from tilewright.op import Inputs
from tilewright.ops import ALL

SHOWN = 40


def main() -> None:
    """Certify the named ops, or all; then remove the files of ops that are gone."""
    known = {op.name for op in ALL}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op", help=", ".join(sorted(known)))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--cases", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.ops) - known:
        parser.error(f"no op called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    given.out.mkdir(parents=True, exist_ok=True)
    for op in ALL:
        if given.ops and op.name not in given.ops:
            continue
        start = time.perf_counter()
        new = certify(op, Inputs, workers=given.jobs, keep=lambda place, key: not given.cases)
        worse = regressions(load(op.name), new) if (FOLDER / f"{op.name}.json").exists() else []
        save(new, given.out)
        configs = sum(len(rows) for rows in new["configs"].values())
        told = [finding for finding in worse if not finding.endswith(": is not certified")]
        print(f"{op.name}: {len(new['cases'])} cases, {configs} configs, {time.perf_counter() - start:.1f} s")
        print(*(f"  {finding}" for finding in told[:SHOWN]), sep="\n", end="\n" if told else "")
        for count, words in ((len(told) - SHOWN, "more findings"), (len(worse) - len(told), "were not certified before")):
            if count > 0:
                print(f"  {count} {words}")
        sys.stdout.flush()
    for path in given.out.glob("*.json"):
        if path.stem not in known:
            path.unlink()
            print(f"{path.stem}: removed, there is no such op")


if __name__ == "__main__":
    main()
