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

Written by scripts/optimize_models_table.py from benchmarks/results/*/studies/optimize-models.json. The models are those of
tests/fuse/zoo_models.py: timm's and transformers' own code, torch.nn's encoder, and three that are written there; full
architectures, weights of their own initialisers, images of 224 pixels, texts of 128 tokens. Nothing in tilewright was made for
them.

- **error**: RMS error over the RMS of the right output, which is the user's own call in float64 (on a GPU: in float32 without
  TF32), on inputs that `optimize` has not seen. **other batch**: a call with one row more.
- **FLOPs, launches**: the share that our operators take. What is left runs as torch's own kernels.
- Times are medians in milliseconds, measured in turns; *x* is how many times faster `optimize` is.

"""
GPU_BASES = {"eager": "eager", "graph": "CUDA graph", "compile": "torch.compile"}


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
                f"Batch {batch}, over the fastest of torch's in each row: {mean:.2f} times as fast in the geometric mean of "
                f"{len(gains)} models, {gains[least]:.2f} at least ({least})."
            )
    for row in rows:
        if "note" in row:
            lines += ["", f"{row['model']}@{row['batch']}: {row['note']}"]
    return lines


def missing(rows: list[dict[str, Any]]) -> str:
    """Models without a row, and rows without torch.compile."""
    names = {row["model"] for row in rows}
    models = [name for name in MODELS if name not in names]
    rest = [f"{row['model']}@{row['batch']}" for row in rows if row["device"] == "cuda" and "compile" not in row.get("us", {})]
    words = f"Not measured here yet: {', '.join(models)}." if models else "Every model has a row."
    return words + (f" Without torch.compile, which took longer than the run had: {', '.join(rest)}." if rest else "")


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
    """One line a model and batch."""
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
    """What stays torch's, over all models, and the reasons that reports give."""
    calls, reasons = Counter[str](), Counter[str]()
    for row in {row["model"]: row for row in rows}.values():
        calls.update(row.get("left", {}))
        reasons.update(row.get("refused", {}))
    kernels = ", ".join(f"{name.removeprefix('aten.')} {n}" for name, n in calls.most_common(12)) or "nothing"
    lines = [
        f"Calls of torch's own kernels that are most frequent, one row of each model: {kernels}.",
        "",
        "Reasons given most often:",
        "",
    ]
    return "\n".join([*lines, *[f"- {n} x {reason}" for reason, n in reasons.most_common(8)]])


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
