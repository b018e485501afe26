"""Compare requests per second of a small model behind `tilewright serve` and behind other servers, in turns.

    python scripts/measure_models.py --clients 64 --seconds 4 --rounds 5 --out FILE

The model is the tabular MLP of `tilewright compare` (64 numbers in, one out, 3 layers of 256) on a CPU. Each client keeps one
connection and sends its next request, of one row, as soon as the last is answered. The clients run in one process on the same
cores, so they take the same processor time from every server. All servers run the whole time, but only one at a time gets
requests.

    tilewright   /v2/models/NAME/infer with binary tensors, and with JSON
    fastapi      def predict(body: Body): return model(tensor(body.x)).tolist()   one uvicorn process, and two
    litserve, ray serve   the same function with their batching, where they are installed

With `--clients 1` two more rows show the cost of the server itself: the same request from a client that only sends prepared
bytes and waits for as many bytes as the first answer had, and a call of the model in this process.

`--peer-path` is put first on the import path of the other servers; tilewright does not use the packages in it.
"""

import argparse
import importlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MODEL = """
import torch
from tilewright.bench.compare.models import load_model
def build():
    model = load_model("tabular_mlp")
    return model.module, model.inputs
torch.set_num_threads(1)
"""
FASTAPI = """
import torch
from fastapi import FastAPI
from pydantic import BaseModel
from measured_model import build
model, _ = build()
app = FastAPI()
class Body(BaseModel):
    x: list[list[float]]
@app.post("/predict")
def predict(body: Body):
    with torch.no_grad():
        return {"y": model(torch.tensor(body.x)).tolist()}
"""
LITSERVE = """
import sys, torch, litserve
from measured_model import build
class Api(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(1)
        self.model, _ = build()
    def decode_request(self, request):
        return torch.tensor(request["x"])
    def batch(self, inputs):
        return torch.cat(inputs)
    def predict(self, x):
        with torch.no_grad():
            return self.model(x)
    def unbatch(self, y):
        return list(y)
    def encode_response(self, y):
        return {"y": y.tolist()}
if __name__ == "__main__":
    api = Api(max_batch_size=64, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[1]), host="127.0.0.1", log_level="error", generate_client_file=False)
"""
RAY = """
import sys, time, torch, ray
from ray import serve
from starlette.requests import Request
from measured_model import build
@serve.deployment(max_ongoing_requests=256)
class Model:
    def __init__(self):
        torch.set_num_threads(1)
        self.model, _ = build()
    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
    async def batched(self, rows):
        with torch.no_grad():
            return self.model(torch.tensor(rows)).tolist()
    async def __call__(self, request: Request):
        return {"y": [await self.batched((await request.json())["x"][0])]}
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Model.bind(), route_prefix="/predict")
    while True: time.sleep(60)
"""


@dataclass
class Side:
    """A server, and the request that it is asked."""

    name: str
    port: int
    request: bytes


