"""The server's side of a model process: starts it, sends it batches, notices its end, and ends it.

Everything runs on one event loop and never waits for the model: a batch is written into shared memory, one packet is sent, and
the answer calls a function.

An instance with large inputs has room for two batches: while one is computed, the next is written and its packet is sent, so
that the model continues without a pause. The second batch can be recalled until it begins. The model's process, not the server,
decides whether it has begun: it compares the clock with the time that the server wrote next to the batch.
"""

import asyncio
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from tilewright.host.arena import NOT_BEGUN, SECONDS, Arena, aligned
from tilewright.host.config import ModelConfig
from tilewright.host.forking import LoadFailed, Nursery
from tilewright.host.regions import INLINE_BYTES, Part, Read, read_all, read_beside, shared_out
from tilewright.host.tensors import Signature, Wire, byte_size

__all__ = ["RECALLED", "Done", "Instance", "Reply", "Runs"]

MAX_PACKET = 1 << 17
MAX_KEPT = 256
"""Number of messages that are kept so that they need not be written or parsed again."""

K = TypeVar("K")
V = TypeVar("V")


class Reply(NamedTuple):
    """The result of a batch. `outputs` are views of shared memory, valid until the called function has returned."""

    outputs: tuple[Wire, ...]
    """Outputs of all requests together, in the signature's order; () if no request has an answer."""
    errors: dict[int, str]
    """Number of a request in the batch -> why it has no answer."""
    seconds: float
    unread: Mapping[int, str] = MappingProxyType({})
    """Number of a request -> why its inputs could not be read from the shared memory that it names."""


RECALLED = Reply((), {}, 0.0)
"""The result of a batch that was never begun: it was recalled, its time was over, or the instance ended before."""
Done = Callable[[Reply | None], None]
"""Called once with the result of a batch; None: the instance ended during this batch."""


