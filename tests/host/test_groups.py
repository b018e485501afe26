"""Items that stand for several requests: the batcher forms the batches that it would form of single requests."""

import heapq
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host.test_batcher import policies
from tilewright.host.batcher import Batch, Batcher, BatchPolicy, Full, Item


class Ids(list[int]):
    """The payload: the numbers of the requests, and their item."""

    item: Item

    def split(self, count: int, rest: Item) -> "Ids":
        other = Ids(self[count:])
        other.item = rest
        del self[count:]
        return other


Message = tuple[float, int, int, int, str, float | None]
"""(arrival, requests, rows of each, priority, key, timeout)."""
messages = st.lists(
    st.tuples(
        st.floats(0, 0.1),
        st.integers(1, 9),
        st.integers(1, 4),
        st.integers(0, 2),
        st.sampled_from(["a", "a", "b"]),
        st.none() | st.floats(0, 0.05),
    ),
    max_size=20,
)
leaving = st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 60)), max_size=10)
"""(when, which request) gives up."""


def arrived(drawn: list[Message], most: int, *, together: bool) -> Iterator[Item]:
    """An item for each message, or for each request."""
    number = 0
    for at, requests, rows, priority, key, timeout in sorted(drawn, key=lambda one: one[0]):
        rows, count = min(rows, most), requests if together else 1
        for first in range(number, number + requests, count):
            ids = Ids(range(first, first + count))
            deadline_s = None if timeout is None else at + timeout
            ids.item = Item(rows * count, at, priority, deadline_s, key, payload=ids, count=count)
            yield ids.item
        number += requests


class Happened:
    """What a queue and one instance make of messages: (when, requests) of each batch and of those that are late."""

    def __init__(self, policy: BatchPolicy, *, ahead: bool):
        self.batcher, self.ahead = Batcher(policy), ahead
        self.batches, self.late = list[tuple[float, list[int]]](), list[tuple[float, list[int]]]()
        self.behind: Batch | None = None
        self.busy = False

    def run(self, items: Iterator[Item], leave: list[tuple[float, int]]) -> None:
        batcher, now_s = self.batcher, 0.0
        events: list[tuple[float, int, Item | int | None]] = [(item.arrival_s, i, item) for i, item in enumerate(items)]
        events += [(at, 10_000 + i, number) for i, (at, number) in enumerate(leave)]
        heapq.heapify(events)
        while True:
            due = batcher.next_s(free=not self.busy) if len(batcher) else None
            times = [t for t in (due, events[0][0] if events else None) if t is not None]
            if not times:
                break
            now_s = max(now_s, min(times))
            while events and events[0][0] <= now_s:
                self.happens(heapq.heappop(events)[2])
            late = sorted(number for item in batcher.expire(now_s) for number in item.payload)
            if late:
                self.late.append((now_s, late))
            begun = None if self.busy else batcher.take(now_s)
            if begun is not None:
                self.begins(now_s, begun)
                heapq.heappush(events, (now_s + 0.01, 20_000 + len(self.batches), None))
            if self.ahead and self.busy and self.behind is None:
                self.behind = batcher.take_ahead(now_s)
            if self.behind is not None and not self.busy:
                batcher.restore(self.behind)
        assert len(batcher) == batcher.rows_waiting == 0

    def begins(self, now_s: float, batch: Batch) -> None:
        assert batch.rows == sum(item.rows for item in batch.items)
        assert [item.count for item in batch.items] == [len(item.payload) for item in batch.items]
        self.batches.append((now_s, [number for item in batch.items for number in item.payload]))
        self.busy = True

    def happens(self, what: Item | int | None) -> None:
        if isinstance(what, Item):
            self.batcher.add(what)
            if self.behind is not None and self.batcher.overtakes(what):
                self.batcher.restore(self.behind)
                self.behind = None
        elif what is None:
            self.busy, behind, self.behind = False, self.behind, None
            if behind is not None:  # it is begun when the instance is free, as far as its items are still wanted
                self.batcher.restore(behind)
        else:
            queued = [entry[2] for entry in self.batcher._heap if not entry[2].gone and what in entry[2].payload]
            for item in queued:
                item.payload.remove(what)
                assert self.batcher.withdraw(item)


@settings(max_examples=300, deadline=None)
@given(policies, messages, leaving, st.booleans())
def test_batches_of_groups_are_those_of_single_requests(
    policy: BatchPolicy, drawn: list[Message], leave: list[tuple[float, int]], ahead: bool
) -> None:
    found = []
    for together in (False, True):
        world = Happened(policy, ahead=ahead)
        world.run(arrived(drawn, policy.max_rows, together=together), [] if ahead else leave)
        found.append((world.batches, world.late))
    assert found[0] == found[1]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12), st.floats(0, 0.6))
def test_a_queue_takes_as_many_requests_of_a_group_as_of_single_ones(
    before: int, rows: int, count: int, most: int, batch_s: float
) -> None:
    batchers = [Batcher(BatchPolicy(max_rows=4, max_waiting=most, max_wait_s=1.0)) for _ in range(2)]
    for batcher in batchers:
        batcher.took(Batch((), 4), batch_s)
        for _ in range(min(before, most)):
            batcher.add(Item(1, 0.0), taken=True)
    taken, error = 0, None
    for _ in range(count):
        try:
            batchers[0].add(Item(rows, 0.0))
            taken += 1
        except Full as full:
            error = error or full
    item = Item(rows * count, 0.0, payload=Ids(range(count)), count=count)
    assert batchers[1].room(item) == taken
    if 0 < taken < count:
        rest = batchers[1].divide(item, taken)
        batchers[1].add(item)
        item = rest
    if taken < count:
        with pytest.raises(Full):
            batchers[1].add(item)
        refusal = batchers[1].refusal(item, 0, 1)
        assert error is not None
        assert refusal is not None
        assert (str(refusal), refusal.retry_after_s) == (str(error), pytest.approx(error.retry_after_s))
    else:
        batchers[1].add(item)
    assert len(batchers[1]) == len(batchers[0])
    assert batchers[1].rows_waiting == batchers[0].rows_waiting


def test_a_group_without_its_last_request_is_gone() -> None:
    batcher, ids = Batcher(BatchPolicy()), Ids(range(3))
    item = Item(6, 0.0, payload=ids, count=3)
    batcher.add(item)
    for left in (2, 1, 0):
        assert batcher.withdraw(item)
        assert (len(batcher), batcher.rows_waiting) == (left, 2 * left)
    assert not batcher.withdraw(item)
    assert batcher.take(1.0) is None
