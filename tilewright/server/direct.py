"""The direct path of a stream's plain events: from a step to the connection, without waking the task that answers the request.

Most tokens of most streams become a plain event, which contains a text and nothing else. Such an event is assembled from bytes
that were encoded once. Everything else goes through the channel: the first and the last event of a sample, log-probabilities,
tool calls and reasoning.

Text that arrives while the task has not written all earlier text, or while the client does not read, is kept and becomes one
event. So the order is preserved, and a slow client is waited for. A process that lags behind its engine also does less work per
token.
"""

from collections.abc import Callable
from json import encoder
from typing import Protocol

from tilewright.server.metrics import Latencies

__all__ = ["Batch", "Direct", "Lane", "Waits", "Wire"]

_quoted: Callable[[str], str] = encoder.encode_basestring
"""Encodes a text as a JSON string, as `json.dumps(..., ensure_ascii=False)` does."""


class Wire(Protocol):
    """A connection on which a chunked answer is being sent."""

    @property
    def blocked(self) -> bool:
        """Whether data written now would have to wait."""
        ...

    def write_chunk(self, data: bytes) -> None:
        """Write a chunk of the answer."""
        ...


class Waits(Protocol):
    """The part of a request's channel that `Direct` uses."""

    waiting: bool
    """Whether the request's task has written everything that it took, and waits for more."""

    def wake(self) -> None:
        """Wake the task so that it takes the deltas."""
        ...


class Batch:
    """The output that is written together through the direct path, on one event loop: one step, or several if this process
    lags behind its engine."""

    def __init__(self, latencies: Latencies):
        self._latencies = latencies
        self._now_s = 0.0
        self.lanes: list[Lane] = []
        """The lanes that have new tokens."""

    def begin(self, now_s: float) -> None:
        """Begin a batch. All tokens until `end` count as arrived at this time."""
        self._now_s = now_s

    def end(self) -> None:
        """Write the pending text of each request whose task has written everything before it."""
        now_s, lanes = self._now_s, self.lanes
        # Most streams had their previous token at the same time; these are counted together.
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
    """The direct path of one sample. `text`: text that has arrived but is not written yet."""

    __slots__ = ("before", "behind", "choice", "direct", "text", "tokens")

    def __init__(self, direct: "Direct", choice: int):
        self.direct, self.choice = direct, choice
        self.before = self.behind = b""
        self.text = ""
        self.tokens = 0

    def take(self, text: str, tokens: int) -> bool:
        """Take tokens of the sample and their text. Returns False, and takes nothing, before the sample's first event."""
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
    """The direct path of one HTTP request.

    Args:
        last_s: choice -> time of its latest token; shared with the channel.
        frames: choice -> the bytes before and after the text of a plain event; None before the choice's first event.
        samples: number of samples of the request; each has a lane.
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
        """Lanes with unwritten text, which waits for earlier text to be written, or for the client."""
        self.tokens = 0
        """Number of tokens that have used this path."""

    def write(self) -> None:
        """Write the pending text in one chunk, with one event per sample."""
        pending = self.pending
        events = [b"%b%b%b" % (lane.before, _quoted(lane.text).encode(), lane.behind) for lane in pending]
        for lane in pending:
            lane.text = ""
        pending.clear()
        self.wire.write_chunk(events[0] if len(events) == 1 else b"".join(events))

    def left(self) -> list[tuple[int, str]]:
        """Remove the pending text and return it as (choice, text), for the channel."""
        found = [(lane.choice, lane.text) for lane in self.pending]
        for lane in self.pending:
            lane.text = ""
        self.pending.clear()
        return found
