"""Requests that a front repeats: those that are alike pass through the server as one group.

A client that leaves its tensors in shared memory sends the same bytes over and over. The second answer to such bytes needs
nothing that the first one did not need, besides its outputs: the server knows the version, the parts of shared memory, and the
answer. Most requests differ only in these parts. So the requests of one message from a front, which arrived together, form one
group as long as they have the same `Lane`: one item of the queue, one slice of the outputs, one message with the answers.

Whatever is unusual takes the usual way, alone: a content that was not answered yet, models with a cache or sequences, several
versions that take turns, outputs of another shape than the last ones, and outputs that cannot be written.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tilewright.host.errors import HostError
from tilewright.host.host import Host
from tilewright.host.regions import Part, Regions, write_each
from tilewright.host.tensors import Wire, byte_size
from tilewright.host.version import Version
from tilewright.host.waiting import Group, Plan
from tilewright.server.v2.codec import InferRequest
from tilewright.server.v2.heading import Head

__all__ = ["Key", "Lane", "Repeat", "Repeated", "Repeats", "Replies"]

MAX_LANES = 1024


class Key(NamedTuple):
    """The information about a request that a front sends in addition to its body."""

    head: Head
    route: str
    """The route under which the request is counted."""


Begin = Callable[[int, Key, bytes], object]
"""Begins to answer a request alone: its number, key and body."""


class Lane(NamedTuple):
    """What the requests of a group have in common."""

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


class Replies(Protocol):
    """The server's end of the connection to a front, as far as a group needs it."""

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


class Repeats:
    """The contents that one front repeats. They are forgotten when a region of shared memory comes or goes.

    Args:
        host: the models.
        regions: clients' shared memory; None: it is off, and there are no groups.
    """

    def __init__(self, host: Host, regions: Regions | None):
        self._host, self._regions = host, regions
        self._contents = dict[int, tuple[Key, bytes]]()
        """Number of a request's content -> the content, as key and body."""
        self._repeats, self._lanes = dict[int, Repeat](), dict[Lane, Lane]()
        if regions is not None:
            regions.watchers.add(self.forget)

    def close(self) -> None:
        """The front has ended."""
        self.forget()
        if self._regions is not None:
            self._regions.watchers.discard(self.forget)

    def forget(self) -> None:
        """Forget everything that holds parts of regions."""
        self._repeats.clear()
        self._lanes.clear()

    def define(self, number: int, key: Key, body: bytes) -> None:
        """Give a content a number, which another one may have had before."""
        self._contents[number] = key, body
        self._repeats.pop(number, None)

    def begin(self, link: Replies | None, first: int, contents: Sequence[int], alone: Begin) -> None:
        """Begin to answer requests whose numbers count from `first`.

        Args:
            link: answers groups; None: there are no groups.
            first: number of the first request.
            contents: number of each request's content.
            alone: begins a request that takes the usual way.
        """
        if link is None:
            for number, content in enumerate(contents, first):
                alone(number, *self._contents[content])
            return
        begin, lane, group, known = first, None, list[Repeat](), self._repeats
        for number, content in enumerate(contents, first):
            repeat = known.get(content) or self._found(content)
            if repeat is None or repeat.lane is not lane:
                if lane is not None:
                    self._begin(link, lane, range(begin, number), group, contents[begin - first : number - first], alone)
                lane, group, begin = (None, [], number) if repeat is None else (repeat.lane, [], number)
            if repeat is None:
                alone(number, *self._contents[content])
            else:
                group.append(repeat)
        if lane is not None:
            self._begin(link, lane, range(begin, begin + len(group)), group, contents[begin - first :], alone)

    def _begin(
        self,
        link: Replies,
        lane: Lane,
        numbers: range,
        repeats: list[Repeat],
        contents: Sequence[int],
        alone: Begin,
    ) -> None:
        version = self._host.steady(lane.model, lane.number)
        if version is None or version.serial != lane.serial:  # another version was loaded since
            self.forget()
            for number, content in zip(numbers, contents, strict=True):
                alone(number, *self._contents[content])
            return
        group = Repeated(link, version, lane, list(numbers), repeats)
        link.taken_over(numbers, group)
        version.begin_group(group, lane.plan, lane.priority, lane.timeout_s)

    def _found(self, content: int) -> Repeat | None:
        """What is known about a content that was answered before; None: it takes the usual way."""
        (head, route), body = self._contents[content]
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
        lane = Lane(
            head.model,
            head.version,
            route,
            version.serial,
            plan,
            asked.ask.priority,
            asked.ask.timeout_s,
            outputs,
            placing.body,
        )
        if len(self._lanes) >= MAX_LANES:
            self.forget()
        lane = self._lanes.setdefault(lane, lane)
        found = self._repeats[content] = Repeat(lane, version.in_order(asked.inputs), parts, asked)
        return found


class Repeated(Group):
    """Requests of one front with the same lane, which arrived together."""

    __slots__ = ("_link", "_numbers", "_repeats", "_version", "lane")

    def __init__(self, link: Replies, version: Version, lane: Lane, numbers: list[int], repeats: list[Repeat]):
        super().__init__([repeat.tensors for repeat in repeats])
        self._link, self._version, self.lane = link, version, lane
        self._numbers, self._repeats = numbers, repeats

    def part(self, begin: int) -> "Repeated":
        """See `Group`."""
        other = Repeated(self._link, self._version, self.lane, self._numbers[begin:], self._repeats[begin:])
        for some in (self.tensors, self._numbers, self._repeats):
            del some[begin:]
        self._link.taken_over(other._numbers, other)
        return other

    def drop(self, position: int) -> None:
        """See `Group`."""
        super().drop(position)
        del self._numbers[position]
        del self._repeats[position]

    def cancel(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self.leave(self._numbers.index(number))

    def answer(self, outputs: Sequence[Wire]) -> int:
        """See `Group`."""
        count, lane, numbers = len(self._numbers), self.lane, self._numbers
        usual = self.waiting() if self.left else range(count)
        failed = self._written(outputs, usual)
        if failed or self.left:
            numbers = [numbers[position] for position in usual if position not in failed]
        if numbers:
            self._link.answer_all(lane, numbers, alone=self._version.answers_one)
        for position in failed:
            repeat = self._repeats[position]
            found = [wire._replace(shape=(lane.plan.rows, *wire.shape[1:])) for wire in outputs]
            sizes = [len(wire.data) // count for wire in outputs]
            own = [
                wire._replace(data=bytes(wire.raw[position * size : (position + 1) * size]))
                for wire, size in zip(found, sizes, strict=True)
            ]
            self._link.answer_alone(self._numbers[position], repeat.asked, self._version, lane.route, tuple(own))
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
        self._link.refuse_all(self.lane.route, [self._numbers[position] for position in positions], error)
