"""Write docs/optimize_models.md from benchmarks/results/CARD/studies/optimize-models.json (of `python -m tests.fuse.zoo`).

python -m scripts.optimize_models_table            # rewrite the file
python -m scripts.optimize_models_table --check    # exit 1 if it is not what the results say
"""

import json
import sys
from collections import Counter
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tests.fuse.zoo_models import MODELS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/optimize_models.md"
NAME = "studies/optimize-models.json"
HEAD = """# `optimize` on other people's models

This page is written by scripts/optimize_models_table.py from benchmarks/results/*/studies/optimize-models.json. The models are
those of tests/fuse/zoo_models.py: the code of timm and transformers, torch.nn's encoder, and three models that are written in
that file. They have their full architectures, weights from their own initialisers, images of 224 pixels and texts of 128
tokens. Nothing in tilewright was made for them.

- **error**: the RMS error divided by the RMS of the right output, on inputs that `optimize` has not seen. The right output is
  that of the user's own call in float64 (on a GPU: in float32 without TF32). **other batch**: a call with one more row.
- **FLOPs, launches**: the share that our operators take. The rest runs as torch's own kernels.
- Times are medians in milliseconds, measured in turns. In brackets: how many times as fast `optimize` is.

"""
GPU_BASES = {"eager": "eager", "graph": "CUDA graph", "compile": "torch.compile"}
REWORDED = {
    "no product or convolution is before it that could take it":
        "there is no product or convolution before it that could fuse it",
    "an activation beside other pointwise calls, which torch's compiler computes in one pass where that is faster":
        "an activation next to other pointwise calls, which torch's compiler can compute in one pass",
    "its operand is computed, not a parameter":
        "its operand is computed in every call, so it cannot be folded into the weight",
    "a concatenation: its operands are copied side by side by torch's kernel":
        "a concatenation: torch's own kernel copies its operands next to each other",
    "no operator here computes it": "no operator of tilewright computes it",
    "an operand is copied: its rows have gaps":
        "an operand is copied, because the operator cannot read its memory layout",
    "a gather of rows, which is torch's own kernel in every operator here":
        "a gather of rows: every operator of tilewright uses torch's own kernel for it",
    "folded into the weight it makes numbers that float16 has not":
        "folding it would make weights that float16 cannot represent",
    "linear takes a residual once": "linear can apply only one residual, and it already has one",
    "it changes the type or the shape": "its result has another dtype or shape than the value that it reads",
    "the rows of the other operand lie in another order":
        "the other operand of the sum has its rows in another order than the product",
    "the rows of the other operand are in another order":
        "the other operand of the sum has its rows in another order than the product",
    "it is stored all the same": "it must be stored anyway",
    "an LSTM: no operator here has its recurrence, and torch's library computes it":
        "an LSTM: no operator of tilewright computes its recurrence, so torch's library does",
    "the other operand has another shape, type or device": "its other operand has another shape, dtype or device",
    "a mean that is not over all pixels of [N, C, H, W]":
        "a mean over other dims than H and W of [N, C, H, W], or with a change of dtype",
}  # fmt: skip
"""Reasons as the stored results have them, and as tilewright.fuse words them since."""


