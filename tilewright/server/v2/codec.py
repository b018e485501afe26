"""Inference requests and answers of the Open Inference Protocol over HTTP: JSON, with tensors in it or as bytes after it.

A body is a JSON object. With the header `Inference-Header-Content-Length`, the body is that many bytes of JSON, followed by the
data of the tensors that have `binary_data_size`, in the order of the tensors. Each size is compared with the number of bytes in
the body. Memory for a tensor is never allocated from its declared shape. The bytes of a request are not copied: tensors are
views of the body.
"""

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tilewright.host.compare import array_of
from tilewright.host.errors import Refused
from tilewright.host.host import Answer
from tilewright.host.regions import INLINE_BYTES, MISSING, Part, Place, Regions
from tilewright.host.tensors import DATATYPES, MAX_DIMS, Wire
from tilewright.host.version import Ask
from tilewright.server.v2.placing import Placing

__all__ = [
    "DEFAULT_PRIORITY",
    "MAX_KNOWN_BYTES",
    "InferRequest",
    "answer_body",
    "ask_of",
    "inflated",
    "numbers",
    "parse_infer",
    "parse_json",
    "part_of",
    "place_of",
    "placed",
    "shape_of",
]

DEFAULT_PRIORITY = 100
"""The priority of a request that states none, or 0. 1 is the most urgent."""
MAX_PRIORITY = 1 << 20
MAX_INPUTS = 1024
MAX_KNOWN, MAX_KNOWN_BYTES = 1024, 2048
"""Most JSON heads of requests that are cached, and the greatest length of such a head in bytes."""
UNSUPPORTED = {
    "classification": "classification is not supported: take the scores and choose",
}


@dataclass(slots=True)
class InferRequest:
    """A parsed request. It is checked against the model's signature later."""

    inputs: dict[str, Wire]
    outputs: dict[str, bool | None] = field(default_factory=dict)
    """Name of a requested output -> whether it is sent as bytes (None: see `binary`). {}: all outputs are requested."""
    places: dict[str, Part] = field(default_factory=dict)
    """Name of an output that is requested in shared memory -> the part of a region to which it is written."""
    binary: bool = False
    """Whether outputs are sent as bytes if the request does not state it for them."""
    ask: Ask = field(default_factory=Ask)
    id: str = ""
    placings: dict[int, Placing] | None = None
    """Serial number of a version -> its answer to this request. None unless the request is kept with all outputs in regions."""


