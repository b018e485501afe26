"""Occupancy and waves against published tables, and against the driver where there is a GPU."""

import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs

from tilewright.hw.device import device_of
from tilewright.hw.occupancy import limits, occupancy
from tilewright.hw.waves import waves

# (arch, threads, registers, shared bytes) -> blocks, limiter: NVIDIA's occupancy calculator.
PUBLISHED = [
    (80, 256, 32, 0, 8, "registers"),  # 8 by registers and by warps: full
    (80, 1024, 64, 0, 1, "registers"),
    (80, 1024, 65, 0, 0, "too big"),
    (80, 128, 255, 0, 2, "registers"),
    (80, 32, 16, 0, 32, "blocks"),
    (80, 256, 32, 48 << 10, 3, "shared memory"),
    (80, 256, 32, 163 << 10, 1, "shared memory"),
    (80, 256, 32, (163 << 10) + 1, 0, "too big"),
    (86, 256, 32, 0, 6, "warps"),
    (86, 32, 16, 0, 16, "blocks"),
    (86, 128, 40, 99 << 10, 1, "shared memory"),
    (89, 32, 16, 0, 24, "blocks"),
    (89, 768, 40, 0, 2, "registers"),
    (90, 256, 168, 0, 1, "registers"),
    (90, 128, 168, 100 << 10, 2, "shared memory"),
    (90, 384, 168, 227 << 10, 1, "registers"),
    (90, 64, 32, 0, 32, "registers"),
    (100, 128, 128, 113 << 10, 2, "shared memory"),
    (120, 256, 64, 0, 4, "registers"),
    (120, 512, 32, 50 << 10, 1, "shared memory"),
]


@pytest.mark.parametrize(("arch", "threads", "registers", "shared", "blocks", "limiter"), PUBLISHED)
def test_published(arch: int, threads: int, registers: int, shared: int, blocks: int, limiter: str) -> None:
    found = occupancy(arch, threads=threads, registers=registers, shared_bytes=shared)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * -(-threads // 32)
    assert found.fraction == found.warps / limits(arch).warps


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_cliffs_are_where_the_number_of_blocks_changes(arch: int) -> None:
    rng = random.Random(arch)
    for _ in range(200):
        now = {"threads": rng.randint(1, 32) * 32, "registers": rng.randint(16, 255), "shared_bytes": rng.randint(0, 99 << 10)}
        found = occupancy(arch, **now)
        for cliff in found.cliffs:
            key = {"shared memory": "shared_bytes"}.get(cliff.resource, cliff.resource)
            step = (32 if key == "threads" else 1) * (1 if cliff.change > 0 else -1)
            there = occupancy(arch, **{**now, key: now[key] + cliff.change}).blocks
            before = occupancy(arch, **{**now, key: now[key] + cliff.change - step}).blocks
            assert there == cliff.blocks != found.blocks == before
            assert cliff.gained == there - found.blocks


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"arch": 75}, "sm_75.*wanted one of.*nearest is sm_80"),
        ({"threads": 1025}, "1025 threads, wanted 1 to 1024"),
        ({"registers": 256}, "256 registers"),
        ({"shared_bytes": -1}, "-1 bytes"),
    ],
)
def test_bad_input(wrong: dict[str, int], words: str) -> None:
    asked = {"arch": 90, "threads": 128, "registers": 32, "shared_bytes": 0, **wrong}
    with pytest.raises(ValueError, match=words):
        occupancy(asked.pop("arch"), **asked)


@pytest.mark.parametrize(
    ("blocks", "sms", "held", "full", "tail", "count", "efficiency"),
    [
        (98, 108, 1, 0, 98, 1, 98 / 108),  # 1792 x 1792 in tiles of 256 x 128 on an A100
        (120, 108, 1, 1, 12, 2, 120 / 216),  # 1793 x 1793
        (264, 132, 2, 1, 0, 1, 1.0),
        (265, 132, 2, 1, 1, 2, 265 / 528),
        (0, 132, 1, 0, 0, 0, 1.0),
    ],
)
def test_waves(blocks: int, sms: int, held: int, full: int, tail: int, count: int, efficiency: float) -> None:
    found = waves(blocks, sms=sms, blocks_per_sm=held)
    assert (found.full, found.tail, found.waves) == (full, tail, count)
    assert found.efficiency == pytest.approx(efficiency)


def test_waves_bad_input() -> None:
    with pytest.raises(ValueError, match="grid of -1 blocks"):
        waves(-1, sms=132)
    with pytest.raises(ValueError, match="0 SMs"):
        waves(1, sms=0)


# ---- against the driver


def _ptx(live: int, arch: int) -> str:
    """A kernel in which so many registers are alive at once."""
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];" for i in range(live))
    stores = "\n".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{live - 1 - i};" for i in range(live))
    return (
        f".version 8.0\n.target sm_{arch}\n.address_size 64\n.visible .entry k(.param .u64 p)\n{{\n"
        f".reg .f32 %f<{live}>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n{loads}\n{stores}\nret;\n}}\n"
    )


class _Driver:
    """The few calls of the CUDA driver that the question needs."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        assert code == 0, f"{name}: CUDA error {code}"

    def kernel(self, cubin: bytes) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        return function

    def attribute(self, function: ctypes.c_void_p, which: int) -> int:
        value = ctypes.c_int()
        self.call("cuFuncGetAttribute", ctypes.byref(value), which, function)
        return value.value

    def blocks(self, function: ctypes.c_void_p, threads: int, dynamic: int) -> int:
        value = ctypes.c_int()
        ask = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self.call(ask, ctypes.byref(value), function, threads, ctypes.c_size_t(dynamic))
        return value.value


def _kernels(driver: _Driver, arch: int, folder: Path) -> Iterator[tuple[ctypes.c_void_p, int]]:
    """Kernels with many numbers of registers, and how many registers they got."""
    registers, max_dynamic = 4, 8  # CU_FUNC_ATTRIBUTE_NUM_REGS, ..._MAX_DYNAMIC_SHARED_SIZE_BYTES
    for live in range(4, 248, 6):
        source, out = folder / f"k{live}.ptx", folder / f"k{live}.cubin"
        source.write_text(_ptx(live, arch))
        subprocess.run([knobs.nvidia.ptxas.path, f"-arch=sm_{arch}", source, "-o", out], check=True)
        function = driver.kernel(out.read_bytes())
        driver.call("cuFuncSetAttribute", function, max_dynamic, device_of(0).smem_bytes)
        yield function, driver.attribute(function, registers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: nothing to ask the driver about")
def test_equals_the_driver_on_1000_random_cases(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")  # makes the context
    device, driver, rng = device_of(0), _Driver(), random.Random(0)
    kernels = list(_kernels(driver, device.arch, tmp_path))
    assert len({registers for _, registers in kernels}) > 10
    wrong = []
    for _ in range(1000):
        function, registers = rng.choice(kernels)
        threads = rng.randint(1, 1024)
        shared = rng.choice([0, rng.randint(0, 4096), rng.randint(0, device.smem_bytes)])
        mine = occupancy(device.arch, threads=threads, registers=registers, shared_bytes=shared).blocks
        theirs = driver.blocks(function, threads, shared)
        if mine != theirs:
            wrong.append((threads, registers, shared, mine, theirs))
    assert not wrong, f"{len(wrong)} of 1000 differ: (threads, registers, shared, ours, driver) {wrong[:10]}"
