"""NVIDIA's client of the protocol, unmodified: over HTTP with bytes and with JSON, with asyncio, and over gRPC."""

import asyncio
import importlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.host.asking import write_model
from tests.host.fakes import ADDS, Makes
from tests.server.v2.running import Server, double, serving
from tilewright.host.config import ModelConfig

pytest.importorskip("tritonclient", reason="tritonclient is not installed: pip install 'tilewright[test]'")
http = importlib.import_module("tritonclient.http")
aio = importlib.import_module("tritonclient.http.aio")
grpc = importlib.import_module("tritonclient.grpc")
InferenceServerException = importlib.import_module("tritonclient.utils").InferenceServerException

X = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m", "1", "2", toml="versions = [{version = 1, weight = 1}, {version = 2, weight = 0}]")
    write_model(folder / "bad", "broken")
    with serving(repository=folder) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[tuple[Any, Any]]:
    """(a client, its module)."""
    module, port = (http, server.port) if request.param == "http" else (grpc, server.rpc_port)
    with module.InferenceServerClient(f"127.0.0.1:{port}") as found:
        yield found, module


def tensor(module: Any, x: np.ndarray = X, kind: str = "FP32", name: str = "x", **said: Any) -> Any:
    found = module.InferInput(name, list(x.shape), kind)
    found.set_data_from_numpy(x, **said)
    return found


def as_dict(found: Any) -> Any:
    if isinstance(found, dict | list):
        return found
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(found, preserving_proto_field_name=True)


def test_what_the_server_says_of_itself(client: tuple[Any, Any]) -> None:
    c, _ = client
    assert c.is_server_live()
    assert c.is_server_ready()
    assert c.is_model_ready("m")
    assert c.is_model_ready("m", "2")
    assert not c.is_model_ready("nothing")
    said = as_dict(c.get_server_metadata())
    assert said["name"] == "tilewright"
    assert "binary_tensor_data" in said["extensions"]
    said = as_dict(c.get_model_metadata("m"))
    assert said["versions"] == ["1", "2"]
    assert [int(n) for n in said["inputs"][0]["shape"]] == [-1, 4]
    said = as_dict(c.get_model_config("m"))
    said = said.get("config", said)
    assert said["max_batch_size"] == 64
    assert said["input"][0]["data_type"] == "TYPE_FP32"
    found = as_dict(c.get_model_repository_index())
    index = found if isinstance(found, list) else found["models"]
    assert [(one["name"], one["state"]) for one in index] == [("m", "READY"), ("m", "READY"), ("bad", "UNAVAILABLE")]
    assert index[2]["reason"].endswith("its weights are damaged")


def test_inference(client: tuple[Any, Any]) -> None:
    c, module = client
    result = c.infer("m", [tensor(module)], request_id="seven")
    assert np.array_equal(result.as_numpy("y"), 2 * X)
    response = as_dict(result.get_response())
    assert (response["id"], response["model_version"]) == ("seven", "1")
    result = c.infer("m", [tensor(module)], model_version="2", outputs=[module.InferRequestedOutput("y")])
    assert np.array_equal(result.as_numpy("y"), 4 * X)
    result = c.infer("m", [tensor(module)], priority=1, timeout=60_000_000)
    assert np.array_equal(result.as_numpy("y"), 2 * X)


def test_refusals_are_sentences(client: tuple[Any, Any]) -> None:
    c, module = client
    cases = [
        (lambda: c.infer("nothing", [tensor(module)]), "no model 'nothing'"),
        (lambda: c.infer("m", [tensor(module)], model_version="3"), "no version '3'"),
        (lambda: c.infer("m", [tensor(module, name="z")]), "the inputs are 'z'"),
        (lambda: c.infer("m", [tensor(module, X[:, :3])]), r"has shape \[2, 3\], wanted \[-1, 4\]"),
        (lambda: c.infer("m", [tensor(module, X.astype(np.int32), "INT32")]), "has datatype INT32, wanted FP32"),
        (lambda: c.infer("m", [tensor(module)], outputs=[module.InferRequestedOutput("z")]), "no output 'z'; it has y"),
        (lambda: c.infer("m", [tensor(module, -np.ones_like(X))]), "the model raised a poisoned row"),
        (lambda: c.infer("m", [tensor(module, np.array([b"a"], np.object_), "BYTES")]), "has datatype 'BYTES'"),
        (lambda: c.infer("bad", [tensor(module)]), "its weights are damaged"),
        (lambda: c.infer("m", [tensor(module)], outputs=[module.InferRequestedOutput("y", class_count=1)]), "classification"),
        (lambda: c.load_model("nothing"), "no model 'nothing' to load"),
        (lambda: c.unload_model("nothing"), "no model 'nothing' that is loaded"),
        (lambda: c.load_model("m", config='{"backend": "x"}'), "load takes no parameters"),
        (lambda: c.load_model("bad"), "its weights are damaged"),
    ]
    for call, words in cases:
        with pytest.raises(InferenceServerException, match=words):
            call()
    # Nobody was hurt.
    assert np.array_equal(c.infer("m", [tensor(module)]).as_numpy("y"), 2 * X)


