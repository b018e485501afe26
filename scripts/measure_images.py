"""Measure a served image network over HTTP, and the same network without a server.

    python scripts/measure_images.py --out FOLDER --server-cores 0-15 --client-cores 16-31

`tilewright serve` serves ResNet-50 (from `tilewright compare`, random weights) in fp16 with dynamic batching and
`--shared-memory`. `tilewright load` sends requests in a closed loop, several at a time, and from several processes where one
process would be the bottleneck. It needs so much time for a request with one image that the server waits for it; cases that end
with `light` have another client, which needs little (light_client.py). Then the server ends, and one process measures the same
optimised model: rows per second with all data on the device, and with copies from pinned host memory and back. With
`--offline-in-server` the model's process does this before the server ends, and nothing is loaded again. Each result is appended
to FOLDER/results.jsonl; the server's log is FOLDER/server.log.

The script ends after `--total` seconds. The most important measurements come first, and those that do not fit are left out. The
last `--offline-seconds` are reserved for the measurement without a server.

`--device cpu --model resnet18 --size 64 --sizes 1,8,16` runs the same on a machine without a GPU. `--model first` returns the
first 1,000 numbers of each image, which costs next to nothing, so that the server is measured alone, also on a CPU. With
`--sleep-ms 2` this model also sleeps for each batch, as if a device computed it. Each result has the processor time of the
server, its fronts (`--fronts`), the model's process and the clients, and which share of the images' bytes the GPU copied from
the clients' memory itself (`direct_share`; `--no-locks` has the processor copy all of them).
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import light_client
from image_server import FIRST, NAME, Run, end, on_cores, serving, written

from tilewright.bench.cpu_time import WARM_UP_S, watched

MEMORY, BYTES, LIGHT = "memory", "bytes", "light"


class Case(NamedTuple):
    """What clients do in one measurement."""

    rows: int
    """Images in a request."""
    in_flight: int
    """Requests in flight, of all processes together."""
    processes: int
    way: str = MEMORY
    """MEMORY or BYTES: `tilewright load`, with tensors in shared memory or in bodies; LIGHT: light_client.py."""


CASES = [  # the most telling first
    Case(64, 8, 1),
    Case(1, 1, 1),
    Case(64, 16, 2),
    Case(1, 256, 4),
    Case(16, 32, 2),
    Case(64, 8, 1, BYTES),
    Case(1, 64, 2),
    Case(64, 4, 1),
    Case(64, 1, 1),
]


def cases_of(text: str) -> list[Case]:
    """Cases from the command line. Raises ValueError."""
    cases = list[Case]()
    for one in text.split(","):
        rows, in_flight, processes, *way = one.split(":")
        if way not in ([], [BYTES], [LIGHT]):
            raise ValueError(f"{one} ends with {':'.join(way)}, wanted {BYTES}, {LIGHT} or nothing")
        cases.append(Case(int(rows), int(in_flight), int(processes), *way))
    return cases


def wait_for(run: Run, file: Path | None) -> None:
    """Wait until the file is there, or the time for one measurement is all that is left."""
    while file is not None and not file.exists():
        if run.left_s() < run.asked.offline_seconds + run.asked.seconds + 10:
            return run.note(what="failed", why=f"{file} is not there in time: other work may still run on the card")
        time.sleep(0.2)
    if file is not None:
        run.say(f"{file} is there")


# ---- the load


def words_of(run: Run, url: str, case: Case) -> list[str]:
    """The command line of a client."""
    asked, share = run.asked, case.in_flight // case.processes
    words = on_cores(asked.client_cores)
    if case.way == LIGHT:
        return words + light_client.command(url, NAME, case.rows, share, asked.seconds, WARM_UP_S)
    words += [sys.executable, "-m", "tilewright.cli", "load", url, "--endpoint", "v2", "--model", NAME, "--json"]
    words += ["--batch", str(case.rows), "--concurrency", str(share)]
    words += ["--duration", str(asked.seconds), "--warmup", str(WARM_UP_S)]
    return words + (["--shared-memory"] if case.way == MEMORY else [])


def load(run: Run, url: str, env: dict[str, str], case: Case) -> None:
    """One stage of requests, by one process or several at once."""
    asked, words = run.asked, words_of(run, url, case)
    case_said = {"rows": case.rows, "in_flight": case.in_flight, "processes": case.processes, "fronts": asked.fronts}
    case_said |= {"shared_memory": case.way != BYTES, "client": "light" if case.way == LIGHT else "tilewright load"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    clients = [subprocess.Popen(words, env=env, text=True, start_new_session=True, **pipes) for _ in range(case.processes)]
    if case.way == LIGHT:
        light_client.begin(clients)
    used = watched(url, NAME, run.server, [client.pid for client in clients], max(0.5, asked.seconds - 2.5))
    end_s, stages, wrong = time.monotonic() + min(asked.seconds + 15, run.left_s() - asked.offline_seconds), [], ""
    for client in clients:
        try:
            out, err = client.communicate(timeout=max(1.0, end_s - time.monotonic()))
            if client.returncode:
                wrong = err.strip()[-400:]
            else:
                found = json.loads(out)
                stages.append({**found["stages"][0], "tensors": found["tensors"]})
        except subprocess.TimeoutExpired:
            wrong = "no result in time"
        finally:
            end(client, 2.0)
    if wrong:
        return run.note(what="failed", why=wrong, **case_said)
    latencies = [stage["latencies"].get("e2e", {}) for stage in stages]
    run.note(
        what="served",
        **case_said,
        tensors=stages[0]["tensors"],
        rows_per_s=round(sum(stage["row_rate"] or 0.0 for stage in stages), 1),
        # Of several clients, which ask the same: the mean of their medians, the largest of their tails.
        p50_ms=round(1e3 * sum(one.get("p50", 0.0) for one in latencies) / len(latencies), 3),
        p99_ms=round(1e3 * max(one.get("p99", 0.0) for one in latencies), 3),
        refused=sum(stage["rejected"] for stage in stages),
        failed=sum(stage["failed"] for stage in stages),
        problems={key: value for stage in stages for key, value in stage["problems"].items()},
        spread=max((stage["spread"] for stage in stages if stage["spread"] is not None), default=None),
        # From the middle of the time, in which all clients send.
        middle=used,
    )


# ---- without a server


def offline(folder: Path, sizes: list[int], seconds: float) -> None:
    """Print the rates of the served model in this process, a JSON line each."""
    import dataclasses

    from tilewright.bench.provenance import environment
    from tilewright.bench.served_rate import rates
    from tilewright.host.config import read_config
    from tilewright.host.loaded import load

    config = read_config(folder / "models" / NAME / "model.toml")
    loaded = load(dataclasses.replace(config, preferred=tuple(sizes), max_batch=max(sizes)), None)
    print(json.dumps({"what": "environment", **environment(card=loaded.device.type == "cuda")}), flush=True)
    _, example = __import__("served_images").build()
    for said in rates(loaded, example, sizes, seconds):
        print(json.dumps(said), flush=True)


def offline_seconds(asked: argparse.Namespace) -> float:
    """Seconds for each measurement without requests."""
    return min(2.0, asked.seconds / 2)


def measure_in_server(run: Run, folder: Path) -> None:
    """Measure without requests in the model's own process; other sizes than the served ones would need graphs of their own."""
    from tilewright.bench.served_rate import ask

    served, asked = run.asked.sizes.split(","), run.asked.offline_sizes.split(",")
    sizes = [int(n) for n in asked if n in served]
    for said in ask(folder, sizes, offline_seconds(run.asked), max(1.0, run.left_s() - 4)):
        run.note(**said)


