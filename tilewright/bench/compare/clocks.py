"""Ways to time a program: a call as a user sees it, the host's part of it, or the device's part alone."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.compare.engine import Settings
from tilewright.hw.device import device_of

__all__ = ["Behind", "empty_caches", "launched", "timed"]


def timed(call: Callable[[], Any], calls: int, settings: Settings) -> float:
    """Seconds of `calls` calls by `settings.clock`; on a GPU each call is waited for."""
    device, total = settings.device, 0.0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if not settings.host_clock:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(calls):
                start.record()
                call()
                end.record()
                end.synchronize()
                total += start.elapsed_time(end) * 1e-3
            return total
    began = time.perf_counter()
    for _ in range(calls):
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - began


def launched(call: Callable[[], Any], calls: int, settings: Settings) -> float:
    """Seconds of `calls` calls until each returns, on a GPU without other work."""
    total = 0.0
    for _ in range(calls):
        torch.cuda.synchronize(settings.device)
        began = time.perf_counter()
        call()
        total += time.perf_counter() - began
    torch.cuda.synchronize(settings.device)
    return total


class Behind:
    """Measures the device's time of a call, by letting the GPU begin only when the host has started all of its work.

    Before a call the device gets other work, which lasts as long as the host needs to start the call's work. If it did not last
    long enough, the call does not count and the lead grows. A call that waits for the device inside is never ahead of it; its
    time is the one with the longest lead.
    """

    _FIRST, _GROWS, _MOST = 1.25, 1.5, 8.0
    """Leads in calls of the host."""
    _CYCLES_PER_S = 2e9
    """Cycles per second with which the lead is computed; on a faster processor the lead is shorter at first."""

    def __init__(self, call: Callable[[], Any], settings: Settings):
        self._call, self._device = call, settings.device
        self._host_s = launched(call, 3, settings) / 3
        self._lead = self._FIRST

    def time(self, calls: int, *, cold: bool = False) -> float:
        """Device seconds of `calls` calls; `cold`: each begins with empty caches."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        total, counted = 0.0, 0
        while counted < calls:
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(int(self._lead * self._host_s * self._CYCLES_PER_S))  # pyright: ignore[reportPrivateUsage]
            if cold:
                empty_caches(self._device)
            start.record()
            self._call()
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or self._lead >= self._MOST:
                total += start.elapsed_time(end) * 1e-3
                counted += 1
            else:
                self._lead = min(self._GROWS * self._lead, self._MOST)
        return total


@cache
def _filling(device: torch.device) -> Tensor:
    return torch.zeros(2 * device_of(device.index or 0).l2_bytes, dtype=torch.int8, device=device)


def empty_caches(device: torch.device) -> None:
    """Fill a GPU's L2 with unused data by reading: written data would be moved to memory while a call is timed."""
    torch.amax(_filling(device).view(torch.int32))
