"""Replicas on Ray: how many there should be, a replica's app without a port, and (`long`) a cluster on this machine."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.awake import until
from tests.server.fake_engine import fake_engine
from tilewright.server.config import ServerConfig
from tilewright.server.on_ray.scaling import METRIC, Scaling, language_load, ordinary_load, wanted_replicas

ROOT = Path(__file__).resolve().parents[2]


# ---- how many


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (language_load(0, 0, 64, 0, 100), 0.0),
        (language_load(48, 0, 64, 10, 100), 1.0),  # three quarters of the places
        (language_load(64, 32, 64, 10, 100), 2.0),  # the queue counts
        (language_load(4, 0, 64, 80, 100), 1.0),  # few long ones: the cache counts
        (ordinary_load(128, 64, 1), 1.0),  # one batch runs, one waits
        (ordinary_load(128, 64, 2), 0.5),
    ],
)
def test_load_is_one_where_a_replica_has_enough(load: float, wanted: float) -> None:
    assert load == pytest.approx(wanted)


def context(loads: list[float], replicas: int | None = None) -> Any:
    count = len(loads) if replicas is None else replicas
    return SimpleNamespace(aggregated_metrics={METRIC: dict(enumerate(loads))}, current_num_replicas=count)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (context([0.0]), 1),
        (context([1.0]), 1),
        (context([1.3]), 2),
        (context([0.4, 0.4]), 1),
        (context([0.6, 0.6]), 2),
        (context([1.0000001, 1.0]), 2),
        (context([3.0, 3.0]), 6),
        (context([0.5], replicas=2), 2),  # one that has just started is not taken away again
        (SimpleNamespace(aggregated_metrics={}, current_num_replicas=3), 3),
    ],
    ids=str,
)
def test_replicas_follow_the_load(given: Any, wanted: int) -> None:
    assert wanted_replicas(given) == (wanted, {})


def test_a_steady_load_gives_a_steady_number() -> None:
    """Whatever the load and the number at the start: after a few decisions the number is the one that the load needs."""
    for total in (0.1, 0.9, 1.1, 3.7, 8.0):
        for start in range(1, 12):
            count = start
            for _ in range(6):
                count = wanted_replicas(context([total / count] * count))[0]
            assert count == math.ceil(total)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_replicas": 2}, "without --ray"),
        ({"ray": True, "replicas": 3, "max_replicas": 2}, "max_replicas is 2, wanted 3 to 64"),
        ({"ray": True, "grpc_port": 1}, "leave out"),
        ({"ray": True, "fronts": 2}, "leave out"),
        ({"scale_down_after_s": 0}, "wanted 1 to 86400 seconds"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServerConfig(**fields)


def test_ray_serve_takes_the_options() -> None:
    config = pytest.importorskip("ray.serve.config")
    policy = config.AutoscalingPolicy(policy_function="tilewright.server.on_ray.scaling:wanted_replicas")
    made = config.AutoscalingConfig(**Scaling(least=2, most=5).options(policy))
    assert (made.min_replicas, made.max_replicas) == (2, 5)
    assert made.policy.get_policy()(context([1.3, 1.2])) == (3, {})


# ---- a replica, without a cluster


def test_a_replica_answers_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers come in pieces; one whose reader leaves ends its request; it says how loaded it is."""
    from tilewright.server.app import create_app
    from tilewright.server.on_ray import replica
    from tilewright.server.prompts import Served

    engine = fake_engine(delay_s=0.02, max_seqs=4, max_model_len=512)
    app = create_app(engine, Served.of(engine, "letters"), ServerConfig())
    monkeypatch.setattr(replica, "app_of_spec", lambda spec: app)

    def scope(path: str, body: bytes) -> dict[str, Any]:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        whole = {"http_version": "1.1", "path": path, "query_string": b"", "headers": headers, "client": None, "scheme": "http"}
        return {**whole, "method": "POST", "raw_path": path.encode(), "root_path": "", "server": None}

    async def run() -> None:
        one: Any = replica.Replica.__new__(replica.Replica)
        await one.__init__({"server": {"log_level": "warning", "log_format": "text"}})
        try:
            body = json.dumps({"prompt": "abc", "max_tokens": 5, "temperature": 0}).encode()
            (status, headers), raw = await one.whole(scope("/v1/completions", body), body)
            assert (status, json.loads(raw)["choices"][0]["text"]) == (200, "defgh")
            assert (b"content-type", b"application/json") in headers
            body = json.dumps({"prompt": "abc", "max_tokens": 200, "temperature": 0, "stream": True}).encode()
            streams = [one.answer(scope("/v1/completions", body), body) for _ in range(4)]
            for stream in streams:
                assert (await anext(stream))[0] == 200
                assert (await anext(stream)).startswith(b"data: ")
            assert (await one.record_autoscaling_stats())[METRIC] == pytest.approx(4 / 3)
            assert one.app.state.server.worker.open_channels == 4
            for stream in streams:
                await stream.aclose()
            assert one.app.state.server.worker.open_channels == 0
            await one.check_health()
            one._server.failure = ValueError("the device is gone")
            with pytest.raises(RuntimeError, match="the device is gone"):
                await one.check_health()
        finally:
            await one.close()

    monkeypatch.delattr(replica.Replica, "__del__")  # which Ray Serve awaits, and Python does not
    asyncio.run(run())


