"""A server of ordinary models while they are loaded: what it answers, what it says in its log, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.host.fakes import Makes
from tests.host.models import marked
from tests.server.v2.running import Server, double, serving
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Refused, Unavailable
from tilewright.host.host import Host, Source
from tilewright.host.loading import Lines, Loading
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.serve import bind, run_server
from tilewright.server.v2.app import create_models_app

ASKED = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
END_S = 120.0
"""How long a busy machine may take for anything here."""
TWO = {"one": ModelConfig(source="a:b"), "two": ModelConfig(source="a:b")}


class Gate:
    """Lets as many models be loaded as `open` was called."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(0)

    def open(self) -> None:
        self._free.release()

    async def __call__(self) -> None:
        while not self._free.acquire(blocking=False):
            await asyncio.sleep(0.001)


def until(true: Callable[[], object], seconds: float = END_S) -> None:
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, "it does not come true"
        time.sleep(0.01)


@contextmanager
def loading() -> Iterator[tuple[Server, Gate]]:
    """A server that answers, and loads the first of two models."""
    gate = Gate()
    with serving(TWO, makes=Makes(double, may_load=gate), loaded=False) as server:
        until(
            lambda: server.request("GET", "/ready")[2].startswith(b'{"status":"loading","loading":"one version 1: beginning, ')
        )
        yield server, gate
        gate.open()
        gate.open()


def state(server: Server, path: str) -> tuple[int, dict[str, str]]:
    status, _, body = server.request("GET", path)
    return status, json.loads(body)


def test_it_answers_from_its_start() -> None:
    with loading() as (server, gate):
        assert state(server, "/health")[0] == 200
        assert state(server, "/health")[1]["status"] == "loading"
        assert server.request("GET", "/v2/health/live")[0] == 200
        for path in ("/ready", "/v2/health/ready"):
            status, said = state(server, path)
            assert (status, said["status"]) == (503, "loading")
            assert said["loading"].startswith("one version 1: beginning, ")
        gate.open()
        until(lambda: state(server, "/ready")[1]["loading"].startswith("two version 1: beginning, "))
        assert server.request("POST", "/v2/models/one/infer", ASKED)[0] == 200
        assert state(server, "/ready")[0] == 503
        gate.open()
        until(lambda: server.request("GET", "/ready")[0] == 200)
        assert state(server, "/ready") == (200, {"status": "ready"})
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert server.request("POST", "/v2/models/two/infer", ASKED)[0] == 200


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_request_for_a_model_that_is_not_there_yet(name: str) -> None:
    """By the short way, by the framework's, as plain JSON, and for its metadata."""
    with loading() as (server, _):
        path = f"/v2/models/{name}/infer"
        chunked = httpx.post(f"http://127.0.0.1:{server.port}{path}", content=iter([ASKED]))
        answers = [
            server.request("POST", path, ASKED),
            (chunked.status_code, dict(chunked.headers), chunked.content),
            server.request("POST", f"/predict/{name}", b"[[1, 2, 3, 4]]", content_type="application/json"),
            server.request("GET", f"/v2/models/{name}"),
            server.request("GET", f"/v2/models/{name}/ready"),
        ]
        begins = (
            "model one version 1 is being loaded: " if name == "one" else "model two is loaded later: one version 1 is being"
        )
        for status, headers, body in answers:
            assert (status, headers["retry-after"]) == (503, "2")
            assert json.loads(body)["error"].startswith(begins)
        assert server.request("POST", "/v2/models/nothing/infer", ASKED)[0] == 404


def test_the_repositorys_index_says_what_is_loaded() -> None:
    with loading() as (server, gate):
        status, found = server.post("/v2/repository/index", {})
        assert status == 200
        assert [(one["name"], one["state"]) for one in found] == [("one", "LOADING"), ("two", "LOADING")]
        gate.open()
        until(lambda: "one" in server.host.models)
        states = {one["name"]: one["state"] for one in server.post("/v2/repository/index", {})[1]}
        assert states == {"one": "READY", "two": "LOADING"}


def test_grpc_says_the_same() -> None:
    grpc = pytest.importorskip("grpc", reason="the extra grpc is not installed")
    from tilewright.server.v2 import messages

    def call(name: str, request: str, answer: str, **fields: object) -> object:
        method = channel.unary_unary(
            f"/{messages.SERVICE}/{name}",
            request_serializer=lambda made: made.SerializeToString(),
            response_deserializer=messages.message(answer).FromString,
        )
        return method(messages.message(request)(**fields), timeout=END_S)

    with loading() as (server, _), grpc.insecure_channel(f"127.0.0.1:{server.rpc_port}") as channel:
        assert call("ServerLive", "ServerLiveRequest", "ServerLiveResponse").live  # type: ignore[attr-defined]
        assert not call("ServerReady", "ServerReadyRequest", "ServerReadyResponse").ready  # type: ignore[attr-defined]
        asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}], "raw_input_contents": [bytes(16)]}
        with pytest.raises(grpc.RpcError) as refused:
            call("ModelInfer", "ModelInferRequest", "ModelInferResponse", model_name="one", **asked)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "model one version 1 is being loaded" in refused.value.details()