class Runs(Protocol):
    """Computes batches: a process, or another object in tests."""

    capacity: int
    most: int | None

    @property
    def busy(self) -> bool:
        """Whether it has a batch, or is closed."""
        ...

    @property
    def room(self) -> bool:
        """Whether it takes another batch behind the one that it has."""
        ...

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Done, until_s: float = inf) -> None:
        """Compute a batch, after the one that runs, and call `done` once; it must not begin after `until_s`."""
        ...

    def recall(self) -> None:
        """Do not begin the batch behind the one that runs; its `done` is told, by RECALLED unless it has begun."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...


class _Place:
    """Memory for a batch, and what is kept of earlier batches in it."""

    def __init__(self, number: int, arena: Arena):
        self.number, self.arena = number, arena
        self.packets = dict[tuple[Any, ...], bytes]()
        self.replies = dict[bytes, tuple[tuple[Wire, ...], dict[int, str]]]()
        self.used = False

    def laid_out(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]]) -> tuple[bytes, list[Read]]:
        """Write a batch into the memory; return (its packet, the parts that are still to be read)."""
        view, at, inputs, rows, reads = self.arena.view, 0, [], sum(parts), list[Read]()
        for column in range(len(batch[0])):
            began = at
            for number, request in enumerate(batch):
                data = request[column].data
                if isinstance(data, Part):
                    reads.append(Read(number, data, view[at : at + len(data)]))
                else:
                    view[at : at + len(data)] = data
                at += len(data)
            shape = batch[0][column].shape
            inputs.append((began, shape if len(batch) == 1 else (rows, *shape[1:])))
            at = aligned(at)
        kind = (*parts, *inputs)
        packet = self.packets.get(kind)
        if packet is None:
            words = json.dumps({"parts": parts, "inputs": inputs}).encode()
            packet = _kept(self.packets, kind, bytes([self.number]) + words)
        return packet, reads

    def read(self, text: bytes) -> tuple[tuple[Wire, ...], dict[int, str]]:
        """Parse a reply. A reply without errors is kept, because batches of the same shapes have the same replies."""
        known = self.replies.get(text)
        if known is not None:
            return known
        said: dict[str, Any] = json.loads(text)
        if said["bytes"] != self.arena.size:
            self.arena.remap(said["bytes"])
            self.replies.clear()
        view = self.arena.view
        wires = tuple(
            Wire(kind, tuple(shape), view[offset : offset + byte_size(kind, shape)]) for offset, kind, shape in said["outputs"]
        )
        errors = {int(number): error for number, error in said["errors"].items()}
        return (wires, errors) if errors else _kept(self.replies, text, (wires, errors))


@dataclass(slots=True, eq=False)
class _Handed:
    """A batch that was handed to an instance."""

    place: _Place
    done: Done
    packet: bytes
    jobs: deque[list[Read]] = field(default_factory=deque)
    """Parts that threads still have to read."""
    unread: dict[int, str] = field(default_factory=dict)
    ready: bool = False
    """Whether nothing is left to read."""
    sent: bool = False


class Instance:
    """One model process. Make it with `start`."""

    def __init__(self, pid: int, channel: socket.socket):
        self._channel = channel
        self._buffer = bytearray(MAX_PACKET)  # read into: as `recv` it would be mapped and unmapped for each packet
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
        self._places: tuple[_Place, ...] = ()
        self._batches = deque[_Handed]()
        """Batches in the order in which they will be answered."""
        self.capacity = 0
        """Most bytes in the inputs of one batch."""
        self.most: int | None = None
        """Most rows of a batch, if the model was exported for a limited number."""
        self._reading = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether it has a batch, or is closed."""
        return self.closed or bool(self._batches)

    @property
    def room(self) -> bool:
        """Whether it takes another batch behind the one that it has."""
        return len(self._places) > 1 and not self.closed and not all(place.used for place in self._places)

    @classmethod
    async def start(
        cls, nursery: Nursery, config: ModelConfig, folder: Path | None, threads: int, note: Callable[[str], None]
    ) -> tuple["Instance", Signature]:
        """Start a process, and wait until it has loaded the model and is warm. Raises LoadFailed.

        `note` is called with each stage.
        """
        note("starting a process")
        pid, channel = await nursery.fork()
        self = cls(pid, channel)
        try:
            async with asyncio.timeout(config.load_timeout_s):
                signature = await self._load(config, folder, threads, note)
        except TimeoutError:
            self.close()
            raise LoadFailed(f"it was not loaded within load_timeout_s={config.load_timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise
        return self, signature

    async def _load(self, config: ModelConfig, folder: Path | None, threads: int, note: Callable[[str], None]) -> Signature:
        first = {"config": config.json(), "folder": None if folder is None else str(folder), "threads": threads}
        await self._loop.sock_sendall(self._channel, json.dumps(first).encode())
        said, fds = await self._heard()
        while "stage" in said:
            note(said["stage"])
            said, fds = await self._heard()
        if "failed" in said:
            raise LoadFailed(said["failed"])
        self._places = tuple(_Place(number, Arena(fd, said["bytes"])) for number, fd in enumerate(fds))
        self.capacity, self.most = said["capacity"], said["most"]
        self._loop.add_reader(self._channel.fileno(), self._answered)
        return Signature.of(said["signature"])

    async def _heard(self) -> tuple[dict[str, Any], list[int]]:
        """The next message of a process that loads a model, and its descriptors. Raises LoadFailed: there is none."""
        await _readable(self._loop, self._channel)
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET, 2)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise LoadFailed("its process ended while it loaded the model")
        return json.loads(data), fds

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Done, until_s: float = inf) -> None:
        """Compute a batch, after the one that runs, and call `done` once.

        Args:
            parts: rows of each request.
            batch: inputs of each request, in the signature's order; requests' tensors differ in the first dimension only.
            done: called with the result; None: the process has ended.
            until_s: latest time at which the batch may begin, by `time.monotonic`.
        """
        place = self._places[0]
        if place.used:
            place = next(place for place in self._places if not place.used)
        place.used = True
        if len(self._places) > 1:
            place.arena.begin_by(self.capacity, until_s)
        packet, reads = place.laid_out(parts, batch)
        handed = _Handed(place, done, packet)
        self._batches.append(handed)
        if reads:
            if sum([len(read.part) for read in reads]) > INLINE_BYTES:
                handed.jobs.extend(shared_out(reads))
                task = self._loop.create_task(self._read_regions(handed))
                self._reading.add(task)
                task.add_done_callback(self._reading.discard)
                return
            handed.unread = read_all(reads)
        handed.ready = True
        self._send()

    async def _read_regions(self, handed: _Handed) -> None:
        """Read the batch's inputs in threads, and send it."""
        handed.unread = await read_beside(handed.jobs)
        handed.ready = True
        if handed in self._batches:
            self._send()
        else:
            handed.place.used = False

    def _send(self) -> None:
        """Send the packets of the batches that are ready, in their order."""
        for handed in list(self._batches):
            if not handed.ready:
                return
            if not handed.sent:
                try:
                    self._channel.send(handed.packet)
                except BlockingIOError:  # the previous packet is as long, and has not been received yet
                    return
                except OSError:
                    self.close()
                    return
                handed.sent = True

    def recall(self) -> None:
        """Do not begin the batch behind the one that runs; its `done` is told, by RECALLED unless it has begun."""
        if len(self._batches) < 2:
            return
        handed = self._batches[1]
        if handed.sent:
            handed.place.arena.begin_by(self.capacity, 0.0)
            return
        handed.jobs.clear()
        handed.place.used = not handed.ready  # threads may still write into this memory
        self._batches.pop()
        self._loop.call_soon(handed.done, RECALLED)

    def _answered(self) -> None:
        try:
            count = self._channel.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        data = bytes(memoryview(self._buffer)[:count])
        handed = self._batches.popleft()
        handed.place.used = False
        if self._batches:
            self._send()
        if data == NOT_BEGUN:
            handed.done(RECALLED)
            return
        wires, errors = handed.place.read(data[SECONDS.size :])
        handed.done(Reply(wires, errors, SECONDS.unpack_from(data)[0], handed.unread))

    def close(self) -> None:
        """Kill the process. `done` of the running batch is called with None, that of a batch behind it with RECALLED."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
        for place in self._places:
            place.arena.close()
        told: Reply | None = None
        while self._batches:
            handed = self._batches.popleft()
            handed.jobs.clear()
            handed.done(told)
            told = RECALLED


def _kept(among: dict[K, V], key: K, value: V) -> V:
    """Return the value, and keep it among the newest `MAX_KEPT`."""
    among[key] = value
    if len(among) > MAX_KEPT:
        del among[next(iter(among))]
    return value


async def _readable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    """Wait until there is something to receive, or the other end is closed."""
    ready: asyncio.Future[None] = loop.create_future()

    def mark() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(channel.fileno(), mark)
    try:
        await ready
    finally:
        loop.remove_reader(channel.fileno())
