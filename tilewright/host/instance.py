"""The server's side of a model process: starts it, sends it batches, notices its end, and ends it.

Everything runs on one event loop and never waits for the model: a batch is written into shared memory, a packet is sent, and
the answer calls a function. Inputs in a client's shared memory are not copied here, unless a batch has a single small request:
the model's process gets each region's file once, and for each batch a table of what to read from where. Nor is a large tensor,
if the model's process has a GPU copy it.

An instance with large inputs has room for two batches: while one is computed, the next is written and its packet is sent, so
that the model continues without a pause. The second batch can be recalled until it begins. The model's process, not the server,
decides whether it has begun: it compares the clock with the time that the server wrote next to the batch.
"""

import asyncio
import json
import os
import signal
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tilewright.host.arena import NOT_BEGUN, SECONDS, TRAFFIC, Arena, Traffic, aligned
from tilewright.host.channel import Channel
from tilewright.host.config import ModelConfig
from tilewright.host.direct import MIN_BYTES
from tilewright.host.errors import Refused
from tilewright.host.forking import LoadFailed, Nursery
from tilewright.host.intake import FORGET, MAX_PACKET, SHARED, Reads, packets
from tilewright.host.regions import INLINE_BYTES, Part, Region
from tilewright.host.runs import RECALLED, Done, Reply
from tilewright.host.tensors import Signature, Wire, byte_size

__all__ = ["Instance"]

MAX_KEPT = 256
"""Number of messages that are kept so that they need not be written or parsed again."""

K = TypeVar("K")
V = TypeVar("V")


class _Place:
    """Memory for a batch, and what is kept of earlier batches in it."""

    def __init__(self, number: int, arena: Arena):
        self.number, self.arena = number, arena
        self.packets = dict[tuple[Any, ...], bytes]()
        self.replies = dict[bytes, _Answer]()
        self.used = False

    def laid_out(
        self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], *, direct: bool = False
    ) -> tuple[bytes, Reads, int]:
        """Write a batch into the memory.

        Args:
            parts, batch: as for `Instance.run`.
            direct: whether the model's process has a GPU copy large tensors from shared memory.

        Returns:
            (its JSON, what the model's process has to read, bytes of shared memory that were read here).
        """
        view, at, inputs, rows, reads, several = self.arena.view, 0, [], sum(parts), Reads(), len(batch) > 1
        here = 0
        for column in range(len(batch[0])):
            began, datas = at, [request[column].data for request in batch]
            if several and set(map(type, datas)) == {Part}:
                *places, at = accumulate([data.size for data in datas], initial=at)  # pyright: ignore[reportAttributeAccessIssue]
                reads.extend(range(len(datas)), datas, places)  # pyright: ignore[reportArgumentType]
                datas = ()
            for number, data in enumerate(datas):
                if isinstance(data, Part):
                    size = data.size
                    if several or (direct and size >= MIN_BYTES) or not _read_here(data, view[at : at + size]):
                        reads.extend((number,), (data,), (at,))
                    else:
                        here += size
                else:
                    size = len(data)
                    view[at : at + size] = data
                at += size
            shape = batch[0][column].shape
            inputs.append((began, shape if len(batch) == 1 else (rows, *shape[1:])))
            at = aligned(at)
        kind = (*parts, *inputs)
        packet = self.packets.get(kind)
        if packet is None:
            packet = _kept(self.packets, kind, json.dumps({"parts": parts, "inputs": inputs}).encode())
        return packet, reads, here

    def read(self, text: bytes) -> "_Answer":
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
        errors, unread = ({int(number): why for number, why in said[name].items()} for name in ("errors", "unread"))
        answer = _Answer(wires, errors, unread)
        return answer if errors or unread else _kept(self.replies, text, answer)


class _Answer(NamedTuple):
    """`Reply`, without the seconds."""

    outputs: tuple[Wire, ...]
    errors: dict[int, str]
    unread: dict[int, str]


