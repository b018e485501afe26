"""How the GPUs and network cards of this machine are connected, in the notation of `nvidia-smi topo -m`:

    X     the device itself
    NV#   # NVLinks
    PIX   at most one PCIe bridge            PXB   several PCIe bridges, not the host's
    PHB   the PCIe host bridge, the CPU      NODE  host bridges of one NUMA node
    SYS   the link between NUMA nodes         ?    unknown

Links between GPUs come from NVML. NVML knows only GPUs, so links to network cards follow from the two devices' paths in sysfs.
Not here: how fast the links are (`hw --measure`), and which other programs use them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.hw.nvml import Gpu, gpus

__all__ = ["Nic", "Topology", "kind_by_path", "topology"]


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network card that supports RDMA."""

    name: str
    """The system's name, such as "mlx5_0"."""
    place: str
    """Its folder in sysfs, whose parent folders are the bridges above it; "" if it is not on a PCI bus."""
    numa: int
    """The NUMA node; -1 if the machine has only one or does not report it."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices, and the kind of link between each pair of them."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    matrix: tuple[tuple[str, ...], ...]
    """Rows and columns: the GPUs, then the network cards."""
    peers: tuple[tuple[tuple[str, ...], ...], ...]
    """Operations that GPU i (row) supports on the memory of GPU j without the host: "read", "write", "atomics", and "nvlink" if
    they use NVLink; empty for i = j."""

    @property
    def names(self) -> list[str]:
        """Row and column headings: GPU0 ..., NIC0 ..."""
        return [f"GPU{g.index}" for g in self.gpus] + [f"NIC{i}" for i in range(len(self.nics))]


def topology(nvml: Any, sysfs: Path = Path("/sys")) -> Topology:
    """The topology, from NVML (the module that `nvml.session` returns) and sysfs."""
    found, nics = gpus(nvml), tuple(_nics(sysfs))
    handles = [nvml.nvmlDeviceGetHandleByIndex(g.index) for g in found]
    places = [_place(sysfs / "bus/pci/devices" / g.pci_id) for g in found]
    places += [(nic.place, nic.numa) for nic in nics]

    def kind(i: int, j: int) -> str:
        if i == j:
            return "X"
        if i < len(found) and j < len(found):
            links = _nvlinks(nvml, found, i, j)
            return f"NV{links}" if links else _ancestor(nvml, handles[i], handles[j])
        return kind_by_path(*places[i], *places[j])

    n = len(places)
    return Topology(
        gpus=tuple(found),
        nics=nics,
        matrix=tuple(tuple(kind(i, j) for j in range(n)) for i in range(n)),
        peers=tuple(
            tuple(tuple(c for c in _PEER if i != j and _peers(nvml, a, b, c)) for j, b in enumerate(handles))
            for i, a in enumerate(handles)
        ),
    )


def _nvlinks(nvml: Any, found: list[Gpu], i: int, j: int) -> int:
    """NVLinks between two GPUs, directly or through switches."""
    far_ends = [[link.remote for link in found[k].links if link.active] for k in (i, j)]
    direct = far_ends[0].count(found[j].pci_id)
    if direct or not _peers(nvml, nvml.nvmlDeviceGetHandleByIndex(i), nvml.nvmlDeviceGetHandleByIndex(j), "nvlink"):
        return direct
    # Every link to a switch reaches every GPU. Old drivers report only a switch's address; virtual machines hide the far ends.
    cards = {gpu.pci_id for gpu in found}
    return min(sum(remote not in cards for remote in remotes) for remotes in far_ends)


# nvmlGpuP2PCapsIndex_t, by number: in pynvml 13 the constant for "read" is a tuple by mistake.
_PEER = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3}


def _peers(nvml: Any, a: Any, b: Any, capability: str) -> bool:
    try:
        return nvml.nvmlDeviceGetP2PStatus(a, b, _PEER[capability]) == nvml.NVML_P2P_STATUS_OK
    except nvml.NVMLError:
        return False


def _ancestor(nvml: Any, a: Any, b: Any) -> str:
    kinds = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
        nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
    }
    try:
        return kinds.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), "?")
    except nvml.NVMLError:
        return "?"


def _nics(sysfs: Path) -> Iterator[Nic]:
    folder = sysfs / "class/infiniband"
    for card in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)) if folder.is_dir() else ():
        place, numa = _place(card / "device")
        yield Nic(name=card.name, place=place, numa=numa)


def _place(device: Path) -> tuple[str, int]:
    """(the folder with its bridges as parents, NUMA node) of a PCI device."""
    if not device.exists():
        return "", -1
    numa = device / "numa_node"
    return str(device.resolve()), int(numa.read_text()) if numa.is_file() else -1


def kind_by_path(place_a: str, numa_a: int, place_b: str, numa_b: int) -> str:
    """The kind of link between two PCI devices, from their folders in sysfs (/sys/devices/pci0000:00/0000:00:01.0/...)."""
    a, b = (_bridges(place) for place in (place_a, place_b))
    if not a or not b:
        return "?"
    if a[0] != b[0]:
        return "NODE" if numa_a == numa_b else "SYS"
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if shared == 1:
        return "PHB"
    # Number of ports between each device and the common switch or bridge: within a single switch it is one each.
    return "PIX" if max(len(a), len(b)) - 1 - shared <= 1 else "PXB"


def _bridges(place: str) -> list[str]:
    """The host bridge, the bridges below it, the device."""
    parts = place.split("/")
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]
