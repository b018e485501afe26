"""Requests that fronts repeat: those that are alike pass through the server as one group.

A client that leaves its tensors in shared memory sends the same bytes over and over. The second answer to such bytes needs
nothing that the first one did not need, besides its outputs: the server knows the version, the parts of shared memory, and the
answer. Most requests differ only in these parts. So the requests that arrive in one turn of the event loop, from all fronts,
form one group if they have the same `Lane`: one item of the queue, one slice of the outputs, one message to each front.

Whatever is unusual takes the usual way, alone: a content that was not answered yet, models with a cache or sequences, several
versions that take turns, outputs of another shape than the last ones, and outputs that cannot be written.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tilewright.host.errors import HostError
from tilewright.host.host import Host
from tilewright.host.regions import Part, Regions, write_each
from tilewright.host.tensors import Wire, byte_size
from tilewright.host.version import Version
from tilewright.host.waiting import Group, Plan
from tilewright.server.v2.codec import InferRequest
from tilewright.server.v2.heading import Head

__all__ = ["Contents", "Key", "Lane", "Repeat", "Repeated", "Repeats", "Replies"]

MAX_LANES = 1024


class Key(NamedTuple):
    """The information about a request that a front sends in addition to its body."""

    head: Head
    route: str
    """The route under which the request is counted."""


class Lane(NamedTuple):
    """What the requests of a group have in common. Equal lanes are one object, so that comparing them takes no time."""

    model: str
    number: str | None
    """The version that the requests name."""
    route: str
    serial: int
    """Of the version that answers."""
    plan: Plan
    priority: int
    timeout_s: float | None
    outputs: tuple[tuple[int, str, tuple[int, ...]], ...]
    """(number, datatype, shape) of each output that is written to shared memory."""
    body: bytes
    """The answer."""


class Repeat(NamedTuple):
    """A content that is known, and answered like the last time."""

    lane: Lane
    tensors: tuple[Wire, ...]
    """The inputs, in the signature's order."""
    parts: tuple[Part, ...]
    """Where each of the lane's outputs is written."""
    asked: InferRequest
    content: tuple[Key, bytes]


class Contents:
    """The contents of requests that one front has numbered."""

    def __init__(self) -> None:
        self.known = dict[int, tuple[Key, bytes]]()
        """Number of a content -> the content, as key and body."""
        self.repeats = dict[int, Repeat]()

    def define(self, number: int, key: Key, body: bytes) -> None:
        """Give a content a number, which another one may have had before."""
        self.known[number] = key, body
        self.repeats.pop(number, None)


class Replies(Protocol):
    """The server's end of the connection to a front, as far as requests that are repeated need it."""

    contents: Contents

    def begin_alone(self, number: int, key: Key, body: bytes) -> None:
        """Begin to answer a request the usual way."""
        ...

    def taken_over(self, numbers: Sequence[int], group: "Repeated") -> None:
        """Note that these requests belong to the group now."""
        ...

    def answer_all(self, lane: Lane, numbers: Sequence[int], *, alone: bool) -> None:
        """Send the answer of a lane to these requests."""
        ...

    def answer_alone(self, number: int, asked: InferRequest, version: Version, route: str, found: tuple[Wire, ...]) -> None:
        """Create the answer of a request from its outputs, the usual way."""
        ...

    def refuse_all(self, route: str, numbers: Sequence[int], error: HostError) -> None:
        """Answer these requests with an error."""
        ...


class _Draft:
    """A group that is being formed."""

    __slots__ = ("lane", "links", "numbers", "repeats")

    def __init__(self, lane: Lane):
        self.lane = lane
        self.links, self.numbers, self.repeats = list[Replies](), list[int](), list[Repeat]()


