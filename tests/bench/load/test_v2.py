"""The v2 endpoint: tensors as JSON, as bytes and in shared memory, and what is left behind of the latter."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.awake import awake_s
from tests.bench.load.test_service import scripted_process
from tests.host.fakes import Makes
from tests.server.v2.running import Server, double, serving
from tests.test_cli import tilewright
from tilewright.bench.load import shared, v2
from tilewright.bench.load.config import LoadConfig
from tilewright.bench.load.run import Outcome, load
from tilewright.bench.load.sample import OK, Sample
from tilewright.bench.load.schedule import Planned
from tilewright.bench.load.target import open_session
from tilewright.bench.load.v2 import V2, Asked, Tensor, describe
from tilewright.host.config import ModelConfig

MODELS = {"m": ModelConfig(source="a:b")}
SEEN: list[np.ndarray] = []


def _watched(x: np.ndarray) -> np.ndarray:
    SEEN.append(x.copy())
    return double(x)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODELS, makes=Makes(_watched), shared_memory=True) as found:
        yield found


def _url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def _loaded(url: str, **config: Any) -> Outcome:
    fields = {"endpoint": "v2", "model": "m", "duration": 20.0, "warmup": 0.0, "limit": 40, **config}
    return asyncio.run(load(url, LoadConfig(**fields)))


def _regions(server: Server) -> list[Any]:
    return json.loads(server.request("GET", "/v2/systemsharedmemory/status")[2])


def _floats(slot: shared.Slot) -> np.ndarray:
    """Input and output of five rows."""
    assert slot.memory.buf is not None
    return np.frombuffer(bytes(slot.memory.buf[:160]), np.float32).reshape(2, 5, 4)


def _objects() -> list[Path]:
    return list(Path("/dev/shm").glob("tilewright-load-*"))


@pytest.mark.parametrize(("in_memory", "way"), [(False, "binary"), (True, "shared memory")])
@pytest.mark.parametrize("load", [{"concurrency": "3,5"}, {"rate": "400"}], ids=["closed loop", "open loop"])
def test_random_rows_come_to_the_model(server: Server, in_memory: bool, way: str, load: dict[str, str]) -> None:
    SEEN.clear()
    outcome = _loaded(_url(server), batch=3, shared_memory=in_memory, **load)
    for summary in outcome.summaries:
        assert (summary.completed, summary.problems) == (40, {})
        assert summary.row_rate == pytest.approx(3 * summary.request_rate)
    said = outcome.to_json()
    assert (said["tensors"], said["rows"]) == (way, 3)
    rows = np.concatenate(SEEN)
    assert rows.shape == (120 * len(outcome.summaries), 4)
    assert rows.min() >= 0
    assert rows.max() < 1
    assert len(np.unique(rows, axis=0)) > 3  # of more than one place or body
    assert _regions(server) == _objects() == []


def test_json_where_a_service_lists_no_extension() -> None:
    with scripted_process("--first-ms", "1", "2") as url:
        outcome = _loaded(url, model="fake", batch=2, concurrency="2", limit=10)
        assert (outcome.tensors, outcome.rows, outcome.summaries[0].completed) == ("json", 2, 10)
        with pytest.raises(ValueError, match="does not list system_shared_memory; start the server with --shared-memory"):
            _loaded(url, model="fake", shared_memory=True)


def test_outputs_are_written_to_the_place_of_their_request(server: Server) -> None:
    async def work() -> None:
        async with open_session(20) as session:
            target = V2(session, _url(server), await describe(session, _url(server), "m", 5), seed=1, shared=True)
            try:
                await target.begin(2)
                slots = target._slots
                assert slots is not None
                assert len(_regions(server)) == len(_objects()) == 2
                held = [await slots.take(), await slots.take()]
                assert _floats(held[0])[0].tolist() != _floats(held[1])[0].tolist(), "every user has numbers of its own"
                slots.give(held[0])
                sample = Sample(planned_s=0.0)
                await target.send(target.prepare(Planned(0.0, 1, 1)), sample, asyncio.get_running_loop().time)
                assert (sample.status, sample.detail) == (OK, "")
                for slot, sent in zip(held, (True, False), strict=True):
                    asked, answered = _floats(slot)
                    assert np.array_equal(answered, 2 * asked if sent else np.zeros((5, 4), np.float32))
                # A request whose region is gone is told so.
                slots.give(held[1])
                server.post("/v2/systemsharedmemory/unregister", {})
                await target.send(b"", sample, asyncio.get_running_loop().time)
                assert "no shared memory region 'tilewright-load-" in sample.detail
            finally:
                await target.close()
        assert _objects() == []

    asyncio.run(work())


def test_what_cannot_be(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="shared_memory is only for endpoint v2, but the endpoint is chat"):
        LoadConfig(endpoint="chat", shared_memory=True)
    with pytest.raises(ValueError, match="1001 users need a region of shared memory each, but at most 1000 are possible"):
        _loaded(_url(server), shared_memory=True, concurrency="1001")
    monkeypatch.setattr(v2, "MAX_TENSOR_BYTES", 1024)
    with pytest.raises(ValueError, match=r"'x' of shape \[65, 4\] is larger than 1024 bytes"):
        _loaded(_url(server), batch=65, concurrency="1")
    monkeypatch.setattr(shared, "MAX_SLOTS", 2)
    outcome = _loaded(_url(server), shared_memory=True, rate="2000", limit=20, max_in_flight=20)
    assert outcome.summaries[0].completed >= 2
    monkeypatch.setattr(shared.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="/dev/shm has no room for 1 regions of 32 bytes"):
        _loaded(_url(server), shared_memory=True, concurrency="2")
    assert _regions(server) == _objects() == []


def test_the_server_refuses_the_second_region(server: Server) -> None:
    """What the first one has is removed all the same."""
    name = None

    async def work() -> None:
        nonlocal name
        async with open_session(20) as session:
            target = V2(session, _url(server), await describe(session, _url(server), "m", 1), seed=0, shared=True)
            assert target._slots is not None
            name = f"{target._slots._prefix}-1"
            (Path("/dev/shm") / "tilewright-other").write_bytes(bytes(64))
            place = {"key": "/tilewright-other", "offset": 0, "byte_size": 64}
            await asyncio.to_thread(server.post, f"/v2/systemsharedmemory/region/{name}/register", place)
            try:
                await target.begin(3)
            finally:
                await target.close()

    try:
        with pytest.raises(ValueError, match="the service refused a region of shared memory: 4"):
            asyncio.run(work())
    finally:
        (Path("/dev/shm") / "tilewright-other").unlink()
        server.post("/v2/systemsharedmemory/unregister", {})
    assert _regions(server) == _objects() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing(server: Server, number: int) -> None:
    command = [sys.executable, "-m", "tilewright.cli", "load", _url(server), "--endpoint", "v2", "--model", "m"]
    command += ["--concurrency", "4", "--shared-memory", "--duration", "60"]

    def heed() -> None:
        """A test run in the background of a shell ignores Ctrl-C, and so would this process."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        end_s = awake_s() + 60
        while len(_regions(server)) < 4:
            assert process.poll() is None
            assert awake_s() < end_s
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode in (128 + number, -number), said
    assert "Traceback" not in said
    assert "leaked" not in said
    assert _regions(server) == _objects() == []


