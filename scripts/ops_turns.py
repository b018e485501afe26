"""Compare the times of operators in this checkout and in another one, in turns on one GPU, to find slowdowns.

    git worktree add ../before COMMIT
    python scripts/ops_turns.py ../before --ops rms_norm softmax --out turns.json

Each checkout runs in its own process and measures the default problems of `tilewright bench OP`: first the other checkout, then
this one. A problem that is slower here by more than `--again` is measured twice more in the other order, because a clock that
changes between two measurements looks like a slower kernel. Microseconds are medians of replays of a CUDA graph over operands
larger than the L2 cache.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

HERE = Path(__file__).resolve().parents[1]
WORKER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tilewright.bench.dims import find_op
from tilewright.bench.harness import interleaved_us, sets_for
from tilewright.bench.op import checked
from tilewright.op import Inputs

answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    name, words, rounds = json.loads(line)
    try:
        op = find_op(name)
        dims = checked(op, words)
        first = op.make(Inputs("cuda", here=True), **dims)
        sets = min(sets_for(op.cost(*first).bytes), 8)
        args = [first, *(op.make(Inputs("cuda", seed=i, here=True), **dims) for i in range(1, sets))]
        with torch.inference_mode():
            [(us, spread)] = interleaved_us([lambda i: op.run(*args[i])], sets=sets, rounds=rounds, call_us=20.0)
        choice = op.choice_for(*first)
        answer = {"us": round(us, 3), "spread_us": round(spread, 3), "impl": choice.impl.name, "config": dict(choice.config)}
        del args, first
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(answer), file=answers, flush=True)
"""


class Checkout:
    """A process that measures with the code of one checkout."""

    def __init__(self, folder: Path):
        if not (folder / "tilewright/op.py").is_file():
            raise SystemExit(f"{folder} has no tilewright/op.py; give the root of a checkout")
        paths = [str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = Popen([sys.executable, "-c", WORKER], env=env, stdin=PIPE, stdout=PIPE, text=True)

    def measure(self, op: str, words: list[str], rounds: int) -> dict[str, Any]:
        """{"us", "spread_us", "impl", "config"}, or {"error"}."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([op, words, rounds]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with code {self.process.wait()}"}


def compared(op: str, words: list[str], there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """A row; `ratio` is above 1 where this checkout is slower."""
    row: dict[str, Any] = {"op": op, "dims": " ".join(words), "there": there, "here": here}
    return row | {"ratio": round(here["us"] / there["us"], 4)} if "us" in here and "us" in there else row


def in_turns(other: Path, problems: list[tuple[str, list[str]]], rounds: int, again: float) -> list[dict[str, Any]]:
    """A row for each problem, printed as it comes, with `turns`, the ratios of all measurements."""
    there, here = Checkout(other), Checkout(HERE)
    rows = []
    for op, words in problems:
        row = compared(op, words, there.measure(op, words, rounds), here.measure(op, words, rounds))
        rows.append(row | {"turns": [row["ratio"]]} if "ratio" in row else row)
        print(json.dumps(rows[-1]), flush=True)
    for row in [row for row in rows if row.get("ratio", 0.0) > 1 + again]:
        for _ in range(2):
            words = row["dims"].split()
            now = here.measure(row["op"], words, 2 * rounds)
            turn = compared(row["op"], words, there.measure(row["op"], words, 2 * rounds), now)
            row["turns"] += [turn["ratio"]] if "ratio" in turn else []
        print(f"again: {row['op']} {row['dims']}: {row['turns']}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each op: the geometric mean and the largest of its ratios, of problems measured again the median."""
    by_op = defaultdict[str, list[float]](list)
    for row in rows:
        if "turns" in row:
            by_op[row["op"]].append(statistics.median(row["turns"]))
    return [
        f"{op}: {len(ratios)} problems, {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}, at most {max(ratios):.3f}"
        for op, ratios in by_op.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root folder of the other checkout")
    parser.add_argument("--ops", nargs="+", required=True, help="operators to measure, named as in `tilewright ops`")
    parser.add_argument("--rounds", type=int, default=6, help="number of timed replays in each measurement")
    parser.add_argument(
        "--again", type=float, default=0.02, help="measure a problem again if it is slower by more than this share"
    )
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    asked = parser.parse_args()

    from tilewright.bench.dims import find_op
    from tilewright.bench.op import shapes_of
    from tilewright.bench.provenance import environment
    from tilewright.hw.device import cuda_count

    try:
        problems = [(name, words) for name in asked.ops for words in shapes_of(find_op(name), [], None)]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if not cuda_count():
        raise SystemExit("error: operators are timed on a GPU, and there is none here")
    said = {"what": "python scripts/ops_turns.py", "environment": environment(), "other": str(asked.other)}
    rows = in_turns(asked.other, problems, asked.rounds, asked.again)
    if asked.out:
        asked.out.write_text(json.dumps(said | {"rows": rows}, indent=1) + "\n")
    print("\n".join(summary(rows)))
    wrong = [row for row in rows if "ratio" not in row]
    for row in wrong:
        print(f"not compared: {row['op']} {row['dims']}: {row['there'].get('error') or row['here'].get('error')}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
