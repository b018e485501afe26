"""Notices a step that does not come back: a hung device raises nothing, it just never answers.

Twice a second a command that does nothing is queued behind the engine's step. As long as it returns, steps end; the age of the
oldest one that has not returned is how long the engine has been in one step.
"""

import asyncio
import logging
import time

from tilewright.server.link import EngineLink, EngineStopped

__all__ = ["Watchdog"]

PERIOD_S = 0.5

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one worker while `run` runs, on the worker's event loop."""

    def __init__(self, worker: EngineLink, step_timeout_s: float):
        self._worker = worker
        self._timeout_s = step_timeout_s
        self._asked_s: float | None = None

    @property
    def silent_s(self) -> float:
        """How long the engine's thread has not answered; 0 while it does."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    @property
    def hangs(self) -> bool:
        """Whether a step has been running for longer than the step timeout."""
        return self.silent_s > self._timeout_s

    async def run(self) -> None:
        """Ask until the engine stops for good, or until cancelled."""
        while True:
            try:
                await self._ask()
            except EngineStopped:
                self._asked_s = None
                if not self._worker.returns:
                    return
            await asyncio.sleep(PERIOD_S)

    async def _ask(self) -> None:
        """Says once that a step hangs, and once that it came back. Raises EngineStopped."""
        self._asked_s = time.monotonic()
        answer = asyncio.ensure_future(self._worker.ping())
        await asyncio.wait({answer}, timeout=self._timeout_s)
        if not answer.done():
            logger.error("a step of the engine has been running for more than %g s; /health is 503", self._timeout_s)
            await asyncio.wait({answer})
            logger.warning("the engine's step came back after %.1f s; /health is 200 again", self.silent_s)
        answer.result()
        self._asked_s = None
