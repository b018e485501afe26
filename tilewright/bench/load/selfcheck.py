"""Checks the load generator against a service in another process whose latencies are known.

For each metric and percentile there are three numbers: the scripted one, the one that the service measured by its own clock (a
busy machine delays it), and that of the load generator. The check passes if the last two differ by at most 2 % everywhere.
"""

import asyncio
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from tilewright.bench.load.config import LoadConfig
from tilewright.bench.load.fake import Script
from tilewright.bench.load.run import load
from tilewright.bench.load.summary import PERCENTILES

__all__ = ["ALLOWED", "Check", "self_check"]

ALLOWED = 0.02


@dataclass(frozen=True)
class Check:
    """One percentile of one metric, in seconds."""

    metric: str
    percentile: str
    scripted_s: float
    done_s: float
    """Measured by the service's own clock."""
    measured_s: float

    @property
    def error(self) -> float:
        """The relative difference of `measured_s` from `done_s`."""
        return self.measured_s / self.done_s - 1

    @property
    def holds(self) -> bool:
        """Whether the error is small enough."""
        return abs(self.error) <= ALLOWED


async def self_check(requests: int = 400, rate: float = 50.0) -> list[Check]:
    """Start the service, load it for `requests` / `rate` seconds, and compare. Raises OSError if it does not start."""
    script = Script(requests=requests)
    command = [sys.executable, "-m", "tilewright.bench.load.fake", "--requests", str(requests)]
    service = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert service.stdout is not None
        url = (await asyncio.wait_for(service.stdout.readline(), 60)).decode().strip()
        if not url:
            raise OSError("the service with known latencies did not start")
        config = LoadConfig(
            rate=f"{rate:g}",
            duration=requests / rate * 1.5,
            warmup=0.0,
            limit=requests,
            prompt_tokens="16",
            arrivals="constant",
        )
        outcome = await load(url, config)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/record") as response:
            record = await response.json()
    finally:
        service.terminate()
        await service.wait()
    return _compare(script, record, outcome.summaries[0].latencies)


def _compare(script: Script, record: list[dict[str, Any]], measured: dict[str, dict[str, float]]) -> list[Check]:
    numbers, last = range(script.requests), script.pieces - 1
    first, gap = ([of(number) for number in numbers] for of in (script.first_s, script.gap_s))
    scripted = {"ttft": first, "itl": gap * last, "tpot": gap, "e2e": [a + last * b for a, b in zip(first, gap)]}
    sent = [(one["came_s"], one["sent_s"]) for one in record]
    done = {
        "ttft": [times[0] - came for came, times in sent],
        "itl": [after - before for _, times in sent for before, after in itertools.pairwise(times)],
        "tpot": [(times[-1] - times[0]) / last for _, times in sent],
        "e2e": [times[-1] - came for came, times in sent],
    }
    return [
        Check(
            metric,
            f"p{p}",
            float(np.percentile(scripted[metric], p)),
            float(np.percentile(done[metric], p)),
            measured[metric][f"p{p}"],
        )
        for metric in scripted
        for p in PERCENTILES
    ]
