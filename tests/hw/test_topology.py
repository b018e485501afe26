"""Links between devices: the logic with a made-up NVML, and the whole against `nvidia-smi topo -m` where there are GPUs."""

import re
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest
import torch

from tests.hw.fake_nvml import FakeNvml
from tilewright.hw import nccl
from tilewright.hw.nvml import NoDriver, session
from tilewright.hw.topology import kind_by_path, topology


def test_eight_gpus_behind_switches(tmp_path: Path) -> None:
    found = topology(FakeNvml([["switch"] * 18 for _ in range(8)]), sysfs=tmp_path)
    assert [row.count("NV18") for row in found.matrix] == [7] * 8
    assert all(found.matrix[i][i] == "X" for i in range(8))
    assert found.names == [f"GPU{i}" for i in range(8)]
    link = found.gpus[0].links[0]
    assert (link.active, link.version, link.mb_per_s, link.remote) == (True, "4.0", 26562, "switch")


def test_links_whose_far_ends_are_hidden(tmp_path: Path) -> None:
    links = [["hidden"] * 18 for _ in range(4)]
    assert topology(FakeNvml(links), sysfs=tmp_path).matrix[0] == ("X", "NV18", "NV18", "NV18")
    nodes = {(i, j): pynvml.NVML_TOPOLOGY_NODE for i in range(4) for j in range(i + 1, 4)}
    apart = topology(FakeNvml(links, nodes, peers=(0, 1)), sysfs=tmp_path)
    assert apart.matrix[0] == ("X", "NODE", "NODE", "NODE")
    assert apart.gpus[0].links[0].remote == "unknown"


def test_direct_links_are_counted_per_pair(tmp_path: Path) -> None:
    links = [["1", "1", "2", "down"], ["0", "0"], ["0"]]
    found = topology(FakeNvml(links, {(1, 2): pynvml.NVML_TOPOLOGY_SYSTEM}), sysfs=tmp_path)
    assert found.matrix == (("X", "NV2", "NV1"), ("NV2", "X", "SYS"), ("NV1", "SYS", "X"))


@pytest.mark.parametrize(
    ("level", "kind"),
    [("SINGLE", "PIX"), ("MULTIPLE", "PXB"), ("HOSTBRIDGE", "PHB"), ("NODE", "NODE"), ("SYSTEM", "SYS")],
)
def test_pcie_levels(tmp_path: Path, level: str, kind: str) -> None:
    fake = FakeNvml([[], []], {(0, 1): getattr(pynvml, f"NVML_TOPOLOGY_{level}")}, peers=(0, 1))
    found = topology(fake, sysfs=tmp_path)
    assert found.matrix == (("X", kind), (kind, "X"))
    assert found.peers == (((), ("read", "write")), (("read", "write"), ()))


ROOT = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"


@pytest.mark.parametrize(
    ("a", "numa_a", "b", "numa_b", "kind"),
    [
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, f"{ROOT}/0000:02:01.0/0000:04:00.0", 0, "PIX"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, f"{ROOT}/0000:02:01.0/0000:05:00.0/0000:06:00.0/0000:07:00.0", 0, "PXB"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:00/0000:00:02.0/0000:08:00.0", 0, "PHB"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:80/0000:80:02.0/0000:88:00.0", 0, "NODE"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "/sys/devices/pci0000:80/0000:80:02.0/0000:88:00.0", 1, "SYS"),
        (f"{ROOT}/0000:02:00.0/0000:03:00.0", 0, "", 0, "?"),
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


def test_folders_of_the_dynamic_loader(tmp_path: Path) -> None:
    more = tmp_path / "ld.so.conf.d"
    more.mkdir()
    config = tmp_path / "ld.so.conf"
    config.write_text("include ld.so.conf.d/*.conf\n# a comment\n\n/opt/lib\n")
    (more / "b.conf").write_text("/opt/b # why\n")
    (more / "a.conf").write_text(f"/opt/a\ninclude {tmp_path}/else.conf\n")
    (tmp_path / "else.conf").write_text("/opt/else")
    folders = [str(folder) for folder in nccl.configured_folders(config)]
    assert folders == ["/opt/a", "/opt/else", "/opt/b", "/opt/lib"]
    assert not list(nccl.configured_folders(tmp_path / "none"))


def _smi_matrix(text: str) -> dict[str, dict[str, str]]:
    """Of `nvidia-smi topo -m`: name -> name -> kind. Network cards by their own names."""
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in text.splitlines()]
    cards = dict(re.findall(r"^\s*(NIC\d+): (\S+)", "\n".join(lines), re.MULTILINE))
    names = [word for word in lines[0].split() if re.fullmatch(r"(GPU|NIC)\d+", word)]
    rows = [line.split() for line in lines[1:]]
    called = {name: cards.get(name, name) for name in names}
    return {called[r[0]]: dict(zip(called.values(), r[1:], strict=False)) for r in rows if r and r[0] in names}


def test_the_matrix_of_nvidia_smi_is_read() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-47\t0\nGPU1\tNV18\t X \tSYS\t48-95\t1\nNIC0\tPIX\tSYS\t X \t\t\n\n"
        "Legend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_3\n"
    )
    assert _smi_matrix(text) == {
        "GPU0": {"GPU0": "X", "GPU1": "NV18", "mlx5_3": "PIX"},
        "GPU1": {"GPU0": "NV18", "GPU1": "X", "mlx5_3": "SYS"},
        "mlx5_3": {"GPU0": "PIX", "GPU1": "SYS", "mlx5_3": "X"},
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: no matrix to compare")
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi here to compare with")
def test_matrix_equals_nvidia_smi() -> None:
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True)
    want = _smi_matrix(done.stdout)
    with session() as nvml:
        found = topology(nvml)
    names = [f"GPU{gpu.index}" for gpu in found.gpus] + [nic.name for nic in found.nics]
    mine = {a: dict(zip(names, row, strict=True)) for a, row in zip(names, found.matrix, strict=True)}
    assert mine == want
