"""Compare the host time of a decode step in this checkout and in another one, alternating in one process.

    git worktree add ../before COMMIT
    python scripts/engine_host_turns.py ../before --running 512

Both engines decode a few steps in turn, so that other load on the machine affects both equally. The table shows microseconds of
processor time for each part, counted as in `tilewright bench engine-host`. "least" is the smallest of the turns' medians, which
other programs disturb least. Both engines are measured by the harness of this checkout.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tilewright
import tilewright.bench.engine_host  # all that the engines share is loaded now

HERE = Path(__file__).resolve().parents[1]


def harness(folder: Path) -> Any:
    """The module `tilewright.bench.engine_host` of this checkout over the `tilewright.engine` of another one. What the engine
    imports of the rest of the package is this checkout's: operators can be registered once in a process."""
    if not (folder / "tilewright/engine").is_dir():
        raise SystemExit(f"{folder} has no tilewright/engine; give the root of a checkout")
    aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("tilewright.engine")}
    paths = tilewright.__path__
    tilewright.__path__ = [str(folder.resolve() / "tilewright"), *paths]
    try:
        spec = importlib.util.spec_from_file_location("engine_host_beside", HERE / "tilewright/bench/engine_host.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        tilewright.__path__ = paths
        for name in [name for name in sys.modules if name.startswith("tilewright.engine")]:
            del sys.modules[name]
        sys.modules.update(aside)
        if "tilewright.engine" in aside:
            setattr(tilewright, "engine", aside["tilewright.engine"])  # noqa: B010 (no name that a type checker knows)


def measured(folders: list[Path], *, turns: int, steps: int, **options: Any) -> list[dict[str, Any]]:
    """A row for each folder: median, p99 and the least of the turns' medians, in microseconds. `options`: of `HostSteps`."""
    engines = [harness(folder).HostSteps(steps=turns * steps, **options) for folder in folders]
    found: list[list[list[dict[str, float]]]] = [[] for _ in folders]
    for turn in range(turns):
        for i in range(len(engines)) if turn % 2 else reversed(range(len(engines))):
            found[i].append(engines[i].measure(steps))
    rows = []
    for folder, of_turns in zip(folders, found):
        every = [row for turn in of_turns for row in turn]
        row: dict[str, Any] = {"checkout": str(folder)}
        for part in every[0]:
            row[part] = {
                "median": round(1e6 * statistics.median(step[part] for step in every), 1),
                "p99": round(1e6 * float(np.quantile([step[part] for step in every], 0.99)), 1),
                "least": round(1e6 * min(statistics.median(step[part] for step in turn) for turn in of_turns), 1),
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="+", help="root folders of the other checkouts")
    parser.add_argument("--running", type=int, default=512, help="number of requests that decode at once")
    parser.add_argument("--context", type=int, default=512, help="length of each prompt in tokens")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps in one turn")
    parser.add_argument("--joining", action="store_true", help="in every step one request ends and another one starts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = {"running": args.running, "context": args.context, "joining": args.joining}
    rows = measured([*args.other, HERE], turns=args.turns, steps=args.steps, **options)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(row.pop("checkout"))
        for part, times in row.items():
            print(f"  {part:<10}" + "".join(f"  {name} {value:8.1f}" for name, value in times.items()))


if __name__ == "__main__":
    main()