class Repeats:
    """Forms the groups of one server. What it knows about contents is forgotten when a region of shared memory comes or goes.

    Args:
        host: the models.
        regions: clients' shared memory; None: it is off, and there are no groups.
        draining: returns whether new requests are refused.
    """

    def __init__(self, host: Host, regions: Regions | None, draining: Callable[[], bool]):
        self._host, self._regions, self._draining = host, regions, draining
        self._links, self._lanes = set[Replies](), dict[Lane, Lane]()
        self._messages = list[tuple[Replies, int, Sequence[int]]]()
        """(front, number of the first request, contents) of each message of this turn of the event loop."""
        self._soon, self._alone, self._count = False, True, 0
        """Whether `_turn` will be called, whether the last turn had fewer than two requests, and how many this one has."""
        self._loop = asyncio.get_running_loop()
        if regions is not None:
            regions.watchers.add(self.forget)

    def close(self) -> None:
        """The server ends."""
        self.forget()
        if self._regions is not None:
            self._regions.watchers.discard(self.forget)

    def forget(self) -> None:
        """Forget everything that holds parts of regions."""
        self._lanes.clear()
        for link in self._links:
            link.contents.repeats.clear()

    def add(self, link: Replies) -> None:
        """A front is there."""
        self._links.add(link)

    def lost(self, link: Replies) -> None:
        """A front has ended."""
        self.begin()
        self._links.discard(link)

    def arrived(self, link: Replies, first: int, contents: Sequence[int]) -> None:
        """Requests have arrived, whose numbers count from `first`; they begin with the others of this turn of the event loop.

        If they come one by one, they begin at once, so that a single client need not wait for the end of the turn.
        """
        self._messages.append((link, first, contents))
        self._count += len(contents)
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._turn)
            if self._alone:
                self.begin()

    def _turn(self) -> None:
        self._soon, self._alone, self._count = False, self._count < 2, 0
        for version in self._begun():
            version.all_there()

    def begin(self) -> None:
        """Begin to answer the requests that have arrived. More may arrive in this turn of the event loop."""
        for version in self._begun():
            version.all_there_soon()

    def _begun(self) -> set[Version]:
        """Begin to answer the requests that have arrived; return the versions that have groups of them."""
        messages, self._messages, together = self._messages, [], not self._draining()
        drafts, latest = list[_Draft](), dict[int, _Draft]()
        for link, first, contents in messages:
            known = link.contents.repeats
            for number, content in enumerate(contents, first):
                repeat = (known.get(content) or self._found(link.contents, content)) if together else None
                if repeat is None:
                    link.begin_alone(number, *link.contents.known[content])
                    continue
                lane = repeat.lane
                draft = latest.get(lane.serial)
                if draft is None or draft.lane is not lane:  # a new one, so that no request of this version passes another
                    draft = latest[lane.serial] = _Draft(lane)
                    drafts.append(draft)
                draft.links.append(link)
                draft.numbers.append(number)
                draft.repeats.append(repeat)
        return {version for draft in drafts if (version := self._begin(draft)) is not None}

    def _begin(self, draft: _Draft) -> Version | None:
        """Begin to answer the requests of a group; return the version that does. None: they take the usual way."""
        lane = draft.lane
        version = self._host.steady(lane.model, lane.number)
        if version is None or version.serial != lane.serial:  # another version was loaded since
            self.forget()
            for link, number, repeat in zip(draft.links, draft.numbers, draft.repeats, strict=True):
                link.begin_alone(number, *repeat.content)
            return None
        group = Repeated(draft, version)
        group.take_over()
        version.begin_group(group, lane.plan, lane.priority, lane.timeout_s)
        return version

    def _found(self, contents: Contents, content: int) -> Repeat | None:
        """What is known about a content that was answered before; None: it takes the usual way."""
        (head, route), body = contents.known[content]
        asked = None if self._regions is None or head.json_bytes is not None else self._regions.kept.get(body)
        version = None if asked is None or not asked.placings else self._host.steady(head.model, head.version)
        if asked is None or version is None:
            return None
        placing, plan = asked.placings.get(version.serial), version.plan(asked.ask)
        if placing is None or plan is None:
            return None
        parts = tuple([part for _, part, _, _ in placing.writes])
        outputs = tuple([(number, datatype, shape) for number, _, datatype, shape in placing.writes])
        if any(byte_size(*kind) > part.size for part, (_, *kind) in zip(parts, outputs, strict=True)):
            return None
        options = asked.ask.priority, asked.ask.timeout_s
        lane = Lane(head.model, head.version, route, version.serial, plan, *options, outputs, placing.body)
        if len(self._lanes) >= MAX_LANES:
            self.forget()
        lane = self._lanes.setdefault(lane, lane)
        found = Repeat(lane, version.in_order(asked.inputs), parts, asked, contents.known[content])
        contents.repeats[content] = found
        return found