class _Handed(NamedTuple):
    """A batch that was handed to an instance."""

    place: _Place
    done: Done
    read: int
    """Bytes of shared memory that were read in this process."""


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
        self._out = self._ahead = Channel(channel, self.close)
        """Of batches for a process that has none; and of others, if it takes them, and of regions."""
        self._direct = False
        """Whether the process has a GPU copy large tensors from shared memory."""
        self.blameless = False
        self.on_end: Callable[[], object] = _nothing
        self._known = set[int]()
        """Numbers of the regions whose files the process has."""
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
        if len(fds) > 1:
            self._ahead = Channel(socket.socket(fileno=fds.pop()), self.close)
        self._places = tuple(_Place(number, Arena(fd, said["bytes"])) for number, fd in enumerate(fds))
        self.capacity, self.most, self._direct = said["capacity"], said["most"], said["direct"]
        self._loop.add_reader(self._channel.fileno(), self._answered)
        return Signature.of(said["signature"])

    async def _heard(self) -> tuple[dict[str, Any], list[int]]:
        """The next message of a process that loads a model, and its descriptors. Raises LoadFailed: there is none."""
        await _readable(self._loop, self._channel)
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET, 3)
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
        place.arena.begin_by(self.capacity, until_s)
        words, reads, here = place.laid_out(parts, batch, direct=self._direct)
        if reads.parts and not self._known.issuperset(reads.regions()):
            for part in reads.parts:
                if part.region.number not in self._known:
                    self._share(part.region)
            if self.closed:  # the process had ended
                place.used = False
                return done(RECALLED)
        out = self._ahead if self._batches else self._out
        self._batches.append(_Handed(place, done, here))
        out.send(*packets(place.number, words, reads))

    def _share(self, region: Region) -> None:
        """Give the process a region's file, and take it back when nobody names the region any more."""
        self._known.add(region.number)
        about = {"number": region.number, "name": region.name, "offset": region.offset, "size": region.size}
        words = json.dumps(about).encode()
        self._ahead.send(SHARED + words, region=region)
        weakref.finalize(region, _forget, weakref.ref(self), region.number).atexit = False

    def forget_soon(self, number: int) -> None:
        """Call `forget` on the event loop; from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the process has ended
            self._loop.call_soon_threadsafe(self.forget, number)

    def forget(self, number: int) -> None:
        """Have the process close a region's file."""
        self._known.discard(number)
        if not self.closed:
            self._ahead.send(FORGET + str(number).encode())

    def recall(self) -> None:
        """Do not begin the batch behind the one that runs; its `done` is told, by RECALLED unless it has begun."""
        if len(self._batches) > 1:
            self._batches[1].place.arena.recall(self.capacity)

    def _answered(self) -> None:
        try:
            count = self._channel.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            return self.close()
        data = bytes(memoryview(self._buffer)[:count])
        handed = self._batches.popleft()
        handed.place.used = False
        if data == NOT_BEGUN:
            handed.done(RECALLED)
            return
        outputs, errors, unread = handed.place.read(data[TRAFFIC.size + SECONDS.size :])
        direct, read, locked = TRAFFIC.unpack_from(data)
        seconds, traffic = SECONDS.unpack_from(data, TRAFFIC.size)[0], Traffic(direct, read + handed.read, locked)
        handed.done(Reply(outputs, errors, seconds, unread, traffic))

    def close(self) -> None:
        """Kill the process. `done` of the first batch is called with None if it has begun; the others with RECALLED."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._channel.fileno())
        for channel in {self._out, self._ahead}:
            channel.close()
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
        begun = [handed.place.arena.begun(self.capacity) for handed in self._batches]
        self.blameless = any(begun[1:])
        for place in self._places:
            place.arena.close()
        told: Reply | None = None if begun and begun[0] else RECALLED
        while self._batches:
            self._batches.popleft().done(told)
            told = RECALLED
        on_end, self.on_end = self.on_end, _nothing  # otherwise a cycle would keep the instance
        on_end()


def _nothing() -> None:
    pass


def _read_here(part: Part, into: memoryview) -> bool:
    """Read a part in this process; return whether it was read.

    For a request that has its batch to itself: few requests come then, and the model's process, which slept, reads more slowly.
    """
    if len(part) > INLINE_BYTES:
        return False
    try:
        part.read_into(into)
    except Refused:  # the model's process will say why
        return False
    return True


def _forget(instance: "weakref.ref[Instance]", number: int) -> None:
    """Tell an instance that a region is gone, if the instance is still there.

    A region may go whenever garbage is collected: in any thread, and while a packet is being sent. So the packet that says it
    is sent later. Sent at once, it would send the other packet a second time, or be sent in its place.
    """
    if (found := instance()) is not None:
        found.forget_soon(number)


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
