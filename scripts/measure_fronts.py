"""Measure how much processor time a request costs each process of a server of images, while the server is busy.

    python scripts/measure_fronts.py --fronts 3 --seconds 6

The model returns the first 1,000 numbers of an image, as with `measure_images.py --model first`. One client with many
connections sends one image at a time over each of them, in shared memory. The client (light_client.py) takes little of the
processor, so that the server's processes get requests as fast as they can answer them.

The result is a line of JSON: requests/s, rows of a batch, and for each kind of process the microseconds of processor time for a
request, as user, system and both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import image_server as images
import light_client
from measure_images import arguments

from tilewright.bench.cpu_time import PROC, ROLES, descendants, fields, rows_and_batches

TICKS = os.sysconf("SC_CLK_TCK")
WARM_UP_S = 1.5


def used(server: int, client: int) -> dict[str, list[int]]:
    """What processes do -> their user and system time since they began, in ticks."""
    found = dict[str, list[int]]()
    for pid in (server, *descendants(server), client):
        try:
            command = (PROC / str(pid) / "cmdline").read_text()
            role = next((role for part, role in ROLES.items() if part in command), "others")
            role = {server: "server", client: "client"}.get(pid, role)
            times = found.setdefault(role, [0, 0])
            for kind, ticks in enumerate(fields(pid)[11:13]):
                times[kind] += int(ticks)
        except OSError:  # it has just ended
            continue
    return found


def measured(run: images.Run, url: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What the requests of `asked.seconds` cost."""
    words = light_client.command(url, images.NAME, 1, asked.connections, asked.seconds + 2 * WARM_UP_S, WARM_UP_S)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        light_client.begin([client])
        time.sleep(WARM_UP_S)
        before, (rows, batches), began_s = used(run.server, client.pid), rows_and_batches(url, images.NAME), time.monotonic()
        time.sleep(asked.seconds)
        after, (rows_then, batches_then) = used(run.server, client.pid), rows_and_batches(url, images.NAME)
        wall_s, rows, batches = time.monotonic() - began_s, rows_then - rows, batches_then - batches
        said, _ = client.communicate()
    if client.returncode:
        raise SystemExit("the client failed")
    stage = json.loads(said)["stages"][0]
    if stage["problems"]:
        raise SystemExit(f"the client was not answered: {stage['problems']}")
    us = 1e6 / TICKS / max(1, rows)
    found: dict[str, Any] = {"requests_per_s": round(rows / wall_s), "rows_per_batch": round(rows / max(1, batches), 1)}
    for role, times in after.items():
        user, system = (us * (now - then) for now, then in zip(times, before.get(role, [0, 0]), strict=True))
        found[role] = {"user_us": round(user, 1), "system_us": round(system, 1), "us": round(user + system, 1)}
    return found


def main() -> None:
    """Serve, send, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images in pixels")
    parser.add_argument("--connections", type=int, default=256, help="connections of the client")
    parser.add_argument("--fronts", type=int, default=3, help="processes of the server that speak HTTP")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds for the measurement")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        words = ["--out", text, "--model", images.FIRST, "--device", "cpu", "--sizes", "256", "--size", str(asked.size)]
        run = images.Run(arguments([*words, "--fronts", str(asked.fronts), "--offline-seconds", "0"]))
        run.say = lambda text: None
        env = images.written(run.asked, folder)
        with images.serving(run, folder, env) as url:
            if url:
                print(json.dumps(measured(run, url, asked)), flush=True)


if __name__ == "__main__":
    main()
