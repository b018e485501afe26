"""Measure a served image network over HTTP, and the same network without a server.

    python scripts/measure_images.py --out FOLDER --server-cores 0-15 --client-cores 16-31

`tilewright serve` serves ResNet-50 (from `tilewright compare`, random weights) in fp16 with dynamic batching and
`--shared-memory`. `tilewright load` sends requests in a closed loop, several at a time, and from several processes where one
process would be the bottleneck. Then the server ends, and one process measures the same optimised model: rows per second with
all data on the device, and with copies from pinned host memory and back. With `--offline-in-server` the model's process does
this before the server ends, and nothing is loaded again. Each result is appended to FOLDER/results.jsonl; the server's log is
FOLDER/server.log.

The script ends after `--total` seconds. The most important measurements come first, and those that do not fit are left out. The
last `--offline-seconds` are reserved for the measurement without a server.

`--device cpu --model resnet18 --size 64 --sizes 1,8,16` runs the same on a machine without a GPU. `--model first` returns the
first 1,000 numbers of each image, which costs next to nothing, so that the server is measured alone, also on a CPU. Each result
has the processor time of the server, its fronts (`--fronts`), the model's process and the clients, and which share of the
images' bytes the GPU copied from the clients' memory itself (`direct_share`; `--no-locks` has the processor copy all of them).
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.bench.cpu_time import watched

CODE = """
import os, sys, threading, time, traceback
import torch
from pathlib import Path
from tilewright.bench.compare.models import load_model
from tilewright.bench.served_rate import wait_to_be_asked

def say_where():
    main = threading.main_thread().ident
    while not os.path.exists({ready!r}):
        time.sleep(10)
        frames = traceback.extract_stack(sys._current_frames()[main])[::-1]
        ours = [f"{{os.path.basename(f.filename)}}:{{f.lineno}} {{f.name}}" for f in frames if "tilewright" in f.filename]
        print("loading:", frames[0].name, *ours[:12], sep=" < ", file=sys.stderr, flush=True)

class Bytes(torch.nn.Module):
    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = net, dtype
    def forward(self, image):
        return self.net(image.to(self.dtype) / 255)

class First(torch.nn.Module):
    def forward(self, image):
        return image.flatten(1)[:, :1000].contiguous()

def build():
    threading.Thread(target=say_where, daemon=True).start()
    net = First() if {model!r} == {first!r} else load_model({model!r}).module
    dtype = torch.float16 if {fp16!r} else torch.float32
    net = net.to(dtype)
    shape = (1, 3, {size}, {size})
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(shape, generator=generator).to(dtype)
    if {uint8!r}:
        net, image = Bytes(net, dtype), torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    wait_to_be_asked(Path({folder!r}), image)
    return net, image
"""
NAME, FIRST = "images", "first"
READY = "ready"
"""File that ends what the model's process says of its loading."""
CASES = [
    # rows of a request, requests in flight, client processes, shared memory; the most telling first
    (64, 8, 1, True),
    (1, 1, 1, True),
    (64, 16, 2, True),
    (1, 256, 4, True),
    (16, 32, 2, True),
    (64, 8, 1, False),
    (1, 64, 2, True),
    (64, 4, 1, True),
    (64, 1, 1, True),
]


class Run:
    """What is asked, until when, and where results go."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.end_s, self._began_s = asked, time.monotonic() + asked.total, time.monotonic()
        asked.out.mkdir(parents=True, exist_ok=True)
        self.results = asked.out / "results.jsonl"
        self.server = 0
        """The server's process number."""

    def left_s(self) -> float:
        """Seconds until everything has to have ended."""
        return self.end_s - time.monotonic()

    def say(self, text: str) -> None:
        """A line on the screen, with the time since the beginning."""
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)

    def note(self, **result: Any) -> None:
        """A line of the results."""
        line = json.dumps({"at_s": round(time.monotonic() - self._began_s, 1), **result})
        with self.results.open("a") as file:
            file.write(line + "\n")
        self.say(line)


def cases_of(text: str) -> list[tuple[int, int, int, bool]]:
    """Cases from the command line. Raises ValueError."""
    parts = [one.split(":") for one in text.split(",")]
    return [(int(one[0]), int(one[1]), int(one[2]), one[3:] != ["bytes"]) for one in parts]


def on_cores(cores: str | None) -> list[str]:
    """The words before a command that has to stay on some cores."""
    return ["taskset", "-c", cores] if cores else []


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a process and all that it began."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# ---- the server


