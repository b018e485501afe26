"""Write the tables of measured figures in README.md from the JSON files in benchmarks/results.

python scripts/results_table.py            # rewrite README.md
python scripts/results_table.py --check    # exit 1 if it is not what the results say
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- results: written by scripts/results_table.py from benchmarks/results -->\n"
END = "<!-- end of results -->\n"


def load(card: str, prefix: str) -> list[dict[str, Any]]:
    """The result files of a card whose names begin so, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results" / card).glob(f"{prefix}*.json"))]


def engine_table(card: str) -> str:
    """One line a shape and workload; the last run is the warm one."""
    lines = [
        "| shape, bf16 | workload | run | output tokens/s | median step, ms | compiles after ready |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['shape']} | {row['workload']} | {row['run']} | {row['output_tok_per_s']:,.0f} "
        f"| {row['median_step_ms']} | {row['compiles_after_ready']} |"
        for result in load(card, "engine")
        for row in result["rows"]
    ]
    return "\n".join(lines)


def ops_table(card: str) -> str:
    """Operators down, shapes across; share of a device copy."""
    rows = [row for result in load(card, "ops") for row in result["rows"] if row["bytes"] >= 64e6]
    lines = ["| operator, bf16 | shape: share of a device copy of the same bytes (TB/s) |", "|---|---|"]
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = [f"{row['shape']}: {row['of_copy']:.2f} ({row['tb_per_s']:.2f})" for row in rows if row["op"] == op]
        lines.append(f"| {op} | {', '.join(cells)} |")
    return "\n".join(lines)


def section() -> str:
    """All that stands between the two markers."""
    facts = (load("h100", "engine") + load("h100", "ops"))[0]["environment"]
    versions = f"driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, ptxas {facts['ptxas']}"
    commands = sorted({result["environment"]["command"] for result in load("h100", "")})
    listed = "\n".join(f"    {command}" for command in commands)
    return (
        f"On one {facts['device']}, {versions}:\n\n{engine_table('h100')}\n\n{ops_table('h100')}\n\n"
        f"Reproduced by\n\n{listed}\n\n"
    )


def main() -> int:
    """Rewrite or check README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = before + BEGIN + section() + END + after
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md does not show what benchmarks/results say; run: python scripts/results_table.py", file=sys.stderr)
        return int(wanted != text)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
