"""The batcher on a simulated clock: random traffic against what its docstring promises."""

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.host.batcher import Batch, Batcher, BatchPolicy, Full, Item


@dataclass
class World:
    """One queue, some instances, and a clock that jumps from event to event.

    `ahead`: the only instance gets its next batch while it computes one.
    """

    policy: BatchPolicy
    instances: int = 1
    batch_s: float = 0.01
    row_s: float = 0.0
    ahead: bool = False
    now_s: float = 0.0
    started: dict[int, float] = field(default_factory=dict)
    expired: list[Item] = field(default_factory=list)
    batches: list[tuple[float, Batch, list[Item]]] = field(default_factory=list)
    """(when it was begun, what, who was left in the queue)."""
    taken_ahead: int = 0
    recalled: int = 0

    def __post_init__(self) -> None:
        self.batcher, self.free = Batcher(self.policy), self.instances
        self.events: list[tuple[float, int, Item | Batch]] = []
        self.waiting = dict[int, Item]()
        """Who has arrived, and was neither begun nor expired."""
        self.behind: Batch | None = None
        self.again = True
        """Whether a batch may be taken ahead: none was recalled since the instance was free."""

    def run(self, arrivals: list[Item]) -> None:
        """Let all of them arrive, and run until the queue is empty and all instances are free."""
        batcher = self.batcher
        self.events = [(item.arrival_s, i, item) for i, item in enumerate(arrivals)]
        heapq.heapify(self.events)
        while True:
            due = batcher.next_s(free=self.free > 0) if len(batcher) else None
            times = [t for t in (due, self.events[0][0] if self.events else None) if t is not None]
            if not times:
                break
            self.now_s = max(self.now_s, min(times))
            while self.events and self.events[0][0] <= self.now_s:
                self._happens(heapq.heappop(self.events)[2])
            for item in batcher.expire(self.now_s):
                self.expired.append(item)
                del self.waiting[id(item)]
            while self.free and (batch := batcher.take(self.now_s)) is not None:
                self.free, self.again = self.free - 1, True
                self._begins(batch)
            if self.ahead and not self.free and self.behind is None and self.again:
                self.behind = batcher.take_ahead(self.now_s)
                self.taken_ahead += self.behind is not None
        assert not self.waiting
        assert self.behind is None
        assert len(batcher) == batcher.rows_waiting == 0

    def _happens(self, what: Item | Batch) -> None:
        batcher, behind = self.batcher, self.behind
        if isinstance(what, Item):
            batcher.add(what, self.instances)
            self.waiting[id(what)] = what
            if behind is not None and batcher.overtakes(what):
                batcher.restore(behind)
                self.behind, self.again = None, False
                self.recalled += 1
            return
        batcher.took(what, self.batch_s)
        self.behind = None
        if behind is None:
            self.free += 1
        elif all(item.deadline_s is None or self.now_s < item.deadline_s for item in behind.items):
            batcher.begun()
            self._begins(behind)
        else:
            self.free += 1
            batcher.restore(behind)

    def _begins(self, batch: Batch) -> None:
        for item in batch.items:
            assert id(item) not in self.started
            self.started[id(item)] = self.now_s
            del self.waiting[id(item)]
        self.batches.append((self.now_s, batch, list(self.waiting.values())))
        end_s = self.now_s + self.batch_s + batch.rows * self.row_s
        heapq.heappush(self.events, (end_s, 1000 + len(self.batches), batch))


policies = st.builds(
    lambda most, delay, sizes: BatchPolicy(
        max_rows=most, max_delay_s=delay, preferred=tuple(s for s in sizes if s <= most), max_wait_s=60.0
    ),  # nobody is refused: 40 batches may take two seconds
    st.integers(1, 16),
    st.sampled_from([0.0, 0.003, 0.02]),
    st.lists(st.integers(1, 16), max_size=3),
)
traffic = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.integers(1, 16),
        st.integers(0, 3),
        st.sampled_from(["a", "a", "b"]),
        st.none() | st.floats(0, 0.1),
    ),
    max_size=40,
)


def items(drawn: list[tuple[float, int, int, str, float | None]], most: int) -> list[Item]:
    return [
        Item(min(rows, most), at, priority, None if timeout is None else at + timeout, key)
        for at, rows, priority, key, timeout in sorted(drawn, key=lambda one: one[0])
    ]


