"""The server's side of a model process: starting it, handing it batches, noticing that it is gone, ending it.

All of it runs on one event loop and never waits for the model: a batch is laid into shared memory, one packet is sent, and the
answer calls back.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from tilewright.host.arena import SECONDS, Arena, aligned
from tilewright.host.config import ModelConfig
from tilewright.host.regions import INLINE_BYTES, Part, Read, read_all, shared_out
from tilewright.host.tensors import Signature, Wire, byte_size

__all__ = ["Instance", "LoadFailed", "Nursery", "Reply", "Runs"]

MAX_PACKET = 1 << 17
MAX_KEPT = 256
"""Messages that are not written or read again."""

K = TypeVar("K")
V = TypeVar("V")


class LoadFailed(ValueError):
    """A model cannot be loaded; the sentence says why."""


class Reply(NamedTuple):
    """What a batch came to. `outputs` are views of shared memory, good until the next batch."""

    outputs: tuple[Wire, ...]
    """Of all requests together, in the signature's order; () where no request has an answer."""
    errors: dict[int, str]
    """Request's number in the batch -> why it has no answer."""
    seconds: float
    unread: Mapping[int, str] = MappingProxyType({})
    """Request's number -> why its inputs could not be read from where it said that they were."""


class Runs(Protocol):
    """What computes batches: a process, or in tests whatever one likes."""

    busy: bool
    capacity: int
    most: int | None

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Callable[[Reply | None], None]) -> None:
        """Compute a batch and call `done` once; None: the instance is gone."""
        ...

    def close(self) -> None:
        """End it, whatever it is in."""
        ...


class Nursery:
    """The process that model processes are forked from; `start` them through it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def fork(self) -> tuple[int, socket.socket]:
        """(the pid of a new process, the socket that its worker reads). Raises LoadFailed: none can be made."""
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                await self._start()
            assert self._socket is not None
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
                pid = await asyncio.get_running_loop().sock_recv(self._socket, 64)
            except OSError as error:
                raise LoadFailed(f"no process for a model can be started: {error.strerror}") from None
            finally:
                theirs.close()
            if not pid:
                ours.close()
                raise LoadFailed("no process for a model can be started: the process that they are forked from has ended")
            ours.setblocking(False)
            return int(pid), ours

    async def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tilewright.host.nursery", str(theirs.fileno())]
        # A session of its own: a Ctrl-C on the terminal is the server's, which lets running requests finish.
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        if not await asyncio.get_running_loop().sock_recv(ours, 16):
            raise LoadFailed("the process that models are forked from ended at its start; its error is in the log")

    def close(self) -> None:
        """End it, and with it every model process."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None


class Instance:
    """One model process. Make it with `start`."""

    def __init__(self, pid: int, channel: socket.socket):
        self._channel = channel
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
        self._arena: Arena | None = None
        self._packets = dict[tuple[Any, ...], bytes]()
        self._replies = dict[bytes, tuple[tuple[Wire, ...], dict[int, str]]]()
        self.capacity = 0
        """Bytes that the inputs of one batch may have."""
        self.most: int | None = None
        """Most rows of a batch, where the model was made for no more."""
        self._done: Callable[[Reply | None], None] | None = None
        self._unread = dict[int, str]()
        self._reading: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.busy = False
        self.closed = False

    @classmethod
    async def start(
        cls, nursery: Nursery, config: ModelConfig, folder: Path | None, threads: int
    ) -> tuple["Instance", Signature]:
        """A process that has loaded the model and is warm. Raises LoadFailed."""
        pid, channel = await nursery.fork()
        self = cls(pid, channel)
        try:
            async with asyncio.timeout(config.load_timeout_s):
                signature = await self._load(config, folder, threads)
        except TimeoutError:
            self.close()
            raise LoadFailed(f"it was not loaded within load_timeout_s={config.load_timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise
        return self, signature

    async def _load(self, config: ModelConfig, folder: Path | None, threads: int) -> Signature:
        first = {"config": config.json(), "folder": None if folder is None else str(folder), "threads": threads}
        await self._loop.sock_sendall(self._channel, json.dumps(first).encode())
        await _readable(self._loop, self._channel)
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET, 1)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            raise LoadFailed("its process ended while the model was loaded")
        said = json.loads(data)
        if "failed" in said:
            raise LoadFailed(said["failed"])
        self._arena, self.capacity, self.most = Arena(fds[0], said["bytes"]), said["capacity"], said["most"]
        self._loop.add_reader(self._channel.fileno(), self._answered)
        return Signature.of(said["signature"])

    def run(self, parts: Sequence[int], batch: Sequence[Sequence[Wire]], done: Callable[[Reply | None], None]) -> None:
        """Compute a batch and call `done` once; None: the process is gone.

        Args:
            parts: rows of each request.
            batch: inputs of each request, in the signature's order; requests' tensors differ in the first dimension only.
        """
        assert self._arena is not None
        assert not self.busy
        view, at, inputs, rows, reads = self._arena.view, 0, [], sum(parts), list[Read]()
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
        self.busy, self._done, self._unread = True, done, {}
        kind = (*parts, *inputs)
        packet = self._packets.get(kind)
        if packet is None:
            packet = _kept(self._packets, kind, json.dumps({"parts": parts, "inputs": inputs}).encode())
        if sum(len(read.part) for read in reads) > INLINE_BYTES:
            self._reading = self._loop.create_task(self._read_regions(reads, packet))
            return
        if reads:
            self._unread = read_all(reads)
        self._send(packet)

    async def _read_regions(self, reads: list[Read], packet: bytes) -> None:
        """Read the batch's inputs beside the event loop, and send it."""
        jobs = [asyncio.to_thread(read_all, job) for job in shared_out(reads)]
        for unread in await asyncio.gather(*jobs):
            self._unread |= unread
        if not self.closed:
            self._send(packet)

    def _send(self, packet: bytes) -> None:
        try:
            self._channel.send(packet)
        except OSError:
            self._gone()

    def _answered(self) -> None:
        try:
            data = self._channel.recv(MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone()
            return
        seconds, text = SECONDS.unpack_from(data)[0], data[SECONDS.size :]
        wires, errors = self._replies.get(text) or self._read(text)
        done, self._done, self.busy = self._done, None, False
        assert done is not None
        done(Reply(wires, errors, seconds, self._unread))

    def _read(self, text: bytes) -> tuple[tuple[Wire, ...], dict[int, str]]:
        """What a reply says, kept where it has no errors: batches of the same shapes are answered with the same words."""
        said: dict[str, Any] = json.loads(text)
        assert self._arena is not None
        if said["bytes"] != self._arena.size:
            self._arena.remap(said["bytes"])
            self._replies.clear()
        view = self._arena.view
        wires = tuple(
            Wire(kind, tuple(shape), view[offset : offset + byte_size(kind, shape)]) for offset, kind, shape in said["outputs"]
        )
        errors = {int(number): error for number, error in said["errors"].items()}
        return (wires, errors) if errors else _kept(self._replies, text, (wires, errors))

    def _gone(self) -> None:
        done, self._done = self._done, None
        self.close()
        if done is not None:
            done(None)

    def close(self) -> None:
        """Kill the process, whatever it is in. `done` of a running batch is called with None."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
        if self._arena is not None:
            self._arena.close()
        done, self._done, self.busy = self._done, None, True
        if done is not None:
            done(None)


def _kept(among: dict[K, V], key: K, value: V) -> V:
    """The value, kept among the newest `MAX_KEPT`."""
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
