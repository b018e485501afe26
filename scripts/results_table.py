"""Write the tables of figures: README.md's summary, docs/results.md and docs/support.md.

What was measured comes from benchmarks/results, what compiles where from tilewright/asm/certificates.

python scripts/results_table.py            # rewrite the three files
python scripts/results_table.py --check    # exit 1 if one is not what the files say
"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
BEGIN = "<!-- results: written by scripts/results_table.py from benchmarks/results -->\n"
END = "<!-- end of results -->\n"
RESULTS_HEAD = """# What was measured

Written by scripts/results_table.py from benchmarks/results; the commands stand at the end. docs/log.md tells what was tried.

"""
SUPPORT_HEAD = """# What compiles where

`make certify` compiles every kernel of every operator for these architectures without a GPU, and all configs that
tuning may choose from; CI compiles a sample of them again and fails, in words, where one got worse (`tilewright asm
OP` shows one of them in full). `make certify-all` shows where Triton's versions differ. A cell counts the configs, or
the examples where there is nothing to choose, says how many of them spill registers, and what most often limits how
many blocks an SM holds. Written by scripts/results_table.py.

"""


def load(card: str, prefix: str) -> list[dict[str, Any]]:
    """The result files of a card whose names begin so, in the order of their names. Raises SystemExit for half of a set."""
    return list(by_name(card, prefix).values())


def by_name(card: str, prefix: str) -> dict[str, dict[str, Any]]:
    """The same, each with its file's name without the end. Raises SystemExit for half of a set."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / card).glob(f"{prefix}*.json"))}
    for name, result in found.items():
        if result.get("incomplete"):
            raise SystemExit(f"{name}.json is incomplete: its run was cut short; measure its set again, or move it to studies/")
    return found