@settings(max_examples=150, deadline=None)
@given(policies, traffic, st.integers(1, 3), st.booleans())
def test_everybody_is_computed_once_or_expires(policy: BatchPolicy, drawn: list, instances: int, ahead: bool) -> None:
    world = World(policy, instances, ahead=ahead and instances == 1)
    arrivals = items(drawn, policy.max_rows)
    world.run(arrivals)
    late = {id(item) for item in world.expired}
    assert late.isdisjoint(world.started)
    assert len(late) + len(world.started) == len(arrivals)
    for item in arrivals:
        if id(item) in world.started and item.deadline_s is not None:
            assert world.started[id(item)] < item.deadline_s  # what is expired is never computed
    for _, batch, _ in world.batches:
        assert batch.rows == sum(item.rows for item in batch.items) <= policy.max_rows
        assert len({item.key for item in batch.items}) == 1


@settings(max_examples=150, deadline=None)
@given(policies, traffic, st.integers(1, 3), st.booleans())
def test_nobody_is_passed_by_somebody_less_urgent_or_younger(
    policy: BatchPolicy, drawn: list, instances: int, ahead: bool
) -> None:
    world = World(policy, instances, ahead=ahead and instances == 1)
    world.run(items(drawn, policy.max_rows))
    for _, batch, left in world.batches:
        leader = batch.items[0]
        for other in left:
            assert (leader.priority, leader.number) < (other.priority, other.number)
            for item in batch.items:
                if other.key == item.key:
                    assert (item.priority, item.number) < (other.priority, other.number)


@settings(max_examples=150, deadline=None)
@given(policies, traffic)
def test_with_an_instance_free_nobody_waits_longer_than_the_delay(policy: BatchPolicy, drawn: list) -> None:
    world = World(policy, instances=len(drawn) + 1)
    arrivals = items([(at, rows, priority, key, None) for at, rows, priority, key, _ in drawn], policy.max_rows)
    world.run(arrivals)
    for item in arrivals:
        assert world.started[id(item)] - item.arrival_s <= policy.max_delay_s + 1e-9


def test_who_cannot_ride_along_does_not_wait_for_a_later_delay() -> None:
    """A less urgent request of another shape: more urgent ones, each with a delay of its own, came after it."""
    policy = BatchPolicy(max_rows=4, max_delay_s=0.02)
    world = World(policy, instances=4)
    arrivals = items([(0.0, 1, 1, "b", None), (0.016, 3, 0, "a", None), (0.0235, 2, 0, "a", None)], 4)
    world.run(arrivals)
    assert [round(world.started[id(item)], 4) for item in arrivals] == [0.02, 0.02, 0.0435]


@settings(max_examples=150, deadline=None)
@given(policies, traffic, st.floats(0.001, 0.05), st.booleans())
def test_who_finds_room_in_the_next_batch_waits_for_the_delay_and_one_batch(
    policy: BatchPolicy, drawn: list, batch_s: float, ahead: bool
) -> None:
    """One instance, one key, one priority: whoever arrives while at most a batch of rows is before them."""
    world = World(policy, batch_s=batch_s, ahead=ahead)
    arrivals = items([(at, rows, 0, "a", None) for at, rows, _, _, _ in drawn], policy.max_rows)
    world.run(arrivals)
    for at, item in enumerate(arrivals):
        before = [o for o in arrivals[:at] if world.started[id(o)] > item.arrival_s]
        if sum(o.rows for o in before) + item.rows <= policy.max_rows and not policy.preferred:
            assert world.started[id(item)] - item.arrival_s <= policy.max_delay_s + batch_s + 1e-9


@settings(max_examples=150, deadline=None)
@given(policies, traffic, st.floats(0.001, 0.05))
def test_batches_that_are_taken_ahead_are_those_that_leave_anyhow(policy: BatchPolicy, drawn: list, batch_s: float) -> None:
    """The same requests together, begun at the same time."""
    begun = []
    for ahead in (False, True):
        world = World(policy, batch_s=batch_s, ahead=ahead)
        arrivals = items([(at, rows, priority, key, None) for at, rows, priority, key, _ in drawn], policy.max_rows)
        world.run(arrivals)
        begun.append([(at, [item.number for item in batch.items]) for at, batch, _ in world.batches])
    assert begun[0] == begun[1]


def test_batches_are_taken_ahead_and_recalled() -> None:
    """That the tests above try both: a backlog, and urgent requests that come into it."""
    world = World(BatchPolicy(max_rows=4), ahead=True)
    world.run([Item(1, 0.0) for _ in range(40)] + [Item(1, 0.0251, -1), Item(1, 0.0252, -1), Item(1, 0.0351)])
    assert world.recalled == 1
    assert world.taken_ahead == 9
    at, batch, _ = world.batches[3]
    assert at == pytest.approx(0.03)
    assert [item.priority for item in batch.items] == [-1, -1, 0, 0]