def parse_json(raw: bytes | memoryview, what: str = "the body") -> dict[str, Any]:
    """Parse a JSON object; no bytes are an empty object. Raises Refused: it is not a JSON object."""
    try:
        found = json.loads(bytes(raw)) if raw else {}
    except (ValueError, RecursionError) as error:
        raise Refused(f"{what} is no JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise Refused(f"{what} is JSON, but no object: got {type(found).__name__}")
    return found


def inflated(raw: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body. Raises Refused: unknown encoding, damaged data, or a result of more than `most` bytes."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return raw
    if encoding not in ("gzip", "deflate"):
        raise Refused(f"content-encoding is {encoding[:40]!r}, wanted gzip, deflate or none")
    unpacker = zlib.decompressobj(wbits=47)  # accepts zlib and gzip headers
    try:
        body = unpacker.decompress(raw, most + 1)
    except zlib.error:
        raise Refused(f"the body is not {encoding}, which content-encoding says it is") from None
    if len(body) > most:
        raise Refused(f"the body is larger than {most} bytes once it is unpacked, the most this server takes")
    if not unpacker.eof:
        raise Refused(f"the body's {encoding} data ends too early")
    return body


def parse_infer(raw: bytes | memoryview, header_length: str | None, regions: Regions | None = None) -> InferRequest:
    """Parse the body of a request.

    Args:
        raw: the body.
        header_length: the value of `Inference-Header-Content-Length`, if the request has one.
        regions: clients' shared memory; None: it is off.

    Raises:
        Refused: the request is invalid.
        NotFound: it names a region that does not exist.
    """
    if regions is not None and header_length is None and isinstance(raw, bytes) and (kept := regions.kept.get(raw)) is not None:
        return kept
    whole, json_bytes = memoryview(raw), len(raw)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdecimal() and int(header_length[:12]) <= len(raw)):
            raise Refused(f"Inference-Header-Content-Length is {header_length[:20]!r}, and the body has {len(raw)} bytes")
        json_bytes = int(header_length[:12])
    if (known := _known(whole, json_bytes, regions)) is not None:
        return known
    said = parse_json(whole[:json_bytes])
    listed = said.get("inputs")
    if not isinstance(listed, list) or not listed or len(listed) > MAX_INPUTS:
        raise Refused(f"inputs must be a list of 1 to {MAX_INPUTS} tensors")
    inputs, at = dict[str, Wire](), json_bytes
    for one in listed:
        name, wire, at = _input(one, whole, at, regions)
        if name in inputs:
            raise Refused(f"two inputs have the name {name!r}")
        inputs[name] = wire
    if at != len(raw):
        raise Refused(f"{len(raw) - at} bytes are left behind the tensors' binary data; the sizes do not add up to the body")
    parameters = _parameters(said, "the request")
    identity = said.get("id", "")
    if not isinstance(identity, str) or len(identity) > 1024:
        raise Refused("id must be a text of at most 1024 characters")
    binary = parameters.get("binary_data_output", False)
    outputs, places = _wanted(said.get("outputs"))
    parts = {name: part_of(regions, place) for name, place in places.items()}
    request = InferRequest(inputs, outputs, parts, bool(binary), ask_of(parameters), identity)
    if json_bytes <= MAX_KNOWN_BYTES and not any("data" in one for one in listed):
        tensors = [
            (name, wire.datatype, wire.shape, place_of(_parameters(one, ""), "") or len(wire.data))
            for one, (name, wire) in zip(listed, inputs.items(), strict=True)
        ]
        request.ask = replace(request.ask, kind=next(_KINDS))
        known = _Known(tensors, at - json_bytes, places, replace(request, inputs={}, places={}))
        _KNOWN[bytes(whole[:json_bytes])] = known
        if len(_KNOWN) > MAX_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
    return request


class _Known(NamedTuple):
    """A JSON head that was parsed, with the layout of the bytes after it."""

    tensors: list[tuple[str, str, tuple[int, ...], int | Place]]
    """(name, datatype, shape, size in bytes or place in shared memory) of each tensor, in the order of their bytes."""
    bytes: int
    """Number of bytes after the head."""
    places: dict[str, Place]
    """Name of an output -> its place in shared memory."""
    request: InferRequest


_KNOWN = dict[bytes, _Known]()
_KINDS = itertools.count()
_HEADS = dict[tuple[Any, ...], bytes]()
"""(kind of request, model, version, names, datatypes and shapes of the outputs) -> JSON of an answer without tensor data."""


def _known(whole: memoryview, json_bytes: int, regions: Regions | None) -> InferRequest | None:
    """A request whose JSON was parsed before; None: it was not. Clients often send the same JSON with other tensor data."""
    if json_bytes > MAX_KNOWN_BYTES:
        return None
    said = bytes(whole[:json_bytes])
    if regions is not None and json_bytes == len(whole) and (kept := regions.kept.get(said)) is not None:
        return kept
    known = _KNOWN.get(said)
    if known is None or known.bytes != len(whole) - json_bytes:
        return None  # `parse_infer` reports sizes that do not add up
    at, inputs, request = json_bytes, dict[str, Wire](), known.request
    for name, datatype, shape, size in known.tensors:
        if isinstance(size, Place):
            inputs[name] = Wire(datatype, shape, part_of(regions, size))
        else:
            inputs[name] = Wire(datatype, shape, whole[at : at + size])
            at += size
    places = {name: part_of(regions, place) for name, place in known.places.items()}
    made = InferRequest(inputs, request.outputs, places, request.binary, request.ask, request.id)
    if regions is not None and not known.bytes:  # all inputs are in regions
        if places and places.keys() == made.outputs.keys() and sum(map(len, places.values())) <= INLINE_BYTES:
            made.placings = {}
        regions.keep(said, made)
    return made


def _parameters(of: Mapping[str, Any], whose: str) -> Mapping[str, Any]:
    found = of.get("parameters") or {}
    if not isinstance(found, dict):
        raise Refused(f"the parameters of {whose} must be an object")
    for name, why in UNSUPPORTED.items():
        if found.get(name):
            raise Refused(f"{whose}: {why}")
    return found


def part_of(regions: Regions | None, place: Place) -> Part:
    """The part of a region at a place. Raises Refused, or NotFound: no such region."""
    if regions is None:
        raise Refused(MISSING)
    return regions.part(place)


def place_of(parameters: Mapping[str, Any], whose: str) -> Place | None:
    """The place of a tensor in shared memory; None: it is not in shared memory. Raises Refused: wrong parameters."""
    region, size = parameters.get("shared_memory_region"), parameters.get("shared_memory_byte_size")
    if region is None and size is None:
        return None
    offset = parameters.get("shared_memory_offset", 0)
    if not isinstance(region, str) or type(size) is not int or type(offset) is not int:
        raise Refused(
            f"{whose} has shared_memory_region {str(region)[:80]!r}, shared_memory_byte_size {str(size)[:30]} and "
            f"shared_memory_offset {str(offset)[:30]}, wanted a name, a whole number, and another or none"
        )
    return Place(region, offset, size)


def _input(one: Any, whole: memoryview, at: int, regions: Regions | None) -> tuple[str, Wire, int]:
    """(name, tensor, offset of the next tensor's bytes in the body)."""
    if not isinstance(one, dict) or not isinstance(one.get("name"), str):
        raise Refused("an input must be an object with a name")
    name = one["name"][:200]
    datatype, shape = one.get("datatype"), shape_of(one.get("shape"), name)
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise Refused(f"input {name!r} has datatype {str(datatype)[:40]!r}, wanted one of {', '.join(DATATYPES)}")
    parameters = _parameters(one, f"input {name!r}")
    size, place = parameters.get("binary_data_size"), place_of(parameters, f"input {name!r}")
    if place is not None:
        if size is not None or "data" in one:
            raise Refused(f"input {name!r} has data or binary_data_size, and is in shared memory, wanted one of them")
        return name, Wire(datatype, shape, part_of(regions, place)), at
    if size is None:
        if "data" not in one:
            raise Refused(f"input {name!r} has neither data nor binary_data_size")
        return name, Wire(datatype, shape, numbers(one["data"], datatype, shape, name)), at
    if "data" in one:
        raise Refused(f"input {name!r} has data and binary_data_size, wanted one of them")
    if type(size) is not int or not 0 <= size <= len(whole) - at:
        raise Refused(f"input {name!r} has binary_data_size {str(size)[:30]}, and {len(whole) - at} bytes are left in the body")
    return name, Wire(datatype, shape, whole[at : at + size]), at + size


def shape_of(said: Any, name: str) -> tuple[int, ...]:
    """Check a declared shape. Raises Refused: it is not a shape."""
    if (
        not isinstance(said, list | tuple)
        or len(said) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n < 1 << 48 for n in said)
    ):
        raise Refused(f"input {name!r} has the shape {str(said)[:80]}, wanted at most {MAX_DIMS} whole numbers")
    return tuple(said)


