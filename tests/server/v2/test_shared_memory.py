"""Tensors in shared memory: NVIDIA's client against models in processes, regions that are not what they say, and neighbours."""

import dataclasses
import importlib
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.awake import until
from tests.host import models
from tests.host.test_regions import open_files
from tests.server.v2.running import Server, serving
from tilewright.host.config import ModelConfig
from tilewright.server.config import ServerConfig
from tilewright.server.v2 import http as usual_way

pytest.importorskip("tritonclient", reason="tritonclient is not installed: pip install 'tilewright[test]'")
http = importlib.import_module("tritonclient.http")
grpc = importlib.import_module("tritonclient.grpc")
theirs = importlib.import_module("tritonclient.utils.shared_memory")
InferenceServerException = importlib.import_module("tritonclient.utils").InferenceServerException

WIDE = 1 << 16
IDS = np.arange(12, dtype=np.int64).reshape(4, 3) - 5
SCALE = np.linspace(-1, 2, 4, dtype=np.float32).reshape(4, 1)


def _model(name: str, **config: Any) -> ModelConfig:
    return ModelConfig(source=f"{models.__name__}:{name}", threads=1, max_batch=64, **config)


MODELS = {
    "two": _model("two"),
    "wide": _model("wide"),
    "slow": _model("marked", max_delay_ms=300.0),
    "kept": _model("marked", cache=8),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(MODELS, processes=True, shared_memory=True) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[tuple[Any, Any]]:
    """(a client, its module)."""
    module, port = (http, server.port) if request.param == "http" else (grpc, server.rpc_port)
    with module.InferenceServerClient(f"127.0.0.1:{port}") as found:
        yield found, module
        found.unregister_system_shared_memory()


@contextmanager
def memory(size: int) -> Iterator[tuple[str, Any]]:
    """(the name, the handle) of a shared memory object of NVIDIA's client."""
    key = f"/tilewright-{uuid.uuid4().hex}"
    handle = theirs.create_shared_memory_region(key, key, size)
    try:
        yield key, handle
    finally:
        theirs.destroy_shared_memory_region(handle)


def file_of(key: str) -> Path:
    return Path("/dev/shm") / key.removeprefix("/")


def placed(module: Any, name: str, x: np.ndarray, kind: str, region: str, offset: int = 0) -> Any:
    found = module.InferInput(name, list(x.shape), kind)
    found.set_shared_memory(region, x.nbytes, offset)
    return found


def sent(module: Any, name: str, x: np.ndarray, kind: str) -> Any:
    found = module.InferInput(name, list(x.shape), kind)
    found.set_data_from_numpy(x)
    return found


def wanted(module: Any, name: str, region: str, size: int, offset: int = 0) -> Any:
    found = module.InferRequestedOutput(name)
    found.set_shared_memory(region, size, offset)
    return found


def test_what_the_server_says(client: tuple[Any, Any]) -> None:
    c, module = client

    def status(*name: str) -> list[tuple[Any, ...]]:
        found = c.get_system_shared_memory_status(*name)
        listed = found if isinstance(found, list) else [_fields(one) for one in found.regions.values()]
        return [tuple(one[field] for field in ("name", "key", "offset", "byte_size")) for one in listed]

    said = c.get_server_metadata()
    assert "system_shared_memory" in (said["extensions"] if module is http else list(said.extensions))
    with memory(4096) as (key, _):
        assert status() == []
        c.register_system_shared_memory("in put", key, 1024)
        c.register_system_shared_memory("out", key, 1000, offset=3000)
        assert sorted(status()) == [("in put", key, 0, 1024), ("out", key, 3000, 1000)]
        assert status("out") == [("out", key, 3000, 1000)]
        c.unregister_system_shared_memory("in put")
        c.unregister_system_shared_memory("in put")
        assert status() == [("out", key, 3000, 1000)]
        with pytest.raises(InferenceServerException, match="no shared memory region 'in put'"):
            status("in put")
        c.unregister_system_shared_memory()
        assert status() == []


def _fields(one: Any) -> dict[str, Any]:
    return {field: getattr(one, field) for field in ("name", "key", "offset", "byte_size")}


@pytest.mark.parametrize("inside", [(True, True), (True, False), (False, True)], ids=["both", "inputs", "outputs"])
def test_values_are_those_of_tensors_that_are_sent(client: tuple[Any, Any], inside: tuple[bool, bool]) -> None:
    c, module = client
    inputs = [sent(module, "ids", IDS, "INT64"), sent(module, "scale", SCALE, "FP32")]
    outputs = [module.InferRequestedOutput(name) for name in ("positive", "scaled")]
    right = c.infer("two", inputs, outputs=outputs)
    with memory(8192) as (key, handle):
        c.register_system_shared_memory("r", key, 8000, offset=64)
        if inside[0]:
            theirs.set_shared_memory_region(handle, [IDS, SCALE], 64 + 128)
            inputs = [
                placed(module, "ids", IDS, "INT64", "r", 128),
                placed(module, "scale", SCALE, "FP32", "r", 128 + IDS.nbytes),
            ]
        if inside[1]:
            outputs = [wanted(module, "positive", "r", 12, 2000), wanted(module, "scaled", "r", 64, 3000)]
        for _ in range(2):  # the second time it is a request that came before
            found = c.infer("two", inputs, outputs=outputs)
            for name, at, kind in (("positive", 2000, np.bool_), ("scaled", 3000, np.float32)):
                values = theirs.get_contents_as_numpy(handle, kind, [4, 3], 64 + at) if inside[1] else found.as_numpy(name)
                assert np.array_equal(values, right.as_numpy(name)), name
            if inside[1]:
                said = found.get_output("scaled")
                assert list(said["shape"] if module is http else said.shape) == [4, 3]
                theirs.set_shared_memory_region(handle, [np.zeros(1000, np.uint8)], 64 + 2000)


def test_one_output_in_memory_and_one_that_is_sent(client: tuple[Any, Any]) -> None:
    c, module = client
    inputs = [sent(module, "ids", IDS, "INT64"), sent(module, "scale", SCALE, "FP32")]
    with memory(4096) as (key, handle):
        c.register_system_shared_memory("r", key, 4096)
        found = c.infer("two", inputs, outputs=[wanted(module, "positive", "r", 12), module.InferRequestedOutput("scaled")])
        assert np.array_equal(found.as_numpy("scaled"), IDS * SCALE)
        assert np.array_equal(theirs.get_contents_as_numpy(handle, np.bool_, [4, 3]), IDS > 0)


def test_many_large_batches_at_once(server: Server, client: tuple[Any, Any]) -> None:
    """Which are read and written by threads."""
    c, module = client
    url = f"127.0.0.1:{server.port if module is http else server.rpc_port}"
    rng, rows = np.random.default_rng(0), (40, 3, 64, 17)
    arrays = [rng.standard_normal((n, WIDE), dtype=np.float32) for n in rows]
    size = sum(x.nbytes for x in arrays)
    with memory(2 * size) as (key, handle):
        c.register_system_shared_memory("r", key, 2 * size)
        theirs.set_shared_memory_region(handle, arrays)
        ends = np.cumsum([x.nbytes for x in arrays])

        def ask(number: int) -> None:
            x, at = arrays[number], int(ends[number]) - arrays[number].nbytes
            outputs = [wanted(module, "output", "r", x.nbytes, size + at)]
            with module.InferenceServerClient(url) as own:
                own.infer("wide", [placed(module, "x", x, "FP32", "r", at)], outputs=outputs)

        with ThreadPoolExecutor(len(rows)) as pool:
            list(pool.map(ask, range(len(rows))))
        for number, x in enumerate(arrays):
            at = size + int(ends[number]) - x.nbytes
            assert np.array_equal(theirs.get_contents_as_numpy(handle, np.float32, list(x.shape), at), 2 * x)


def test_requests_go_the_short_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the usual way")

    monkeypatch.setattr(usual_way, "parse_infer", never)
    with memory(64) as (key, handle), http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
        c.register_system_shared_memory("r", key, 64)
        x = np.ones((1, 4), np.float32)
        theirs.set_shared_memory_region(handle, [x])
        c.infer("kept", [placed(http, "x", x, "FP32", "r")], outputs=[wanted(http, "output", "r", 16, 16)])
        right = np.tanh(1.0) * np.arange(1.0, 5.0, dtype=np.float32)
        assert np.allclose(theirs.get_contents_as_numpy(handle, np.float32, [4], 16), right)
        c.unregister_system_shared_memory()


# ---- requests


X = np.full((1, 4), 0.5, np.float32)
RIGHT = models.Marked()(torch.from_numpy(X)).detach().numpy()


def test_requests_that_name_what_is_not_there(client: tuple[Any, Any]) -> None:
    c, module = client

    def ask(region: str = "r", size: int = 16, at: int = 0, outputs: Any = None, x: np.ndarray = X) -> Callable[[], Any]:
        one = module.InferInput("x", list(x.shape), "FP32")
        one.set_shared_memory(region, size, at)
        return lambda: c.infer("kept", [one], outputs=outputs)

    good = sent(module, "x", X, "FP32")
    with memory(4096) as (key, handle):
        c.register_system_shared_memory("r", key, 32, offset=8)
        theirs.set_shared_memory_region(handle, [X], 8)
        cases = [
            (ask("z"), "no shared memory region 'z'"),
            (ask(at=17), "has 32 bytes, but the request names 16 bytes from byte 17 on"),
            (ask(at=-8), "bytes from byte -8 on"),
            (ask(at=1 << 62), "but the request names"),
            (ask(size=-16), "bytes from byte"),
            (ask(size=12), "has 12 bytes of data, and FP32 of shape"),
            (ask(x=X[:, :3], size=12), r"has shape \[1, 3\], wanted"),
            (lambda: c.infer("kept", [good], outputs=[wanted(module, "output", "z", 16)]), "no shared memory region 'z'"),
            (lambda: c.infer("kept", [good], outputs=[wanted(module, "output", "r", 16, 17)]), "but the request names"),
            (lambda: c.infer("kept", [good], outputs=[wanted(module, "output", "r", 15)]), "has 16 bytes, but its place"),
            (lambda: c.infer("kept", [good], outputs=[wanted(module, "other", "r", 16)]), "no output 'other'; it has output"),
        ]
        for call, words in cases:
            with pytest.raises(InferenceServerException, match=words):
                call()
        assert np.array_equal(ask()().as_numpy("output"), RIGHT)


def test_json_that_contradicts_itself(server: Server) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    for change, words in (
        ({"data": [1, 2, 3, 4]}, "wanted one of them"),
        ({"parameters": {**place, "binary_data_size": 0}}, "wanted one of them"),
        ({"parameters": {"shared_memory_region": "r"}}, "shared_memory_byte_size None"),
        ({"parameters": {"shared_memory_byte_size": 16}}, "shared_memory_region 'None'"),
        ({"parameters": {**place, "shared_memory_offset": "0"}}, "wanted a name"),
        ({"parameters": {**place, "shared_memory_byte_size": True}}, "wanted a name"),
        ({"parameters": {**place, "shared_memory_region": ["r"]}}, "wanted a name"),
    ):
        one = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place, **change}
        status, said = server.post("/v2/models/kept/infer", {"inputs": [one]})
        assert status == 400, said
        assert words in said["error"]


