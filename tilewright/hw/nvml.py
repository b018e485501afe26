"""The GPUs of this machine as reported by the driver's management library (NVML), through nvidia-ml-py.

NVML lists all GPUs of the machine; CUDA lists those that the process may see. They are matched by PCI address.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from tilewright.hw.device import pci_id

__all__ = [
    "Gpu",
    "Link",
    "NoDriver",
    "clocks_mhz",
    "cuda_version",
    "disturbances",
    "driver_version",
    "gpus",
    "power_w",
    "session",
]


# nvmlNvlinkVersion_t
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}


class NoDriver(RuntimeError):
    """There is no NVIDIA driver, or it does not answer; the message has NVML's error."""


@contextmanager
def session() -> Iterator[Any]:
    """The module pynvml, ready for calls. Raises NoDriver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(f"no NVIDIA driver answers here ({error})") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """The driver's version, such as "580.159.04". Raises NoDriver."""
    with session() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


def cuda_version(nvml: Any) -> str:
    """The newest CUDA version that the driver supports, such as "13.0"."""
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{number // 1000}.{number % 1000 // 10}"


def clocks_mhz(index: int) -> dict[str, int]:
    """Current and highest clocks of a CUDA device: "sm", "memory", "sm_max", "memory_max". Raises NoDriver."""
    with session() as nvml:
        return _clocks(nvml, nvml.nvmlDeviceGetHandleByPciBusId(pci_id(index)))


def disturbances(index: int) -> tuple[int, int]:
    """Reasons for a CUDA device's current clocks (bits of nvmlClocksEventReasons), and the number of processes that use it."""
    with session() as nvml:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_id(index))
        reasons = _try(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        processes = _try(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return reasons or 0, len(processes or [])


def power_w(index: int) -> dict[str, float]:
    """Power of a CUDA device in watts: "drawn", "limit"; values that it does not report are absent. Raises NoDriver."""
    with session() as nvml:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_id(index))
        asked = {"drawn": nvml.nvmlDeviceGetPowerUsage, "limit": nvml.nvmlDeviceGetEnforcedPowerLimit}
        milliwatts = {name: _try(nvml, lambda ask=ask: ask(handle)) for name, ask in asked.items()}
        return {name: mw / 1000 for name, mw in milliwatts.items() if mw is not None}


@dataclass(frozen=True, kw_only=True)
class Link:
    """One NVLink of a GPU."""

    index: int
    active: bool
    version: str
    mb_per_s: int | None
    """Megabytes per second in one direction."""
    remote: str
    """"switch", the PCI address of a GPU, or "unknown"."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of the machine, visible to this process or not."""

    index: int
    name: str
    arch: int
    pci_id: str
    memory_bytes: int
    clocks_mhz: dict[str, int]
    power_limit_w: float | None
    links: tuple[Link, ...]
    """All links of the GPU, active or not."""


def gpus(nvml: Any) -> list[Gpu]:
    """All GPUs, in NVML's order, which is by PCI address."""
    return [_gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    limit = _try(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return Gpu(
        index=index,
        name=str(nvml.nvmlDeviceGetName(handle)),
        arch=10 * major + minor,
        pci_id=short_pci(nvml.nvmlDeviceGetPciInfo(handle).busId),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        clocks_mhz=_clocks(nvml, handle),
        power_limit_w=None if limit is None else limit / 1000,
        links=tuple(_links(nvml, handle)),
    )


def short_pci(address: str | bytes) -> str:
    """NVML's "00000000:1B:00.0" in the system's form: "0000:1b:00.0"."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, rest = text.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _clocks(nvml: Any, handle: Any) -> dict[str, int]:
    kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    now = {name: _try(nvml, lambda k=kind: nvml.nvmlDeviceGetClockInfo(handle, k)) for name, kind in kinds.items()}
    most = {f"{name}_max": _try(nvml, lambda k=kind: nvml.nvmlDeviceGetMaxClockInfo(handle, k)) for name, kind in kinds.items()}
    return {name: mhz for name, mhz in {**now, **most}.items() if mhz is not None}


def _links(nvml: Any, handle: Any) -> Iterator[Link]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _try(nvml, lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))
        if state is None:
            continue
        active = state == nvml.NVML_FEATURE_ENABLED
        version = _try(nvml, lambda link=link: nvml.nvmlDeviceGetNvLinkVersion(handle, link))
        yield Link(
            index=link,
            active=active,
            version=_VERSIONS.get(version, "unknown"),
            mb_per_s=_link_speed(nvml, handle, link) if active else None,
            remote=_remote(nvml, handle, link) if active else "unknown",
        )


def _link_speed(nvml: Any, handle: Any, link: int) -> int | None:
    values = _try(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)]))
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _remote(nvml: Any, handle: Any, link: int) -> str:
    kind = _try(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return "switch"
    info = _try(nvml, lambda: nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return "unknown" if info is None else short_pci(info.busId)


def _try(nvml: Any, ask: Any) -> Any:
    """The answer, or None if the driver returns an error for this GPU."""
    try:
        return ask()
    except nvml.NVMLError:
        return None