class Repeated(Group):
    """Requests of some fronts with the same lane, which arrived together."""

    __slots__ = ("_links", "_numbers", "_repeats", "_version", "lane")

    def __init__(self, draft: _Draft, version: Version):
        super().__init__([repeat.tensors for repeat in draft.repeats])
        self.lane, self._version = draft.lane, version
        self._links, self._numbers, self._repeats = draft.links, draft.numbers, draft.repeats

    def part(self, begin: int) -> "Repeated":
        """See `Group`."""
        rest = _Draft(self.lane)
        rest.links, rest.numbers, rest.repeats = self._links[begin:], self._numbers[begin:], self._repeats[begin:]
        for some in (self.tensors, self._links, self._numbers, self._repeats):
            del some[begin:]
        other = Repeated(rest, self._version)
        other.take_over()
        return other

    def drop(self, position: int) -> None:
        """See `Group`."""
        super().drop(position)
        for some in (self._links, self._numbers, self._repeats):
            del some[position]

    def take_over(self) -> None:
        """Have the fronts' links know that their requests belong to this group."""
        for link, numbers in self._by_link(range(len(self._numbers))):
            link.taken_over(numbers, self)

    def cancel(self, link: Replies, number: int) -> None:
        """Nobody waits for a request any more."""
        position = self._numbers.index(number)
        while self._links[position] is not link:
            position = self._numbers.index(number, position + 1)
        self.leave(position)

    def _by_link(self, positions: Sequence[int]) -> Iterable[tuple[Replies, Sequence[int]]]:
        """The numbers of some requests, by link."""
        links, numbers = self._links, self._numbers
        if len(positions) == len(numbers) and links.count(links[0]) == len(links):
            return [(links[0], numbers)]
        found = dict[Replies, list[int]]()
        for position in positions:
            found.setdefault(links[position], []).append(numbers[position])
        return found.items()

    def answer(self, outputs: Sequence[Wire]) -> int:
        """See `Group`."""
        count, lane, numbers = len(self._numbers), self.lane, self._numbers
        usual = self.waiting() if self.left else range(count)
        failed = self._written(outputs, usual)
        answered = [position for position in usual if position not in failed] if failed else usual
        for link, some in self._by_link(answered) if answered else ():
            link.answer_all(lane, some, alone=self._version.answers_one)
        sizes = [len(wire.raw) // count for wire in outputs]
        for position in failed:
            own = [
                Wire(wire.datatype, (lane.plan.rows, *wire.shape[1:]), bytes(wire.raw[position * size : (position + 1) * size]))
                for wire, size in zip(outputs, sizes, strict=True)
            ]
            asked = self._repeats[position].asked
            self._links[position].answer_alone(numbers[position], asked, self._version, lane.route, tuple(own))
        return len(usual)

    def _written(self, outputs: Sequence[Wire], positions: Sequence[int]) -> set[int]:
        """Write the outputs of some requests. Returns the positions of those whose outputs are unusual or cannot be written."""
        lane, failed, count = self.lane, set[int](), len(self._repeats)
        for column, (number, datatype, shape) in enumerate(lane.outputs):
            wire = outputs[number]
            if wire.datatype != datatype or (lane.plan.rows, *wire.shape[1:]) != shape:
                return set(positions)
            data = memoryview(wire.raw)
            size = len(data) // count
            if len(positions) == count:
                failed.update(write_each([repeat.parts[column] for repeat in self._repeats], data, size))
                continue
            for position in positions:
                one = data[position * size : (position + 1) * size]
                if write_each([self._repeats[position].parts[column]], one, size):
                    failed.add(position)
        return failed

    def refuse(self, error: HostError, positions: Sequence[int]) -> None:
        """See `Group`."""
        for link, numbers in self._by_link(positions):
            link.refuse_all(self.lane.route, numbers, error)