def test_a_model_that_is_loaded_again_later_says_so_too() -> None:
    """After the start, and after it had failed: `loading` is for those who ask while it goes on."""

    async def test() -> None:
        gate = Gate()
        makes = Makes(double)
        host = Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=makes)
        await host.start()
        await host.unload("m")
        with pytest.raises(Unavailable, match="model m is not loaded: unloaded"):
            host.model("m")
        makes.may_load = gate
        task = asyncio.ensure_future(host.load("m"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="model m version 1 is being loaded: beginning, 0 s"):
            host.model("m")
        assert host.loading is None
        gate.open()
        await task
        assert host.model("m").ready
        await host.close()

    asyncio.run(test())


def test_a_model_of_the_command_line_that_fails_ends_the_start() -> None:
    async def test() -> None:
        makes = Makes(double)
        makes.failing = "its weights are damaged"
        host = Host(sources={name: Source(config, None) for name, config in TWO.items()}, start=makes)
        with pytest.raises(Refused, match="model one cannot be loaded: its weights are damaged"):
            await host.start()
        assert not host.started
        assert list(host.failed) == ["one"]
        await host.close()

    asyncio.run(test())


def test_lines_of_the_log() -> None:
    """One at the start, one for each change but not within a second, one every ten seconds, none for numbers that count up."""
    said, now_s, loading = list[str](), 0.0, Loading("resnet50 version 1", began_s=time.monotonic())
    lines = Lines(lambda line: said.append(f"{now_s:g}: {line.rpartition(', ')[0]}"), lambda: now_s)
    stages = {
        0: "starting a process",
        50: "optimising for batch 1 (1 of 5)",
        52: "optimising for batch 2 (2 of 5)",
        55: "reading 1/99",
    }
    for tenth in range(800):
        now_s = tenth / 10
        loading.note(stages.get(tenth, f"reading {tenth}/9999" if tenth > 300 else loading.stage))
        lines.look(loading)
    one = "loading resnet50 version 1: "
    assert said == [
        f"0: {one}starting a process",
        f"5: {one}optimising for batch 1 (1 of 5)",
        f"6: {one}reading 1/99",
        f"16: {one}reading 1/99",
        f"26: {one}reading 1/99",
        f"36: {one}reading 360/9999",
        f"46: {one}reading 460/9999",
        f"56: {one}reading 560/9999",
        f"66: {one}reading 660/9999",
        f"76: {one}reading 760/9999",
    ]


# ---- the end of a start


def served(host: Host, config: ServerConfig, tmp_path: Path) -> tuple[int, str]:
    """(exit code, log) of a server that ends by itself."""
    with open(tmp_path / "log", "wb") as file, Log("info", "text", file.fileno()) as log:
        code = run_server(create_models_app(host, config), bind(config), log)
    return code, (tmp_path / "log").read_text()


def test_the_end_of_a_start_that_fails(tmp_path: Path) -> None:
    makes = Makes(double)
    makes.failing = "its weights are damaged"
    host = Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=makes)
    code, log = served(host, ServerConfig(port=0), tmp_path)
    assert code == 1
    assert "model m cannot be loaded: its weights are damaged" in log
    assert "Serving" not in log


def test_a_grpc_port_in_use_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    makes = Makes(double)
    host = Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=makes)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, log = served(host, ServerConfig(port=0, grpc_port=taken.getsockname()[1]), tmp_path)
    assert code == 1
    assert "for gRPC: it is in use" in log
    assert makes.made == []


GATED = """
import time
from pathlib import Path
from tests.host.models import marked

def build():
    while not Path({gate!r}).exists():
        time.sleep(0.01)
    return marked()
"""


@contextmanager
def command(folder: Path, port: int, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """`tilewright serve` of a model that is built once the file `gate` is there."""
    (folder / "gated.py").write_text(GATED.format(gate=str(folder / "gate")))
    words = [sys.executable, "-m", "tilewright.cli", "serve", "gated:build", "--port", str(port), *more]
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ""), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}  # for `ended`
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: "subprocess.Popen[str]") -> int:
    """The exit code. If the process does not end, the test fails with what all of its threads do."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        assert process.stderr is not None
        pytest.fail(f"{process.args} does not end:\n{process.stderr.read()}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def reads(port: int, stage: str) -> bool:
    """Whether the server on a port says that it is in this stage."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=END_S)
    except httpx.ConnectError:
        return False
    return answer.status_code == 503 and stage in answer.json()["loading"]


def test_a_server_from_the_first_answer_to_the_last(tmp_path: Path) -> None:
    port = free_port()
    with command(tmp_path, port) as process:
        until(lambda: reads(port, "gated version 1: reading the model"))
        with command(tmp_path, port) as second:
            assert ended(second) == 1
            assert second.stderr is not None
            assert "it is in use; stop the other program or choose another with --port" in second.stderr.read()
        (tmp_path / "gate").touch()
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("Serving"):
                break
        assert lines[-1].startswith(f"Serving models at http://127.0.0.1:{port}")
        assert [line for line in lines if line.startswith("loading gated version 1: reading the model, ")], lines
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/ready").json() == {"status": "ready"}
            found = client.post("/predict/gated", json=[[0.5, 1, 2, 3]]).json()["outputs"]["output"]
            assert np.allclose(found, marked()[0](marked()[1].new_tensor([[0.5, 1, 2, 3]])).detach())
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 0


def below(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    try:
        found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()
    return found.union(*map(below, found))


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_a_signal_while_a_model_is_loaded_ends_everything(tmp_path: Path, number: int, code: int, word: str) -> None:
    port = free_port()
    with command(tmp_path, port) as process:
        until(lambda: reads(port, "reading the model"))
        others = below(process.pid)
        assert len(others) == 2, "the process that models are forked from, and the model's"
        process.send_signal(number)
        assert ended(process) == code
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == word
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))


def test_a_model_that_cannot_be_built_ends_the_command(tmp_path: Path) -> None:
    with command(tmp_path, free_port(), "--model", "bad=tests.host.models:raises") as process:
        (tmp_path / "gate").touch()
        assert ended(process) == 1
        assert process.stderr is not None
        assert "model bad cannot be loaded: the model tests.host.models:raises failed in " in process.stderr.read()