def test_a_process_that_is_killed_leaves_no_objects(server: Server) -> None:
    code = "import os, signal, tilewright.bench.load.shared as s; m = s.SharedMemory('tilewright-load-killed', True, 64)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; os.kill(os.getpid(), signal.SIGKILL)"], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    end_s = awake_s() + 60
    while _objects():
        assert awake_s() < end_s
        time.sleep(0.05)


def test_the_command_without_the_extension() -> None:
    with serving(MODELS) as server:
        done = tilewright("load", _url(server), "--endpoint", "v2", "--model", "m", "--shared-memory")
    assert done.returncode == 1
    assert "does not list system_shared_memory; start the server with --shared-memory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_numbers_of_every_datatype(bits: int) -> None:
    rng = np.random.default_rng(0)
    for name, kind in ((f"INT{bits}", f"i{bits // 8}"), (f"UINT{bits}", f"u{bits // 8}"), (f"FP{bits}", f"f{bits // 8}")):
        if name == "FP8":
            continue
        one = Tensor("x", name, (50, 7))
        data = one.drawn(rng)
        values = np.frombuffer(data, f"<{kind}")
        assert len(data) == one.size
        assert values.shape == (350,)
        assert 0 <= values.min() < values.max() <= (1 if kind[0] == "f" else 99)


def test_the_other_datatypes() -> None:
    rng = np.random.default_rng(0)
    halves = np.frombuffer(Tensor("x", "BF16", (100,)).drawn(rng), "<u2").astype(np.uint32) << 16
    assert 0 <= halves.view(np.float32).min() < halves.view(np.float32).max() <= 1
    assert set(Tensor("x", "BOOL", (100,)).drawn(rng)) == {0, 1}
    strings = Tensor("x", "BYTES", (2,))
    assert (strings.size, strings.drawn(rng)) == (None, b"\4\0\0\0text" * 2)


def test_shapes_that_are_not_said_are_not_placed() -> None:
    """Outputs whose inner dimensions are open are sent back as bytes."""

    async def work() -> Asked:
        async with open_session(5) as session:
            return await describe(session, "http://nowhere", "m", 6)

    said = {
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1, -1]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, -1, 9]},
            {"name": "label", "datatype": "INT64", "shape": [-1]},
            {"name": "words", "datatype": "BYTES", "shape": [-1]},
        ],
    }
    answers = {"http://nowhere/v2/models/m": said, "http://nowhere/v2": {"extensions": ["system_shared_memory"]}}

    async def get(session: Any, url: str) -> Any:
        return answers[url]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.bench.load.v2.get_json", get)
        asked = asyncio.run(work())
        assert asked.inputs == [Tensor("ids", "INT64", (6, 6))]
        assert asked.outputs == [Tensor("label", "INT64", (6,))]
        assert (asked.rest, asked.rows) == (["logits", "words"], 6)
        said["inputs"][0]["shape"] = [4, -1]
        asked = asyncio.run(work())
        assert (asked.outputs, asked.rows) == ([], None)
