"""Dynamic batching: decides which requests are computed next and together, as a pure function of a queue and a given clock.

An item is a request of some rows. Items whose tensors can be in one batch have the same `key`. `take` is called whenever an
instance of the model is free, and returns the batch that this instance should compute now, or nothing:

- The leader of a batch is the oldest of the most urgent items. Smaller `priority` numbers are more urgent.
- Items with the leader's key join it in the same order, until one does not fit. No item after that one is taken, so that within
  a key no item passes another that is as urgent or older.
- A batch leaves immediately if it fills one of the preferred sizes and cannot fill a larger one. Otherwise it leaves when its
  oldest item has waited for `max_delay_s`, or has to leave to meet its deadline.
- An item whose deadline has passed is never computed: `expire` returns it.

If writing the inputs of a batch takes long, `take_ahead` gives the next batch while the instance still computes another one. It
must not make batches smaller than they would be otherwise, and must not let an item pass another:

- A batch is taken ahead only if it is full, or if its next item no longer fits: the same items would leave together when the
  instance is free. A batch that has room stays in the queue until then.
- An item that arrives later and is more urgent than the last of them, or than the one that did not fit, `overtakes` the batch.
  The batch is then recalled, and `restore` puts its items back to their places.
- If a deadline is near, nothing is taken ahead. The process that begins the batch checks the clock again.

Two consequences are tested on a simulated clock. If an instance is free, no item waits longer than `max_delay_s`. If all
instances are busy, an item that fits into the next batch waits for the delay or for the running batch, whichever ends later.

An item may stand for several requests that arrived together and have the same number of rows, priority, deadline and key
(`count`). Such an item is divided where a batch ends, so that batches are those that would be formed of single requests.

Threads, tensors and the wall clock are not used here. Less urgent items starve while more urgent ones fill every batch; a
deadline or the bound of the queue ends their wait.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from tilewright.host.policy import BatchPolicy

__all__ = ["Batch", "BatchPolicy", "Batcher", "Full", "Item", "Parts"]

SLACK_S = 1e-3
"""Seconds before its deadline at which an item leaves that waits for others to join its batch."""
DUE_BATCHES = 2
"""An item is taken ahead only if its deadline is at least this many batch durations away."""
SMOOTHING = 0.2
"""Weight of the latest batch in the moving average of the speed."""


class Parts(Protocol):
    """The payload of an item that stands for several requests."""

    def split(self, count: int, rest: "Item") -> "Parts":
        """Keep the first `count` requests, and return the others, which are those of the item `rest` from now on."""
        ...


@dataclass(slots=True)
class Item:
    """A request in the queue, or several that are alike; `rows` are those of all of them."""

    rows: int
    arrival_s: float
    priority: int = 0
    deadline_s: float | None = None
    key: Hashable = None
    most: int | None = None
    """Most rows of a batch of this key, if that is less than the policy's limit."""
    payload: Any = None
    count: int = 1
    """Number of requests. If there are several, `payload` is their `Parts`."""
    number: int = 0
    """Set by the batcher: the order of arrival, of the first request if there are several."""
    gone: bool = False
    """Whether the item has left the queue."""


class Batch(NamedTuple):
    """Items to be computed together, in the order of their rows."""

    items: tuple[Item, ...]
    rows: int

    @property
    def requests(self) -> int:
        """Number of requests."""
        return sum([item.count for item in self.items])


class Full(Exception):
    """The queue is full; `retry_after_s`: the estimated seconds until it has room."""

    def __init__(self, waiting: int, retry_after_s: float, most: str):
        super().__init__(f"{waiting} requests are waiting, {most}")
        self.retry_after_s = retry_after_s


