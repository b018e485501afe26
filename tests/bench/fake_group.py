"""A measuring process without a GPU and without torch, resumable like the real ones: its files are those of `bench.results`.

    python -m tests.bench.fake_group FILE ENVIRONMENT ROWS SECONDS [crash]

It writes a row every SECONDS until FILE has ROWS of them in all its parts; with "crash" it dies before its second row.
ENVIRONMENT is what its files say of code, card and versions, as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

__all__ = ["CRASH", "main"]

CRASH = 7


def main(file: str, environment: str, wanted: str, seconds: str, how: str = "") -> None:
    """Measure what is missing."""
    path, number, there, rows = Path(file), 1, set(), []
    while path.exists():
        there |= {row["dims"] for row in json.loads(path.read_text())["rows"]}
        number += 1
        path = Path(file).with_name(f"{Path(file).stem}.{number}.json")

    def write(mark: dict[str, bool]) -> None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps({"what": "fake", **mark, "environment": json.loads(environment), "rows": rows}))
        beside.replace(path)

    for name in (f"M={i}" for i in range(int(wanted))):
        if name in there:
            continue
        time.sleep(float(seconds))
        if how == "crash" and rows:
            os._exit(CRASH)
        rows.append({"op": "fake", "dims": name, "pid": os.getpid()})
        write({"incomplete": True})
    write({})


if __name__ == "__main__":
    main(*sys.argv[1:])
