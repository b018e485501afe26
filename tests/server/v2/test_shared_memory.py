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

from tests.host import models
from tests.server.v2.running import Server, serving
from tilewright.host import regions
from tilewright.host.config import ModelConfig
from tilewright.host.regions import Read, Regions, read_all, shared_out
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