# ---- a cluster on this machine


@contextmanager
def command(*words: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """(address, process) of `tilewright serve --ray`."""
    quick = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **quick}
    line = [sys.executable, "-m", "tilewright.cli", "serve", *words, "--ray", "--port", "0"]
    with log.open("wb") as out, subprocess.Popen(line, cwd=ROOT, env=environment, stdout=out, stderr=out) as process:
        try:
            until(lambda: "Serving" in log.read_text() or process.poll() is not None, 300)
            found = re.search(r"at (http://\S+)", log.read_text())
            assert found is not None, log.read_text()
            yield found[1], process
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(90)
        assert code == 0, log.read_text()


def replicas_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of replicas that descend from the command."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def ours(pid: int) -> bool:
        while pid > 1 and pid != process.pid:
            pid = parents.get(pid, 0)
        return pid == process.pid

    return [int(pid) for pid, _, words in rows if words.startswith("ray::ServeReplica") and ours(int(pid))]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_cluster_grows_survives_and_shrinks(tmp_path: Path) -> None:
    """A language model and an ordinary one: a second replica comes under load, one is killed, and one ends; no error."""
    pytest.importorskip("ray.serve", reason="pip install 'tilewright[ray]'")
    words = ["bookworm", "--device", "cpu", "--max-seqs", "2", "--kv-cache-gib", "0.05", "--max-wait", "60", "--queue", "64"]
    words += ["--model", "marked=tests.host.models:marked", "--replicas", "1", "--max-replicas", "2", "--scale-down-after", "3"]
    log = tmp_path / "log"
    with command(*words, log=log) as (url, process):

        async def clients() -> list[int]:
            answers, stopping, light = list[int](), asyncio.Event(), asyncio.Event()

            async def one(client: httpx.AsyncClient, number: int) -> None:
                while not stopping.is_set() and (number < 2 or not light.is_set()):
                    if number % 2:
                        body = {"prompt": f"Chapter {number}. The", "max_tokens": 16, "ignore_eos": True}
                        answer = await client.post("/v1/completions", json=body)
                    else:
                        answer = await client.post("/predict/marked", json=[[0.5] * 4])
                    answers.append(answer.status_code)
                    assert answer.status_code == 200, answer.text
                    await asyncio.sleep(0.2 if light.is_set() or not number % 2 else 0)

            async def state(count: int) -> None:
                while (await asyncio.to_thread(lambda: httpx.get(f"{url}/health").json()["replicas"])) != count:
                    await asyncio.sleep(0.5)

            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                tasks = [asyncio.ensure_future(one(client, number)) for number in range(14)]
                async with asyncio.timeout(400):
                    await state(2)
                    await asyncio.sleep(2)
                    os.kill(replicas_of(process)[0], signal.SIGKILL)
                    before = len(answers)
                    await asyncio.sleep(3)
                    await state(2)
                    assert len(answers) > before
                    light.set()
                    await state(1)
                stopping.set()
                await asyncio.gather(*tasks)
            return answers

        answers = asyncio.run(clients())
        assert set(answers) == {200}
        text = httpx.get(f"{url}/metrics", timeout=30).text
        lost = re.search(r'retries_total\{reason="lost"\} (\d+)', text)
        assert lost is not None, "nobody was asked when it was killed: the test shows nothing"
        assert 'tilewright_requests_running{replica="0"}' in text
