"""Write the tables in README.md: measured figures from benchmarks/results, support from tilewright/asm/certificates.

python scripts/results_table.py            # rewrite README.md
python scripts/results_table.py --check    # exit 1 if it is not what the files say
"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- results: written by scripts/results_table.py from benchmarks/results -->\n"
END = "<!-- end of results -->\n"
SUPPORT_BEGIN = "<!-- support: written by scripts/results_table.py from tilewright/asm/certificates -->\n"
SUPPORT_END = "<!-- end of support -->\n"


def load(card: str, prefix: str) -> list[dict[str, Any]]:
    """The result files of a card whose names begin so, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/results" / card).glob(f"{prefix}*.json"))]


def engine_table(card: str) -> str:
    """One line a shape and workload; the last run is the warm one."""
    lines = [
        "| shape | weights | workload | run | output tokens/s | input tokens/s | median step, ms | compiles after ready |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for result in load(card, "engine") for row in result["rows"]):
        prompts = row.get("input_tok_per_s")
        cells = [row["shape"], row.get("weights", "bfloat16"), row["workload"], row["run"], f"{row['output_tok_per_s']:,.0f}"]
        cells += [f"{prompts:,.0f}" if prompts else "", row["median_step_ms"], row["compiles_after_ready"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def ops_table(card: str) -> str:
    """Operators down, shapes across; share of a device copy."""
    rows = [row for result in load(card, "ops") for row in result["rows"] if row["bytes"] >= 64e6]
    lines = ["| operator, bf16 | shape: share of a device copy of the same bytes (TB/s) |", "|---|---|"]
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = [f"{row['shape']}: {row['of_copy']:.2f} ({row['tb_per_s']:.2f})" for row in rows if row["op"] == op]
        lines.append(f"| {op} | {', '.join(cells)} |")
    return "\n".join(lines)


def products_table(card: str) -> str:
    """Matrix products against cuBLAS: one line a set of shapes and number of rows."""
    lines = [
        "| linear, bf16 | shapes | implementations | cuBLAS's time over ours: geometric mean | lowest |",
        "|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "benchmarks/results" / card).glob("linear-*.json")):
        rows = [row | dims_of(row["dims"]) for row in json.loads(path.read_text())["rows"]]
        named = path.stem.partition("-")[2]
        groups = (
            [("", rows)] if named == "awkward" else [(f", {m} rows", [r for r in rows if r["M"] == m]) for m in rows_of(rows)]
        )
        for label, group in groups:
            worst = min(group, key=lambda row: row["ratio"])
            impls = ", ".join(f"{name} {count}" for name, count in Counter(row["impl"] for row in group).most_common())
            lines.append(
                f"| {named}{label} | {len(group)} | {impls} | {geomean(group):.3f} | {worst['ratio']:.2f} ({worst['dims']}) |"
            )
    return "\n".join(lines)


def layers_table(card: str) -> str:
    """Quantised layers against F.linear in bf16: formats down, rows across; geometric mean over the projections, and lowest."""
    rows = [row for result in load(card, "layers") for row in result["rows"]]
    sizes = rows_of(rows)
    lines = [f"| layer | {' | '.join(f'{m} rows' for m in sizes)} |", "|---|" + "---|" * len(sizes)]
    for name in dict.fromkeys(row["format"] for row in rows):
        groups = [[row for row in rows if row["format"] == name and row["M"] == m] for m in sizes]
        cells = [f"{geomean(g):.2f} ({min(r['ratio'] for r in g):.2f})" if g else "" for g in groups]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(rows: list[dict[str, Any]]) -> list[int]:
    """The numbers of rows that were measured, in order."""
    return sorted({row["M"] for row in rows})


def dims_of(text: str) -> dict[str, int]:
    """ "M=64 N=4096 offset=x" -> its numbers."""
    return {key: int(value) for key, _, value in (word.partition("=") for word in text.split()) if value.isdecimal()}


def geomean(rows: list[dict[str, Any]]) -> float:
    """Of the ratios."""
    return statistics.geometric_mean(row["ratio"] for row in rows)


def section() -> str:
    """All that stands between the two markers."""
    facts = (load("h100", "engine") + load("h100", "ops"))[0]["environment"]
    versions = f"driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, ptxas {facts['ptxas']}"
    environments = [result["environment"] for result in load("h100", "")]
    commands = sorted({e["command"] for e in environments if "command" in e})  # docs/regret.md has the study's own
    listed = "\n".join(f"    {command}" for command in commands)
    parts = [
        f"On one {facts['device']}, {versions}:",
        engine_table("h100"),
        ops_table("h100"),
        products_table("h100"),
    ]
    if load("h100", "layers"):
        parts += [
            "Quantised linear layers, quantising of the activation included, against `F.linear` in bf16 (above 1 is faster),\n"
            "geometric mean over the projections and in brackets the lowest:",
            layers_table("h100"),
        ]
    parts += ["Reproduced by", listed]
    return "\n\n".join(parts) + "\n\n"


def support_table() -> str:
    """Operators and implementations down, architectures across: what of each compiles, spills, and limits occupancy."""
    certificates = [json.loads(path.read_text()) for path in sorted((ROOT / "tilewright/asm/certificates").glob("*.json"))]
    archs = list(dict.fromkeys(arch for certificate in certificates for arch in certificate["ptxas"]))
    lines = [f"| operator | implementation | {' | '.join(archs)} |", "|---|---|" + "---|" * len(archs)]
    for certificate in certificates:
        # A library's implementation launches no kernel of ours: it has refusals and nothing else.
        impls = dict.fromkeys(name.partition("/")[0] for name, case in certificate["cases"].items() if "refused" not in case)
        for impl in impls:
            cells = [support_cell(certificate, impl, arch) for arch in archs]
            lines.append(f"| {certificate['op']} | {impl} | {' | '.join(cells)} |")
    versions = sorted({certificate["triton"] for certificate in certificates})
    return f"{chr(10).join(lines)}\n\nCompiled with triton {', '.join(versions)}.\n"


def support_cell(certificate: dict[str, Any], impl: str, arch: str) -> str:
    """One implementation on one architecture, over the examples and all configs of its space."""
    names = [name for name in certificate["cases"] if name.startswith(f"{impl}/") and name.endswith(f"/{arch}")]
    cases = [certificate["cases"][name] for name in names]
    configs = certificate["configs"].get(f"{impl}/{arch}", [])
    rows = configs or [case for case in cases if "refused" not in case]
    what = "configs" if configs else "examples"
    if not rows:
        return Counter(case["refused"] for case in cases).most_common(1)[0][0]
    limiters = Counter(kernel["limiter"] for row in rows for kernel in row.get("kernels", ()) if "limiter" in kernel)
    spilling = sum(any(kernel.get("spill_bytes") for kernel in row.get("kernels", ())) for row in rows)
    failing = sum("error" in row for row in rows)
    words = [f"{len(rows) - failing} of {len(rows)} {what} compile" if failing else f"{len(rows)} {what}"]
    words += [f"{spilling} spill"] if spilling else []
    return f"{', '.join(words)}; {limiters.most_common(1)[0][0]}" if limiters else words[0]


def replaced(text: str, begin: str, end: str, inside: str) -> str:
    """The text with what stands between the two markers changed."""
    before, rest = text.split(begin)
    return before + begin + inside + end + rest.split(end)[1]


def main() -> int:
    """Rewrite or check README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    wanted = replaced(text, BEGIN, END, section())
    wanted = replaced(wanted, SUPPORT_BEGIN, SUPPORT_END, support_table())
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md does not show what benchmarks/results and tilewright/asm/certificates say;", file=sys.stderr)
            print("run: python scripts/results_table.py", file=sys.stderr)
        return int(wanted != text)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