def engine_table(card: str, warm: bool) -> str:
    """One line a shape, workload and run; `warm`: of several runs only the last."""
    lines = [
        "| shape | weights | workload | run | output tokens/s | input tokens/s | median step, ms | compiles after ready |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for result in load(card, "engine") for row in result["rows"]]
    if warm:
        rows = list({(row["shape"], row.get("weights"), row["workload"]): row for row in rows}.values())
    for row in rows:
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


def against(card: str) -> dict[str, list[dict[str, Any]]]:
    """Results of `tilewright bench OP`: name of the file -> its rows that were compared with something, if there are any."""
    found = {}
    for name, result in by_name(card, "").items():
        rows = [row for row in result.get("rows", ()) if "their_us" in row]
        if rows:
            settled = f", each alone for {result['settle_s']} s first" if result.get("settle_s") else ""
            found[name + settled] = [row | dims_of(row["dims"]) for row in rows]
    return found


def comparison_table(card: str) -> str:
    """Operators against what they replace: one line a result file."""
    lines = [
        "| operators | against | problems | implementations | its time over ours: geometric mean | lowest |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in against(card).items():
        worst = min(rows, key=lambda row: row["ratio"])
        impls = ", ".join(f"{impl} {count}" for impl, count in Counter(row["impl"] for row in rows).most_common())
        peers = ", ".join(dict.fromkeys(row["against"] for row in rows))
        lowest = f"{worst['ratio']:.2f} ({worst['dims']})"
        lines.append(f"| {name} | {peers} | {len(rows)} | {impls} | {geomean(rows):.3f} | {lowest} |")
    return "\n".join(lines)


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Every problem of a result file."""
    lines = [
        "| problem | implementation | us | TB/s | TFLOP/s | against | its us | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["dims"], row["impl"], row["us"], row["tb_per_s"], row["tflop_per_s"], row["against"], row["their_us"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['ratio']:.3f} |")
    return "\n".join(lines)


def alone_table(card: str) -> str:
    """Problems of `tilewright bench OP` that nothing was compared with."""
    lines = ["| operator | problem | implementation | us | TB/s | TFLOP/s |", "|---|---|---|---|---|---|"]
    for row in (row for result in load(card, "") for row in result.get("rows", ())):
        if "against" in row and "their_us" not in row:
            cells = [row[name] for name in ("op", "dims", "impl", "us", "tb_per_s", "tflop_per_s")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def layers_table(card: str, settled: bool = False) -> str:
    """Quantised layers against F.linear in bf16: formats down, rows across; mean over projections, lowest, how many.

    `settled`: those that each ran alone before they were timed, instead of those in short turns.
    """
    wanted = [result for result in load(card, "layers") if bool(result.get("settle_s")) == settled]
    newest_first = sorted(wanted, key=lambda result: result["environment"]["date"], reverse=True)
    rows = [row for result in newest_first for row in result["rows"]]
    sizes = rows_of(rows)
    lines = [f"| layer | {' | '.join(f'{m} rows' for m in sizes)} |", "|---|" + "---|" * len(sizes)]
    for name in dict.fromkeys(row["format"] for row in rows):
        groups = [[row for row in rows if row["format"] == name and row["M"] == m] for m in sizes]
        cells = [f"{geomean(g):.2f} ({min(r['ratio'] for r in g):.2f}; {len(g)})" if g else "" for g in groups]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attention_table(card: str) -> str:
    """Attention in 8 bits against ours in 16: problems down, the two ways of timing across."""
    cells: dict[tuple[str, str], dict[bool, str]] = {}
    for result in load(card, "attention-8bit"):
        for row in result["rows"]:
            ways = cells.setdefault((row["format"], row["dims"]), {})
            ways[bool(result.get("settle_s"))] = f"{row['us'] / 1e3:.2f} ({row['ratio']:.2f})"
    lines = ["| format | problem | in turns: ms (times as fast) | alone first |", "|---|---|---|---|"]
    lines += [f"| {name} | {dims} | {ways.get(False, '')} | {ways.get(True, '')} |" for (name, dims), ways in cells.items()]
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


def machine(card: str) -> str:
    """The device and the versions."""
    facts = (load(card, "engine") + load(card, "ops"))[0]["environment"]
    versions = f"driver {facts['driver']}, torch {facts['torch']}, triton {facts['triton']}, ptxas {facts['ptxas']}"
    return f"One {facts['device']}, {versions}."


LAYERS = (
    "Quantised linear layers, quantising of the activation included, against `F.linear` in bf16 (above 1 is faster);\n"
    "geometric mean over the projections that were measured, in brackets the lowest and how many they are:"
)
SETTLED = (
    "The same, each call alone for half a second before it is timed (`--settle 0.5`): long products run at the card's power\n"
    "limit, and in the turns of milliseconds above all calls have one clock."
)
ATTENTION = (
    "Attention in 8 bits, quantising included, and how many times as fast as ours in bf16 it is: in turns of milliseconds,\n"
    "and each call alone for half a second before it is timed:"
)


def summary(card: str) -> str:
    """README's part."""
    parts = [machine(card), "The engine, warm:", engine_table(card, warm=True)]
    parts += ["Operators against what they replace, above 1 is faster:", comparison_table(card)]
    parts += [LAYERS, layers_table(card), SETTLED, layers_table(card, settled=True), ATTENTION, attention_table(card)]
    parts += ["Each row, and the commands: [docs/results.md](docs/results.md)."]
    return "\n\n".join(parts) + "\n\n"


def results(card: str) -> str:
    """docs/results.md."""
    said = [result.get("repeat", result["environment"].get("command")) for result in load(card, "")]
    commands = sorted({command for command in said if command})  # docs/regret.md has the study's own
    parts = [machine(card), "## The engine", engine_table(card, warm=False)]
    parts += ["## Operators limited by bytes", ops_table(card), "## Quantised layers", LAYERS, layers_table(card)]
    parts += [SETTLED, layers_table(card, settled=True), "## Attention in 8 bits", ATTENTION, attention_table(card)]
    parts += ["## Operators against what they replace", comparison_table(card)]
    for name, rows in against(card).items():
        parts += [f"### {name}", rows_table(rows)]
    parts += ["## Operators that PyTorch has no one call for", alone_table(card)]
    parts += ["## Commands", "\n".join(f"    {command}" for command in commands)]
    return RESULTS_HEAD + "\n\n".join(parts) + "\n"


def support_table() -> str:
    """Operators and implementations down, architectures across: what of each compiles, spills, and limits occupancy."""
    certificates = [json.loads(path.read_text()) for path in sorted((ROOT / "tilewright/asm/certificates").glob("*.json"))]
    archs = list(dict.fromkeys(arch for certificate in certificates for arch in certificate["ptxas"]))
    lines = [f"| operator | implementation | {' | '.join(archs)} |", "|---|---|" + "---|" * len(archs)]
    for certificate in certificates:
        # A library's implementation launches no kernel of ours: it has refusals and nothing else.
        compiled = [name for name, case in certificate["cases"].items() if "refused" not in case] + list(certificate["configs"])
        for impl in dict.fromkeys(name.partition("/")[0] for name in compiled):
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
    """Rewrite or check the files."""
    readme = ROOT / "README.md"
    wanted = {
        readme: replaced(readme.read_text(), BEGIN, END, summary("h100")),
        ROOT / "docs/results.md": results("h100"),
        ROOT / "docs/support.md": SUPPORT_HEAD + support_table(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} does not show what benchmarks/results and tilewright/asm/certificates say;", file=sys.stderr)
            print("run: python scripts/results_table.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
