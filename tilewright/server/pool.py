"""Passes of many requests through one model, in turn: the engine steps between two passes, and no request waits for all of
another.

A pass takes a text of each waiting request, round after round, until it is full: short requests are done early, beside long
ones. One pass is out at a time, so a text stream waits for at most one between two of its tokens.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from tilewright.engine.pooling import Pass, Pooled, Text
from tilewright.server.errors import overloaded

__all__ = ["Pool"]

MAX_WAITING_TOKENS = 1 << 20
"""Of all waiting requests; one that would make it more is refused, and one alone is always taken."""

Run = Callable[[Pass], Awaitable[np.ndarray]]


class _Request:
    def __init__(self, texts: Sequence[Text], labels: bool, dimensions: int | None):
        self.texts, self.kind = texts, (labels, dimensions)
        self.sent = 0
        self.answers: list[np.ndarray] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waits(self) -> bool:
        return self.sent < len(self.texts) and not self.done.done()


class Pool:
    """On one event loop. `run` takes a pass to the model; `close` ends it."""

    def __init__(self, pooled: Pooled, run: Run):
        self.pooled = pooled
        self._run = run
        self._requests: deque[_Request] = deque()
        self._waiting_tokens = 0
        self._running: asyncio.Task[None] | None = None

    async def ask(self, texts: Sequence[Text], *, labels: bool = False, dimensions: int | None = None) -> np.ndarray:
        """float32, a row for each text; texts have been checked. Leaving early takes back what has not been sent.

        Raises:
            ApiError: 429; too many texts wait.
        """
        tokens, before = sum(len(text.ids) for text in texts), self._waiting_tokens
        if before and before + tokens > MAX_WAITING_TOKENS:
            wanted = f"wanted at most {MAX_WAITING_TOKENS} with these {tokens}"
            raise overloaded(f"{before} tokens of texts wait, {wanted}; try again in 2 s", 2.0)
        request = _Request(texts, labels, dimensions)
        self._waiting_tokens += tokens
        self._requests.append(request)
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._work())
        try:
            await request.done
        finally:
            request.done.cancel()
            self._waiting_tokens -= tokens
        return np.stack(request.answers)

    def close(self) -> None:
        """Send no more passes."""
        if self._running is not None:
            self._running.cancel()

    async def _work(self) -> None:
        while picked := self._pick():
            labels, dimensions = picked[0][0].kind
            work = Pass(tuple(text for _, text in picked), labels, dimensions)
            (answer,) = await asyncio.gather(self._run(work), return_exceptions=True)
            if isinstance(answer, BaseException):  # it belongs to those whose texts were in the pass
                for request, _ in picked:
                    if not request.done.done():
                        request.done.set_exception(answer)
                continue
            for (request, _), row in zip(picked, answer, strict=True):
                request.answers.append(row)
                if len(request.answers) == len(request.texts) and not request.done.done():
                    request.done.set_result(None)

    def _pick(self) -> list[tuple[_Request, Text]]:
        """Texts of the next pass: of requests that ask for the same as the first, one of each in turn."""
        self._requests = deque(request for request in self._requests if request.waits)
        if not self._requests:
            return []
        kind, picked, tokens = self._requests[0].kind, [], 0
        alike = deque(request for request in self._requests if request.kind == kind)
        while alike:
            request = alike.popleft()
            text = request.texts[request.sent]
            if picked and tokens + len(text.ids) > self.pooled.pass_tokens:
                break
            picked.append((request, text))
            tokens += len(text.ids)
            request.sent += 1
            if request.waits:
                alike.append(request)
        self._requests.rotate(-1)  # another one is first next time
        return picked