@pytest.mark.parametrize(("model", "shape"), [("slow", (1, 4)), ("wide", (8, WIDE))], ids=["on the event loop", "by threads"])
def test_a_file_that_is_truncated_costs_its_own_request_only(server: Server, model: str, shape: tuple[int, int]) -> None:
    x = np.full(shape, 0.5, np.float32)
    right = 2 * x if model == "wide" else RIGHT
    with memory(x.nbytes) as (key, handle), memory(x.nbytes) as (other, victim):
        with http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
            c.register_system_shared_memory("cut", key, x.nbytes)
            c.register_system_shared_memory("whole", other, x.nbytes)
        for one in (handle, victim):
            theirs.set_shared_memory_region(one, [x])
        os.truncate(file_of(key), x.nbytes - 1)
        stats = server.host.models[model].versions[1].stats
        before = stats.json(model, 1)["execution_count"]

        def ask(region: str) -> Any:
            with http.InferenceServerClient(f"127.0.0.1:{server.port}") as own:
                try:
                    return own.infer(model, [placed(http, "x", x, "FP32", region)]).as_numpy("output")
                except InferenceServerException as error:
                    return error

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, ("cut", "whole", "cut", "whole")))
        if model == "slow":
            assert stats.json(model, 1)["execution_count"] == before + 1, "they were not in one batch"
        for error in found[::2]:
            assert "region 'cut' is shorter than it was" in str(error), error
            assert error.status() == "400"
        assert np.array_equal(found[1], right)
        assert np.array_equal(found[3], right)
        # Neither is anything written behind its end.
        with http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
            with pytest.raises(InferenceServerException, match="region 'cut' is shorter"):
                c.infer(model, [placed(http, "x", x, "FP32", "whole")], outputs=[wanted(http, "output", "cut", x.nbytes)])
            assert file_of(key).stat().st_size == x.nbytes - 1
            c.unregister_system_shared_memory()
        assert stats.restarts == 0


