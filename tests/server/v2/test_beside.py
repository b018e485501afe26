"""A language model and ordinary ones in one server; and the whole command, from an exported folder to the last signal."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch

from tests.host.fakes import Makes
from tests.server.fake_engine import fake_engine
from tests.server.v2.running import double
from tilewright.host.config import ModelConfig
from tilewright.host.export import export
from tilewright.host.host import Host, Source
from tilewright.server.app import create_app
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.prompts import Served
from tilewright.server.serve import HttpServer, bind, run_server
from tilewright.server.v2.app import attach, create_models_app

INFER = "/v2/models/m/infer"
ASKED = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def test_the_command_line_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A language model that is named is served beside ordinary ones; the default of MODEL steps back."""
    from typer.testing import CliRunner

    from tilewright.cli import app, serve

    seen = []
    monkeypatch.setattr(serve, "_serve", lambda model, *rest: seen.append((model, rest[4])) or 0)
    for words in (["bookworm", "--model", "a.b:c"], ["--model", "a.b:c"], ["a.b:c"], ["bookworm"], []):
        assert CliRunner().invoke(app, ["serve", *words]).exit_code == 0
    assert seen == [("bookworm", ["a.b:c"]), (None, ["a.b:c"]), (None, ["a.b:c"]), ("bookworm", []), ("bookworm", [])]


def test_both_live_in_one_server() -> None:
    engine, config = fake_engine(), ServerConfig(port=0)
    host = Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=Makes(double))
    app = create_app(engine, Served.of(engine, "letters"), config)
    attach(app, host, config)
    listener = bind(config)
    server = HttpServer(app, listener)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and host.started):
        assert thread.is_alive()
        time.sleep(0.001)
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        said = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()
        assert said["usage"]["completion_tokens"] == 3
        assert client.post(INFER, json=ASKED).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert client.post("/predict/m", json=[1, 2, 3, 4]).json()["outputs"] == {"y": [[2, 4, 6, 8]]}
        # Errors are those of the API that was asked.
        assert client.post("/v2/models/nothing/infer", json=ASKED).json()["error"].startswith("there is no model 'nothing'")
        assert client.post("/v1/completions", json={"prompt": 1}).json()["error"]["type"] == "invalid_request_error"
        text = client.get("/metrics").text
        assert 'tilewright_model_requests_total{model="m",version="1"} 2.0' in text
        assert "tilewright_generation_tokens_total 3.0" in text
        app.state.server.draining = True
        assert client.post(INFER, json=ASKED).status_code == 503
        assert client.get("/v2/health/ready").status_code == 503
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_the_command_serves_an_exported_folder_until_it_is_told_to_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()).eval(), torch.randn(2, 4)
    export(model, (x,), tmp_path / "models" / "mine" / "1", ModelConfig(precision="fp32", max_batch=2))
    command = [sys.executable, "-m", "tilewright.cli", "serve", "--repository", tmp_path / "models", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url, lines = None, list[str]()
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"Serving models at (http://\S+)", line)
        if found:
            url = found[1]
            break
    assert url is not None, lines
    with torch.no_grad():
        wanted = model(x)
    said = httpx.post(f"{url}/predict/mine", json=x.tolist(), timeout=20).json()
    assert torch.allclose(torch.tensor(said["outputs"]["output"]), wanted, atol=1e-5)
    assert httpx.post(f"{url}/predict/mine", json=[[0] * 4] * 3, timeout=20).json() == {
        "error": "model mine: the request has 3 rows, wanted 1 to 2"
    }
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_grpc_port_in_use_ends_the_server_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=0, grpc_port=taken.getsockname()[1])
        host = Host(sources={"m": Source(ModelConfig(source="a:b"), None)}, start=Makes(double))
        app = create_models_app(host, config)
        with Log("error", "text", os.open(os.devnull, os.O_WRONLY)) as log:
            assert run_server(app, bind(config), log) == 1
    assert "for gRPC: it is in use" in str(app.state.server.failure)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m:build", "--model", "m=m:build"], "two models have the name 'm'"),
        (["--model", "bookworm"], "the model 'bookworm' is neither MODULE:FUNCTION nor a folder"),
        (["--repository", "/no/such/folder"], "the model repository /no/such/folder is not a folder"),
        (["m:build", "--precision", "fp7"], "precision is 'fp7', wanted one of fp32, fp16, bf16, int8"),
        (["m:build", "--max-batch", "0"], "max_batch is 0, wanted 1 to 65536"),
        (["m:build", "--grpc-port", "99999"], "grpc_port is 99999, wanted 0 to 65535"),
        (["a b=m:build", "--model", "x"], "the model"),
        (
            ["bookworm", "--model", "m:build", "--fronts", "2"],
            "--fronts works only if the server has either a language model or ordinary models",
        ),
        (
            ["m:build", "--fronts", "2", "--traces", "http://127.0.0.1:4318"],
            "the front processes of ordinary models do not support traces",
        ),
    ],
)
def test_what_the_command_refuses(arguments: list[str], words: str) -> None:
    from tests.test_cli import tilewright

    done = tilewright("serve", *arguments, "--port", "0")
    assert done.returncode == 1
    assert words in done.stderr
    assert json.dumps(done.stderr).count("\\n") == 1
