"""Write the tables of figures: docs/results*.md, docs/support.md, and quant/speed.json of the package.

What was measured comes from benchmarks/results, a folder a card; what compiles where from tilewright/asm/certificates. No table
has figures of two cards, nor of two commits: docs/results.md shows the newest set, every other set has a page of its own
(docs/results-h100.md). Rows whose kernels have changed since are marked.

python scripts/results_table.py            # rewrite the files
python scripts/results_table.py --check    # exit 1 if one is not what the results say
"""

import json
import re
import shlex
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from results_sets import ResultSet, changed_mark, day, mark, mark_of, sets, shown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
RESULTS_HEAD = """# All results

This page is written by scripts/results_table.py from benchmarks/results/{name}. The commands are at the end;
`tilewright bench all` runs those of the tables. The [experiments](experiments/index.md) describe what was tried.{others}

"""
SUPPORT_HEAD = """# What compiles where

`make certify` compiles every kernel of every operator for these architectures without a GPU, with all configs that tuning may
choose from. CI compiles a sample of them again and fails with an explanation if one got worse; `tilewright asm OP` shows one of
them in full. `make certify-all` shows where the versions of Triton differ.

A cell gives the number of configs, or of examples where there is only one config, the number of them that spill registers,
and the resource that most often limits how many blocks fit on an SM. This page is written by scripts/results_table.py.

"""


Row = dict[str, Any]


