"""The short way of a stream's plain events: from a step to its connection, without waking the task that answers the request.

Most tokens of most streams are an event with a text and nothing else. Such an event is put together from bytes that were made
once. Everything else goes the long way through the channel: the first event of a sample and the last, log-probabilities, calls
and reasoning. Text that comes while the task has not written yet what came before, or while the client does not read, is kept
and becomes one event. So the order is kept, a client that is slow is waited for, and a process that is behind its engine has
less to do for each token.
"""

from collections.abc import Callable
from json import encoder
from typing import Protocol

from tilewright.server.metrics import Latencies

__all__ = ["Batch", "Direct", "Lane", "Waits", "Wire"]

_quoted: Callable[[str], str] = encoder.encode_basestring
"""A text as JSON, as `json.dumps` without `ensure_ascii` writes it."""


class Wire(Protocol):
    """A connection with a chunked answer under way."""

    @property
    def blocked(self) -> bool:
        """Whether what is written now would have to wait."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of the answer."""
        ...


class Waits(Protocol):
    """What `Direct` asks of the channel of a request."""

    waiting: bool
    """Whether the request's task has written all that it has taken, and waits for more."""

    def wake(self) -> None:
        """Let the task take what has come."""
        ...


class Batch:
    """What is written the short way at once, on one event loop: a step, or several where this process is behind its engine."""

    def __init__(self, latencies: Latencies):
        self._latencies = latencies
        self._now_s = 0.0
        self.lanes: list[Lane] = []
        """Those that have something."""

    def begin(self, now_s: float) -> None:
        """What comes until `end` has come at this time."""
        self._now_s = now_s

    def end(self) -> None:
        """Write it, where its turn has come."""
        now_s, lanes = self._now_s, self.lanes
        # Most streams had their last token at the same time, and are counted together.
        same_s, same_tokens, streams = now_s, 1, 0
        for lane in lanes:
            direct, tokens = lane.direct, lane.tokens
            lane.tokens = 0
            direct.tokens += tokens
            before_s = direct.last_s[lane.choice]
            direct.last_s[lane.choice] = now_s
            if before_s != same_s or tokens != same_tokens:
                if streams:
                    self._latencies.following(now_s - same_s, same_tokens, streams)
                same_s, same_tokens, streams = before_s, tokens, 0
            streams += 1
            if direct.pending and direct.channel.waiting:
                if direct.wire.blocked:
                    direct.channel.wake()
                else:
                    direct.write()
        if streams:
            self._latencies.following(now_s - same_s, same_tokens, streams)
        lanes.clear()


class Lane:
    """The short way of one sample. `text`: what has come and is not written."""

    __slots__ = ("before", "behind", "choice", "direct", "text", "tokens")

    def __init__(self, direct: "Direct", choice: int):
        self.direct, self.choice = direct, choice
        self.before = self.behind = b""
        self.text = ""
        self.tokens = 0

    def take(self, text: str, tokens: int) -> bool:
        """Whether these tokens of the sample, and their text, go this way. Not before the sample's first event."""
        direct = self.direct
        if not self.behind:
            frame = direct.frames(self.choice)
            if frame is None:
                return False
            self.before, self.behind = frame
        if not self.tokens:
            direct.batch.lanes.append(self)
        self.tokens += tokens
        if text:
            if not self.text:
                direct.pending.append(self)
            self.text += text
        return True


class Direct:
    """The short way of one HTTP request.

    Args:
        last_s: by choice, when its last token came; shared with the long way.
        frames: by choice, what stands before and behind the text of a plain event; None before its first event.
        samples: of the request; there is a lane for each.
    """

    def __init__(
        self,
        wire: Wire,
        batch: Batch,
        channel: Waits,
        last_s: dict[int, float],
        frames: Callable[[int], tuple[bytes, bytes] | None],
        samples: int = 1,
    ):
        self.wire, self.batch, self.channel = wire, batch, channel
        self.last_s, self.frames = last_s, frames
        self.lanes = tuple(Lane(self, choice) for choice in range(samples))
        self.pending: list[Lane] = []
        """Those with a text that is not written: it waits for what has come before it, or for the client."""
        self.tokens = 0
        """That have gone this way."""

    def write(self) -> None:
        """Write what is pending: an event a sample, in one chunk."""
        pending = self.pending
        events = [b"%b%b%b" % (lane.before, _quoted(lane.text).encode(), lane.behind) for lane in pending]
        for lane in pending:
            lane.text = ""
        pending.clear()
        self.wire.write_chunk(events[0] if len(events) == 1 else b"".join(events))

    def left(self) -> list[tuple[int, str]]:
        """What is pending as (choice, text), for the long way; it is not pending then."""
        found = [(lane.choice, lane.text) for lane in self.pending]
        for lane in self.pending:
            lane.text = ""
        self.pending.clear()
        return found
