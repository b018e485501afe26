"""The tables of `regret.py --from`: what every way to choose without a search loses against the best candidate, as Markdown."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["cases_of", "percentile", "read", "show"]

Json = dict[str, Any]


def read(path: Path) -> tuple[list[Json], list[Json]]:
    """(environments, candidates) of a data file; a line that was cut short, at the end, is left out.

    Raises:
        ValueError: the file has no candidates.
    """
    environments, rows = [], []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "environment" in row:
            environments.append(row["environment"])
        else:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no candidates; wanted what `regret.py --out` writes")
    return environments, rows


def cases_of(rows: Iterable[Json]) -> dict[tuple[str, str], list[Json]]:
    """(op, label) -> its measured candidates, fastest first, torch's own kernels aside."""
    found: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok" and row["impl"] != "torch":
            found[row["op"], row["label"]].append(row)
    return {case: sorted(members, key=lambda row: row["us"]) for case, members in found.items()}


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of them does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else math.nan


def _config(row: Json) -> str:
    return f"{row['impl']} " + " ".join(f"{k}={v}" for k, v in row["config"].items())


def _us(row: Json | None) -> str:
    return f"{row['us']:.1f}" if row else ""


def show(path: Path) -> None:
    """Print the tables of a data file."""
    environments, rows = read(path)
    for environment in environments[:1]:
        print(", ".join(f"{k} {v}" for k, v in environment.items()), "\n")
    statuses: dict[str, int] = defaultdict(int)
    for row in rows:
        statuses[row["status"]] += 1
    print(", ".join(f"{count} {status}" for status, count in sorted(statuses.items())), "\n")
    wrong = [row for row in rows if row.get("off", 0) > 0.05]
    for row in wrong[:10]:
        print(f"differs from the first result by {row['off']:.3g}: {row['op']} {row['label']} {_config(row)}")
    torch_of = {(row["op"], row["label"]): row for row in rows if row["impl"] == "torch" and row["status"] == "ok"}
    print("| op | case | candidates | best | us | spread | library us | default us | default's regret |")
    print("|---|---|---|---|---|---|---|---|---|")
    regrets: dict[str, list[float]] = defaultdict(list)
    for (op, label), members in cases_of(rows).items():
        best = members[0]
        default = min((r for r in members if r["default"]), key=lambda r: _rank(op, r), default=None)
        library = torch_of.get((op, label)) or next((r for r in members if r["impl"] == "vendor"), None)
        regret = default["us"] / best["us"] - 1 if default else math.nan
        if default:
            regrets[op].append(regret)
        print(
            f"| {op} | {label} | {len(members)} | {_config(best)} | {_us(best)} | {best['us_spread']:.2f} "
            f"| {_us(library)} | {_us(default)} | {regret:.1%} |"
        )
    print("\n| op | cases | default's regret: median | 95th percentile | most |\n|---|---|---|---|---|")
    for op, values in regrets.items():
        print(f"| {op} | {len(values)} | {percentile(values, 0.5):.1%} | {percentile(values, 0.95):.1%} | {max(values):.1%} |")


def _rank(op: str, row: Json) -> int:
    """Where an implementation stands in its op: the first that does not refuse is what an untuned program runs."""
    from tilewright.ops import ALL

    names = next([impl.name for impl in candidate.impls] for candidate in ALL if candidate.name == op)
    return names.index(row["impl"])