def measure_offline(run: Run, folder: Path, env: dict[str, str]) -> None:
    """`offline` in a process of its own, which may hang."""
    words = [*on_cores(run.asked.server_cores), sys.executable, __file__, "--offline", str(folder)]
    words += ["--offline-sizes", run.asked.offline_sizes, "--out", str(run.asked.out), "--seconds", str(run.asked.seconds)]
    with (run.asked.out / "offline.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
    assert process.stdout is not None
    timer = threading.Timer(max(1.0, run.left_s() - 2), lambda: end(process, 0.5))
    timer.start()
    try:
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                run.note(**json.loads(line))
        if process.wait():
            text = (run.asked.out / "offline.log").read_text(errors="replace")[-400:]
            run.note(what="failed", why=f"the rate without a server did not end in time, or failed: {text}")
    finally:
        timer.cancel()
        end(process, 0.5)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says; or `words`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", default="resnet50", help=f"name of the model, as for `tilewright compare`, or {FIRST}")
    parser.add_argument("--fronts", type=int, default=0, help="processes of the server that speak HTTP")
    parser.add_argument(
        "--cases",
        type=cases_of,
        help="instead of the usual ones, such as 1:256:4,1:256:2:light,64:8:1:bytes: images in a request, requests in flight, "
        f"client processes; and {BYTES}, if not in shared memory, or {LIGHT} for light_client.py",
    )
    parser.add_argument("--size", type=int, default=224, help="height and width of the images in pixels")
    parser.add_argument("--sleep-ms", type=float, default=0.0, help=f"milliseconds for which model {FIRST} sleeps for a batch")
    parser.add_argument("--input", choices=("float", "uint8"), default="float", help="type in which images are sent")
    parser.add_argument("--device", default="cuda", help="device: cuda or cpu")
    parser.add_argument("--precision", choices=("fp32", "fp16"), help="precision; default: fp16 on cuda, fp32 on cpu")
    parser.add_argument("--sizes", default="1,32,64,128,256", help="batch sizes that batches are padded to")
    parser.add_argument("--offline-sizes", default="256,64", help="batch sizes to measure without a server")
    parser.add_argument("--server-cores", help="processor cores for the server (taskset), such as 0-15")
    parser.add_argument("--client-cores", help="processor cores for the clients, such as 16-31")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for each measurement; the first one is a warm-up")
    parser.add_argument("--wait-for", type=Path, help="wait until this file exists before sending requests")
    parser.add_argument("--total", type=float, default=600.0, help="seconds after which the script ends")
    parser.add_argument(
        "--offline-seconds",
        type=float,
        default=60.0,
        help="seconds of --total reserved for the measurement without a server; 0: none",
    )
    parser.add_argument(
        "--offline-in-server",
        action="store_true",
        help="measure without requests in the model's process, for those --offline-sizes that are among --sizes",
    )
    parser.add_argument("--no-locks", action="store_true", help="have the processor copy what is in shared memory")
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    asked.out = asked.out.resolve()
    asked.precision = asked.precision or ("fp32" if asked.device == "cpu" and asked.model != FIRST else "fp16")
    return asked


def main() -> None:
    """Serve, ask, end the server, measure without it."""
    asked = arguments()
    if asked.offline is not None:
        offline(asked.offline, [int(n) for n in asked.offline_sizes.split(",")], offline_seconds(asked))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # in order: the server has its own session
    run = Run(asked)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        env = written(asked, folder)
        with serving(run, folder, env) as url:
            wait_for(run, asked.wait_for)
            for case in (asked.cases or CASES) if url else []:
                if case.rows > max(int(n) for n in asked.sizes.split(",")):
                    continue
                if run.left_s() < asked.offline_seconds + asked.seconds + 6:
                    run.note(what="left out", why="no time", **case._asdict())
                    continue
                load(run, url, env, case)
            if url and asked.offline_seconds and asked.offline_in_server:
                measure_in_server(run, folder)
        run.say("the server has ended")
        if asked.offline_seconds and not asked.offline_in_server:
            measure_offline(run, folder, env)


if __name__ == "__main__":
    main()