@pytest.mark.parametrize("sent", [True, False], ids=["bytes in", "JSON in"])
@pytest.mark.parametrize("given", [True, False], ids=["bytes out", "JSON out"])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_http_with_bytes_and_with_json(server: Server, sent: bool, given: bool, packed: str | None) -> None:
    with http.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
        wanted = [http.InferRequestedOutput("y", binary_data=given)]
        inputs = [tensor(http, binary_data=sent)]
        result = c.infer("m", inputs, outputs=wanted, request_compression_algorithm=packed)
        assert np.array_equal(result.as_numpy("y"), 2 * X)
        assert ("data" in result.get_output("y")) != given


def test_asyncio(server: Server) -> None:
    async def run() -> None:
        async with aio.InferenceServerClient(f"127.0.0.1:{server.port}") as c:
            inputs = [[tensor(http, X + i)] for i in range(20)]
            found = await asyncio.gather(*(c.infer("m", one) for one in inputs))
            for i, result in enumerate(found):
                assert np.array_equal(result.as_numpy("y"), 2 * (X + i))

    asyncio.run(run())


def test_loading_and_unloading(server: Server, client: tuple[Any, Any]) -> None:
    c, module = client
    c.unload_model("m")
    assert not c.is_model_ready("m")
    with pytest.raises(InferenceServerException, match="model m is not loaded: unloaded"):
        c.infer("m", [tensor(module)])
    c.load_model("m")
    assert np.array_equal(c.infer("m", [tensor(module)]).as_numpy("y"), 2 * X)


def test_statistics(client: tuple[Any, Any]) -> None:
    c, module = client

    def stat() -> dict[str, Any]:
        return as_dict(c.get_inference_statistics("m", "1"))["model_stats"][0]

    before = int(stat().get("inference_count", 0))
    for _ in range(3):
        c.infer("m", [tensor(module)])
    after = stat()
    assert int(after["inference_count"]) - before == 6
    times = after["inference_stats"]
    # perf_analyzer refuses a server where these differ.
    assert len({int(times[kind]["count"]) for kind in ("compute_input", "compute_infer", "compute_output")}) == 1


def test_a_stream_answers_in_order_with_its_errors(server: Server) -> None:
    with grpc.InferenceServerClient(f"127.0.0.1:{server.rpc_port}") as c:
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        c.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(8):
            c.async_stream_infer("m" if i != 5 else "nothing", [tensor(grpc, X + i)], request_id=str(i))
        for i in range(8):
            result, error = answers.get(timeout=20)
            if i == 5:
                assert "no model 'nothing'" in str(error)
            else:
                assert result.get_response().id == str(i)
                assert np.array_equal(result.as_numpy("y"), 2 * (X + i))
        c.stop_stream()


def test_sequences() -> None:
    models = {"sums": ModelConfig(source="a:b", state={"h": "y"})}
    with serving(models, makes=Makes(double, signature=ADDS)) as server:
        clients = ((http, server.port), (grpc, server.rpc_port))
        for number, (module, port) in enumerate(clients, 1):
            with module.InferenceServerClient(f"127.0.0.1:{port}") as c:
                found = [
                    c.infer("sums", [tensor(module)], sequence_id=number, sequence_start=i == 0, sequence_end=i == 2)
                    for i in range(3)
                ]
                assert [np.max(one.as_numpy("y") / np.maximum(X, 1)).item() for one in found] == [2, 6, 14]
                with pytest.raises(InferenceServerException, match="is not open"):
                    c.infer("sums", [tensor(module)], sequence_id=number)


def test_the_api_key_is_asked_for_on_both_ports(tmp_path: Path) -> None:
    with serving({"m": ModelConfig(source="a:b")}, api_key="secret") as server:
        for module, port in ((http, server.port), (grpc, server.rpc_port)):
            with module.InferenceServerClient(f"127.0.0.1:{port}") as c:
                with pytest.raises(InferenceServerException):
                    c.infer("m", [tensor(module)])
                with pytest.raises(InferenceServerException):
                    c.infer("m", [tensor(module)], headers={"authorization": "Bearer other"})
                found = c.infer("m", [tensor(module)], headers={"authorization": "Bearer secret"})
                assert np.array_equal(found.as_numpy("y"), 2 * X)


def test_our_messages_have_the_numbers_and_types_of_the_protocol() -> None:
    """Against the messages that NVIDIA's client was generated with."""
    from tilewright.server.v2.messages import MESSAGES, message

    files = [importlib.import_module(f"tritonclient.grpc.{name}_pb2").DESCRIPTOR for name in ("service", "model_config")]
    theirs: dict[str, Any] = {}
    # CUDA's shared memory is not here, and has a message inside that is named as one of the system's.
    waiting = [m for file in files for m in file.message_types_by_name.values() if not m.name.startswith("Cuda")]
    while waiting:
        one = waiting.pop()
        theirs.setdefault(one.name, one)
        waiting += one.nested_types
    enum, int32 = 14, 5
    for name in MESSAGES:
        ours = message(name).DESCRIPTOR
        for field in ours.fields:
            other = theirs[name].fields_by_name[field.name]
            kind = int32 if other.type == enum else other.type  # the same on the wire
            assert (field.number, field.type, field.is_repeated) == (other.number, kind, other.is_repeated), (name, field.name)
