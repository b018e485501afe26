"""The order in which a model's process begins, ends and answers batches.

Batches are answered in the order in which they arrived. If the model is a CUDA graph that is only replayed, and the next batch
is there, the process begins it LEAD_S before the one on the device is expected to end. So the device works without a pause. Not
sooner, because until then the server may recall the batch, and give its place to more urgent requests. A batch that comes
later begins when the one before it has ended, before that one is answered. Other models begin a batch after that answer.

As long as requests come one by one, nothing is timed and nothing begins early: that starts with the batch after the first one
that had another one behind it.

A batch that costs the device is the cause of the loss of the one before it, if that was still on the device. Then neither is
answered: the process ends, and the server has a new one compute their requests.
"""

import socket
import time
from collections.abc import Sequence

from tilewright.host.arena import NOT_BEGUN, TRAFFIC
from tilewright.host.computing import Begun, Computing
from tilewright.host.direct import Direct
from tilewright.host.intake import Arrived, Intake

__all__ = ["LEAD_S", "Turns"]

LEAD_S = 5e-4
"""Seconds before the expected end of a batch at which the next one begins. A graph takes 0.1 to 0.2 ms to launch."""
SPIN_S = 1e-4
"""Seconds before the expected end from which on the process waits for that only."""
SLICE_S = 1e-3
"""Seconds after which the process looks whether a batch has ended sooner than expected."""
RISE = 0.1
"""Weight of the latest batch in the expected duration, if it took longer than expected; if it took less, that is expected."""
MAX_KEPT = 256
"""Number of kinds of batches whose duration is kept."""


class Turns:
    """Answers batches, until the server closes the channel or the device is lost.

    Args:
        channel: to the server.
        intake: the batches.
        places: what computes the batches of each arena.
        direct: what has a GPU copy inputs.
    """

    def __init__(self, channel: socket.socket, intake: Intake, places: Sequence[Computing], direct: Direct | None):
        self._channel, self._intake, self._places, self._direct = channel, intake, places, direct
        self._behind: Arrived | None = None
        """A batch that has arrived and has not begun."""
        self._followed = False
        """Whether the last batch had another one behind it when it ended; then the next one will probably have one, too."""
        self._durations = dict[bytes, float]()
        """A batch's words -> the seconds for which the device is expected to compute such a batch."""

    def run(self) -> None:
        """Answer batches."""
        while (arrived := self._behind or self._intake.next()) is not None:
            self._behind, place = None, self._places[arrived.arena]
            marked = self._followed and place.begins_at_once(arrived)
            batch = place.begin(arrived, marked=marked) if place.may_begin() else None
            if batch is None:
                place.settled(arrived.fetched)
                self._channel.send(NOT_BEGUN)
            while batch is not None:
                batch = self._after(batch)
            if any(one.broken for one in self._places):
                return

    def _after(self, batch: Begun) -> Begun | None:
        """End and answer a batch. Returns the batch that has begun behind it, if any."""
        place = self._places[batch.arrived.arena]
        after = None if batch.mark is None else self._near_end(batch)
        place.end(batch)
        if place.broken and after is not None:
            return None
        ended_s = time.perf_counter()
        if after is None and not place.broken:
            after = self._begun_at_once()
        self._followed = after is not None or self._behind is not None
        self._answer(place, batch)
        if place.broken:
            return None
        self._expect(batch)
        if after is not None:
            after.since_s = ended_s  # the time before counts for the other batch
        return after

    def _near_end(self, batch: Begun) -> Begun | None:
        """Wait until a batch is near its end; begin the one behind it, if that is there by then."""
        expected_s = self._expected_s(batch)
        if expected_s is None:
            return None
        end_s = batch.since_s + expected_s
        while (left_s := end_s - LEAD_S - time.perf_counter()) > 0:
            if batch.ended():
                return None
            time.sleep(min(left_s, SLICE_S))
        return self._begun_at_once(end_s - SPIN_S)

    def _begun_at_once(self, until_s: float = 0.0) -> Begun | None:
        """The next batch, begun, if it comes until then and may begin before the one before it is answered."""
        if self._behind is None:
            self._behind = self._intake.next(within_s=max(0.0, until_s - time.perf_counter()))
        arrived = self._behind
        if arrived is None:
            return None
        place = self._places[arrived.arena]
        if not (place.begins_at_once(arrived) and place.may_begin()):
            return None
        self._behind = None
        return place.begin(arrived, marked=True)

    def _expected_s(self, batch: Begun) -> float | None:
        """The seconds for which the device is expected to compute a batch; None: there was none like it."""
        return self._durations.get(batch.arrived.words)

    def _expect(self, batch: Begun) -> None:
        """Note for how long the device computed a batch that has ended."""
        words, seconds = batch.arrived.words, batch.device_s()
        if seconds is None:
            return
        known = self._durations.get(words, seconds)
        if len(self._durations) >= MAX_KEPT and words not in self._durations:
            self._durations.clear()
        self._durations[words] = min(seconds, known + RISE * (seconds - known))

    def _answer(self, place: Computing, batch: Begun) -> None:
        """Send the answer to a batch that has ended."""
        words, fetched = place.answer(batch), batch.arrived.fetched
        locked = 0 if self._direct is None else self._direct.locked_bytes
        self._channel.send(TRAFFIC.pack(0 if fetched is None else fetched.nbytes, batch.arrived.read, locked) + words)
