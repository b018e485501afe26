"""Links between devices: the logic with a made-up NVML, and the whole against `nvidia-smi topo -m` where there are GPUs."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tilewright.hw import nccl
from tilewright.hw.nvml import NoDriver, session
from tilewright.hw.topology import kind_by_path, topology


class FakeNvml:
    """GPUs on PCI addresses 0000:01:00.0, 0000:02:00.0 ...; `links[i]` are the far ends of GPU i's NVLinks."""

    NVMLError = pynvml.NVMLError

    def __init__(self, links: list[list[str]], ancestors: dict[tuple[int, int], int] | None = None):
        self._links, self._ancestors = links, ancestors or {}

    def __getattr__(self, name: str) -> Any:
        if name.isupper() or name.startswith("NVML_"):
            return getattr(pynvml, name)
        raise AttributeError(name)

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
        return 2 if self._links[handle][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{int(self._links[handle][link]) + 1:02X}:00.0")

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        return pynvml.NVML_P2P_STATUS_OK

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self._ancestors[min(a, b), max(a, b)]


def test_eight_gpus_behind_switches(tmp_path: Path) -> None:
    found = topology(FakeNvml([["switch"] * 18 for _ in range(8)]), sysfs=tmp_path)
    assert [row.count("NV18") for row in found.matrix] == [7] * 8
    assert all(found.matrix[i][i] == "X" for i in range(8))
    assert found.names == [f"GPU{i}" for i in range(8)]
    link = found.gpus[0].links[0]
    assert (link.active, link.version, link.mb_per_s, link.remote) == (True, "4.0", 26562, "switch")


def test_direct_links_are_counted_per_pair(tmp_path: Path) -> None:
    links = [["1", "1", "2", "down"], ["0", "0"], ["0"]]
    found = topology(FakeNvml(links, {(1, 2): pynvml.NVML_TOPOLOGY_SYSTEM}), sysfs=tmp_path)
    assert found.matrix == (("X", "NV2", "NV1"), ("NV2", "X", "SYS"), ("NV1", "SYS", "X"))


@pytest.mark.parametrize(
    ("level", "kind"),
    [("SINGLE", "PIX"), ("MULTIPLE", "PXB"), ("HOSTBRIDGE", "PHB"), ("NODE", "NODE"), ("SYSTEM", "SYS")],
)
def test_pcie_levels(tmp_path: Path, level: str, kind: str) -> None:
    found = topology(FakeNvml([[], []], {(0, 1): getattr(pynvml, f"NVML_TOPOLOGY_{level}")}), sysfs=tmp_path)
    assert found.matrix == (("X", kind), (kind, "X"))
    assert found.peer_access == ((True, True), (True, True))


ROOT = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


@pytest.mark.parametrize(
    ("a", "numa_a", "b", "numa_b", "kind"),
    [
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, f"{ROOT}/0000:02:01.0/0000:04:00.0", 0, "PIX"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, f"{ROOT}/0000:02:01.0/0000:05:00.0/0000:06:00.0/0000:07:00.0", 0, "PXB"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:00/0000:00:02.0/0000:08:00.0", 0, "PHB"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:80/0000:80:02.0/0000:88:00.0", 0, "NODE"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:80/0000:80:02.0/0000:88:00.0", 1, "SYS"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "", 0, "SYS"),
    ],
)
def test_kind_by_path(a: str, numa_a: int, b: str, numa_b: int, kind: str) -> None:
    assert kind_by_path(a, numa_a, b, numa_b) == kind == kind_by_path(b, numa_b, a, numa_a)


def test_network_cards_come_from_sysfs(tmp_path: Path) -> None:
    bridge = tmp_path / "devices/pci0000:00/0000:00:01.0"
    for address in ("0000:01:00.0", "0000:05:00.0"):
        (bridge / address).mkdir(parents=True)
        (bridge / address / "numa_node").write_text("0\n")
    pci, ib = tmp_path / "bus/pci/devices", tmp_path / "class/infiniband/mlx5_0"
    pci.mkdir(parents=True)
    ib.mkdir(parents=True)
    (pci / "0000:01:00.0").symlink_to(bridge / "0000:01:00.0")
    (ib / "device").symlink_to(bridge / "0000:05:00.0")
    found = topology(FakeNvml([[]]), sysfs=tmp_path)
    assert (found.names, [nic.name for nic in found.nics]) == (["GPU0", "NIC0"], ["mlx5_0"])
    assert found.matrix == (("X", "PIX"), ("PIX", "X"))


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    with pytest.raises(NoDriver, match="no NVIDIA driver answers here"), session():
        pass


def test_nccl_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF..NCCL version 2.28.9+cuda13.0\0")
    (tmp_path / "libnccl.so.1").write_bytes(b"broken")
    (tmp_path / "libnccl-net.so").write_bytes(b"NCCL version 9.9.9")
    (tmp_path / "libnccl.so.0").write_bytes(b"")
    monkeypatch.setattr(nccl, "_folders", lambda: iter([tmp_path]))
    found = {Path(n.path).name: (n.version, n.loaded) for n in nccl.installed()}
    want = {"libnccl.so.2": ("2.28.9", False), "libnccl.so.1": ("unknown", False), "libnccl.so.0": ("unknown", False)}
    assert {name: found[name] for name in want} == want
    assert "libnccl-net.so" not in found


def _smi_matrix(text: str) -> dict[str, dict[str, str]]:
    """Of `nvidia-smi topo -m`: name -> name -> kind."""
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in text.splitlines()]
    names = [word for word in lines[0].split() if re.fullmatch(r"(GPU|NIC)\d+", word)]
    rows = (line.split() for line in lines[1:])
    return {row[0]: dict(zip(names, row[1:], strict=False)) for row in rows if row and row[0] in names}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: no matrix to compare")
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi here to compare with")
def test_matrix_equals_nvidia_smi() -> None:
    done = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, env={**os.environ, "TERM": "dumb"}
    )
    want = _smi_matrix(done.stdout)
    with session() as nvml:
        found = topology(nvml)
    mine = {a: dict(zip(found.names, row, strict=True)) for a, row in zip(found.names, found.matrix, strict=True)}
    assert mine == want