def written(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Write the model's code and its repository; the environment of processes that need them."""
    sizes, fp16 = [int(n) for n in asked.sizes.split(",")], asked.precision == "fp16"
    fields = {"model": asked.model, "first": FIRST, "fp16": fp16, "size": asked.size, "uint8": asked.input == "uint8"}
    code = CODE.format(**fields, ready=str(folder / READY), folder=str(folder))
    (folder / "served_images.py").write_text(code)
    (folder / "models" / NAME / "1").mkdir(parents=True)
    options = {"source": "served_images:build", "device": asked.device, "max_batch": max(sizes), "max_wait_s": 30}
    options |= {"lock_regions": False} if asked.no_locks else {}
    options |= {} if asked.model == FIRST else {"precision": asked.precision, "preferred": sizes}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    (folder / "models" / NAME / "model.toml").write_text("[model]\n" + text)
    root = str(Path(__file__).resolve().parents[1])
    paths = [str(folder), root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextlib.contextmanager
def serving(run: Run, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """The URL of a server that is ready. Ends the program where it is not in time."""
    port, log = free_port(), run.asked.out / "server.log"
    words = [*on_cores(run.asked.server_cores), sys.executable, "-m", "tilewright.cli", "serve"]
    words += ["--repository", str(folder / "models"), "--package", "served_images", "--shared-memory", "--port", str(port)]
    words += ["--max-body-mib", "64", "--fronts", str(run.asked.fronts)]  # 64 images as bytes are 18 MiB
    with log.open("wb") as file:
        server = subprocess.Popen(words, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True)
    run.server = server.pid
    try:
        if wait_until_ready(run, server, f"http://127.0.0.1:{port}"):
            (folder / READY).touch()
            yield f"http://127.0.0.1:{port}"
        else:
            run.say("the server's log ends with\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))
            run.note(what="failed", why="the server is not ready in time, or ended", code=server.poll())
            yield ""
    finally:
        end(server, 10.0)


def wait_until_ready(run: Run, server: "subprocess.Popen[Any]", url: str) -> bool:
    """Whether the server takes requests before only the time without it is left."""
    began_s = said_s = time.monotonic()
    while server.poll() is None and run.left_s() > run.asked.offline_seconds + 10:
        try:
            with urllib.request.urlopen(f"{url}/v2/models/{NAME}/ready", timeout=2) as answer:
                if answer.status == 200:
                    run.note(what="ready", seconds=round(time.monotonic() - began_s, 1))
                    return True
            state = f"status {answer.status}"
        except urllib.error.HTTPError as error:
            state = f"status {error.code}"
        except OSError as error:
            state = str(error)
        if time.monotonic() - said_s >= 10:
            said_s = time.monotonic()
            lines = (run.asked.out / "server.log").read_text(errors="replace").splitlines()
            run.say(f"not ready ({state}); its log: {lines[-1][:200] if lines else 'empty'}")
        time.sleep(0.2)
    return False


def wait_for(run: Run, file: Path | None) -> None:
    """Wait until the file is there, or the time for one measurement is all that is left."""
    while file is not None and not file.exists():
        if run.left_s() < run.asked.offline_seconds + run.asked.seconds + 10:
            return run.note(what="failed", why=f"{file} is not there in time: other work may still run on the card")
        time.sleep(0.2)
    if file is not None:
        run.say(f"{file} is there")


# ---- the load


def load(run: Run, url: str, env: dict[str, str], case: tuple[int, int, int, bool]) -> None:
    """One stage of requests, by one process or several at once."""
    rows, in_flight, processes, shared = case
    asked, words = run.asked, [*on_cores(run.asked.client_cores), sys.executable, "-m", "tilewright.cli", "load", url]
    words += ["--endpoint", "v2", "--model", NAME, "--batch", str(rows), "--concurrency", str(in_flight // processes)]
    words += ["--duration", str(asked.seconds), "--warmup", "1", "--json", *(["--shared-memory"] if shared else [])]
    case_said = {"rows": rows, "in_flight": in_flight, "processes": processes, "shared_memory": shared, "fronts": asked.fronts}
    clients = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(processes)
    ]
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
        spread=max((stage["spread"] or 0.0) for stage in stages),
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
        help="instead of the usual ones, such as 1:256:4,64:8:1:bytes: images in a request, requests in flight, "
        "client processes; and bytes, if not in shared memory",
    )
    parser.add_argument("--size", type=int, default=224, help="height and width of the images in pixels")
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
                if case[0] > max(int(n) for n in asked.sizes.split(",")):
                    continue
                if run.left_s() < asked.offline_seconds + asked.seconds + 6:
                    run.note(what="left out", why="no time", rows=case[0], in_flight=case[1], shared_memory=case[3])
                    continue
                load(run, url, env, case)
            if url and asked.offline_seconds and asked.offline_in_server:
                measure_in_server(run, folder)
        run.say("the server has ended")
        if asked.offline_seconds and not asked.offline_in_server:
            measure_offline(run, folder, env)


if __name__ == "__main__":
    main()
