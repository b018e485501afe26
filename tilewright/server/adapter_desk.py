"""Handles the fronts' requests about the LoRA adapters of an engine process: list, load, unload.

A thread reads the folders while the engine steps, and an adapter is added to the engine between two steps. The list of loaded
adapters is saved in a file, so that an engine that is started again gets the adapters of the one before.
"""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.core import Engine
from tilewright.server.wire import WireError

__all__ = ["AdapterDesk"]

MAX_WAITING = 64
"""Most folders that wait to be read."""
VERBS = ("list", "load", "unload")
FILE = "adapters.json"

logger = logging.getLogger(__name__)


class AdapterDesk:
    """Handles adapter requests for one engine, in the engine's thread.

    Args:
        home: the private folder of the server, where the list of adapters is saved; None: it is not saved.
    """

    def __init__(self, engine: Engine, home: Path | None):
        self._engine, self._file = engine, None if home is None else home / FILE
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilewright-adapters")
        self._reading: list[tuple[bytes, int, str, str, Future[Any]]] = []
        self._answered: list[tuple[bytes, int, Any]] = []
        self._restore()

    @property
    def busy(self) -> bool:
        """Whether a folder is being read."""
        return bool(self._reading)

    def ask(self, front: bytes, number: int, verb: str, name: str, folder: str) -> None:
        """Handle a front's request. Its answer appears in `answers`, for "load" once the folder is read. Raises WireError."""
        if verb not in VERBS:
            raise WireError(f"a request about adapters is {verb[:30]!r}, wanted one of {', '.join(VERBS)}")
        adapters = self._engine.adapters
        if verb == "load" and adapters is not None and len(self._reading) < MAX_WAITING:
            self._reading.append((front, number, name, folder, self._thread.submit(adapters.read, folder)))
            return
        try:
            answer = self._now(verb, name)
        except ValueError as error:
            answer = error
        self._answered.append((front, number, answer))

    def _now(self, verb: str, name: str) -> Any:
        adapters = self._engine.adapters
        if verb == "list":
            return [] if adapters is None else list(adapters.names)
        if verb == "load":
            if adapters is not None:
                raise ValueError(f"{MAX_WAITING} adapters are already waiting to be read; try again later")
            raise ValueError("this server has no room for adapters; start it with --max-adapters")
        if adapters is None:
            raise UnknownAdapter(f"there is no adapter {name[:200]!r} here")
        adapters.remove(name)
        self._keep()
        return None

    def answers(self) -> Iterator[tuple[bytes, int, Any]]:
        """Yield (front, number, the answer or the error) of finished requests. Call it between two steps."""
        waiting, self._reading = self._reading, []
        for front, number, name, folder, read in waiting:
            if self._reading or not read.done():  # answers keep the order of their questions
                self._reading.append((front, number, name, folder, read))
                continue
            try:
                self._engine.hold_adapter(name, read.result(), folder)
                self._keep()
                self._answered.append((front, number, None))
            except (ValueError, OSError) as error:
                self._answered.append((front, number, error))
        done, self._answered = self._answered, []
        yield from done

    def close(self) -> None:
        """End the thread after the folder that it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _keep(self) -> None:
        adapters = self._engine.adapters
        if self._file is not None and adapters is not None:
            held = {name: adapters.get(name).folder for name in adapters.names}
            temporary = self._file.with_suffix(".new")
            temporary.write_text(json.dumps(held))
            temporary.replace(self._file)

    def _restore(self) -> None:
        """Load the adapters of the saved list, which an earlier engine process wrote, and unload all others."""
        adapters = self._engine.adapters
        if self._file is None or adapters is None or not self._file.exists():
            return
        wanted = json.loads(self._file.read_text())
        for name in adapters.names:
            if name not in wanted:
                adapters.remove(name)
        for name, folder in wanted.items():
            if name not in adapters.names:
                try:
                    self._engine.hold_adapter(name, adapters.read(folder), folder)
                except (ValueError, OSError) as error:
                    logger.error("the adapter %s is no longer there: %s", name, error)
