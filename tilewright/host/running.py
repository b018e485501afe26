"""A batch that was handed to a model's process, and the answers to its requests."""

import asyncio
import time
from dataclasses import dataclass

from tilewright.host.batcher import Batch, Item
from tilewright.host.errors import Failed, HostError, Refused
from tilewright.host.runs import Reply
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire, byte_size
from tilewright.host.waiting import Group, Waiting, fail

__all__ = ["Cut", "Run", "kept", "may_be_kept"]

MAX_KEPT_BYTES = 1 << 20
"""Most bytes of outputs that are copied so that the next batch can begin before the answers are made."""


@dataclass(slots=True, eq=False)
class Run:
    """A batch that was handed to an instance."""

    batch: Batch
    began_s: float
    """The time at which it was handed over; for a batch sent ahead, the time at which the batch before it was answered."""
    late: asyncio.TimerHandle | None = None
    """The timer that ends the batch if it hangs; None: another batch is before it."""
    over: bool = False
    """Whether there is a reply, or the instance has ended."""

    def laid_out(self) -> tuple[list[int], list[tuple[Wire, ...]]]:
        """(rows of each request, its inputs)."""
        parts, inputs = list[int](), list[tuple[Wire, ...]]()
        for item in self.batch.items:
            if item.payload.is_group:
                parts += [item.rows // item.count] * item.count
                inputs += item.payload.tensors
            else:
                parts.append(item.rows)
                inputs.append(item.payload.inputs)
        return parts, inputs

    def unwanted(self) -> bool:
        """Whether nobody waits for any of its requests."""
        return all(item.payload.done() for item in self.batch.items)

    def tell(self, reply: Reply, ended_s: float, label: str, signature: Signature, stats: Stats) -> None:
        """Give each request its answer or its error, and note how many were answered and how long they waited."""
        at, number, told = 0, 0, _Told(ended_s)
        cuts = [Cut(wire, signature.batched) for wire in reply.outputs]
        only = cuts[0].rows if len(cuts) == 1 else None
        errors, unread = reply.errors, reply.unread
        times = self.began_s, ended_s, self.batch.rows, reply.seconds
        try:
            for item in self.batch.items:
                rows, waiting = item.rows, item.payload
                if waiting.is_group:
                    if errors or unread:
                        told.failed(item, number, reply, label, stats)
                    if not waiting.done():
                        told.add(item, waiting.answer([cut.view(at, rows) for cut in cuts]), waiting)
                    number, at, waiting.item = number + item.count, at + rows, None
                    continue
                waiting.times = times
                if unread and number in unread:
                    fail(item, Refused(f"{label}: {unread[number]}"), stats)
                elif errors and number in errors:
                    fail(item, Failed(f"{label}: {errors[number]}"), stats)
                elif not waiting.done():
                    told.add(item, 1, waiting)
                    outputs = (only(at, rows),) if only is not None else tuple([cut.rows(at, rows) for cut in cuts])
                    waiting.set_result(outputs)
                number, at = number + 1, at + rows
        finally:
            told.note(self.began_s, reply.seconds, stats)


class _Told:
    """How many requests of a batch were answered, and how long they waited."""

    __slots__ = ("_arrived_s", "_count", "_delivered", "_delivered_arrived_s", "_ended_s", "_rows")

    def __init__(self, ended_s: float):
        self._ended_s, self._count, self._rows, self._arrived_s = ended_s, 0, 0, 0.0
        self._delivered, self._delivered_arrived_s = 0, 0.0

    def add(self, item: Item, count: int, waiting: Waiting) -> None:
        """Note that `count` requests of an item were answered."""
        arrived_s = count * item.arrival_s
        self._count += count
        self._rows += count * item.rows // item.count
        self._arrived_s += arrived_s
        if waiting.has_callback:
            self._delivered += count
            self._delivered_arrived_s += arrived_s

    @staticmethod
    def failed(item: Item, number: int, reply: Reply, label: str, stats: Stats) -> None:
        """Tell the requests of a group of their errors. `number`: of its first request in the batch."""
        group: Group = item.payload
        failed: dict[int, HostError] = {n - number: Failed(f"{label}: {why}") for n, why in reply.errors.items()}
        failed |= {n - number: Refused(f"{label}: {why}") for n, why in reply.unread.items()}
        failed = {position: error for position, error in failed.items() if 0 <= position < item.count}
        before = len(group.left)
        group.fail(failed)
        count = len(group.left) - before
        stats.times["fail"].add(count * (time.monotonic() - item.arrival_s), count)

    def note(self, began_s: float, model_s: float, stats: Stats) -> None:
        """Add the numbers to the statistics."""
        if self._delivered:
            stats.times["success"].add(self._delivered * time.monotonic() - self._delivered_arrived_s, self._delivered)
        stats.inferences += self._rows
        stats.answered(self._count, self._count * began_s - self._arrived_s, began_s, self._ended_s, model_s)


def may_be_kept(reply: Reply) -> bool:
    """Whether the outputs are few enough for `kept`."""
    return sum([len(wire.raw) for wire in reply.outputs]) <= MAX_KEPT_BYTES


def kept(reply: Reply) -> Reply:
    """A reply with outputs of its own: those in shared memory are overwritten by the instance's next batch."""
    return reply._replace(outputs=tuple([wire._replace(data=bytes(wire.raw)) for wire in reply.outputs]))


class Cut:
    """Copies the shares of requests in an output out of the shared memory."""

    def __init__(self, wire: Wire, batched: bool):
        self._wire, self._batched = wire, batched
        self._datatype, self._data = wire.datatype, wire.raw
        self._row_bytes = byte_size(wire.datatype, wire.shape[1:])
        self._rows, self._shape = 1, (1, *wire.shape[1:])
        """The rows of the last share, and its shape."""

    def view(self, at: int, rows: int) -> Wire:
        """The shares of several requests together, which are not copied."""
        begin, size = at * self._row_bytes, rows * self._row_bytes
        return Wire(self._datatype, (rows, *self._wire.shape[1:]), memoryview(self._data)[begin : begin + size])

    def rows(self, at: int, rows: int) -> Wire:
        """The share with `rows` rows from row `at` on."""
        if not self._batched:
            return Wire(self._datatype, self._wire.shape, bytes(self._data))
        if rows != self._rows:
            self._rows, self._shape = rows, (rows, *self._wire.shape[1:])
        begin, size = at * self._row_bytes, rows * self._row_bytes
        return Wire(self._datatype, self._shape, bytes(self._data[begin : begin + size]))