def test_a_region_that_is_unregistered_serves_the_requests_that_have_it(server: Server) -> None:
    with memory(16) as (key, handle), http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
        clients = len(open_files(file_of(key)))
        c.register_system_shared_memory("r", key, 16)
        theirs.set_shared_memory_region(handle, [X])
        with ThreadPoolExecutor(1) as pool, http.InferenceServerClient(f"127.0.0.1:{server.port}") as own:
            assert len(open_files(file_of(key))) > clients
            begun = pool.submit(own.infer, "slow", [placed(http, "x", X, "FP32", "r")])
            slow = server.host.models["slow"].versions[1]
            while not slow.waiting:  # for 300 ms, for company
                assert not begun.done()
            c.unregister_system_shared_memory("r")
            assert np.array_equal(begun.result(20).as_numpy("output"), RIGHT)
        with pytest.raises(InferenceServerException, match="no shared memory region 'r'"):
            c.infer("slow", [placed(http, "x", X, "FP32", "r")])
        until(lambda: len(open_files(file_of(key))) == clients)


def test_what_is_cached_is_never_a_clients_memory(server: Server) -> None:
    with memory(16) as (key, handle), http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
        c.register_system_shared_memory("r", key, 16)
        for value in (0.5, 1.0, 0.25):
            theirs.set_shared_memory_region(handle, [np.full((1, 4), value, np.float32)])
            found = c.infer("kept", [placed(http, "x", X, "FP32", "r")]).as_numpy("output")
            assert np.allclose(found, np.tanh(value) * np.arange(1.0, 5.0))
        c.unregister_system_shared_memory()


