"""The current state of the machine: load, clocks, other users of the GPU.

Two states, before and after a measurement, show how much of the processor others used in between. Values that a machine does
not report (no /proc, no frequency governor, no driver) are None or absent, never guessed.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.hw import nvml

__all__ = ["State", "others_share", "state"]

_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
# nvmlClocksEventReasons.
_POWER_CAP = 0x04
"""The power limit lowers the clock. This is normal for a busy card, and not a disturbance."""
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Reasons for an unintended slowdown."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The machine at one moment."""

    at: float
    """`time.monotonic()`."""
    load: float | None
    """Processes that run or wait to run, average over a minute."""
    ticks: tuple[int, int] | None
    """Clock ticks of all processors since boot: (busy, total)."""
    own_ticks: int
    """The busy ticks of this process and its descendants."""
    governor: str | None
    """The governor of the processor's frequency: "performance", "powersave" ..."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """"sm", "memory", "sm_max", "memory_max" in MHz; "slowdowns" (unintended reasons); "power_capped" (whether the power limit
    lowers the clock); "processes" (number of processes that use the GPU); or empty."""


def state(cuda: int | None = None) -> State:
    """The state now; `cuda` is the index of the GPU to look at. Takes a few milliseconds."""
    return State(
        at=time.monotonic(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        ticks=_ticks(),
        own_ticks=_own_ticks(),
        governor=_GOVERNOR.read_text().strip() if _GOVERNOR.is_file() else None,
        gpu={} if cuda is None else _gpu(cuda),
    )


def others_share(before: State, after: State) -> float | None:
    """The share of all processors that others used between two states, 0 to 1; None if the system does not report it."""
    if before.ticks is None or after.ticks is None or after.ticks[1] <= before.ticks[1]:
        return None
    busy, total = (b - a for a, b in zip(before.ticks, after.ticks))
    # The ticks of a descendant that ended without being waited for are lost.
    own = max(after.own_ticks - before.own_ticks, 0)
    return min(max(busy - own, 0) / total, 1.0)


def _ticks() -> tuple[int, int] | None:
    path = Path("/proc/stat")
    if not path.is_file():
        return None
    # user nice system idle iowait irq softirq steal; guest time, the rest of the line, is in user time already.
    fields = [int(text) for text in path.read_text().partition("\n")[0].split()[1:9]]
    return sum(fields) - sum(fields[3:5]), sum(fields)


def _own_ticks() -> int:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # it ended meanwhile
            continue
        # The name in brackets may contain anything, also brackets.
        fields = text.rpartition(")")[2].split()
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(number) for number in fields[11:15])
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks.get(pid, 0) for pid in own)


def _gpu(index: int) -> dict[str, Any]:
    try:
        clocks = nvml.clocks_mhz(index)
        slowdowns, processes = nvml.disturbances(index)
    except nvml.NoDriver:
        return {}
    reasons = [text for bit, text in _SLOWDOWNS.items() if slowdowns & bit]
    return {**clocks, "slowdowns": reasons, "power_capped": bool(slowdowns & _POWER_CAP), "processes": processes}
