"""Detects a step that does not return. A hung device raises no error; it just never answers.

Twice per second a command that does nothing is queued after the engine's current step. As long as the command returns, steps
end. The age of the oldest command that has not returned shows how long the engine has been in one step.
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
        """How long the engine's thread has not answered, in seconds; 0 if no command waits for it."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    @property
    def hangs(self) -> bool:
        """Whether a step has been running for longer than the step timeout."""
        return self.silent_s > self._timeout_s

    async def run(self) -> None:
        """Ping the engine until it stops for good, or until cancelled."""
        while True:
            try:
                await self._ask()
            except EngineStopped:
                self._asked_s = None
                if not self._worker.returns:
                    return
            await asyncio.sleep(PERIOD_S)

    async def _ask(self) -> None:
        """Ping the engine once. Logs once if a step hangs, and once when it returns. Raises EngineStopped."""
        self._asked_s = time.monotonic()
        answer = asyncio.ensure_future(self._worker.ping())
        await asyncio.wait({answer}, timeout=self._timeout_s)
        if not answer.done():
            logger.error("a step of the engine has been running for more than %g s; /health is 503", self._timeout_s)
            await asyncio.wait({answer})
            logger.warning("the engine's step came back after %.1f s; /health is 200 again", self.silent_s)
        answer.result()
        self._asked_s = None
