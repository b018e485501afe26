"""A load test's target for models behind the Open Inference Protocol v2: random tensors with the shapes in the metadata.

Tensors are sent in one of three ways:

| way           | when                                       | content of a request                                           |
|---------------|--------------------------------------------|----------------------------------------------------------------|
| shared memory | requested                                  | names of places in a region that this client shares            |
| binary        | the service lists `binary_tensor_data`     | bytes after the JSON, in both directions                       |
| json          | otherwise                                  | numbers as text, drawn for each request                        |

Bytes are drawn once, for a few requests that are sent in turn, because generating large tensors would limit the rate.
"""

import json
import random
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from tilewright.bench.load.sample import OK, Sample
from tilewright.bench.load.schedule import Planned
from tilewright.bench.load.shared import Slots
from tilewright.bench.load.target import Clock, Http, get_json

__all__ = ["V2", "Asked", "Tensor", "describe"]

_NUMBERS = {
    **{f"INT{bits}": "int" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": "int" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": "float" for bits in (16, 32, 64)},
    "BF16": "float",
    "BOOL": "bool",
    "BYTES": "text",
}
_SIZES = {name: 1 if name == "BOOL" else int(name.lstrip("BUINTFP")) // 8 for name in _NUMBERS if name != "BYTES"}
"""Bytes of a number."""
MAX_TENSOR_BYTES = 1 << 30
"""Most bytes of one input or output."""
MAX_POOL_BYTES = 64 << 20
"""Most bytes of the prepared bodies that binary requests use in turn; a single body may be larger."""
MAX_POOL = 64
"""Most prepared bodies."""


class Tensor(NamedTuple):
    """An input or output, with every dimension known."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int | None:
        """Size in bytes; None for strings, whose lengths vary."""
        item = _SIZES.get(self.datatype)
        return None if item is None else item * prod(self.shape)

    def said(self, **more: Any) -> dict[str, Any]:
        """The description of the tensor in a request."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape), **more}

    def drawn(self, rng: np.random.Generator) -> bytes:
        """Random numbers from 0 to 1, or integers from 0 to 99, as the protocol's bytes."""
        count, kind = prod(self.shape), _NUMBERS[self.datatype]
        if kind == "text":
            return b"\x04\0\0\0text" * count
        if kind == "bool":
            return rng.integers(0, 2, count, dtype=np.uint8).tobytes()
        if kind == "int":
            return rng.integers(0, 100, count, dtype=np.uint8).astype(f"<i{_SIZES[self.datatype]}").tobytes()
        values = rng.random(count, dtype=np.float32)
        if self.datatype == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        return values.astype(f"<f{_SIZES[self.datatype]}").tobytes()


class Asked(NamedTuple):
    """The contents of the requests to a service."""

    model: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    """Outputs whose shapes are known before the answer arrives."""
    rest: list[str]
    """Names of the other outputs."""
    rows: int | None
    """Rows of a request, if the first dimension of every input is open."""
    extensions: frozenset[str]
    """Extensions of the protocol that the service lists."""


async def describe(session: aiohttp.ClientSession, url: str, model: str, batch: int) -> Asked:
    """Read a model's metadata. Open dimensions get the size `batch`.

    Raises:
        OSError: the service cannot be reached.
        ValueError: the service has no such model, or the metadata does not follow the protocol.
    """
    metadata = await get_json(session, f"{url}/v2/models/{model}")
    try:
        open_rows = all(one["shape"] and one["shape"][0] < 1 for one in metadata["inputs"])
        inputs = [_tensor(one, batch) for one in metadata["inputs"]]
        # Metadata do not say how open dimensions of an output depend on those of the inputs, except for rows.
        known = [one for one in metadata.get("outputs", ()) if min(one["shape"][1:], default=1) > 0]
        known = [one for one in known if open_rows or (one["shape"] and one["shape"][0] > 0)]
        outputs = [one for one in (_tensor(one, batch) for one in known) if one.size is not None]
        rest = [one["name"] for one in metadata.get("outputs", ()) if one["name"] not in {o.name for o in outputs}]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata of {model!r} does not follow the v2 protocol ({error})") from None
    unknown = [one.datatype for one in inputs if one.datatype not in _NUMBERS]
    if unknown:
        raise ValueError(f"an input of {model!r} has the datatype {unknown[0]!r}, wanted one of {', '.join(_NUMBERS)}")
    for one in (*inputs, *outputs):
        if prod(one.shape) > MAX_TENSOR_BYTES or (one.size or 0) > MAX_TENSOR_BYTES:
            raise ValueError(f"{one.name!r} of shape {list(one.shape)} is larger than {MAX_TENSOR_BYTES} bytes")
    try:
        service = await get_json(session, f"{url}/v2")
    except ValueError:
        service = None
    listed = service.get("extensions") if isinstance(service, dict) else None
    extensions = frozenset(map(str, listed)) if isinstance(listed, list) else frozenset[str]()
    return Asked(model, inputs, outputs, rest, batch if open_rows and inputs else None, extensions)


def _tensor(one: dict[str, Any], batch: int) -> Tensor:
    return Tensor(one["name"], one["datatype"], tuple(n if n > 0 else batch for n in one["shape"]))


class V2(Http):
    """`/v2/models/NAME/infer`.

    Args:
        asked: the result of `describe`.
        shared: pass tensors in shared memory. Raises ValueError if the service or the model does not support this.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, asked: Asked, *, seed: int, shared: bool = False):
        super().__init__(session, f"{url}/v2/models/{asked.model}/infer")
        self._asked, self._rng, self._draw = asked, random.Random(seed), np.random.default_rng(seed)
        self._bodies, self._turn, self._slots = list[bytes](), 0, None
        binary = "binary_tensor_data" in asked.extensions
        self.way = "shared memory" if shared else "binary" if binary else "json"
        """How tensors are sent."""
        self.rows = asked.rows
        if shared:
            self._slots = self._in_memory(session, url)
        elif binary:
            self._in_bytes()
        elif any(one.datatype == "BF16" for one in asked.inputs):
            raise ValueError(
                f"{asked.model!r} needs BF16, which JSON cannot carry, but {url}/v2 does not list binary_tensor_data"
            )

    async def begin(self, in_flight: int | None) -> None:
        """See `Http`."""
        if self._slots is not None and in_flight is not None:
            await self._slots.reserve(in_flight)

    async def close(self) -> None:
        """See `Http`."""
        if self._slots is not None:
            await self._slots.close()

    # ---- requests

    def _in_memory(self, session: aiohttp.ClientSession, url: str) -> Slots:
        """Regions with room for all tensors of known size; the inputs are written when a region is made."""
        asked = self._asked
        if "system_shared_memory" not in asked.extensions:
            raise ValueError(f"{url}/v2 does not list system_shared_memory; start the server with --shared-memory")
        strings = [one.name for one in asked.inputs if one.size is None]
        if strings:
            raise ValueError(f"the input {strings[0]!r} is BYTES, which is not supported in shared memory here")

        def fill(name: str) -> tuple[bytes, bytes]:
            data = [one.drawn(self._draw) for one in asked.inputs]
            at, inputs, outputs = 0, [], list[dict[str, Any]]()
            for one in (*asked.inputs, *asked.outputs):
                place = {"shared_memory_region": name, "shared_memory_offset": at, "shared_memory_byte_size": one.size}
                if len(inputs) < len(asked.inputs):
                    inputs.append(one.said(parameters=place))
                else:
                    outputs.append({"name": one.name, "parameters": place})
                at += one.size or 0
            outputs += [{"name": rest, "parameters": {"binary_data": True}} for rest in asked.rest]
            return _compact({"inputs": inputs, "outputs": outputs}), b"".join(data)

        return Slots(session, url, sum(one.size or 0 for one in (*asked.inputs, *asked.outputs)), fill)

    def _in_bytes(self) -> None:
        """Prepare the bodies, and the header that says where their JSON ends."""
        inputs, head, size = self._asked.inputs, b"", 0
        while not self._bodies or (len(self._bodies) < MAX_POOL and size + len(self._bodies[0]) <= MAX_POOL_BYTES):
            data = [one.drawn(self._draw) for one in inputs]
            said = [one.said(parameters={"binary_data_size": len(part)}) for one, part in zip(inputs, data, strict=True)]
            head = _compact({"inputs": said, "parameters": {"binary_data_output": True}})
            self._bodies.append(b"".join((head, *data)))
            size += len(self._bodies[-1])
        self._headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(head))}

    def prepare(self, planned: Planned) -> bytes:
        """See `Target`. With shared memory, the body belongs to a region, which is taken when the request is sent."""
        if self.way == "json":
            return _compact({"inputs": [one.said(data=self._numbers(one)) for one in self._asked.inputs]})
        if not self._bodies:
            return b""
        self._turn += 1
        return self._bodies[self._turn % len(self._bodies)]

    def _numbers(self, one: Tensor) -> list[Any]:
        draw: dict[str, Callable[[], Any]] = {
            "int": lambda: self._rng.randrange(100),
            "float": lambda: round(self._rng.random(), 4),
            "bool": lambda: self._rng.random() < 0.5,
            "text": lambda: "text",
        }
        value = draw[_NUMBERS[one.datatype]]
        return [value() for _ in range(prod(one.shape))]

    async def send(self, body: bytes, sample: Sample, clock: Clock) -> None:
        """See `Target`."""
        if self._slots is None:
            return await super().send(body, sample, clock)
        try:
            slot = await self._slots.take()
        except (OSError, ValueError) as error:
            sample.sent_s = sample.end_s = clock()
            sample.detail = str(error)[:200]
            return
        try:
            await super().send(slot.body, sample, clock)
        finally:
            self._slots.give(slot)

    async def _read(self, response: aiohttp.ClientResponse, sample: Sample, clock: Clock) -> None:
        data = await response.read()
        length = response.headers.get("inference-header-content-length")
        answer = json.loads(data if length is None else data[: int(length)])
        if not isinstance(answer, dict) or not isinstance(answer.get("outputs"), list):
            raise ValueError("the answer has no outputs")
        sample.status = OK


def _compact(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()
