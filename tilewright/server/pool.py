"""Batches the texts of many embedding and score requests into passes through one model. The engine can step between two passes.

A pass takes one text of each waiting request, round after round, until it is full. So short requests finish early, and no
request has to wait for all texts of another. Only one pass is in flight at a time, so a text stream waits for at most one pass
between two of its tokens.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from tilewright.engine.pooling import Pass, Pooled, Text
from tilewright.server.errors import overloaded

__all__ = ["Pool"]

MAX_WAITING_TOKENS = 1 << 20
"""Most tokens of all waiting requests. A request that would exceed this is refused, unless no other request waits."""

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
    """Runs passes, on one event loop. `run` executes a pass on the model; `close` ends the pool."""

    def __init__(self, pooled: Pooled, run: Run):
        self.pooled = pooled
        self._run = run
        self._requests: deque[_Request] = deque()
        self._waiting_tokens = 0
        self._running: asyncio.Task[None] | None = None

    async def ask(self, texts: Sequence[Text], *, labels: bool = False, dimensions: int | None = None) -> np.ndarray:
        """Run texts through the model. Returns float32 [texts, columns], one row per text.

        The texts must have been checked. If the call is cancelled, texts that have not been sent are dropped.

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
            if isinstance(answer, BaseException):  # only the requests with a text in this pass fail
                for request, _ in picked:
                    if not request.done.done():
                        request.done.set_exception(answer)
                continue
            for (request, _), row in zip(picked, answer, strict=True):
                request.answers.append(row)
                if len(request.answers) == len(request.texts) and not request.done.done():
                    request.done.set_result(None)

    def _pick(self) -> list[tuple[_Request, Text]]:
        """The texts of the next pass: one text per request in turn, from all requests of the same kind as the first request."""
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
        self._requests.rotate(-1)  # another request is first next time
        return picked
