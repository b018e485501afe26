"""Occupancy and waves against published tables, and against the driver where there is a GPU."""

import ctypes
import doctest
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton import knobs

from tilewright.hw.device import device_of
from tilewright.hw.occupancy import limits, occupancy
from tilewright.hw.waves import waves

ARCHS = (80, 86, 87, 89, 90, 100, 103, 120, 121)
# (threads, registers, shared bytes, barriers, carve-out) -> blocks on each of ARCHS, as NVIDIA's occupancy calculator says:
# cudaOccMaxActiveBlocksPerMultiprocessor of cuda_occupancy.h, version 12.1 in CUDA 13.
CALCULATOR = [
    ((1, 255, 0, 0, None), (8, 8, 8, 8, 8, 8, 8, 8, 8)),
    ((32, 16, 0, 0, None), (32, 16, 16, 24, 32, 32, 32, 24, 24)),
    ((33, 33, 1, 0, None), (24, 16, 16, 24, 24, 24, 24, 24, 24)),
    ((64, 40, 3000, 0, None), (24, 16, 16, 24, 24, 24, 24, 24, 24)),
    ((96, 168, 0, 0, None), (4, 4, 4, 4, 4, 4, 4, 4, 4)),
    ((100, 40, 0, 0, None), (12, 12, 12, 12, 12, 12, 12, 12, 12)),
    ((128, 64, 16384, 0, None), (8, 5, 8, 5, 8, 8, 8, 5, 5)),
    ((128, 64, 49152, 0, None), (3, 2, 3, 2, 4, 4, 4, 2, 2)),
    ((128, 128, 40000, 0, None), (4, 2, 4, 2, 4, 4, 4, 2, 2)),
    ((160, 96, 0, 0, None), (4, 4, 4, 4, 4, 4, 4, 4, 4)),
    ((192, 80, 20000, 0, None), (4, 4, 4, 4, 4, 4, 4, 4, 4)),
    ((256, 32, 0, 0, None), (8, 6, 6, 6, 8, 8, 8, 6, 6)),
    ((256, 128, 65536, 0, None), (2, 1, 2, 1, 2, 2, 2, 1, 1)),
    ((256, 255, 0, 0, None), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((288, 56, 0, 0, None), (4, 4, 4, 4, 4, 4, 4, 4, 4)),
    ((384, 168, 100000, 0, None), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((416, 72, 5000, 0, None), (2, 2, 2, 2, 2, 2, 2, 2, 2)),
    ((512, 24, 9000, 0, None), (4, 3, 3, 3, 4, 4, 4, 3, 3)),
    ((640, 48, 1024, 0, None), (2, 2, 2, 2, 2, 2, 2, 2, 2)),
    ((768, 40, 0, 0, None), (2, 2, 2, 2, 2, 2, 2, 2, 2)),
    ((1024, 32, 33000, 0, None), (2, 1, 1, 1, 2, 2, 2, 1, 1)),
    ((1024, 64, 0, 0, None), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((1024, 65, 0, 0, None), (0, 0, 0, 0, 0, 0, 0, 0, 0)),
    ((992, 72, 0, 0, None), (0, 0, 0, 0, 0, 0, 0, 0, 0)),
    ((896, 72, 0, 0, None), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((128, 32, 7000, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((128, 32, 7000, 0, 10), (4, 2, 4, 2, 4, 4, 4, 2, 2)),
    ((128, 32, 7000, 0, 50), (12, 8, 12, 8, 16, 16, 16, 8, 8)),
    ((128, 32, 7169, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((64, 24, 0, 0, 0), (8, 8, 8, 8, 8, 8, 8, 8, 8)),
    ((128, 32, 70000, 0, 25), (1, 1, 1, 1, 1, 1, 1, 1, 1)),
    ((128, 32, 0, 1, None), (16, 12, 12, 12, 16, 16, 16, 12, 12)),
    ((128, 32, 0, 3, None), (16, 12, 12, 12, 16, 16, 10, 8, 8)),
    ((256, 64, 0, 9, None), (4, 4, 4, 4, 4, 4, 3, 2, 2)),
    ((128, 168, 32768, 16, None), (3, 3, 3, 3, 3, 3, 2, 1, 1)),
]

# (arch, threads, registers, shared bytes) -> blocks, limiter.
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


@pytest.mark.parametrize(("asked", "blocks"), CALCULATOR, ids=str)
def test_equals_the_calculator(asked: tuple[int, int, int, int, int | None], blocks: tuple[int, ...]) -> None:
    threads, registers, shared, barriers, carveout = asked
    mine = [
        occupancy(a, threads=threads, registers=registers, shared_bytes=shared, barriers=barriers, carveout=carveout)
        for a in ARCHS
    ]
    assert tuple(found.blocks for found in mine) == blocks


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_memory_to_the_last_byte(arch: int) -> None:
    sm = limits(arch)

    def held(shared: int) -> int:
        return occupancy(arch, threads=32, registers=32, shared_bytes=shared).blocks

    half = sm.shared_bytes // 2 - 1024
    assert [held(n) for n in (half, half + 1, sm.block_shared_bytes, sm.block_shared_bytes + 1)] == [2, 1, 1, 0]


def test_cliffs_in_words() -> None:
    found = occupancy(90, threads=256, registers=132, shared_bytes=65536)
    assert [str(cliff) for cliff in found.cliffs] == [
        "4 registers fewer: 1 more block per SM",
        "166913 bytes of shared memory more: no block fits",
        "64 threads fewer: 1 more block per SM",
        "160 threads more: no block fits",
    ]
    two = occupancy(80, threads=128, registers=81, shared_bytes=0).cliffs[0]
    assert str(two) == "1 register fewer: 1 more block per SM"


@pytest.mark.parametrize("arch", ARCHS)
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
        ({"barriers": 17}, "17 barriers"),
        ({"carveout": 101}, "101 percent"),
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


def test_the_documented_example_of_waves() -> None:
    found = doctest.testmod(sys.modules[waves.__module__])
    assert (found.attempted, found.failed) == (2, 0)


@pytest.mark.parametrize(("n", "tiles", "count"), [(1792, 98, 1), (1793, 120, 2)])
def test_one_row_more_is_one_wave_more(n: int, tiles: int, count: int) -> None:
    """A product n x n x n in tiles of 256 x 128 on an A100."""
    blocks = -(-n // 256) * -(-n // 128)
    assert (blocks, waves(blocks, sms=108).waves) == (tiles, count)


def test_waves_bad_input() -> None:
    with pytest.raises(ValueError, match="grid of -1 blocks"):
        waves(-1, sms=132)
    with pytest.raises(ValueError, match="0 SMs"):
        waves(1, sms=0)


# ---- against the driver


def _ptx(live: int, arch: int, barriers: int = 0) -> str:
    """A kernel in which so many registers are alive at once, and that has so many named barriers.

    Left alone, ptxas takes more registers where that costs no block: `maxnreg` gives every number a kernel.
    """
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%rd1+{4 * i}];" for i in range(live))
    stores = "\n".join(f"st.volatile.global.f32 [%rd1+{4 * i}], %f{live - 1 - i};" for i in range(live))
    waits = "\n".join(f"bar.sync {i};" for i in range(barriers))
    return (
        f".version 8.0\n.target sm_{arch}\n.address_size 64\n.visible .entry k(.param .u64 p)\n"
        f".maxnreg {max(16, live + 12)}\n{{\n"
        f".reg .f32 %f<{live}>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n{loads}\n{waits}\n{stores}\nret;\n}}\n"
    )


class _Driver:
    """The few calls of the CUDA driver that the question needs, and kernels to ask about."""

    REGISTERS, MAX_DYNAMIC, CARVEOUT = 4, 8, 9  # CU_FUNC_ATTRIBUTE_NUM_REGS, ..._PREFERRED_SHARED_MEMORY_CARVEOUT

    def __init__(self, folder: Path) -> None:
        torch.zeros(1, device="cuda")  # makes the context
        self._cuda, self._folder, self.device = ctypes.CDLL("libcuda.so.1"), folder, device_of(0)

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        assert code == 0, f"{name}: CUDA error {code}"

    def kernel(self, live: int, barriers: int = 0) -> tuple[ctypes.c_void_p, int]:
        """(a kernel, the registers that it got)."""
        source, out = (self._folder / f"k{live}-{barriers}.{kind}" for kind in ("ptx", "cubin"))
        source.write_text(_ptx(live, self.device.arch, barriers))
        subprocess.run([knobs.nvidia.ptxas.path, f"-arch=sm_{self.device.arch}", source, "-o", out], check=True)
        module, function, registers = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self.call("cuModuleLoadData", ctypes.byref(module), out.read_bytes())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        self.call("cuFuncSetAttribute", function, self.MAX_DYNAMIC, self.device.smem_bytes)
        self.call("cuFuncGetAttribute", ctypes.byref(registers), self.REGISTERS, function)
        return function, registers.value

    def blocks(self, function: ctypes.c_void_p, threads: int, dynamic: int) -> int:
        value = ctypes.c_int()
        ask = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self.call(ask, ctypes.byref(value), function, threads, ctypes.c_size_t(dynamic))
        return value.value


def _differ(driver: _Driver, kernels: list[tuple[ctypes.c_void_p, int]], cases: int, **more: int) -> list[tuple[int, ...]]:
    """(threads, registers, shared bytes, ours, the driver's) of random cases in which the two differ."""
    rng, wrong = random.Random(0), []
    for _ in range(cases):
        function, registers = rng.choice(kernels)
        threads, most = rng.randint(1, 1024), driver.device.smem_bytes
        shared = rng.choice([0, rng.randint(0, 4096), rng.randint(0, most)])
        mine = occupancy(driver.device.arch, threads=threads, registers=registers, shared_bytes=shared, **more).blocks
        theirs = driver.blocks(function, threads, shared)
        if mine != theirs:
            wrong.append((threads, registers, shared, mine, theirs))
    return wrong


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: nothing to ask the driver about")


@gpu
def test_equals_the_driver_on_1000_random_cases(tmp_path: Path) -> None:
    driver = _Driver(tmp_path)
    kernels = [driver.kernel(live) for live in range(4, 240, 6)]
    assert len({registers for _, registers in kernels}) > 20
    wrong = _differ(driver, kernels, 1000)
    assert not wrong, f"{len(wrong)} of 1000 differ: (threads, registers, shared, ours, driver) {wrong[:10]}"


@gpu
@pytest.mark.parametrize("carveout", [0, 10, 30, 50, 75, 100])
def test_equals_the_driver_for_a_preferred_carveout(carveout: int, tmp_path: Path) -> None:
    driver = _Driver(tmp_path)
    kernels = [driver.kernel(live) for live in (4, 60, 120)]
    for function, _ in kernels:
        driver.call("cuFuncSetAttribute", function, driver.CARVEOUT, carveout)
    wrong = _differ(driver, kernels, 200, carveout=carveout)
    assert not wrong, f"{len(wrong)} of 200 differ: (threads, registers, shared, ours, driver) {wrong[:10]}"


@gpu
@pytest.mark.parametrize("barriers", [1, 3, 9, 16])
def test_equals_the_driver_for_named_barriers(barriers: int, tmp_path: Path) -> None:
    driver = _Driver(tmp_path)
    wrong = _differ(driver, [driver.kernel(live, barriers) for live in (4, 60, 120)], 200, barriers=barriers)
    assert not wrong, f"{len(wrong)} of 200 differ: (threads, registers, shared, ours, driver) {wrong[:10]}"
