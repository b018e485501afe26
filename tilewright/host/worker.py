"""The process of one instance of a model: it loads it, warms it up, and computes batches until it is told to end or killed.

Messages are JSON, one per packet. The first is {"config", "folder", "threads"}. While the model is loaded, each stage is sent
as {"stage": words}. Then follows {"signature", "bytes", "capacity", "most", "direct"} with the descriptors of one arena, or of
two and a second channel, or {"failed": sentence}. After that, each batch is {"parts": rows of each request, "inputs": [[offset,
shape], ...]}, in a packet with the number of its arena and what to read from clients' memory (intake.py). The answer is three
numbers of bytes (`Traffic`), the seconds that the batch took as eight bytes, and {"outputs": [[offset, datatype, shape], ...],
"errors": {request: sentence}, "unread": {request: sentence}, "bytes"}. Messages that occurred before are not parsed or written
again.

If "direct" is true, the process has its GPU copy large inputs in shared memory (direct.py). Their batch is then laid out on the
device, and what the processor has read is added to it there.

Batches are answered in the order in which they arrive; with two arenas, the second may arrive while the first is computed. An
arena contains the time until which its batch may begin. A batch that cannot begin in time is answered by NOT_BEGUN only.

If a batch of several requests fails, each of them is computed alone, so that the input of one client does not cost the others
their answers. If the model returns a NaN for finite inputs, this is an error of that request, unless the config allows it. The
model's printed output goes to stderr.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewright.host.arena import ALIGN, NOT_BEGUN, SECONDS, TRAFFIC, Arena, aligned
from tilewright.host.config import ModelConfig
from tilewright.host.direct import MIN_BYTES, Copies, Direct, Fetched
from tilewright.host.intake import MAX_PACKET, Intake
from tilewright.host.loaded import NAMES as DTYPE_NAMES
from tilewright.host.loaded import Loaded, load
from tilewright.host.regions import INLINE_BYTES
from tilewright.host.tensors import DATATYPES, byte_size
from tilewright.hw.copies import HostCopies
from tilewright.hw.device import page_locked

__all__ = ["main"]

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 300
MAX_STAGED_BYTES = 1 << 30
"""Size of a batch's inputs above which there is no memory for a second batch, because on a GPU its pages are locked."""
MAX_KEPT = 256
"""Number of tensors in shared memory, and of messages, that are kept for batches of the same shape."""

K = TypeVar("K")
V = TypeVar("V")


def main(channel: socket.socket) -> None:
    """Serve one model over a socket that is connected to the server."""
    os.dup2(2, 1)

    def note(stage: str) -> None:
        _send(channel, {"stage": stage})

    first = json.loads(channel.recv(MAX_PACKET))
    config = ModelConfig.of(first["config"])
    try:
        torch.set_num_threads(first["threads"])
        loaded = load(config, None if first["folder"] is None else Path(first["folder"]), note)
        output_bytes = _warm_up(loaded, config, note)
        arenas, capacity = _arenas(loaded, config, output_bytes)
    except Exception as error:  # noqa: BLE001 (whatever a user's model raises while it loads is said, and ends the process)
        _send(channel, {"failed": _sentence(error)})
        return
    for arena in arenas:
        arena.begin_by(capacity)
    instances = [_Instance(loaded, config, arena, capacity + ALIGN) for arena in arenas]
    direct = _direct(loaded, config, len(arenas), capacity)
    said = {"signature": loaded.signature.json(), "bytes": arenas[0].size, "capacity": capacity, "most": loaded.most}
    ahead = _ready(channel, {**said, "direct": direct is not None}, arenas)
    for number, packet, unread, fetched, read in Intake(channel, ahead, arenas, capacity, direct):
        instance = instances[number]
        if not arenas[number].may_begin(capacity, time.monotonic()):
            instance.settled(fetched)
            channel.send(NOT_BEGUN)
        else:
            answer = instance.answer(packet, unread, fetched)
            traffic = 0 if fetched is None else fetched.nbytes, read, 0 if direct is None else direct.locked_bytes
            channel.send(TRAFFIC.pack(*traffic) + answer)
        if instance.broken:
            return


def _copies(device: torch.device) -> Copies | None:
    """What copies from clients' memory to the device. Raises RuntimeError or OSError."""
    return HostCopies(device) if device.type == "cuda" else None