def numbers(said: Any, datatype: str, shape: tuple[int, ...], name: str) -> bytes:
    """The bytes of a tensor from its numbers in JSON, nested or flat. Raises Refused: they do not match datatype or shape."""
    try:
        array = np.asarray(said if isinstance(said, list) else [said])
    except (ValueError, OverflowError, RecursionError):
        raise Refused(f"the data of input {name!r} must be a list of numbers whose rows have equal lengths") from None
    if array.size != prod(shape):
        raise Refused(f"input {name!r} has {array.size} numbers, and shape {list(shape)} has {prod(shape)}")
    if not array.size:
        return b""
    kind = DATATYPES[datatype].numpy or "float32"
    wanted = np.dtype(kind)
    takes = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[wanted.kind]
    if array.dtype.kind not in takes:
        words = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "numbers"}[wanted.kind]
        raise Refused(f"input {name!r} is {datatype}, and its data is not only {words}")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise Refused(f"input {name!r} has numbers outside of {datatype}, {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        array = array.astype(wanted)
    if datatype == "BF16":
        bits = array.view(np.uint32)
        # Round to nearest, ties to even. Values that are not finite are only truncated.
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        array = (np.where(np.isfinite(array), rounded, bits) >> 16).astype(np.uint16)
    return array.tobytes()


def _wanted(said: Any) -> tuple[dict[str, bool | None], dict[str, Place]]:
    """(requested outputs, each with whether it is sent as bytes; places of the outputs requested in shared memory)."""
    if said is None:
        return {}, {}
    if not isinstance(said, list) or len(said) > MAX_INPUTS:
        raise Refused("outputs must be a list of outputs")
    found, places = dict[str, bool | None](), dict[str, Place]()
    for one in said:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise Refused("an output must be an object with a name")
        whose = f"output {one['name'][:200]!r}"
        parameters = _parameters(one, whose)
        binary, place = parameters.get("binary_data"), place_of(parameters, whose)
        found[one["name"]] = None if binary is None else bool(binary)
        if place is not None:
            places[one["name"]] = place
    return found, places


def ask_of(parameters: Mapping[str, Any]) -> Ask:
    """Priority, timeout and sequence from a request's parameters. Raises Refused."""
    for name in ("priority", "timeout"):
        value = parameters.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise Refused(f"{name} is {str(value)[:40]!r}, wanted a whole number that is not negative")
    sequence = parameters.get("sequence_id")
    if sequence is not None and (type(sequence) not in (int, str) or len(str(sequence)) > 128):
        raise Refused("sequence_id is neither a whole number nor a short text")
    timeout_us = parameters.get("timeout", 0)
    return Ask(
        priority=min(parameters.get("priority", 0), MAX_PRIORITY) or DEFAULT_PRIORITY,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        sequence=sequence,
        starts=bool(parameters.get("sequence_start")),
        ends=bool(parameters.get("sequence_end")),
    )


def placed(answer: Answer, places: Mapping[str, Part]) -> None:
    """Write outputs to their places in shared memory. Raises Refused: no such output, or it cannot be written there."""
    for name, part in places.items():
        wire = _output(answer, name)
        try:
            part.write(wire.raw)
        except Refused as error:
            raise Refused(f"model {answer.model}: output {name[:200]!r}: {error}") from None


def _output(answer: Answer, name: str) -> Wire:
    wire = answer.outputs.get(name)
    if wire is None:
        raise Refused(f"model {answer.model} has no output {name[:200]!r}; it has {', '.join(answer.outputs)}")
    return wire


def answer_body(answer: Answer, request: InferRequest) -> tuple[bytes, int | None]:
    """Returns (body, number of bytes of JSON before the tensors' bytes; None: all of it is JSON).

    Raises Refused: the model has no such output, or JSON cannot represent a number (NaN or infinity).
    """
    names: Sequence[str] = tuple(request.outputs) or tuple(answer.outputs)
    kind = request.ask.kind
    known = None
    if kind is not None:
        known = (kind, answer.model, answer.version, *answer.outputs, *[wire[:2] for wire in answer.outputs.values()])
    if known is not None and (head := _HEADS.get(known)) is not None:
        sent = [answer.outputs[name].raw for name in names if name not in request.places]
        return (b"".join((head, *sent)), len(head)) if sent else (head, None)
    listed, blobs = list[dict[str, Any]](), list[bytes]()
    for name in names:
        wire = _output(answer, name)
        said: dict[str, Any] = {"name": name, "datatype": wire.datatype, "shape": list(wire.shape)}
        binary = request.outputs.get(name)
        if name in request.places:
            pass  # no parameters: to NVIDIA's C++ client, any parameters mean that the output's bytes follow
        elif request.binary if binary is None else binary:
            said["parameters"] = {"binary_data_size": len(wire.data)}
            blobs.append(bytes(wire.raw))
        else:
            said["data"] = array_of(wire).ravel().tolist()
        listed.append(said)
    whole: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version), "outputs": listed}
    if request.id:
        whole["id"] = request.id
    try:
        head = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        raise Refused("the outputs have numbers that JSON does not have (NaN or infinity); ask for binary_data") from None
    if known is not None and len(blobs) + len(request.places) == len(names):
        _HEADS[known] = head
        if len(_HEADS) > MAX_KNOWN:
            del _HEADS[next(iter(_HEADS))]
    return (b"".join((head, *blobs)), len(head)) if blobs else (head, None)
