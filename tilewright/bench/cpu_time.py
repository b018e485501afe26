"""Processor time of the processes of a served model, by what they do: which of them limits how many requests are answered."""

import json
import os
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["WARM_UP_S", "Seconds", "descendants", "fields", "rows_and_batches", "served", "share_of", "shared_bytes", "watched"]

PROC = Path("/proc")
ROLES = {"tilewright.server.v2.front\0": "fronts", "tilewright.host.nursery\0": "model"}
"""Part of a command line -> what such a process does; the server itself is neither."""
LOOK_S = 0.1
WARM_UP_S = 1.0
"""Seconds after the first answer that are not measured."""

Seconds = Mapping[str, Mapping[int, float]]
"""What processes do -> process number -> seconds of processor time, user and system."""


def served(server: int, clients: Sequence[int]) -> Seconds:
    """Seconds of a server, its fronts, its models' processes and the clients, since each of them began.

    Args:
        server: process number of `tilewright serve`.
        clients: process numbers of the clients.
    """
    found = defaultdict[str, dict[int, float]](dict)
    for pid in (server, *descendants(server), *clients):
        try:
            command = (PROC / str(pid) / "cmdline").read_text()
            role = next((role for part, role in ROLES.items() if part in command), "others")
            role = "server" if pid == server else "clients" if pid in clients else role
            found[role][pid] = sum(map(int, fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has just ended
            continue
    return found


def share_of(before: Seconds, after: Seconds, wall_s: float, rows: int) -> dict[str, dict[str, float]]:
    """What was used between two samples.

    Returns:
        What processes do -> {"us_per_row": microseconds of processor time for each of `rows` rows, of all these processes
        together; "cores": cores that they kept busy; "busiest": cores that the busiest of them kept busy}.
    """
    found = dict[str, dict[str, float]]()
    for role, seconds in after.items():
        used = [one - before.get(role, {}).get(pid, 0.0) for pid, one in seconds.items()]
        found[role] = {
            "us_per_row": round(1e6 * sum(used) / max(1, rows), 1),
            "cores": round(sum(used) / wall_s, 2),
            "busiest": round(max(used) / wall_s, 2),
        }
    return found


def watched(url: str, model: str, server: int, clients: Sequence[int], seconds: float, wait_s: float = 20.0) -> dict[str, Any]:
    """Watch a server while clients send requests; the clients must go on for `seconds` and `WARM_UP_S` after the first answer.

    Args:
        url: of the server.
        model: the model that is asked.
        server, clients: process numbers.
        seconds: for how long to watch.
        wait_s: longest wait for the first answer.

    Returns:
        {"rows_per_s": rows that were computed, "rows_per_batch": on average, "cpu": the result of `share_of`, "direct_share":
        share of the bytes in clients' shared memory that a GPU copied itself, None if there were none, "locked_bytes": bytes of
        it whose pages were locked}; {} if no request was answered in time.
    """
    end_s, first = time.monotonic() + wait_s, rows_and_batches(url, model)
    while rows_and_batches(url, model) == first:
        if time.monotonic() > end_s:
            return {}
        time.sleep(LOOK_S)
    time.sleep(WARM_UP_S)
    moved = shared_bytes(url, model)
    began_s, (rows, batches), before = time.monotonic(), rows_and_batches(url, model), served(server, clients)
    time.sleep(seconds)
    after, wall_s = served(server, clients), time.monotonic() - began_s
    rows_then, batches_then = rows_and_batches(url, model)
    rows, batches = rows_then - rows, batches_then - batches
    moved_then = shared_bytes(url, model)
    direct, read = (moved_then[way] - moved[way] for way in ("direct", "read"))
    return {
        "rows_per_s": round(rows / wall_s, 1),
        "rows_per_batch": round(rows / max(1, batches), 1),
        "cpu": share_of(before, after, wall_s, rows),
        "direct_share": round(direct / (direct + read), 4) if direct + read else None,
        "locked_bytes": moved_then["locked"],
    }


def shared_bytes(url: str, model: str) -> dict[str, int]:
    """Bytes in clients' shared memory, of all versions of a model.

    Returns:
        {"direct": copied by a GPU so far, "read": read by a processor so far, "locked": whose pages are locked}.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, int] = dict.fromkeys(("direct", "read", "locked"), 0)
    for way, labels, value in re.findall(
        r"^tilewright_model_shared_bytes_([a-z]+)(?:_total)?\{(.*)\} (\S+)$", text, re.MULTILINE
    ):
        if way in found and f'model="{model}"' in labels.split(","):
            found[way] += int(float(value))
    return found


def rows_and_batches(url: str, model: str) -> tuple[int, int]:
    """(rows, batches) that the server has computed for a model."""
    with urllib.request.urlopen(f"{url}/v2/models/{model}/stats", timeout=10) as answer:
        stats = json.load(answer)["model_stats"]
    return sum(one["inference_count"] for one in stats), sum(one["execution_count"] for one in stats)


def descendants(pid: int) -> list[int]:
    """The process numbers of all children of a process, and of theirs."""
    parents = dict[int, int]()
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(fields(int(folder.name))[1])
            except OSError:  # it has just ended
                continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def fields(pid: int) -> list[str]:
    """What /proc/PID/stat says, from the state on."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
