"""The engine's state for the web page: requests, page pool, counters. It contains only numbers, never the text of a request.

A snapshot is made in the engine's thread, between two steps, so it must be cheap. The page map of a pool of 100000 pages costs
5 ms. Therefore it is updated only so often that it costs at most `MAX_SHARE` of the time.
"""

import json
import time
from dataclasses import asdict
from itertools import groupby, islice
from typing import Any

from tilewright.engine.core import Engine
from tilewright.engine.request import Request
from tilewright.server.steps import StepLog

__all__ = ["LiveView"]

MAX_CELLS = 2048
"""Most cells in the web page's grid. In a larger pool several KV-cache pages share one cell."""
MAX_LISTED = 64
"""Most requests that are listed of each kind (running, waiting); the rest is only counted."""
FREE, KEPT = -1, -2
"""Values for cells that no slot owns: free, or kept for reuse."""
_NUMBERS = {"free": FREE, "cached": KEPT}
MAX_SHARE = 0.01
"""Largest share of the engine thread's time for page maps."""
MIN_INTERVAL_S = 0.1


class LiveView:
    """Makes snapshots of one engine; several viewers share them."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._steps = StepLog.of(engine)
        self._map: dict[str, Any] = {}
        self._map_again_s = 0.0
        self._made = b""
        self._made_again_s = 0.0

    def snapshot(self) -> bytes:
        """The state as JSON. Call it in the engine's thread."""
        now_s = time.perf_counter()
        if now_s >= self._made_again_s:
            self._made = json.dumps(self._state(now_s)).encode()
            self._made_again_s = now_s + MIN_INTERVAL_S
        return self._made

    def _state(self, now_s: float) -> dict[str, Any]:
        scheduler = self._engine.scheduler
        if now_s >= self._map_again_s:
            # Processor time: time in which this thread only waited for other threads is not counted.
            before_s = time.thread_time()
            self._map = self._page_map()
            self._map_again_s = now_s + (time.thread_time() - before_s) / MAX_SHARE
        return {
            "time_s": now_s,
            "running": [_listed(request) for request in islice(scheduler.running, MAX_LISTED)],
            "waiting": [_listed(request) for request in islice(scheduler.waiting, MAX_LISTED)],
            "stats": asdict(scheduler.stats()),
            "pages": self._map,
            "steps": self._steps.last(),
        }

    def _page_map(self) -> dict[str, Any]:
        """The pool as runs of equal cells: (slot of the owner, or -1 free, or -2 kept for reuse; owners; number of cells)."""
        scheduler = self._engine.scheduler
        per_cell = -(-scheduler.blocks.num_pages // MAX_CELLS)
        runs = [
            (_NUMBERS.get(state, state), owners, len(list(equal)))  # type: ignore[arg-type]
            for (state, owners), equal in groupby(scheduler.page_map(per_cell))
        ]
        return {"page_size": scheduler.blocks.page_size, "per_cell": per_cell, "runs": runs}


def _listed(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "index": request.index,
        "slot": request.slot,
        "prompt": len(request.prompt_ids),
        "cached": request.cached,
        "output": request.generated,
        "max": request.max_tokens,
        "pages": len(request.pages),
    }
