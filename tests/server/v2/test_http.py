"""What can be wrong with a request on the way in, and plain JSON, CSV and images: raw HTTP, no client library."""

import io
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.host.fakes import Makes
from tests.server.v2.running import Server, double, serving
from tilewright.host.config import ModelConfig
from tilewright.host.tensors import Signature, TensorSpec
from tilewright.server.v2.codec import numbers

IMAGE = Signature((TensorSpec("image", "FP32", (-1, 3, 2, 2)),), (TensorSpec("y", "FP32", (-1, 3, 2, 2)),), True)
INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"m": ModelConfig(source="a:b")}, max_body_bytes=1 << 16) as found:
        yield found


def body(**changes: Any) -> tuple[bytes, int]:
    """A binary request, with changes to its JSON; (body, length of the JSON)."""
    one: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    outer = {name: changes.pop(name) for name in ("outputs", "parameters_", "id") if name in changes}
    if "parameters_" in outer:
        outer["parameters"] = outer.pop("parameters_")
    one |= changes
    head = json.dumps({"inputs": [{k: v for k, v in one.items() if v is not None}], **outer}).encode()
    return head + bytes(16), len(head)


HUGE = 1 << 40
WRONG = [
    ({"parameters": {"binary_data_size": 17}}, "binary_data_size 17, and 16 bytes are left in the body"),
    ({"parameters": {"binary_data_size": -1}}, "binary_data_size -1"),
    ({"parameters": {"binary_data_size": HUGE}}, f"binary_data_size {HUGE}"),
    ({"parameters": {"binary_data_size": True}}, "binary_data_size True"),
    ({"parameters": {"binary_data_size": "16"}}, "binary_data_size 16"),
    ({"parameters": {"binary_data_size": 12}}, "4 bytes are left behind the tensors' binary data"),
    ({"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}}, "shared memory is off"),
    ({"parameters": []}, "neither data nor binary_data_size"),
    ({"parameters": "x"}, "the parameters of input 'x' must be an object"),
    ({"shape": [1, HUGE]}, "has shape"),
    ({"shape": [HUGE, 4]}, f"has {16 * HUGE}"),
    ({"shape": [1 << 60, 4]}, "has the shape"),
    ({"shape": [-1, 4]}, "has the shape"),
    ({"shape": [1.0, 4]}, "has the shape"),
    ({"shape": [1] * 17}, "wanted at most 16 whole numbers"),
    ({"shape": None}, "has the shape None"),
    ({"datatype": "FP33"}, "has datatype 'FP33', wanted one of BOOL"),
    ({"datatype": None}, "has datatype 'None'"),
    ({"datatype": ["FP32"]}, "has datatype \"['FP32']\""),
    ({"name": None}, "an input must be an object with a name"),
    ({"name": "z"}, "the inputs are 'z', wanted 'x'"),
    ({"data": [1, 2, 3, 4]}, "has data and binary_data_size"),
    ({"outputs": [{"name": "z"}]}, "no output 'z'"),
    ({"outputs": "y"}, "outputs must be a list"),
    ({"outputs": [3]}, "an output must be an object"),
    ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "classification is not supported"),
    ({"parameters_": {"priority": -1}}, "priority is '-1'"),
    ({"parameters_": {"timeout": 1.5}}, "timeout is '1.5'"),
    ({"parameters_": {"sequence_id": [1]}}, "sequence_id is neither"),
    ({"id": 7}, "id must be a text"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda v: str(v)[:40])
def test_a_request_that_lies_is_one_sentence(server: Server, changes: dict[str, Any], words: str) -> None:
    raw, length = body(**changes)
    status, headers, said = server.request("POST", INFER, raw, inference_header_content_length=str(length))
    assert status == 400, said
    assert headers["content-type"] == "application/json"
    message = json.loads(said)["error"]
    assert words in message
    assert "\n" not in message


RAW = [
    (b"", {}, 400, "inputs must be a list"),
    (b"{", {}, 400, "the body is no JSON"),
    (b"[]", {}, 400, "JSON, but no object: got list"),
    (b"[" * 30000, {}, 400, "the body is no JSON"),
    (b'{"inputs": []}', {}, 400, "inputs must be a list"),
    (b'{"inputs": [1]}', {}, 400, "an input must be an object"),
    (b"{}", {"inference_header_content_length": "3"}, 400, "Inference-Header-Content-Length is '3', and the body has 2 bytes"),
    (b"{}", {"inference_header_content_length": "-1"}, 400, "is '-1'"),
    (b"{}", {"inference_header_content_length": "x" * 1000}, 400, "Inference-Header-Content-Length"),
    (b"{}", {"content_encoding": "br"}, 400, "content-encoding is 'br'"),
    (b"{}", {"content_encoding": "gzip"}, 400, "the body is not gzip"),
    (zlib.compress(bytes(1 << 20)), {"content_encoding": "deflate"}, 400, "larger than 65536 bytes once it is unpacked"),
    (zlib.compress(b"{}" * 99)[:-6], {"content_encoding": "deflate"}, 400, "ends too early"),
    (bytes(1 << 17), {}, 413, "larger than 65536 bytes"),
]


@pytest.mark.parametrize(("raw", "headers", "wanted", "words"), RAW, ids=range(len(RAW)))
def test_a_body_that_is_none(server: Server, raw: bytes, headers: dict[str, str], wanted: int, words: str) -> None:
    status, _, said = server.request("POST", INFER, raw, **headers)
    assert status == wanted, said
    assert words in str(json.loads(said)["error"])


def test_two_inputs_of_one_name(server: Server) -> None:
    one = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}
    status, said = server.post(INFER, {"inputs": [one, one]})
    assert (status, said) == (400, {"error": "two inputs have the name 'x'"})


@pytest.mark.parametrize(
    ("data", "kind", "shape", "words"),
    [
        ([1, 2, 3], "FP32", (2, 2), "has 3 numbers, and shape [2, 2] has 4"),
        ([[1, 2], [3]], "FP32", (2, 2), "rows have equal lengths"),
        (["1"], "FP32", (1,), "is not only numbers"),
        ([None], "FP32", (1,), "is not only numbers"),
        ([True], "FP32", (1,), "is not only numbers"),
        ([1.5], "INT32", (1,), "is not only whole numbers"),
        ([1], "BOOL", (1,), "is not only true and false"),
        ([300], "UINT8", (1,), "outside of UINT8, 0 to 255"),
        ([-1], "UINT64", (1,), "outside of UINT64"),
        ([1 << 70], "INT64", (1,), "is not only whole numbers"),
        ({"a": 1}, "FP32", (1,), "is not only numbers"),
        ([[[[[[1]]]]]], "FP32", (1 << 40,), "has 1 numbers"),
    ],
)
def test_numbers_that_are_others_than_declared(data: Any, kind: str, shape: tuple[int, ...], words: str) -> None:
    from tilewright.host.errors import Refused

    with pytest.raises(Refused) as caught:
        numbers(data, kind, shape, "x")
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint8", "uint64", "float16", "float32", "float64"])
def test_numbers_as_json_are_those_of_numpy(kind: str) -> None:
    from tilewright.host.tensors import DATATYPES

    name = next(name for name, one in DATATYPES.items() if one.numpy == kind)
    array = (np.arange(6) % 2).reshape(2, 3).astype(kind)
    assert numbers(array.tolist(), name, (2, 3), "x") == array.tobytes()
    assert numbers(array.ravel().tolist(), name, (2, 3), "x") == array.tobytes()


def test_bfloat16_is_rounded_as_torch_does() -> None:
    import torch

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10
    x[:3] = torch.tensor([1.00390625, 1.01171875, 3e38])
    wanted = x.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert numbers(x.tolist(), "BF16", (1000,), "x") == wanted


# ---- without a protocol


def test_plain_json(server: Server) -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    wanted = {"model": "m", "version": 1, "outputs": {"y": [[2.0, 4, 6, 8], [10, 12, 14, 16]]}}
    for said in (rows, {"x": rows}, {"inputs": {"x": rows}}):
        assert server.post("/predict/m", said) == (200, wanted)
    assert server.post("/predict/m", rows[0])[1]["outputs"] == {"y": [[2.0, 4, 6, 8]]}
    assert server.post("/predict/m/versions/1", rows)[0] == 200
    for said, words in (
        ({"z": rows}, "differ from the inputs in 'z'; wanted x"),
        ([[1, 2]], "has shape [1, 2], wanted [-1, 4]"),
        ([[1, 2, 3, 4], [1]], "rows have equal lengths"),
        ("x", "is not only numbers"),
        ([[-1, 0, 0, 0]], "a poisoned row"),
    ):
        status, found = server.post("/predict/m", said)
        assert status == (500 if "poisoned" in words else 400)
        assert words in found["error"]
    assert server.post("/predict/other", rows)[0] == 404
    assert server.post("/predict/m/versions/7", rows)[0] == 404


def test_csv(server: Server) -> None:
    table = b"a,b,c,d\n1,2,3,4\n0.5,0,0,1e3\n"
    status, _, said = server.request("POST", "/predict/m", table, content_type="text/csv")
    assert (status, json.loads(said)["outputs"]) == (200, {"y": [[2, 4, 6, 8], [1, 0, 0, 2000]]})
    status, headers, said = server.request("POST", "/predict/m", table, content_type="text/csv", accept="text/csv")
    assert headers["content-type"].startswith("text/csv")
    assert said == b"y_0,y_1,y_2,y_3\n2.0,4.0,6.0,8.0\n1.0,0.0,0.0,2000.0\n"
    for wrong, words in (
        (b"a,b\n", "no row of numbers"),
        (b"1,2,3,4\n1,2\n", "line 2 of the CSV has 2 cells, and the first 4"),
        (b"1,2,3,4\n1,2,3,x\n", "line 2 of the CSV has a cell that is not a number"),
        (b"\xff\xfe", "the body is no CSV"),
        (b"1,2\n", "has shape [1, 2]"),
    ):
        status, _, said = server.request("POST", "/predict/m", wrong, content_type="text/csv")
        assert status == 400
        assert words in json.loads(said)["error"]
    status, _, said = server.request("POST", "/predict/m", b"", content_type="application/xml")
    assert "content-type is 'application/xml'" in json.loads(said)["error"]


def test_an_image() -> None:
    images = pytest.importorskip("PIL.Image", reason="pillow is not installed: pip install 'tilewright[images]'")

    def png(pixels: np.ndarray) -> bytes:
        file = io.BytesIO()
        images.fromarray(pixels).save(file, "PNG")
        return file.getvalue()

    quarters = np.zeros((2, 4, 3), np.uint8)  # wider than the model: the middle is taken
    quarters[:, 1:3] = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]]
    makes = Makes(double, signature=IMAGE)
    # The fakes' rows have any shape.
    with serving({"m": ModelConfig(source="a:b")}, makes=makes) as server:
        status, _, said = server.request("POST", "/predict/m", png(quarters), content_type="image/png")
        assert status == 200, said
        wanted = 2.0 * np.array([[[1, 0], [0, 1]], [[0, 1], [0, 1]], [[0, 0], [1, 1]]])
        assert np.allclose(json.loads(said)["outputs"]["y"], [wanted])
        bomb = png(np.zeros((9000, 9000), np.uint8))
        for raw, words in ((b"GIF89a", "not an image that can be read"), (bomb, "9000 x 9000 pixels, wanted at most")):
            status, _, said = server.request("POST", "/predict/m", raw, content_type="image/png")
            assert status == 400
            assert words in json.loads(said)["error"]


def test_health_metrics_and_paths(server: Server) -> None:
    for path in ("/health", "/ready", "/version", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
        assert server.request("GET", path)[0] == 200
    assert server.post(INFER, {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}]})[0] == 200
    text = server.request("GET", "/metrics")[2].decode()
    assert 'tilewright_model_ready{model="m",version="1"} 1.0' in text
    assert 'tilewright_http_requests_total{path="/v2/models/*",status="200"}' in text
    assert "tilewright_model_batches_total" in text
    assert server.request("GET", "/nothing")[0] == 404


def test_a_queue_that_is_full_says_when_to_come_again() -> None:
    makes = Makes(double, seconds=0.2)
    with serving({"m": ModelConfig(source="a:b", max_waiting=1, max_batch=1)}, makes=makes) as server:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: server.request("POST", "/predict/m", b"[0, 0, 0, 0]"), range(8)))
        refused = [headers for status, headers, _ in found if status == 429]
        assert {status for status, _, _ in found} == {200, 429}
        assert all(int(h["retry-after"]) == 1 and 0 < int(h["retry-after-ms"]) < 1000 for h in refused)
