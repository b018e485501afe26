"""The short way of a stream's plain events: from a step to its connection, without waking the task that answers the request.

Most tokens of most streams are an event with a text and nothing else. Such an event is put together from bytes that were made
once, and all that a step has for a connection is written at once. Everything else goes the long way through the channel: the
first event of a sample and the last, log-probabilities, calls and reasoning, and whatever comes while the task has not written
yet what came before, or while the client does not read. So the order is kept, and a client that is slow is waited for as ever.
"""

from collections.abc import Callable
from json import encoder
from typing import Protocol

from tilewright.server.metrics import Latencies

__all__ = ["Batch", "Direct", "Wire"]

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


class Batch:
    """What one step writes the short way, on one event loop."""

    def __init__(self, latencies: Latencies):
        self._latencies = latencies
        self.now_s = 0.0
        self.gaps: dict[tuple[float, int], int] = {}
        """(time of the token before, tokens that came now) -> streams: most have the same, and are counted together."""
        self.touched: list[Direct] = []

    def begin(self, now_s: float) -> None:
        """Of a step that has come at this time."""
        self.now_s = now_s

    def end(self) -> None:
        """Write it."""
        for direct in self.touched:
            direct.flush()
        self.touched.clear()
        for (before_s, tokens), streams in self.gaps.items():
            self._latencies.following(self.now_s - before_s, tokens, streams)
        self.gaps.clear()


class Direct:
    """The short way of one HTTP request.

    Args:
        last_s: by choice, when its last token came; shared with the long way.
        frames: by choice, what stands before and behind the text of a plain event; None before its first event.
        waiting: whether the request's task has written all that it has taken, and waits for more.
    """

    def __init__(
        self,
        wire: Wire,
        batch: Batch,
        last_s: dict[int, float],
        frames: Callable[[int], tuple[bytes, bytes] | None],
        waiting: Callable[[], bool],
    ):
        self._wire, self._batch, self._last_s = wire, batch, last_s
        self._frames_of, self._waiting = frames, waiting
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._pieces: list[bytes] = []
        self.tokens = 0
        """That have gone this way."""

    def take(self, choice: int, text: str, tokens: int) -> bool:
        """Whether these tokens of a sample, and their text, have gone this way."""
        frame = self._frames.get(choice)
        if frame is None:
            frame = self._frames_of(choice)
            if frame is None:
                return False
            self._frames[choice] = frame
        pieces = self._pieces
        if not pieces and (not self._waiting() or self._wire.blocked):
            return False
        batch, last_s = self._batch, self._last_s
        gap = (last_s[choice], tokens)
        last_s[choice] = batch.now_s
        batch.gaps[gap] = batch.gaps.get(gap, 0) + 1
        self.tokens += tokens
        if text:
            if not pieces:
                batch.touched.append(self)
            pieces.append(frame[0])
            pieces.append(_quoted(text).encode())
            pieces.append(frame[1])
        return True

    def flush(self) -> None:
        """Write what a step has brought."""
        self._wire.write_chunk(b"".join(self._pieces))
        self._pieces.clear()