def _direct(loaded: Loaded, config: ModelConfig, arenas: int, capacity: int) -> Direct | None:
    """What has the GPU copy from clients' memory; None: there is no GPU, or the config or the system forbids it."""
    try:
        copies = _copies(loaded.device) if config.lock_regions and capacity >= MIN_BYTES else None
        return None if copies is None else Direct(copies, arenas, capacity)
    except (RuntimeError, OSError) as error:
        logger.warning("the processor copies tensors from shared memory: %s", error)
        return None


def _ready(channel: socket.socket, said: dict[str, Any], arenas: list[Arena]) -> socket.socket | None:
    """Send the server the arenas, and an end of a second channel if there are two; return the other end."""
    fds = [arena.fd for arena in arenas]
    if len(arenas) < 2:
        socket.send_fds(channel, [json.dumps(said).encode()], fds)
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(channel, [json.dumps(said).encode()], [*fds, theirs.fileno()])
    return ours


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _keep(among: dict[K, V], key: K, value: V) -> None:
    if len(among) >= MAX_KEPT:
        among.clear()
    among[key] = value


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return (text if type(error) is ValueError and text else f"{type(error).__name__}: {text}")[:MAX_ERROR_CHARS]


def _warm_up(loaded: Loaded, config: ModelConfig, note: Callable[[str], None]) -> int:
    """Call the model with every padded batch size, so that it is warm for the first request.

    Returns the bytes of the largest outputs. An optimised model makes a graph for each new size.
    """
    largest = 0
    sizes = (loaded.buckets or (1, config.max_batch)) if loaded.signature.batched else (1,)
    doing = "optimising for" if loaded.optimised else "warming up"
    for number, rows in enumerate(sizes, 1):
        note(f"{doing} batch {rows} ({number} of {len(sizes)})")
        outputs = list[Tensor]()
        for _ in range(2):
            outputs = loaded.call([_zeros(spec.datatype, _closed(spec.shape, rows)) for spec in loaded.signature.inputs])
        largest = max(largest, sum(aligned(x.numel() * x.element_size()) for x in outputs))
    return largest


def _closed(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """A shape with `rows` for its first open dimension, and 8 for others."""
    return tuple((rows if at == 0 else 8) if n == -1 else n for at, n in enumerate(shape))


def _zeros(datatype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, DATATYPES[datatype].torch))


def _arenas(loaded: Loaded, config: ModelConfig, output_bytes: int) -> tuple[list[Arena], int]:
    """(memory for the largest batch, or for two if writing the inputs takes long; the size of the inputs in bytes)."""
    inputs, rows = 0, max(config.max_batch, *loaded.buckets, 1)
    for spec in loaded.signature.inputs:
        inner = spec.shape[1:] if loaded.signature.batched else spec.shape
        fixed = byte_size(spec.datatype, inner) * (rows if loaded.signature.batched else 1)
        inputs += aligned(config.max_bytes if -1 in inner else fixed)
    staged = config.instances == 1 and INLINE_BYTES < inputs <= MAX_STAGED_BYTES
    return [Arena.create(inputs + ALIGN + output_bytes) for _ in range(1 + staged)], inputs


class _Asked(NamedTuple):
    """The content of a packet."""

    parts: list[int]
    """Rows of each request."""
    inputs: list[Tensor]
    """Views of shared memory."""
    places: list[tuple[int, int]]
    """(first byte, byte behind the last) of each input there."""
    moved: list[Tensor]
    """Views of the device's copy of it; [] until there is one."""


class _Room(NamedTuple):
    """The place of outputs of certain shapes in shared memory."""

    tensors: list[Tensor]
    placed: list[tuple[int, str, list[int]]]
    """(offset, datatype, shape) of each."""
    said: bytes
    """The answer if there are no errors."""