def page(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The whole file, from the contents of result files by card."""
    parts = [HEAD]
    for card, kept in results.items():
        rows = kept["rows"]
        told = [setting(rows), *map(made, kept["runs"]), table(rows), *summary(rows), missing(rows), left(rows)]
        parts.append(f"## {card}\n\n" + "\n\n".join(told) + "\n")
    return "\n".join(parts)


def made(run: dict[str, Any]) -> str:
    """Card, code, date and command of a run."""
    where = f"{run['device']}, driver {run['driver']}" if "device" in run else f"CPU {run['cpu']}"
    changes = " with uncommitted changes" if run["dirty"] else ""
    return f"{where}, triton {run['triton']}; {run['date'][:10]}, commit {run['commit'][:7]}{changes}; `{run['command']}`"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The geometric mean over the strongest baseline by batch, and the row that gains least."""
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        gains = {row["model"]: min(us for b, us in row["us"].items() if b != "ours") / row["us"]["ours"]
                 for row in rows if row["batch"] == batch and "us" in row}  # fmt: skip
        if gains:
            mean, least = geometric_mean(gains.values()), min(gains, key=lambda name: gains[name])
            lines.append(
                f"Batch {batch}, compared with the fastest of torch's in each row: {mean:.2f} times as fast on geometric mean "
                f"over {len(gains)} models, at least {gains[least]:.2f} ({least})."
            )
    return lines + [f"{row['model']}@{row['batch']}: {row['note']}" for row in rows if "note" in row]


def missing(rows: list[dict[str, Any]]) -> str:
    """Models without a row, and rows without torch.compile."""
    names = {row["model"] for row in rows}
    models = [name for name in MODELS if name not in names]
    rest = [f"{row['model']}@{row['batch']}" for row in rows if row["device"] == "cuda" and "compile" not in row.get("us", {})]
    words = f"Not measured here yet: {', '.join(models)}." if models else "Every model has a row."
    if rest:
        words += f" These rows have no time of torch.compile, which took longer than the run allowed: {', '.join(rest)}."
    return words


def setting(rows: list[dict[str, Any]]) -> str:
    """How the rows were made, in a sentence."""
    versions = ", ".join(sorted({f"torch {row['torch']}" for row in rows}))
    if rows[0]["device"] == "cuda":
        jobs = max(row.get("jobs", 1) for row in rows)
        beside = (
            f" Models were optimised and compiled in {jobs} processes at once, and timed one after the other."
            if jobs > 1
            else ""
        )
        return (
            f"{versions}; fp16. torch runs in fp16 too, images channels-last: eager, a CUDA graph of that, and "
            f"torch.compile with max-autotune and frozen weights.{beside}"
        )
    return (
        f"{versions}; fp32. The operators run one by one (`compiled=False`), which on a CPU are torch's own calls: the "
        "times show what the fused graph costs or saves without Inductor."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """One line per model and batch."""
    bases = [base for base in GPU_BASES if any(base in row.get("us", {}) for row in rows)]
    head = [
        "model",
        "batch",
        "error",
        "other batch",
        "FLOPs",
        "launches",
        "ours, ms",
        *[f"{GPU_BASES[b]}, ms (x)" for b in bases],
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        us = row.get("us", {})
        cells = [row["model"], row["batch"], f"{row['error']:.1e}" if row["right"] == "right" else row["right"]]
        cells += [row.get("other_batch", ""), _share(row.get("flops_ours")), _launches(row)]
        cells += [f"{us['ours'] / 1e3:.2f}" if us else ""]
        cells += [f"{us[b] / 1e3:.2f} ({us[b] / us['ours']:.2f})" if b in us else "" for b in bases]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def left(rows: list[dict[str, Any]]) -> str:
    """The calls that stay torch's, over all models, and the reasons that reports give."""
    calls, reasons = Counter[str](), Counter[str]()
    for row in {row["model"]: row for row in rows}.values():
        calls.update(row.get("left", {}))
        reasons.update(row.get("refused", {}))
    kernels = ", ".join(f"{name.removeprefix('aten.')} {n}" for name, n in calls.most_common(12)) or "nothing"
    lines = [
        f"The most frequent calls of torch's own kernels, counting one row of each model: {kernels}.",
        "",
        "The reasons that are given most often:",
        "",
    ]
    return "\n".join([*lines, *[f"- {n} x {_reworded(reason)}" for reason, n in reasons.most_common(8)]])


def _reworded(reason: str) -> str:
    for old, new in REWORDED.items():
        if reason.endswith(old):
            return reason.removesuffix(old) + new
    return reason


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _launches(row: dict[str, Any]) -> str:
    return f"{row['launches_ours']} of {row['launches']}" if "launches" in row else ""


def main(given: list[str]) -> int:
    """Write or check the page. Returns the exit code."""
    found = sorted((ROOT / "benchmarks/results").glob(f"*/{NAME}"))
    text = page({path.parents[1].name: json.loads(path.read_text(encoding="utf-8")) for path in found})
    if given == ["--check"]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        if not same:
            print("docs/optimize_models.md is not what the results say: run scripts/optimize_models_table.py", file=sys.stderr)
        return int(not same)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