def engine_table(of: ResultSet) -> str:
    """One line a shape, workload and run."""
    lines = [
        "| shape | weights | workload | run | output tokens/s | input tokens/s | median step, ms "
        "| share of the limit by bytes, by FLOP, pass by pass | compiles after ready | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    files = [content for name, content in of.results.items() if name.startswith("engine")]
    rows = [row | {"day": day(content)} for content in files for row in content["rows"]]
    for row in rows:
        prompts = row.get("input_tok_per_s")
        shares = [row[name] for name in ("of_bytes_limit", "of_flops_limit", "of_steps_limit") if name in row]
        limits = ", ".join(f"{share:.2f}" for share in shares)
        cells = [row["shape"], row.get("weights", "bfloat16"), row["workload"], row["run"], f"{row['output_tok_per_s']:,.0f}"]
        cells += [f"{prompts:,.0f}" if prompts else "", row["median_step_ms"], limits, row["compiles_after_ready"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['day']}{mark(row)} |")
    return "\n".join(lines)


def ops_table(of: ResultSet) -> str:
    """Operators down, shapes across; share of a device copy."""
    rows = [row for row in of.rows("ops") if row["bytes"] >= 64e6]
    lines = ["| operator, bf16 | shape: share of a device copy of the same bytes (TB/s) |", "|---|---|"]
    for op in dict.fromkeys(row["op"] for row in rows):
        some = [row for row in rows if row["op"] == op]
        cells = [f"{row['shape']}: {row['of_copy']:.2f} ({row['tb_per_s']:.2f})" for row in some]
        lines.append(f"| {op}{changed_mark(some)} | {', '.join(cells)} |")
    return "\n".join(lines)


def against(of: ResultSet) -> dict[str, list[Row]]:
    """Results of `tilewright bench OP`: name of the file -> its rows that were compared with something, if there are any."""
    found = {}
    for name, result in of.results.items():
        rows = [row for row in result["rows"] if "their_us" in row]
        if rows:
            found[name] = [row | dims_of(row["dims"]) for row in rows]
    return found


def comparison_table(of: ResultSet) -> str:
    """Operators against what they replace: one line a result file."""
    lines = [
        "| operators | against | problems | implementations | its time over ours: geometric mean | lowest | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in against(of).items():
        worst = min(rows, key=lambda row: row["ratio"])
        impls = ", ".join(f"{impl} {count}" for impl, count in Counter(row["impl"] for row in rows).most_common())
        peers = ", ".join(dict.fromkeys(row["against"] for row in rows))
        lowest = f"{worst['ratio']:.2f} ({worst['dims']})"
        measured = day(of.results[name]) + mark_of(rows)
        lines.append(f"| {name} | {peers} | {len(rows)} | {impls} | {geomean(rows):.3f} | {lowest} | {measured} |")
    return "\n".join(lines)


def rows_table(rows: list[Row]) -> str:
    """Every problem of a result file."""
    lines = [
        "| problem | implementation | us | TB/s | TFLOP/s | against | its us | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["dims"], row["impl"], row["us"], row["tb_per_s"], row["tflop_per_s"], row["against"], row["their_us"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['ratio']:.3f}{changed_mark([row])} |")
    return "\n".join(lines)


def alone_table(of: ResultSet) -> str:
    """Problems of `tilewright bench OP` that nothing was compared with."""
    lines = ["| operator | problem | implementation | us | TB/s | TFLOP/s |", "|---|---|---|---|---|---|"]
    for row in (row for result in of.results.values() for row in result["rows"]):
        if "against" in row and "their_us" not in row:
            cells = [row[name] for name in ("op", "dims", "impl", "us", "tb_per_s", "tflop_per_s")]
            lines.append(f"| {' | '.join(map(str, cells))}{changed_mark([row])} |")
    return "\n".join(lines)


def layers_table(of: ResultSet, name: str = "layers") -> str:
    """Quantised layers of one file: formats down, rows across; mean over projections, lowest, how many."""
    rows = of.rows(name)
    sizes = rows_of(rows)
    lines = [f"| layer | {' | '.join(f'{m} rows' for m in sizes)} |", "|---|" + "---|" * len(sizes)]
    for format in dict.fromkeys(row["format"] for row in rows):
        groups = [[row for row in rows if row["format"] == format and row["M"] == m] for m in sizes]
        cells = [f"{geomean(g):.2f} ({min(r['ratio'] for r in g):.2f}; {len(g)}){changed_mark(g)}" if g else "" for g in groups]
        lines.append(f"| {format} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attention_table(of: ResultSet) -> str:
    """Attention in 8 bits against ours in 16: problems down, the two ways of timing across, a file each."""
    cells: dict[tuple[str, str], dict[bool, str]] = {}
    for settled, name in ((False, "attention-8bit-turns"), (True, "attention-8bit")):
        for row in of.rows(name):
            ways = cells.setdefault((row["format"], row["dims"]), {})
            ways[settled] = f"{row['us'] / 1e3:.2f} ({row['ratio']:.2f}){changed_mark([row])}"
    lines = ["| format | problem | in turns: ms (times as fast) | alone first |", "|---|---|---|---|"]
    lines += [f"| {name} | {dims} | {ways.get(False, '')} | {ways.get(True, '')} |" for (name, dims), ways in cells.items()]
    return "\n".join(lines)


def programs_table(of: ResultSet, fair: bool) -> str:
    """Whole models under `tilewright compare`: those whose fairness card is closed, or those that have something open on it.

    A line for each claim of a comparison, in its order: at equal precision and launch mode first.
    """
    lines = [
        "| model | ours | against | what is equal | ms | its ms | times as fast, 95 % | segments shown, the lowest at least "
        "| measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if not fair:
        lines = [lines[0] + " open |", lines[1] + "---|"]
    for content in of.programs.values():
        if content["fair"] != fair:
            continue
        ours, theirs, segments = content["ours"], content["baseline"], content["segments"]
        each = f"{len(segments)}, {min(s['ratio'][1] for s in segments):.2f}" if len(segments) > 1 else ""
        # Comparisons of before 2026-11-23 have one claim, and did not record what is equal.
        whole = {"engine": theirs["engine"], "words": "", "seconds": theirs["whole"], "ratio": content["ratio"]}
        for claim in content.get("claims") or [whole]:
            value, low, high = claim["ratio"]
            cells = [content["model"], ours["engine"], claim["engine"], claim["words"]]
            cells += [f"{1e3 * ours['whole'][0]:.3f}", f"{1e3 * claim['seconds'][0]:.3f}"]
            shown_each = each if claim["engine"] == theirs["engine"] else ""
            cells += [f"{value:.2f} ({low:.2f} to {high:.2f})", shown_each, day(content)]
            if not fair:
                cells.append("; ".join(f"{point['name']}: {point['why']}" for point in content["card"] if point["open"]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(rows: list[Row]) -> list[int]:
    """The numbers of rows that were measured, in order."""
    return sorted({row["M"] for row in rows})


def dims_of(text: str) -> dict[str, int]:
    """ "M=64 N=4096 offset=x" -> its numbers."""
    return {key: int(value) for key, _, value in (word.partition("=") for word in text.split()) if value.isdecimal()}


def geomean(rows: list[Row]) -> float:
    """Of the ratios."""
    return statistics.geometric_mean(row["ratio"] for row in rows)


WORKLOADS = (
    "The figures are output tokens divided by wall time. This includes prefill, except where a workload is decoding only:\n"
    "there the time is that from the first token to the last. Sampling is greedy except in R2000, and requests and answers\n"
    "are token ids.\n"
    "\n"
    "- **W1**: 256 requests of 100 to 1024 tokens in and 100 to 1024 out, submitted at once, with the lengths of\n"
    "  nano-vllm's benchmark (142,827 tokens in, 133,966 out; rows measured before 2026-11-23 had other lengths of the same\n"
    "  size).\n"
    "- **W2**: 256 requests of 1024 tokens in and 1024 out.\n"
    "- **B1**, **B64**: one request, or 64 at once, of 128 tokens in and 256 out, decoding only.\n"
    "- **P4096**: 16 prompts of 4095 tokens with one token out of each; the figure that counts is input tokens/s.\n"
    "- **R2000**: 2000 requests of 1 to 2048 tokens in and 1 to 32 out, with sampling parameters chosen at random."
)
LAYERS = (
    "The speed of quantised linear layers relative to `F.linear` in bf16 (above 1 is faster), with quantising the\n"
    "activation included. Each cell gives the geometric mean over the projections that were measured and, in brackets, the\n"
    "lowest ratio and the number of projections."
)
SETTLED = (
    "The same, where each call runs alone for half a second before it is timed (`--settle 0.5`). Long products run at the\n"
    "card's power limit, and calls that alternate within milliseconds, as above, all share one clock."
)
ATTENTION = (
    "Attention in 8 bits, with quantising included, and how many times as fast it is as ours in bf16: in turns of\n"
    "milliseconds, and with each call alone for half a second before it is timed."
)
PROGRAMS = (
    "Whole models under `tilewright compare`: the time of one call on both engines, the number of the model's segments that\n"
    "were each shown to be faster, and the lower bound of the smallest of their gains (95 % for all at once). Comparisons\n"
    "with an open point on their fairness card are not listed here. eager is PyTorch as it is, in float32 (tf32\n"
    "convolutions); its speed is set by the host."
)


def said(of: ResultSet, words: str, *names: str) -> str:
    """A table's caption, with the days of its files and what they say of themselves."""
    told = []
    for name in names:
        content = of.results.get(name)
        if content is not None:
            note = content.get("note") or content.get("how") or content["what"].partition("; ")[2]
            parts = f", by {content['parts']} processes" if content["parts"] > 1 else ""
            told.append(f"{name}.json: measured {day(content)}{parts}{mark_of(content['rows'])}{f' ({note})' if note else ''}")
    return f"{words}\n{'; '.join(told)}." if told else words


def filled(*parts: str) -> list[str]:
    """Headings, captions and then a table; nothing where the table has no row."""
    return list(filter(None, parts)) if parts[-1].count("\n") > 1 else []


def tables(of: ResultSet) -> list[str]:
    """Quantised layers and attention in 8 bits."""
    return [
        *filled(said(of, LAYERS, "layers"), layers_table(of)),
        *filled(said(of, SETTLED, "layers-settled"), layers_table(of, "layers-settled")),
        *filled(said(of, ATTENTION, "attention-8bit-turns", "attention-8bit"), attention_table(of)),
    ]


def page_of(of: ResultSet, others: list[str]) -> str:
    """docs/results.md, or that of another card."""
    parts = [of.machine(), *filled("## The engine", WORKLOADS, engine_table(of))]
    parts += filled("## Operators limited by bytes", said(of, "", "ops").strip(), ops_table(of))
    parts += ["## Quantised layers and attention in 8 bits", *tables(of)]
    parts += filled("## Operators compared with what they replace", comparison_table(of))
    for name, rows in against(of).items():
        settled = of.results[name].get("settle_s")
        words = f"Each alone for {settled} s first." if settled else ""
        parts += [f"### {name}", said(of, words, name).strip(), rows_table(rows)]
    parts += filled("## Operators for which PyTorch has no single call", alone_table(of))
    parts += filled("## Whole models", PROGRAMS, programs_table(of, fair=True))
    parts += filled(
        "Open on their fairness card. These comparisons prove nothing until they are measured again:",
        programs_table(of, fair=False),
    )
    parts += of.legend("\n".join(parts))
    parts += ["## Commands", "\n".join(f"    {command}" for command in commands(of))]
    links = [f"[{name}](results-{name}.md)" for name in others]
    told = f" Other cards: {', '.join(links)}." if links else ""
    return RESULTS_HEAD.format(name=of.name, others=told) + "\n\n".join(parts) + "\n"


def commands(of: ResultSet) -> list[str]:
    """What measures each file again, from the root of the repository."""
    found = []
    for name, content in sorted((of.results | of.programs).items()):
        command = content.get("repeat", content["environment"].get("command"))
        if command:
            command = shlex.join(word for word in shlex.split(command) if word != "--resume")
            found.append(re.sub(r"(--out|--report) \S+", rf"\1 benchmarks/results/{of.name}/{name}.json", command))
    return sorted(set(found))


def speed(of: ResultSet) -> str:
    """What the report of `tw.quantize` says of speed: ratios to bf16 by format and rows, of the table of layers."""
    content = of.results["layers"]
    ratios: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        some = [r for r in content["rows"] if (r["format"], r["M"]) == (row["format"], row["M"])]
        ratios.setdefault(row["format"], {}).setdefault(str(row["M"]), round(geomean(some), 2))
    told = {"card": content["environment"]["device"], "measured": day(content), "ratios": ratios}
    return json.dumps(told, indent=1) + "\n"


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


def wanted() -> dict[Path, str]:
    """Every file, and what it has to hold."""
    docs, found = ROOT / "docs", sets(RESULTS)
    first = shown(found)
    others = [each for each in found if each.folder != first.folder]
    files = {
        docs / "results.md": page_of(first, [each.name for each in others]),
        docs / "support.md": SUPPORT_HEAD + support_table(),
        ROOT / "tilewright/quant/speed.json": speed(next(each for each in (first, *others) if "layers" in each.results)),
    }
    return files | {docs / f"results-{each.name}.md": page_of(each, []) for each in others}


def main() -> int:
    """Rewrite or check the files."""
    files = wanted()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    left = [path for path in (ROOT / "docs").glob("results-*.md") if path not in files]
    if "--check" in sys.argv[1:]:
        for path in [*stale, *left]:
            print(f"{path.name} does not show what benchmarks/results and tilewright/asm/certificates say;", file=sys.stderr)
            print("run: python scripts/results_table.py", file=sys.stderr)
        return int(bool(stale or left))
    for path in stale:
        path.write_text(files[path])
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