def test_a_batch_that_is_not_certain_is_not_taken_ahead() -> None:
    batcher = Batcher(BatchPolicy(max_rows=4, preferred=(2,)))
    batcher.took(Batch((), 4), 0.1)
    for _ in range(3):
        batcher.add(Item(1, 0.0))
    assert batcher.take_ahead(1.0) is None  # neither the delay nor a preferred size is a reason
    batcher.add(Item(1, 0.0, deadline_s=1.19))
    assert batcher.take_ahead(1.0) is None  # it could be over before the one that runs
    late = Item(1, 0.0, priority=-1)
    batcher.add(late)
    batch = batcher.take_ahead(0.98)
    assert batch is not None
    assert batch.items[0] is late
    assert batcher.take_ahead(0.98) is None  # one at a time
    assert batcher.wait_s() == pytest.approx(0.1 + 5 * 0.025)
    batcher.restore(batch, lambda item: item is not late)
    assert len(batcher) == 4
    assert [item.number for item in batcher.drain()] == [1, 2, 3, 4]


def test_who_may_still_fit_before_the_one_that_did_not_overtakes() -> None:
    batcher = Batcher(BatchPolicy(max_rows=4))
    for item in (Item(3, 0.0, 0), Item(2, 0.0, 5)):
        batcher.add(item)
    batch = batcher.take_ahead(0.0)
    assert batch is not None
    assert batch.rows == 3
    assert not batcher.overtakes(Item(1, 0.0, 5))
    assert batcher.overtakes(Item(1, 0.0, 4))


def test_preferred_sizes_leave_at_once_and_the_rest_after_the_delay() -> None:
    batcher = Batcher(BatchPolicy(max_rows=8, max_delay_s=0.01, preferred=(2, 4)))
    for at in range(5):
        batcher.add(Item(1, at * 1e-4))
    first = batcher.take(0.001)
    assert first is not None
    assert first.rows == 4
    assert batcher.take(0.001) is None
    assert batcher.next_s() == pytest.approx(4e-4 + 0.01)
    second = batcher.take(4e-4 + 0.01)
    assert second is not None
    assert second.rows == 1


def test_a_full_queue_says_when_it_has_room() -> None:
    batcher = Batcher(BatchPolicy(max_rows=4, max_waiting=8))
    for _ in range(4):
        batcher.add(Item(1, 0.0))
    batch = batcher.take(0.0)
    assert batch is not None
    batcher.took(batch, 0.4)  # 0.1 s a row
    for _ in range(8):
        batcher.add(Item(1, 0.0))
    with pytest.raises(Full) as caught:
        batcher.add(Item(1, 0.0))
    assert caught.value.retry_after_s == pytest.approx(0.4 + 8 * 0.1)


def test_who_would_wait_too_long_is_refused_once_a_batch_waits() -> None:
    batcher = Batcher(BatchPolicy(max_rows=4, max_wait_s=2.0))
    batcher.took(Batch((), 4), 3.0)  # one batch alone takes longer
    for _ in range(4):
        batcher.add(Item(1, 0.0))
    with pytest.raises(Full, match=r"4 requests are waiting, which takes about 6\.0 s, more than max_wait_s=2") as refused:
        batcher.add(Item(1, 0.0))
    assert refused.value.retry_after_s == pytest.approx(6.0)
    batcher.add(Item(1, 0.0), instances=4, taken=True)
    assert len(batcher) == 5
    for _ in range(50):
        batcher.took(Batch((), 4), 0.1)
    while batcher.wait_s() <= 2.0:  # until there is no end of it
        batcher.add(Item(1, 0.0))
    assert len(batcher) in (76, 77)
    with pytest.raises(Full):
        batcher.add(Item(1, 0.0))


def test_withdrawn_items_are_never_computed_and_hold_nothing() -> None:
    batcher, rng = Batcher(BatchPolicy(max_rows=4, max_waiting=1 << 20)), random.Random(0)
    kept = list[Item]()
    for number in range(5000):
        item = Item(1, number * 1e-6, deadline_s=1e9)
        batcher.add(item)
        if rng.random() < 0.99:
            assert batcher.withdraw(item)
            assert not batcher.withdraw(item)
        else:
            kept.append(item)
    assert len(batcher._heap) < 200 + 4 * len(kept)
    assert len(batcher._deadlines) < 200 + 4 * len(kept)
    found = list[Item]()
    while (batch := batcher.take(1.0)) is not None:
        found += batch.items
    assert found == kept


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_rows": 0}, "max_batch is 0"),
        ({"max_delay_s": -1.0}, "max_delay is -1000 ms"),
        ({"max_rows": 4, "preferred": (5,)}, r"preferred sizes are \[5\]"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"max_wait_s": 0.0}, "max_wait_s is 0"),
    ],
)
def test_a_policy_that_is_none(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BatchPolicy(**fields)
