"""How large a request of tensors may be: the default, another limit, and a byte more."""

import json
import struct

import pytest

from tests.server.v2.running import Server, serving
from tilewright.host.config import ModelConfig
from tilewright.server.config import MAX_BODY_BYTES, ServerConfig

MIB = 1 << 20
INFER = "/v2/models/m/infer"


def post(server: Server, size: int) -> tuple[int, dict]:
    """A request whose body has `size` bytes: rows of four numbers, and JSON that is filled up with spaces."""
    rows = (size - 4096) // 16
    one = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": {"binary_data_size": 16 * rows}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [one], "outputs": outputs}).encode()
    head += b" " * (size - 16 * rows - len(head))
    headers = {"inference_header_content_length": str(len(head)), "content_type": "application/octet-stream"}
    status, _, answer = server.request("POST", INFER, head + struct.pack("<4f", 1, 2, 3, 4) * rows, **headers)
    return status, {} if status == 200 else json.loads(answer)


@pytest.mark.parametrize("mib", [16, 24])
def test_a_body_may_have_as_many_bytes_as_the_limit(mib: int) -> None:
    """64 images of 224 x 224 in float16 are 19 MB: more than the default, and within the other limit."""
    with serving({"m": ModelConfig(source="a:b", max_batch=1 << 16)}, max_body_bytes=mib * MIB) as server:
        status, said = post(server, mib * MIB)
        # What the server read whole, the model may still refuse: it has a limit of rows.
        assert status == 400, said
        assert "rows, wanted 1 to 65536" in said["error"]
        status, said = post(server, mib * MIB + 1)
        assert status == 413
        assert f"the body is larger than {mib * MIB} bytes, the most this server takes (--max-body-mib)" in str(said)


def test_the_limit_has_limits() -> None:
    assert ServerConfig(max_body_bytes=MAX_BODY_BYTES).max_body_bytes == 1 << 30
    for wrong in (0, -1, MAX_BODY_BYTES + 1):
        with pytest.raises(ValueError, match=f"max_body_bytes is {wrong}, wanted 1 to 1073741824"):
            ServerConfig(max_body_bytes=wrong)
