"""The data of the regret study in two forms: the lines that `regret.py --out` writes, and one small JSON file for git.

The small file: {"environment", "failed": {status: how many}, "cases": [{"op", "label", "dims", "torch_us", "impls": {name:
{"axes": [name ...], "configs": [[value ...] ...], "facts": [[warps, registers, spills, shared bytes, blocks an SM] ...],
"us": [...], "spread": [...], "off": [...]}}}]}. What was not measured (spills, a failed compile) is a count there.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["compact", "read", "write"]

Json = dict[str, Any]

_FACTS = ("warps", "registers", "spill_bytes", "shared_bytes", "blocks_per_sm")


def read(path: Path) -> tuple[Json, list[Json], Counter[str]]:
    """(environment, measured candidates, how many failed by status) of a file in either form.

    A line that was cut short, at the end, is left out.

    Raises:
        ValueError: the file has no candidates.
    """
    text = path.read_text()
    if path.suffix == ".json":
        held = json.loads(text)
        return held["environment"], list(_rows(held["cases"])), Counter(held["failed"])
    environment, rows, failed = {}, [], Counter()
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "environment" in row:
            environment = environment or row["environment"]
        elif row["status"] == "ok":
            rows.append(row)
        else:
            failed[row["status"]] += 1
    if not rows:
        raise ValueError(f"{path}: no candidates; wanted what `regret.py --out` writes, or the small file made of it")
    return environment, rows, failed


def _rows(cases: Iterable[Json]) -> Iterable[Json]:
    for case in cases:
        head = {name: case[name] for name in ("op", "label", "dims")}
        if case["torch_us"] is not None:
            yield {**head, "impl": "torch", "config": {}, "resources": {}, "us": case["torch_us"], "us_spread": 0.0, "off": 0.0}
        for impl, held in case["impls"].items():
            columns = (held[name] for name in ("configs", "facts", "us", "spread", "off"))
            for values, facts, us, spread, off in zip(*columns, strict=True):
                config = dict(zip(held["axes"], values, strict=True))
                resources = dict(zip(_FACTS, facts, strict=True)) if facts else {}
                yield {
                    **head,
                    "impl": impl,
                    "config": config,
                    "resources": resources,
                    "us": us,
                    "us_spread": spread,
                    "off": off,
                }


def compact(environment: Json, rows: Iterable[Json], failed: Counter[str]) -> Json:
    """The small form."""
    cases: dict[tuple[str, str], Json] = {}
    for row in rows:
        head = {name: row[name] for name in ("op", "label", "dims")}
        case = cases.setdefault((row["op"], row["label"]), {**head, "torch_us": None, "impls": {}})
        if row["impl"] == "torch":
            case["torch_us"] = row["us"]
            continue
        empty = {"axes": list(row["config"]), "configs": [], "facts": [], "us": [], "spread": [], "off": []}
        held = case["impls"].setdefault(row["impl"], empty)
        held["configs"].append([row["config"][name] for name in held["axes"]])
        held["facts"].append([row["resources"][name] for name in _FACTS] if row["resources"] else [])
        held["us"].append(row["us"])
        held["spread"].append(row["us_spread"])
        held["off"].append(float(f"{row.get('off', 0.0):.2g}"))
    return {"environment": environment, "failed": dict(sorted(failed.items())), "cases": list(cases.values())}


def write(path: Path, small: Json) -> None:
    """One line an implementation of a case, so that git shows what moved."""
    lines = []
    for case in small["cases"]:
        impls = ",\n".join(f"  {json.dumps(name)}: {json.dumps(held)}" for name, held in case["impls"].items())
        head = json.dumps({name: value for name, value in case.items() if name != "impls"})
        lines.append(f'{head[:-1]}, "impls": {{\n{impls}\n}}}}')
    top = f'"environment": {json.dumps(small["environment"])},\n"failed": {json.dumps(small["failed"])}'
    path.write_text(f'{{\n{top},\n"cases": [\n' + ",\n".join(lines) + "\n]\n}\n")