def port_of() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def http(path: str, body: bytes, **headers: str) -> bytes:
    """A request."""
    fields = {"host": "127.0.0.1", "content-length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def ours(x: np.ndarray, *, binary: bool) -> bytes:
    """A request of the protocol."""
    one: dict[str, Any] = {"name": "input", "datatype": "FP32", "shape": list(x.shape)}
    if not binary:
        body = json.dumps({"inputs": [{**one, "data": x.ravel().tolist()}]}).encode()
        return http("/v2/models/measured_model/infer", body, content_type="application/json")
    said = {"inputs": [{**one, "parameters": {"binary_data_size": x.nbytes}}], "parameters": {"binary_data_output": True}}
    head = json.dumps(said).encode()
    return http("/v2/models/measured_model/infer", head + x.tobytes(), inference_header_content_length=str(len(head)))


@contextmanager
def started(command: list[str], folder: Path, port: int, path: str | None, timeout_s: float = 180.0) -> Iterator[None]:
    """A server process, once its port takes connections."""
    before = os.environ.get("PYTHONPATH", "")
    paths = [p for p in (path, str(folder), before) if p]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(f"{' '.join(command)} did not start") from None
                time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def loaded(port: int, timeout_s: float = 180.0) -> None:
    """Wait until tilewright has loaded its model."""
    end_s = time.monotonic() + timeout_s
    while True:
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(b"GET /v2/health/ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            if one.recv(64).startswith(b"HTTP/1.1 200"):
                return
        if time.monotonic() > end_s:
            raise SystemExit("tilewright did not load its model")
        time.sleep(0.1)


def drive(side: Side, clients: int, seconds: float) -> tuple[float, list[float]]:
    """(requests a second, seconds of each) of so many clients, each with one request at a time."""
    selector, times, sent = selectors.DefaultSelector(), list[float](), dict[socket.socket, float]()
    for _ in range(clients):
        one = socket.create_connection(("127.0.0.1", side.port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(one, selectors.EVENT_READ, bytearray())
    start_s = time.perf_counter()
    for key in list(selector.get_map().values()):
        sent[key.fileobj] = time.perf_counter()  # type: ignore[index]
        key.fileobj.sendall(side.request)  # type: ignore[union-attr]
    while time.perf_counter() - start_s < seconds:
        for key, _ in selector.select(5):
            one, held = key.fileobj, key.data
            held += one.recv(1 << 16)  # type: ignore[union-attr]
            end = held.find(b"\r\n\r\n")
            if end < 0:
                continue
            at = held.lower().find(b"content-length:", 0, end)
            if at < 0 and not held.endswith(b"0\r\n\r\n"):  # in chunks
                continue
            if at >= 0 and len(held) < end + 4 + int(held[at + 15 : held.index(b"\r", at)]):
                continue
            if not held.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"{side.name}: {bytes(held[:300])!r}")
            held.clear()
            now_s = time.perf_counter()
            times.append(now_s - sent[one])  # type: ignore[index]
            sent[one] = now_s  # type: ignore[index]
            one.sendall(side.request)  # type: ignore[union-attr]
    took_s = time.perf_counter() - start_s
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return len(times) / took_s, times


def thin(side: Side, seconds: float) -> tuple[float, list[float]]:
    """`drive` of one client that takes next to no time of its own: it counts bytes, and looks at the first answer alone."""
    buffer, times = bytearray(1 << 16), list[float]()
    with socket.create_connection(("127.0.0.1", side.port)) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(side.request)
        length = one.recv_into(buffer)
        head, _, body = bytes(buffer[:length]).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or f"content-length: {len(body)}".encode() not in head:
            raise SystemExit(f"{side.name}: {bytes(buffer[:300])!r}")
        start_s = time.perf_counter()
        while (sent_s := time.perf_counter()) - start_s < seconds:
            one.sendall(side.request)
            left = length
            while left > 0:
                left -= one.recv_into(buffer, left)
            times.append(time.perf_counter() - sent_s)
    return len(times) / seconds, times


def direct(folder: Path, x: np.ndarray, seconds: float) -> tuple[float, list[float]]:
    """`drive` of a call of the model in this process."""
    import torch

    sys.path.insert(0, str(folder))
    model, _ = importlib.import_module("measured_model").build()
    rows, times, start_s = torch.from_numpy(x), list[float](), time.perf_counter()
    with torch.no_grad():
        while (began_s := time.perf_counter()) - start_s < seconds:
            model(rows)
            times.append(time.perf_counter() - began_s)
    return len(times) / seconds, times


def main() -> None:
    """Start all, take turns, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds in each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-path", help="folder of Python packages that only the other servers use")
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["fastapi", "fastapi2"],
        help="other servers to measure: fastapi, fastapi2 (two processes), litserve, ray",
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    x = np.random.default_rng(0).standard_normal((1, 64), dtype=np.float32)
    theirs = http("/predict", json.dumps({"x": x.tolist()}).encode(), content_type="application/json")
    python, ports = sys.executable, {name: port_of() for name in ("tilewright", *asked.peers)}
    uvicorn = [python, "-m", "uvicorn", "measured_fastapi:app", "--log-level", "error", "--no-access-log"]
    commands = {
        "tilewright": [python, "-m", "tilewright.cli", "serve", "measured_model:build", "--log-level", "warning"],
        "fastapi": uvicorn,
        "fastapi2": [*uvicorn, "--workers", "2"],
        "litserve": [python, "measured_litserve.py"],
        "ray": [python, "measured_ray.py"],
    }
    with tempfile.TemporaryDirectory() as text:
        folder, running = Path(text), []
        for name, code in (("model", MODEL), ("fastapi", FASTAPI), ("litserve", LITSERVE), ("ray", RAY)):
            (folder / f"measured_{name}.py").write_text(code)
        try:
            for name, port in ports.items():
                flag = [str(port)] if name in ("litserve", "ray") else ["--port", str(port)]
                one = started([*commands[name], *flag], folder, port, None if name == "tilewright" else asked.peer_path)
                one.__enter__()
                running.append(one)
            loaded(ports["tilewright"])
            sides = [Side("tilewright", ports["tilewright"], ours(x, binary=True))]
            sides += [Side("tilewright, JSON", ports["tilewright"], ours(x, binary=False))]
            sides += [Side(name, ports[name], theirs) for name in asked.peers]
            turns = {side.name: partial(drive, side, asked.clients) for side in sides}
            if asked.clients == 1:
                turns |= {"tilewright, thin": partial(thin, sides[0]), "direct call": partial(direct, folder, x)}
            rates: dict[str, list[float]] = {name: [] for name in turns}
            times: dict[str, list[float]] = {name: [] for name in turns}
            for number in range(-1, asked.rounds):
                for name, turn in turns.items():
                    rate, took = turn(asked.seconds if number >= 0 else 1.0)
                    if number >= 0:
                        rates[name].append(rate)
                        times[name] += took
        finally:
            for one in reversed(running):
                one.__exit__(None, None, None)
    report(asked, rates, times)


def report(asked: argparse.Namespace, rates: dict[str, list[float]], times: dict[str, list[float]]) -> None:
    """Print the table, and write it."""
    rows = dict[str, dict[str, float]]()
    for name, of in rates.items():
        p50, p99 = (1e3 * float(np.percentile(times[name], q)) for q in (50, 99))
        rate, ratio = statistics.median(of), statistics.median(a / b for a, b in zip(rates["tilewright"], of, strict=True))
        rows[name] = {"per_s": rate, "p50_ms": p50, "p99_ms": p99, "tilewright_over_this": ratio}
        print(f"{name:18} {rate:8.0f}/s  p50 {p50:7.2f} ms  p99 {p99:7.2f} ms  tilewright is {ratio:.2f}x")
    if asked.out is not None:
        said = {name: getattr(asked, name) for name in ("clients", "seconds", "rounds")}
        asked.out.write_text(json.dumps({**said, "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