def test_random_places_beside_a_victim(server: Server) -> None:
    """Who is answered, and with what, is a sum of the numbers in the request."""
    rng, stop, wrong = random.Random(0), threading.Event(), list[str]()
    numbers = np.arange(64, dtype=np.float32) / 64

    def victim() -> None:
        with http.InferenceServerClient(f"127.0.0.1:{server.port}") as own:
            while not stop.is_set():
                if not np.array_equal(own.infer("kept", [placed(http, "x", X, "FP32", "mine")]).as_numpy("output"), RIGHT):
                    wrong.append("the victim's values")

    with memory(256) as (key, handle), memory(16) as (own, mine), ThreadPoolExecutor(1) as pool:
        theirs.set_shared_memory_region(handle, [numbers])
        theirs.set_shared_memory_region(mine, [X])
        for name, of, at, size in (("r", key, 16, 128), ("mine", own, 0, 16)):
            server.post(f"/v2/systemsharedmemory/region/{name}/register", {"key": of, "offset": at, "byte_size": size})
        beside = pool.submit(victim)
        seen = dict[int, int]()
        for _ in range(400):
            region, rows = rng.choice(("r", "r", "r", "z")), rng.choice((1, 2, 3))
            at, size = 4 * rng.randrange(-2, 40), 16 * rng.choice((rows, rows, rows, rows + 1))
            place = {"shared_memory_region": region, "shared_memory_offset": at, "shared_memory_byte_size": size}
            one = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": place}
            status, said = server.post("/v2/models/kept/infer", {"inputs": [one]})
            right = 404 if region == "z" else 400 if at < 0 or at + size > 128 or size != 16 * rows else 200
            assert status == right, (one, said)
            seen[status] = seen.get(status, 0) + 1
            if status == 200:
                x = numbers[4 + at // 4 : 4 + at // 4 + 4 * rows].reshape(rows, 4)
                found = np.array(said["outputs"][0]["data"]).reshape(rows, 4)
                assert np.allclose(found, np.tanh(x) * np.arange(1.0, 5.0))
        stop.set()
        beside.result(20)
        server.post("/v2/systemsharedmemory/unregister", {})
    assert not wrong
    assert min(seen[status] for status in (200, 400, 404)) > 40, seen


# ---- off, and refused


def test_off_by_default() -> None:
    with serving({"m": ModelConfig(source="a:b")}) as server, memory(64) as (key, _):
        for module, port in ((http, server.port), (grpc, server.rpc_port)):
            with module.InferenceServerClient(f"127.0.0.1:{port}") as c:
                for call in (
                    c.get_system_shared_memory_status,
                    lambda c=c: c.register_system_shared_memory("r", key, 64),
                    c.unregister_system_shared_memory,
                    lambda c=c, m=module: c.infer("m", [placed(m, "x", X, "FP32", "r")]),
                ):
                    with pytest.raises(InferenceServerException, match="start the server with --shared-memory"):
                        call()
        status, _, body = server.request("GET", "/v2")
        assert (status, b"system_shared_memory" in body) == (200, False)


@pytest.mark.parametrize("fields", [{"host": "0.0.0.0"}, {"ray": True}, {"replicas": 2}], ids=repr)
def test_servers_that_cannot_have_it(fields: dict[str, Any]) -> None:
    config = ServerConfig(**{"host": "127.0.0.1", **fields})
    with pytest.raises(ValueError, match="shared_memory is for"):
        dataclasses.replace(config, shared_memory=True)
