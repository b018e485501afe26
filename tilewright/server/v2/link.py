"""The server's end of the connection to a front (fronts.py): receives its requests, and sends it their answers."""

import asyncio
import json
import socket
import subprocess
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from tilewright.host.errors import HostError, Unavailable
from tilewright.host.tensors import Wire
from tilewright.host.version import Version
from tilewright.server.connections import Connection
from tilewright.server.v2.codec import InferRequest
from tilewright.server.v2.heading import Head
from tilewright.server.v2.quick import JSON, Pending, begin, refused
from tilewright.server.v2.relay import (
    CANCEL,
    CLOSED,
    DEFINE_ANSWER,
    DEFINE_REQUEST,
    END,
    EVICT,
    IDLE,
    MAX_KNOWN,
    READY,
    REPEATED_ANSWERS,
    REPEATED_REQUESTS,
    REQUEST,
    Arrivals,
    Frames,
    frame,
    move,
    numbers,
    packed,
)
from tilewright.server.v2.repeats import Contents, Key, Lane, Repeated

if TYPE_CHECKING:
    from tilewright.server.v2.fronts import Fronts

__all__ = ["Link"]

FAILED = json.dumps({"error": "the server failed on this request; its log has the traceback"}).encode()


class Link(Frames):
    """The server's end of the two sockets to a front."""

    def __init__(self, fronts: "Fronts", process: "subprocess.Popen[bytes]", moves: socket.socket):
        super().__init__()
        self.process, self.connections, self.ready = process, 0, False
        self._fronts, self._moves, self._arrivals = fronts, moves, Arrivals(moves)
        self._loop = asyncio.get_running_loop()
        self._open = dict[int, _Passed | Repeated]()
        """Number of a request that is not answered yet -> the request, or the group that it belongs to."""
        self._keys = dict[bytes, Key]()
        self._repeats, self.contents = fronts.repeats, Contents()
        self._repeats.add(self)
        self._known_answers = dict[bytes, int]()
        """Body of an answer -> the number by which the front knows it."""
        self._made = list[_Passed]()
        """Requests whose answers can be created."""
        self._answers = list[bytes]()
        """Messages that are sent before these answers."""
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream to the front is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._stream = transport
        self._loop.add_reader(self._moves.fileno(), self._returned)

    def connection_lost(self, exc: Exception | None) -> None:
        """The front has ended: give up its requests."""
        self.ready = False
        self._loop.remove_reader(self._moves.fileno())
        self._moves.close()
        self.give_up()
        self._fronts.lost(self)
        self._loop.run_in_executor(None, self.process.wait)

    def give_up(self) -> None:
        """Give up all requests, because the front has ended."""
        self._repeats.lost(self)
        for number, one in self._open.items():
            one.cancel(self, number)
        self._open.clear()

    def data_received(self, data: bytes) -> None:
        """Called with messages from the front."""
        for kind, number, text, body in self.messages(data):
            if kind == REPEATED_REQUESTS:
                self._repeats.arrived(self, number, numbers(body))
            elif kind == REQUEST:
                self.begin_alone(number, self._key(text), body)
            elif kind == DEFINE_REQUEST:
                if number in self.contents.known:  # requests may still name the content that had this number
                    self._repeats.begin()
                self.contents.define(number, self._key(text), body)
            elif kind == CANCEL:
                self._repeats.begin()
                if (one := self._open.pop(number, None)) is not None:
                    one.cancel(self, number)
            elif kind == CLOSED:
                self._left()
                if text:
                    self._fronts.connections.ended[text.decode()] += 1
            elif kind == READY:
                self.ready = True
            elif kind == IDLE:
                self._fronts.rooms.heard(self, number, text)
            elif kind == EVICT:
                self._fronts.rooms.evicted(number, done=bool(text))

    def _left(self) -> None:
        self.connections -= 1
        self._fronts.connections.elsewhere -= 1

    # ---- connections

    def give(self, connection: Connection, data: bytes) -> bool:
        """Give the front a connection and the bytes that have arrived on it. Returns whether the front has it now."""
        try:
            move(self._moves, connection.socket, data)
        except OSError:  # the front is busy, or has ended
            return False
        self.connections += 1
        self._fronts.connections.elsewhere += 1
        connection.abort()  # the front has its own descriptor
        return True

    def _returned(self) -> None:
        try:
            arrived = self._arrivals.next()
        except BlockingIOError:
            return
        except (OSError, EOFError):  # `connection_lost` handles the end of a front
            self._loop.remove_reader(self._moves.fileno())
            return
        if arrived is not None:
            self._left()
            self._fronts.do(self._fronts.returned(*arrived))

    # ---- requests

    def _key(self, text: bytes) -> Key:
        found = self._keys.get(text)
        if found is None:
            if len(self._keys) >= MAX_KNOWN:
                self._keys.clear()
            head = _head_of(text)
            found = self._keys[text] = Key(head, self._fronts.counts.route(head.path))
        return found

    def begin_alone(self, number: int, key: Key, body: bytes) -> None:
        """See `repeats.Replies`."""
        one, fronts = _Passed(self, number, key.route), self._fronts
        self._open[number] = one
        if fronts.draining():
            one.deliver(Unavailable("the server is shutting down and takes no new requests"))
        else:
            begin(fronts.host, fronts.regions, key.head, body, one)

    def answered(self, one: "_Passed", *, alone: bool) -> None:
        """Called when the answer of a request can be created. The answers of one turn of the event loop are sent together."""
        if self._open.pop(one.number, None) is None:
            return  # nobody waits for it any more
        first = not (self._made or self._answers)
        self._made.append(one)
        self._send_soon(first=first, alone=alone)

    def _send_soon(self, *, first: bool, alone: bool) -> None:
        """Send what is there at the end of this turn, unless it is not the `first`; at once if it is `alone`."""
        if first and alone:
            self._send()
        elif first:
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        made, sent, done, counts = self._made, self._answers, 0, self._fronts.counts.requests
        self._made, self._answers, repeated = [], [], dict[int, list[int]]()
        try:
            for one in made:
                done += 1
                try:
                    if (body := one.again()) is not None:
                        repeated.setdefault(self._known(body, sent, repeated), []).append(one.number)
                        counts[one.route, 200] += 1
                    else:
                        status, headers, body = one.made()
                        counts[one.route, status] += 1
                        sent.append(frame(status, one.number, headers, body))
                except BaseException:
                    sent.append(frame(500, one.number, JSON, FAILED))
                    raise  # to the event loop, which logs it
        finally:
            # An error affects only its own request: the others are still answered.
            if done < len(made):
                self._made = made[done:] + self._made
                self._loop.call_soon(self._send)
            _end_repeated(sent, repeated)
            assert self._stream is not None
            self._stream.write(b"".join(sent))

    def _known(self, body: bytes, sent: list[bytes], repeated: dict[int, list[int]]) -> int:
        """The number by which the front knows an answer. A new answer is sent to the front."""
        number = self._known_answers.get(body)
        if number is not None:
            return number
        _end_repeated(sent, repeated)  # first, because their numbers may be used again below
        if len(self._known_answers) >= MAX_KNOWN:
            self._known_answers.clear()
        number = self._known_answers[body] = len(self._known_answers)
        sent.append(frame(DEFINE_ANSWER, number, body=body))
        return number

    # ---- groups

    def taken_over(self, numbers: Sequence[int], group: Repeated) -> None:
        """See `repeats.Replies`."""
        self._open.update(zip(numbers, repeat(group)))

    def answer_all(self, lane: Lane, numbers: Sequence[int], *, alone: bool) -> None:
        """See `repeats.Replies`."""
        first, sent = not (self._made or self._answers), self._answers
        sent.append(frame(REPEATED_ANSWERS, self._known(lane.body, sent, {}), body=packed(numbers)))
        self._fronts.counts.requests[lane.route, 200] += len(numbers)
        self._end(numbers)
        self._send_soon(first=first, alone=alone)

    def answer_alone(self, number: int, asked: InferRequest, version: Version, route: str, found: tuple[Wire, ...]) -> None:
        """See `repeats.Replies`."""
        one = self._open[number] = _Passed(self, number, route)
        one.asked, one.version, one.found = asked, version, found
        self.answered(one, alone=False)

    def refuse_all(self, route: str, numbers: Sequence[int], error: HostError) -> None:
        """See `repeats.Replies`."""
        first, (status, headers, body) = not (self._made or self._answers), refused(error)
        self._answers += [frame(status, number, headers, body) for number in numbers]
        self._fronts.counts.requests[route, status] += len(numbers)
        self._end(numbers)
        self._send_soon(first=first, alone=False)

    def _end(self, numbers: Sequence[int]) -> None:
        """These requests are answered."""
        for number in numbers:
            del self._open[number]

    # ---- other messages

    def say(self, message: bytes) -> None:
        """Send a message."""
        assert self._stream is not None
        self._stream.write(message)

    def end(self) -> None:
        """Make the front close its connections and end."""
        if self._stream is None:
            self.process.kill()
        else:
            self._stream.write(frame(END))


class _Passed(Pending):
    """A request that a front has forwarded."""

    __slots__ = ("_link", "number", "route")

    def __init__(self, link: Link, number: int, route: str):
        super().__init__()
        self._link, self.number, self.route = link, number, route

    def ready(self, *, alone: bool) -> None:
        self._link.answered(self, alone=alone)

    def cancel(self, link: Link, number: int) -> None:
        """Nobody waits for the answer any more."""
        self.give_up()


def _end_repeated(sent: list[bytes], repeated: dict[int, list[int]]) -> None:
    """Turn the collected numbers of requests, by the numbers of their answers, into messages."""
    sent += [frame(REPEATED_ANSWERS, known, body=packed(numbers)) for known, numbers in repeated.items()]
    repeated.clear()


def _head_of(key: bytes) -> Head:
    """The head of a request, from the text of a front's message: its path and the length of its JSON."""
    path, _, json_bytes = key.decode().partition("\0")
    parts = path.split("/")  # /v2/models/NAME[/versions/N]/infer
    return Head(path, parts[3], parts[5] if len(parts) > 5 else None, 0, json_bytes or None, None)