class Batcher:
    """One queue, for any number of instances of one model."""

    def __init__(self, policy: BatchPolicy):
        self.policy = policy
        self._heap: list[tuple[int, int, Item]] = []  # (priority, number, item)
        self._deadlines: list[tuple[float, int, Item]] = []
        self._numbers = 0
        self._waiting = 0
        self._rows_waiting = 0
        self._ahead: Batch | None = None
        self._rows_ahead = 0
        self._ahead_until = 0
        """The priority of the item that ended the batch taken ahead: its last item, or the one that no longer fitted."""
        self._row_s: float | None = None
        self._batch_s = 0.0

    def __len__(self) -> int:
        return self._waiting

    @property
    def rows_waiting(self) -> int:
        """Rows of all items in the queue."""
        return self._rows_waiting

    def wait_s(self, instances: int = 1, more: int = 0) -> float:
        """Estimated seconds until a new item would start after `more` new rows, from the duration of the last batches."""
        if self._row_s is None:
            return 0.0
        return self._batch_s + (self._rows_waiting + self._rows_ahead + more) * self._row_s / max(1, instances)

    def add(self, item: Item, instances: int = 1, *, taken: bool = False) -> None:
        """Add an item to the queue. Raises Full if there is no room, or if (the last request of) the item would wait too long.

        `taken`: the item was in a batch before, so that it may wait for any time.
        """
        refusal = self.refusal(item, item.count - 1, instances, taken=taken)
        if refusal is not None:
            raise refusal
        item.number = self._numbers + 1
        self._numbers += item.count
        self._enter(item)

    def room(self, item: Item, instances: int = 1) -> int:
        """How many of an item's requests `add` takes; the others would be refused."""
        if self.refusal(item, item.count - 1, instances) is None:
            return item.count
        return bisect_left(range(item.count), 1, key=lambda at: self.refusal(item, at, instances) is not None)

    def refusal(self, item: Item, before: int, instances: int, *, taken: bool = False) -> Full | None:
        """The reason why a request of the item is refused if `before` others of the item come before it; None: it is not."""
        policy, waiting, rows = self.policy, self._waiting + before, before and before * item.rows // item.count
        if waiting >= policy.max_waiting:
            return Full(waiting, self.wait_s(instances, rows), "the most that this model's queue can hold")
        if (
            self._rows_waiting + self._rows_ahead + rows >= policy.max_rows
            and not taken
            and (wait_s := self.wait_s(instances, rows)) > policy.max_wait_s
        ):
            return Full(waiting, wait_s, f"which takes about {wait_s:.1f} s, more than max_wait_s={policy.max_wait_s:g}")
        return None

    @staticmethod
    def divide(item: Item, count: int) -> Item:
        """Keep the first `count` requests in the item; return an item of the others."""
        rows = count * item.rows // item.count
        rest = replace(item, rows=item.rows - rows, count=item.count - count, number=item.number + count)
        rest.payload = item.payload.split(count, rest)
        item.rows, item.count = rows, count
        return rest

    def _enter(self, item: Item) -> None:
        self._push(item)
        item.gone = False
        self._waiting += item.count
        self._rows_waiting += item.rows

    def _push(self, item: Item) -> None:
        heapq.heappush(self._heap, (item.priority, item.number, item))
        if item.deadline_s is not None:
            heapq.heappush(self._deadlines, (item.deadline_s, item.number, item))

    def withdraw(self, item: Item) -> bool:
        """Remove a request whose owner no longer waits; return whether it was still in the queue.

        If the item stands for several requests, the caller removes that one from its payload.
        """
        if item.gone:
            return False
        if item.count == 1:
            self._leave(item)
            return True
        rows = item.rows // item.count
        item.rows, item.count = item.rows - rows, item.count - 1
        self._waiting, self._rows_waiting = self._waiting - 1, self._rows_waiting - rows
        return True

    def _leave(self, item: Item) -> None:
        item.gone = True
        self._waiting -= item.count
        self._rows_waiting -= item.rows
        self._tidy()

    def _tidy(self) -> None:
        """Keep the heaps short after items have left."""
        if not self._waiting:
            self._heap.clear()
            self._deadlines.clear()
        elif len(self._heap) > 64 + 2 * self._waiting:
            # Withdrawn and expired items stay in the heaps until they come up. Many withdrawals must not fill the heaps.
            self._clean()

    def _clean(self) -> None:
        """Remove items from the heaps that have left the queue."""
        self._heap = [entry for entry in self._heap if not entry[2].gone]
        self._deadlines = [entry for entry in self._deadlines if not entry[2].gone]
        heapq.heapify(self._heap)
        heapq.heapify(self._deadlines)

    def expire(self, now_s: float) -> list[Item]:
        """Remove and return the items whose deadline has passed."""
        late: list[Item] = []
        while self._deadlines and (self._deadlines[0][2].gone or self._deadlines[0][0] <= now_s):
            item = heapq.heappop(self._deadlines)[2]
            if not item.gone:
                self._leave(item)
                late.append(item)
        return late

    def take(self, now_s: float) -> Batch | None:
        """The batch that a free instance should compute now; None: wait for `next_s`. Call `expire` first."""
        chosen, last = self._led()
        if not chosen:
            return None
        if last is None and self.policy.max_delay_s and now_s < self._leaves_s(chosen):
            rows = sum(item.rows for item in chosen)
            size = max((size for size in self.policy.preferred if size <= rows), default=None)
            if size is None:
                return None
            chosen = self._prefix(chosen, size)
        return self._left(chosen)

    def _left(self, chosen: list[Item]) -> Batch:
        rows = count = 0
        for item in chosen:
            item.gone = True
            rows += item.rows
            count += item.count
        self._waiting -= count
        self._rows_waiting -= rows
        self._tidy()
        return Batch(tuple(chosen), rows)

    def take_ahead(self, now_s: float) -> Batch | None:
        """The batch after the running one, if it is certain already; else None. Call `begun` or `restore` for it later."""
        leader = self._leader()
        if self._ahead is not None or leader is None or self._rows_waiting < self._most(leader):
            return None
        chosen, last = self._led()
        due = min((item.deadline_s for item in chosen if item.deadline_s is not None), default=None)
        if last is None or (due is not None and due < now_s + DUE_BATCHES * self._batch_s):
            return None
        self._ahead, self._ahead_until = self._left(chosen), last.priority
        self._rows_ahead = self._ahead.rows
        return self._ahead

    def begun(self) -> None:
        """Note that the batch that was taken ahead now runs."""
        self._ahead, self._rows_ahead = None, 0

    def overtakes(self, item: Item) -> bool:
        """Whether an item that has arrived since may belong into the batch that was taken ahead, or before it."""
        return self._ahead is not None and item.priority < self._ahead_until

    def restore(self, batch: Batch, wanted: Callable[[Item], bool] = lambda item: True) -> None:
        """Put the items of a batch that was never begun back to their places in the queue, except those not `wanted`."""
        if self._ahead is batch:
            self._ahead, self._rows_ahead = None, 0
        self._clean()
        for item in filter(wanted, batch.items):
            self._enter(item)

    def next_s(self, *, free: bool = True) -> float | None:
        """The time at which to call `expire` (and `take`, if an instance is `free`) again if nothing arrives until then."""
        times = list[float]()
        chosen = self._led()[0] if free else []
        if chosen:
            times.append(self._leaves_s(chosen))
        while self._deadlines and self._deadlines[0][2].gone:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min(times, default=None)

    def took(self, batch: Batch, seconds: float) -> None:
        """Note that a batch took so many seconds; Retry-After is estimated from this."""
        row_s = seconds / max(1, batch.rows)
        if self._row_s is None:
            self._row_s, self._batch_s = row_s, seconds
        else:
            self._row_s += SMOOTHING * (row_s - self._row_s)
            self._batch_s += SMOOTHING * (seconds - self._batch_s)

    def drain(self) -> Iterator[Item]:
        """Remove and return all items, because the model is unloaded."""
        for _, _, item in sorted(self._heap):
            if not item.gone:
                self._leave(item)
                yield item

    # ---- choosing

    def _most(self, leader: Item) -> int:
        most = self.policy.max_rows if leader.most is None else min(leader.most, self.policy.max_rows)
        return max(most, leader.rows // leader.count)

    def _leader(self) -> Item | None:
        """The leader of the next batch."""
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _led(self) -> tuple[list[Item], Item | None]:
        """(the leader and the items that join it, in order; the item that ends the batch).

        The item that ends the batch is its last one, or the one that no longer fits; None if there is room for others.
        """
        leader = self._leader()
        if leader is None:
            return [], None
        chosen, rows, most = list[Item](), 0, self._most(leader)
        if self._waiting == 1:
            return [leader], leader if leader.rows == most else None
        # If all of them may fit, sorting them is less work than walking.
        order = (
            [entry[2] for entry in sorted(self._heap) if not entry[2].gone] if self._rows_waiting <= most else self._in_order()
        )
        key = leader.key
        for item in order:
            if item.key is not key and item.key != key:
                continue
            together = rows + item.rows
            if together > most:
                rest, fitting = item, (most - rows) // (item.rows // item.count)
                if fitting:
                    rest = self._cut(item, fitting)
                    chosen.append(item)
                return chosen, rest
            chosen.append(item)
            rows = together
            if rows == most:
                return chosen, item
        return chosen, None

    def _cut(self, item: Item, count: int) -> Item:
        """`divide` for an item in the queue, in which both parts are then."""
        rest = self.divide(item, count)
        self._push(rest)
        return rest

    def _in_order(self) -> Iterator[Item]:
        """The queue from the most urgent and oldest on, without taking it apart: a walk over the heap's tree."""
        heap = self._heap
        front = [(*heap[0][:2], 0)] if heap else []
        while front:
            _, _, at = heapq.heappop(front)
            item = heap[at][2]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(front, (*heap[child][:2], child))
            if not item.gone:
                yield item

    def _leaves_s(self, chosen: list[Item]) -> float:
        """The time at which these items leave although more could join: a delay is over, or a deadline is near.

        The delay or deadline may be that of an item with another key, which waits only until these have left.
        """
        all_chosen = sum([item.count for item in chosen]) == self._waiting
        waiting = chosen if all_chosen else [entry[2] for entry in self._heap if not entry[2].gone]
        leaves = min(item.arrival_s for item in waiting) + self.policy.max_delay_s
        due = min((item.deadline_s for item in waiting if item.deadline_s is not None), default=None)
        # A deadline is a limit for the start. If it is nearer than the delay, leave some time for timers that are late.
        return leaves if due is None else min(leaves, due - SLACK_S)

    def _prefix(self, chosen: list[Item], size: int) -> list[Item]:
        """The first requests that have at most `size` rows together; at least the leader."""
        taken, rows = list[Item](), 0
        for item in chosen:
            if rows + item.rows > size:
                fitting = (size - rows) // (item.rows // item.count) if taken else max(1, size // (item.rows // item.count))
                if fitting:
                    if fitting < item.count:
                        self._cut(item, fitting)
                    taken.append(item)
                break
            taken.append(item)
            rows += item.rows
        return taken
