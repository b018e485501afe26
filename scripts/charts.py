"""Write the charts of README.md and the page docs/performance.md from benchmarks/results.

python scripts/charts.py            # rewrite docs/images/*.svg and docs/performance.md
python scripts/charts.py --check    # exit 1 if one of them is not what the results say
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from results_sets import ResultSet, day, sets, shown
from results_table import against, geomean

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES, PAGE = ROOT / "benchmarks/results", ROOT / "docs/images", ROOT / "docs/performance.md"
MODELS = "studies/optimize-models.json"
ENGINES = {"ours": "tilewright.optimize", "compile": "torch.compile, max-autotune", "graph": "PyTorch in a CUDA graph"}
FORMATS = {"int8": "int8", "fp8": "fp8", "mxfp8": "mxfp8", "int4": "int4 weights"}
ROWS = (1, 16, 256, 2048)
"""Rows of the activation that the chart of quantised layers shows."""
WIDTH, LABEL, BAR, GAP, TOP, FOOT = 760, 180, 11, 14, 62, 6
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328} .s{font-size:11px} .t{font-size:15px;font-weight:600} .f{fill:#59636e}
.page{fill:#fff} .b0{fill:#3f51b5} .b1{fill:#8f9bd8} .b2{fill:#c4cad3} .b3{fill:#e0a458}
.mark{stroke:#1f2328;stroke-dasharray:3 3}
@media (prefers-color-scheme: dark){
text{fill:#e6edf3} .f{fill:#9198a1} .page{fill:#0d1117} .b0{fill:#8c9eff} .b1{fill:#5c6bc0} .b2{fill:#515b66} .b3{fill:#d29922}
.mark{stroke:#e6edf3}}
</style>"""
"""The page of a picture is its own, so that it can be read whatever the colours around it are."""


class Chart(NamedTuple):
    """Groups of bars. A bar is its share of the full width, the words behind it, and the number of its colour."""

    title: str
    legend: tuple[str, ...]
    groups: list[tuple[str, list[tuple[float, str, int]]]]
    caption: list[str]
    mark: float | None = None
    """A line at this share of the width, which stands for "as fast"."""


def svg(chart: Chart) -> str:
    """The picture, which follows the reader's choice of a light or a dark page."""
    parts, y, full = [], TOP, WIDTH - LABEL - 130
    for label, bars in chart.groups:
        parts.append(f'<text x="{LABEL - 10}" y="{y + len(bars) * BAR / 2 + 4:.0f}" text-anchor="end">{escape(label)}</text>')
        for share, words, kind in bars:
            parts.append(f'<rect class="b{kind}" x="{LABEL}" y="{y}" width="{share * full:.1f}" height="{BAR - 1}"/>')
            parts.append(f'<text class="s f" x="{LABEL + share * full + 6:.1f}" y="{y + BAR - 2}">{escape(words)}</text>')
            y += BAR
        y += GAP
    if chart.mark is not None:
        at = LABEL + chart.mark * full
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{y - GAP + 4}"/>')
    at = LABEL
    for number, name in enumerate(chart.legend):
        parts.append(f'<rect class="b{number}" x="{at}" y="36" width="10" height="10"/>')
        parts.append(f'<text class="s" x="{at + 15}" y="45">{escape(name)}</text>')
        at += 32 + 6 * len(name)
    for number, line in enumerate(chart.caption):
        parts.append(f'<text class="s f" x="10" y="{y + 8 + 15 * number}">{escape(line)}</text>')
    height = y + FOOT + 15 * len(chart.caption)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join(
        [head, STYLE, page, f'<text class="t" x="{LABEL}" y="22">{escape(chart.title)}</text>', *parts, "</svg>\n"]
    )


def models_file() -> Path:
    """The newest result of `python -m tests.fuse.zoo` on a GPU."""
    found = sorted(RESULTS.glob(f"*/{MODELS}"), key=lambda path: json.loads(path.read_text())["runs"][-1]["date"])
    if not found:
        raise SystemExit(
            f"no {RESULTS}/CARD/{MODELS}; on a machine with a GPU: python -m tests.fuse.zoo --out FILE --device cuda"
        )
    return found[-1]


def timed_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the largest batch that have times."""
    most = max(row["batch"] for row in content["rows"])
    return [row for row in content["rows"] if "us" in row and row["batch"] == most]


def models_gain(rows: list[dict[str, Any]]) -> float:
    """How many times as fast as the fastest of PyTorch's ways: only rows count in which all of them were measured."""
    whole = [row["us"] for row in rows if set(ENGINES) <= set(row["us"])]
    return statistics.geometric_mean(min(us for name, us in row.items() if name != "ours") / row["ours"] for row in whole)


def models_chart() -> Chart:
    """Whole models: one call of ours, of torch.compile, of PyTorch in a CUDA graph."""
    content = json.loads(models_file().read_text())
    rows, made = timed_rows(content), content["runs"][-1]
    groups = []
    for row in rows:
        us = {name: row["us"][name] for name in ENGINES if name in row["us"]}
        longest = max(us.values())
        bars = [(us[name] / longest, f"{us[name] / 1e3:.2f} ms", list(ENGINES).index(name)) for name in us]
        groups.append((row["model"], bars))
    gain = models_gain(rows)
    wrong = [row["model"] for row in rows if row["right"] != "right"]
    batch = ", ".join(map(str, sorted({row["batch"] for row in rows})))
    without = ", ".join(row["model"] for row in rows if "compile" not in row["us"])
    runs = [content["runs"][i] for i in sorted({row["run"] for row in rows})]
    commits = list(dict.fromkeys(run["commit"][:7] for run in runs))
    dates = list(dict.fromkeys(run["date"][:10] for run in runs))
    code = f"commit{'s' if commits[1:] else ''} {', '.join(commits)}"
    code += " with uncommitted changes" if any(run["dirty"] for run in runs) else ""
    caption = [
        f"{made['device']}, torch {made['torch']}, triton {made['triton']}, {' and '.join(dates)}, {code}.",
        f"All three in fp16, batch {batch}; models of timm, transformers and torch.nn with random weights.",
        f"Geometric mean over the fastest of PyTorch's, of the models that have all bars: {gain:.2f} times as fast.",
        *([f"Not compiled in the time of the run: {without}."] if without else []),
        *([f"Outputs outside the tolerance: {', '.join(wrong)}."] if wrong else []),
    ]
    return Chart("One call of a model, shorter is better", tuple(ENGINES.values()), groups, caption)