class _Instance:
    """A loaded model, and the memory of its batches."""

    def __init__(self, loaded: Loaded, config: ModelConfig, arena: Arena, outputs_at: int):
        self._loaded, self._config, self._arena, self._outputs_at = loaded, config, arena, outputs_at
        self._unlock: Callable[[], object] = self._locked()
        self._asked = dict[bytes, _Asked]()
        self._rooms = dict[tuple[Any, ...], _Room]()
        self._kept = False
        """Whether the model must not write to the inputs of its batch, because they may be needed for a second call."""
        self.broken = False
        """Whether the device is lost, so that every later call would fail, too."""

    def _locked(self) -> Callable[[], object]:
        """Lock the arena's pages if a GPU copies from them; return a function that unlocks them."""
        if self._loaded.device.type == "cuda":
            try:
                return page_locked(torch.frombuffer(self._arena.view, dtype=torch.uint8))
            except OSError as error:
                logger.warning("inputs are copied to the GPU more slowly: %s", error)
        return lambda: None

    def answer(self, packet: bytes, unread: Mapping[int, str] = MappingProxyType({}), fetched: Fetched | None = None) -> bytes:
        """Compute one batch.

        Args:
            packet: its JSON.
            unread: requests whose inputs could not be read -> why; the server refuses them.
            fetched: inputs that are on their way to the device; it has ended when this returns.
        """
        started = time.perf_counter()
        asked = self._asked.get(packet) or self._read(packet)
        views = asked.inputs if fetched is None else self._moved(asked, fetched)
        parts, inputs = asked.parts, [x.detach() for x in views]  # a model may unsqueeze_ its own
        self._kept = fetched is not None and not self._loaded.copies_inputs
        outputs, errors = self._computed(inputs, parts)
        if not self.settled(fetched) and outputs is not None:
            outputs, errors = None, dict.fromkeys(range(len(parts)), "the device is lost")
        if outputs is not None and self._config.nan == "error":
            errors |= self._nans(inputs, outputs, parts)
        room = None if outputs is None else self._placed(outputs)
        seconds = time.perf_counter() - started
        if room is not None and not (errors or unread):
            return SECONDS.pack(seconds) + room.said
        return SECONDS.pack(seconds) + self._words([] if room is None else room.placed, errors, unread)

    def settled(self, fetched: Fetched | None) -> bool:
        """Wait until nothing reads the clients' memory, or that of the batch, any more; return whether the device works.

        Clients may change their memory as soon as they have their answer, and the server may write the next batch.
        """
        try:
            if fetched is not None:
                fetched.end()
        except RuntimeError as error:
            logger.error("the device is lost: %s", error)
            self.broken = True
            return False
        return True

    def _moved(self, asked: _Asked, fetched: Fetched) -> list[Tensor]:
        """The inputs on the device, in its copy of this memory."""
        fetched.begin(torch.frombuffer(self._arena.view, dtype=torch.uint8), asked.places)
        if not asked.moved:
            for (begin, end), x in zip(asked.places, asked.inputs, strict=True):
                asked.moved.append(fetched.memory[begin:end].view(x.dtype).view(x.shape))
        return asked.moved

    def _words(self, placed: list[tuple[int, str, list[int]]], errors: Mapping[int, str], unread: Mapping[int, str]) -> bytes:
        """An answer, without the time that its batch took."""
        said = {"outputs": placed, "errors": dict(errors), "unread": dict(unread), "bytes": self._arena.size}
        return json.dumps(said).encode()

    def _read(self, packet: bytes) -> _Asked:
        """Parse a packet that has not come before."""
        message = json.loads(packet)
        specs = self._loaded.signature.inputs
        views = [self._view(at, spec.datatype, shape) for spec, (at, shape) in zip(specs, message["inputs"], strict=True)]
        places = [(at, at + x.nbytes) for x, (at, _) in zip(views, message["inputs"], strict=True)]
        read = _Asked(message["parts"], views, places, [])
        _keep(self._asked, packet, read)
        return read

    def _view(self, offset: int, datatype: str, shape: list[int]) -> Tensor:
        dtype, count = getattr(torch, DATATYPES[datatype].torch), 1
        for n in shape:
            count *= n
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._arena.view, dtype=dtype, count=count, offset=offset).view(shape)

    def _computed(self, inputs: list[Tensor], parts: list[int]) -> tuple[list[Tensor] | None, dict[int, str]]:
        """(outputs of all requests, errors by request); None if no request has outputs."""
        try:
            return self._called(inputs, sum(parts)), {}
        except Exception as error:  # noqa: BLE001 (whatever a user's model raises costs its request, and is said)
            self.broken = self._loaded.device.type == "cuda" and "CUDA error" in str(error)
            if len(parts) == 1 or self.broken:
                return None, dict.fromkeys(range(len(parts)), f"the model raised {_sentence(error)}")
        found, errors, at = list[list[Tensor] | None](), dict[int, str](), 0
        for number, rows in enumerate(parts):
            own, error = self._computed([x[at : at + rows] for x in inputs], [rows])
            found.append(own)
            if own is None:
                errors[number] = error[0]
            at += rows
        some = next((own for own in found if own is not None), None)
        if some is None:
            return None, errors
        filled = [
            [x.new_zeros((rows, *x.shape[1:])) for x in some] if own is None else own
            for own, rows in zip(found, parts, strict=True)
        ]
        return [torch.cat(pieces) for pieces in zip(*filled, strict=True)], errors

    def _called(self, inputs: list[Tensor], rows: int) -> list[Tensor]:
        """The model's outputs for `rows` rows."""
        padded = self._loaded.padded(rows) if self._loaded.signature.batched else rows
        if self._kept and padded == rows:  # a padded batch is new memory anyway
            inputs = [x.clone() for x in inputs]
        if not self._loaded.signature.batched:
            return self._loaded.call(inputs)
        if padded > rows:
            inputs = self._loaded.moved(inputs)  # before zeros are added: a concatenated tensor is not in locked memory
            inputs = [torch.cat([x, x.new_zeros((padded - rows, *x.shape[1:]))]) for x in inputs]
        outputs = self._loaded.call(inputs)
        for spec, x in zip(self._loaded.signature.outputs, outputs, strict=True):
            if not x.dim() or len(x) != padded:
                raise ValueError(f"output {spec.name!r} has shape {list(x.shape)} for {padded} rows; wanted as many rows")
        return [x[:rows] for x in outputs] if padded > rows else outputs

    def _nans(self, inputs: list[Tensor], outputs: list[Tensor], parts: list[int]) -> dict[int, str]:
        """Requests whose outputs have a NaN although their inputs are finite."""
        suspect = [
            (spec.name, x)
            for spec, x in zip(self._loaded.signature.outputs, outputs, strict=True)
            # A sum takes one pass. It is also NaN if there are infinities of both signs, which is checked below.
            if x.is_floating_point() and isnan(x.sum().item())
        ]
        if not suspect:
            return {}
        floats = [x for x in inputs if x.is_floating_point()]
        errors, at = dict[int, str](), 0
        for number, rows in enumerate(parts):
            mine = slice(at, at + rows) if self._loaded.signature.batched else slice(None)
            at += rows
            name = next((name for name, x in suspect if bool(torch.isnan(x[mine] if x.dim() else x).any())), None)
            if name is not None and all(bool(torch.isfinite(x[mine] if x.dim() else x).all()) for x in floats):
                errors[number] = f"the model returned NaN in output {name!r} for finite inputs"
        return errors

    def _placed(self, outputs: list[Tensor]) -> _Room:
        """Write outputs into the arena."""
        kind = tuple([(x.dtype, x.shape) for x in outputs])
        room = self._rooms.get(kind)
        if room is None:
            room = self._room(outputs)
            _keep(self._rooms, kind, room)
        for place, x in zip(room.tensors, outputs, strict=True):
            place.copy_(x)
        return room

    def _room(self, outputs: list[Tensor]) -> _Room:
        """Choose a place for outputs of these shapes. The arena grows if they are larger than any before."""
        needed = self._outputs_at + sum(aligned(x.numel() * x.element_size()) for x in outputs)
        if needed > self._arena.size:
            self._unlock()
            self._arena.grow(needed)
            self._asked.clear()  # otherwise the previous memory would stay mapped
            self._rooms.clear()
            self._unlock = self._locked()
        at, tensors, placed = self._outputs_at, list[Tensor](), list[tuple[int, str, list[int]]]()
        for x in outputs:
            name, shape = DTYPE_NAMES[x.dtype], list(x.shape)
            tensors.append(self._view(at, name, shape))
            placed.append((at, name, shape))
            at += aligned(x.numel() * x.element_size())
        return _Room(tensors, placed, self._words(placed, {}, {}))
