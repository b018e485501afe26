"""A made-up NVML: as much of the module pynvml as is asked of it, for machines that are not there."""

from types import SimpleNamespace
from typing import Any

import pynvml


class FakeNvml:
    """GPUs on PCI addresses 0000:01:00.0, 0000:02:00.0 ...; `links[i]` are the far ends of GPU i's NVLinks.

    A far end is a GPU's number, "switch", "down", or "hidden" (in a virtual machine). `peers` is what `nvmlDeviceGetP2PStatus`
    grants, by NVML's number.
    """

    NVMLError = pynvml.NVMLError

    def __init__(
        self, links: list[list[str]], ancestors: dict[tuple[int, int], int] | None = None, peers: tuple[int, ...] = (0, 1, 2, 3)
    ):
        self._links, self._ancestors, self._peers = links, ancestors or {}, peers

    def __getattr__(self, name: str) -> Any:
        if name.isupper() or name.startswith("NVML_"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self._links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle + 1:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1755

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self._links[handle]):
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(self._links[handle][link] != "down")

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return 6

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        if self._links[handle][link] == "hidden":
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 2 if self._links[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        if self._links[handle][link] == "hidden":
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(busId=f"00000000:{int(self._links[handle][link]) + 1:02X}:00.0")

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        assert isinstance(capability, int), "the driver takes a number"
        return pynvml.NVML_P2P_STATUS_OK if capability in self._peers else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self._ancestors[min(a, b), max(a, b)]