def machine(of: ResultSet) -> list[str]:
    """Card and versions, then dates and commit: two lines of a caption."""
    card, _, made = of.machine().partition(" Measured")
    return [card, f"Measured{made}"]


def operators_chart(of: ResultSet) -> Chart:
    """Operators against what they replace: geometric mean of a set of problems."""
    means = {name: geomean(rows) for name, rows in against(of).items()}
    top = max(means.values())
    groups = [(name, [(mean / top, f"{mean:.2f}", 0)]) for name, mean in sorted(means.items())]
    caption = [*machine(of), "The dashed line is as fast as what the operator replaces (cuBLAS, cuDNN, PyTorch)."]
    return Chart("Speed over the library call, geometric mean of each set", (), groups, caption, 1 / top)


def layers_chart(of: ResultSet) -> Chart:
    """Quantised linear layers against bf16, quantising of the activation included."""
    rows = of.rows("layers")
    means = {
        (format, m): geomean([row for row in rows if (row["format"], row["M"]) == (format, m)])
        for format in FORMATS
        for m in ROWS
    }
    top = max(means.values())
    groups = [
        (f"{m} row{'s' * (m > 1)}", [(means[f, m] / top, f"{means[f, m]:.2f}", i) for i, f in enumerate(FORMATS)]) for m in ROWS
    ]
    measured = f"Measured {day(of.results['layers'])}, 12 projections of Llama-3.1-8B and 70B and Qwen3-32B; dashed: bf16."
    return Chart("Quantised linear layers, speed over bf16", tuple(FORMATS.values()), groups, [*machine(of), measured], 1 / top)


def performance_page(of: ResultSet) -> str:
    """docs/performance.md, at most 60 lines."""
    engine = {}
    for name, content in of.results.items():
        if name.startswith("engine"):
            engine |= {(row["shape"], row.get("weights", "bfloat16"), row["workload"]): row for row in content["rows"]}
    lines = []
    for (shape, weights, workload), row in engine.items():
        tokens = row.get("input_tok_per_s") if workload.startswith("P") else row["output_tok_per_s"]
        if workload in ("B1", "B64", "W1", "P4096"):
            lines.append(f"| {shape} | {weights} | {workload} | {tokens:,.0f} | {row['median_step_ms']:.2f} |")
    table = "\n".join(sorted(lines))
    return PERFORMANCE.format(machine=of.machine(), engine=table)


PICTURE = "![{alt}](images/{name}.svg)"
PERFORMANCE = f"""# Performance

This page summarises how fast tilewright is compared with the libraries it replaces. It is written by scripts/charts.py from
benchmarks/results. [All results](results.md) lists every measurement with its command,
[optimize on other people's models](optimize_models.md) lists whole models, and the [experiments](experiments/index.md) describe
what was tried.

## Whole models

{PICTURE.format(alt="Time of one call of each model", name="models")}

## Operators

{PICTURE.format(alt="Speed of operators over the library", name="operators")}

## Quantised layers

{PICTURE.format(alt="Speed of quantised layers over bf16", name="layers")}

## The engine

{{machine}} The models have random weights. Sampling is greedy, and requests
and answers are token ids, so the time of the tokenizer is not included.

| shape | weights | workload | tokens/s | median step, ms |
|---|---|---|---|---|
{{engine}}

- **B1**: one request, decoding only. **B64**: 64 requests at once, decoding only.
- **P4096**: prompts of 4096 tokens; the figure counts prompt tokens.
- **W1**: 256 requests submitted at once, each with 100 to 1024 prompt tokens and 100 to 1024 output tokens. The time includes
  prefill.

## How it is measured

- The calls that are compared run alternately in one process, in random order. Each is a CUDA graph over operands larger than
  the L2 cache.
- Each operator is compared with the call that a user would otherwise make: cuBLAS, cuDNN or PyTorch with their own choice of
  algorithm.
- With `--settle 0.5` each call runs alone for half a second before it is timed. Otherwise, at the GPU's power limit, calls that
  alternate quickly all run at the same GPU clock ([experiment](experiments/power-limit.md)).
- Every result file records GPU, driver, versions, commit and date. Rows whose kernels have changed since then are marked.
- `tilewright bench all --out DIR` repeats all measurements, in about 23 minutes on one GPU.
"""


def wanted() -> dict[Path, str]:
    """Every file, and what it has to hold."""
    of = shown(sets(RESULTS))
    charts = {"models": models_chart(), "operators": operators_chart(of), "layers": layers_chart(of)}
    pictures = {IMAGES / f"{name}.svg": svg(chart) for name, chart in charts.items()}
    return pictures | {PAGE: performance_page(of)}


def main() -> int:
    """Rewrite or check the files."""
    stale = {path: text for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} does not show what benchmarks/results say; run: python scripts/charts.py",
                file=sys.stderr,
            )
        return int(bool(stale))
    IMAGES.mkdir(exist_ok=True)
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
