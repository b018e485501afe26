"""Rewrite the certificates of every op, or of those named: `python scripts/certify.py [op ...]`. Needs no GPU.

What got worse is printed as it is written down: committing the file accepts it.
"""

import sys
import time

from tilewright.asm.certificate import FOLDER, certify, load, regressions, save
from tilewright.op import Inputs
from tilewright.ops import ALL


def main(names: list[str]) -> None:
    """Certify the named ops, or all; then remove the files of ops that are gone."""
    known = {op.name for op in ALL}
    if unknown := set(names) - known:
        sys.exit(f"certify: no op called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    for op in ALL:
        if names and op.name not in names:
            continue
        start = time.perf_counter()
        new = certify(op, Inputs)
        worse = regressions(load(op.name), new) if (FOLDER / f"{op.name}.json").exists() else []
        save(new)
        print(f"{op.name}: {len(new['cases'])} cases, {time.perf_counter() - start:.1f} s", *worse, sep="\n  ", flush=True)
    for path in FOLDER.glob("*.json"):
        if path.stem not in known:
            path.unlink()
            print(f"{path.stem}: removed, there is no such op")


if __name__ == "__main__":
    main(sys.argv[1:])
