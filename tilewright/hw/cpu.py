"""The processor of this machine."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor's properties, as the system reports them."""

    name: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int
    """All memory of the machine, in bytes."""


def cpu() -> Cpu:
    """The processor, as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Cpu(
        name=names[0] if names else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
