"""The batches in one memory of a model's process. Each is begun, ends on the device, and is answered.

A GPU works while the process continues. So these are three steps, and the process can begin the next batch, which is in another
memory, before the second or the third (turns.py): the device then has work while the process waits or makes the answer.

1. `begin` gives the device all its work: copies of inputs, the model, and copies of outputs into the memory of the batch.
2. `end` waits until that is done. Then nothing reads the inputs any more.
3. `answer` looks for NaN and writes the message.

`begins_at_once` says for which batches the first step takes microseconds. Other models may wait for the device in it, or run a
user's code, which may hang or end the process and would cost the batch before it its answer. On a CPU, `begin` computes.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewright.host.arena import ALIGN, SECONDS, Arena, aligned
from tilewright.host.config import ModelConfig
from tilewright.host.direct import Fetched
from tilewright.host.intake import Arrived
from tilewright.host.loaded import NAMES as DTYPE_NAMES
from tilewright.host.loaded import Loaded
from tilewright.host.tensors import DATATYPES
from tilewright.hw.device import page_locked

__all__ = ["Begun", "Computing", "sentence"]

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 300
MAX_KEPT = 256
"""Number of tensors in shared memory, and of messages, that are kept for batches of the same shape."""
LOST = "the device is lost"

K = TypeVar("K")
V = TypeVar("V")


def _keep(among: dict[K, V], key: K, value: V) -> None:
    if len(among) >= MAX_KEPT:
        among.clear()
    among[key] = value


def sentence(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return (text if type(error) is ValueError and text else f"{type(error).__name__}: {text}")[:MAX_ERROR_CHARS]


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


@dataclass(slots=True)
class Begun:
    """A batch that was begun and has not been answered."""

    arrived: Arrived
    parts: list[int]
    """Rows of each request."""
    since_s: float
    """The time from which on it counts, by `time.perf_counter`."""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] | None = None
    """Of all requests; None if no request has outputs. They are on the host and complete when the batch has ended."""
    room: _Room | None = None
    """Where the outputs are; None: not in the memory of the batch yet."""
    start: torch.cuda.Event | None = None
    """An event before its work on the device, if it is marked and there is a GPU; else None."""
    mark: torch.cuda.Event | None = None
    """An event behind all its work on the device, if another batch may begin before that; else None."""
    failure: Exception | None = None
    """What the model raised for all requests together."""
    errors: dict[int, str] = field(default_factory=dict)
    """Number of a request -> why it has no outputs."""

    def device_s(self) -> float | None:
        """The seconds for which the device has computed it, if its `mark` has been reached; None: it has none."""
        if self.start is None or self.mark is None:
            return None
        try:
            return 1e-3 * self.start.elapsed_time(self.mark)
        except RuntimeError:  # a batch behind this one has cost the device; that one's end will say so
            return None

    def ended(self) -> bool:
        """Whether its `mark` has been reached, or the device is lost."""
        try:
            return self.mark is None or self.mark.query()
        except RuntimeError:
            return True

    def lose(self) -> None:
        """Give each request an error, because the device is lost."""
        self.outputs, self.room, self.errors = None, None, dict.fromkeys(range(len(self.parts)), LOST)


class Computing:
    """A loaded model, and memory for one batch.

    Args:
        loaded: the model.
        config: its config.
        arena: the memory.
        capacity: most bytes of inputs. At this byte stands the time until which a batch may begin, and outputs come after it.
    """

    def __init__(self, loaded: Loaded, config: ModelConfig, arena: Arena, capacity: int):
        self._loaded, self._config, self._arena = loaded, config, arena
        self._capacity, self._outputs_at = capacity, capacity + ALIGN
        self._waits = False
        """Whether copies between the memory and the device wait, because its pages are not locked."""
        self._unlock: Callable[[], object] = self._locked()
        self._asked = dict[bytes, _Asked]()
        self._rooms = dict[tuple[Any, ...], _Room]()
        self.broken = False
        """Whether the device is lost, so that every later call would fail, too."""

    def _locked(self) -> Callable[[], object]:
        """Lock the arena's pages if a GPU copies from and to them; return a function that unlocks them."""
        self._waits = False
        if self._loaded.device.type == "cuda":
            try:
                return page_locked(torch.frombuffer(self._arena.view, dtype=torch.uint8))
            except OSError as error:
                self._waits = True
                logger.warning("inputs are copied to the GPU more slowly: %s", error)
        return lambda: None

    def may_begin(self) -> bool:
        """Whether the batch in the memory may still begin."""
        return self._arena.may_begin(self._capacity, time.monotonic())

    def begins_at_once(self, arrived: Arrived) -> bool:
        """Whether `begin` neither waits for the device nor runs a user's code."""
        return not (self._waits or self.broken) and self._loaded.replays(self._content(arrived.words).inputs)

    # ---- a batch is begun

    def begin(self, arrived: Arrived, *, marked: bool) -> Begun:
        """Begin a batch, which the server sees if the process ends. What else goes wrong is handled when the batch has ended.

        `marked`: with events around its work on the device, so that another one may begin before it has ended.
        """
        self._arena.begins(self._capacity)
        asked, fetched = self._content(arrived.words), arrived.fetched
        batch = Begun(arrived, asked.parts, time.perf_counter())
        try:
            views = asked.inputs if fetched is None else self._moved(asked, fetched)
        except RuntimeError as error:  # the device refuses a copy
            batch.failure, self.broken = error, True
            return batch
        batch.inputs = [x.detach() for x in views]  # a model may unsqueeze_ its own
        try:
            batch.start = self._loaded.mark() if marked else None
            outputs = self._called(batch, batch.inputs, sum(asked.parts), self._loaded.begin)
            batch.room = self._rooms.get(_kind(outputs))
            if batch.room is not None:
                self._loaded.bring(outputs, batch.room.tensors)
            batch.outputs = outputs if batch.room is None else batch.room.tensors
            batch.mark = self._loaded.mark() if marked and batch.room is not None else None
        except Exception as error:  # noqa: BLE001 (whatever a user's model raises costs its request, and is said)
            batch.failure = error
        return batch

    def _content(self, packet: bytes) -> _Asked:
        return self._asked.get(packet) or self._read(packet)

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

    def _moved(self, asked: _Asked, fetched: Fetched) -> list[Tensor]:
        """The inputs on the device, in its copy of this memory."""
        fetched.begin(torch.frombuffer(self._arena.view, dtype=torch.uint8), asked.places)
        if not asked.moved:
            for (begin, end), x in zip(asked.places, asked.inputs, strict=True):
                asked.moved.append(fetched.memory[begin:end].view(x.dtype).view(x.shape))
        return asked.moved

    def _called(
        self, batch: Begun, inputs: list[Tensor], rows: int, call: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """The model's outputs for `rows` rows. `call`: calls the model with padded inputs."""
        loaded = self._loaded
        padded = loaded.padded(rows) if loaded.signature.batched else rows
        # The device's copy may be needed for a second call, so the model must not write to it. A padded batch is new memory.
        if batch.arrived.fetched is not None and not loaded.copies_inputs and padded == rows:
            inputs = [x.clone() for x in inputs]
        if not loaded.signature.batched:
            return call(inputs)
        if padded > rows:
            inputs = loaded.moved(inputs)  # before zeros are added: a concatenated tensor is not in locked memory
            inputs = [torch.cat([x, x.new_zeros((padded - rows, *x.shape[1:]))]) for x in inputs]
        outputs = call(inputs)
        for spec, x in zip(loaded.signature.outputs, outputs, strict=True):
            if not x.dim() or len(x) != padded:
                raise ValueError(f"output {spec.name!r} has shape {list(x.shape)} for {padded} rows; wanted as many rows")
        return [x[:rows] for x in outputs] if padded > rows else outputs

    # ---- it ends

    def end(self, batch: Begun) -> None:
        """Wait until a batch has ended on the device. If the model raised, compute each of its requests alone."""
        if batch.failure is None:
            try:
                self._loaded.wait(batch.mark)
                if batch.room is None and batch.outputs is not None:  # the first ones of these shapes
                    batch.outputs = [x.cpu() for x in batch.outputs]
            except Exception as error:  # noqa: BLE001 (an error of the user's model may come this late)
                batch.failure = error
        if batch.failure is not None:
            batch.room = batch.mark = None
            batch.outputs, batch.errors = self._alone(batch, batch.failure)
        if not self.settled(batch.arrived.fetched, batch.mark) and batch.outputs is not None:
            batch.lose()

    def settled(self, fetched: Fetched | None, mark: torch.cuda.Event | None = None) -> bool:
        """Wait until nothing reads the clients' memory, or that of the batch, any more; return whether the device works.

        `mark`: as in `Begun`. Clients may change their memory as soon as they have their answer, and the server may write the
        next batch.
        """
        try:
            if fetched is not None:
                fetched.end(mark)
        except RuntimeError as error:
            logger.error("the device is lost: %s", error)
            self.broken = True
            return False
        return True

    def _failed(self, error: Exception) -> str:
        """What a request is told of an error of the model; notes whether it means that the device is lost."""
        self.broken |= self._loaded.device.type == "cuda" and "CUDA error" in str(error)
        return f"the model raised {sentence(error)}"

    def _alone(self, batch: Begun, failure: Exception) -> tuple[list[Tensor] | None, dict[int, str]]:
        """(outputs of all requests, errors by request) of a batch that failed; None if no request has outputs."""
        parts, why = batch.parts, self._failed(failure)
        if len(parts) == 1 or self.broken:
            return None, dict.fromkeys(range(len(parts)), why)
        found, errors, at = list[list[Tensor] | None](), dict[int, str](), 0
        for number, rows in enumerate(parts):
            try:
                found.append(self._called(batch, [x[at : at + rows] for x in batch.inputs], rows, self._loaded.call))
            except Exception as error:  # noqa: BLE001 (whatever a user's model raises costs its request, and is said)
                errors[number] = self._failed(error)
                found.append(None)
            at += rows
        some = next((own for own in found if own is not None), None)
        if some is None:
            return None, errors
        filled = [
            [x.new_zeros((rows, *x.shape[1:])) for x in some] if own is None else own
            for own, rows in zip(found, parts, strict=True)
        ]
        return [torch.cat(pieces) for pieces in zip(*filled, strict=True)], errors

    # ---- it is answered

    def answer(self, batch: Begun) -> bytes:
        """The answer to a batch that has ended."""
        if batch.outputs is not None and self._config.nan == "error":
            try:
                batch.errors |= self._nans(batch.inputs, batch.outputs, batch.parts)
            except RuntimeError as error:
                if "CUDA error" not in str(error):
                    raise
                # The inputs cannot be read. The batch that was begun behind this one may be the cause.
                logger.error("the device is lost: %s", error)
                self.broken = True
                batch.lose()
        unread, room = batch.arrived.unread, batch.room
        if batch.outputs is not None and room is None:
            room = self._placed(batch.outputs)
        seconds = time.perf_counter() - batch.since_s
        if room is not None and not (batch.errors or unread):
            return SECONDS.pack(seconds) + room.said
        return SECONDS.pack(seconds) + self._words([] if room is None else room.placed, batch.errors, unread)

    def _words(self, placed: list[tuple[int, str, list[int]]], errors: Mapping[int, str], unread: Mapping[int, str]) -> bytes:
        """An answer, without the time that its batch took."""
        said = {"outputs": placed, "errors": dict(errors), "unread": dict(unread), "bytes": self._arena.size}
        return json.dumps(said).encode()

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
        """Write outputs into the arena that are on the host."""
        kind = _kind(outputs)
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


def _kind(outputs: list[Tensor]) -> tuple[Any, ...]:
    """The key of outputs with these datatypes and shapes."""
    return tuple([(x.dtype, x.shape) for x in outputs])
