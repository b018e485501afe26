"""Compares the results of two recipes: documents that only one of them kept, texts that differ, and the effect of each step."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["compare", "lines"]

_SHOWN = 10


def compare(before: Path, after: Path) -> dict[str, Any]:
    """The differences between two output folders. Documents are matched by their ids, which identify input file and record."""
    reports = [_report(folder) for folder in (before, after)]
    texts = [dict(_documents(folder)) for folder in (before, after)]
    both = texts[0].keys() & texts[1].keys()
    changed = sorted(name for name in both if texts[0][name][0] != texts[1][name][0])
    only = [sorted(a.keys() - b.keys()) for a, b in (texts, texts[::-1])]
    names = list(dict.fromkeys(step["name"] for report in reports for step in report["steps"]))
    steps = [[next((s for s in report["steps"] if s["name"] == name), None) for report in reports] for name in names]
    return {
        "documents": [len(found) for found in texts],
        "in both": len(both),
        "same text": len(both) - len(changed),
        "changed text": changed[:_SHOWN],
        "only before": [[name, texts[0][name][1]] for name in only[0][:_SHOWN]],
        "only after": [[name, texts[1][name][1]] for name in only[1][:_SHOWN]],
        "only before, count": len(only[0]),
        "only after, count": len(only[1]),
        "steps": {name: [_brief(step) for step in pair] for name, pair in zip(names, steps)},
        "recipe": _changes(reports[0]["recipe"], reports[1]["recipe"]),
    }


def _report(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"{folder} has no report.json; wanted the folder of a finished `tilewright data clean`") from None


def _documents(folder: Path) -> Iterator[tuple[str, tuple[bytes, str]]]:
    for path in sorted((folder / "documents").glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                text = row["text"]
                yield row["id"], (hashlib.blake2b(text.encode(), digest_size=16).digest(), " ".join(text[:200].split()))


def _brief(step: dict[str, Any] | None) -> dict[str, Any] | None:
    return step and {key: step[key] for key in ("documents_in", "documents_out", "bytes_out", "reasons")}


def _changes(before: Any, after: Any, place: str = "") -> list[list[Any]]:
    """[place in the recipe, value before, value after] for every value that differs between two recipes."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [row for key in keys for row in _changes(before.get(key), after.get(key), f"{place}.{key}".lstrip("."))]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [row for i, pair in enumerate(zip(before, after)) for row in _changes(*pair, f"{place}[{i}]")]
    return [] if before == after else [[place, before, after]]


def lines(found: dict[str, Any]) -> list[str]:
    """The comparison as text."""
    rows = [f"recipe: {place or 'all'}: {before!r} -> {after!r}" for place, before, after in found["recipe"]]
    rows.append(f"{'step':24}{'documents before':>18}{'after':>10}")
    for name, (before, after) in found["steps"].items():
        rows.append(f"{name:24}{before['documents_out'] if before else '-':>18}{after['documents_out'] if after else '-':>10}")
        reasons = [step["reasons"] if step else {} for step in (before, after)]
        for reason in dict.fromkeys([*reasons[0], *reasons[1]]):
            counts = [part.get(reason, 0) for part in reasons]
            if counts[0] != counts[1]:
                rows.append(f"    {reason:32}{counts[0]:>6}{counts[1]:>10}")
    rows.append(f"kept by both {found['in both']}, with the same text {found['same text']}")
    for which in ("only before", "only after"):
        rows.append(f"{which}: {found[which + ', count']}")
        rows += [f"    {name} {text[:90]}" for name, text in found[which]]
    return rows
