"""Layouts, sectors, bank conflicts and pipelines of probe kernels of which we can count them on paper."""

import re
from typing import Any

import pytest
import torch

from tests.asm import probes
from tilewright.asm.compile import record
from tilewright.asm.judge import judge
from tilewright.asm.memory import memory
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.kernels.norm.backward import layer_norm_backward_op
from tilewright.op import Inputs

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")

VECTOR = torch.zeros(4096)
SQUARE = (torch.zeros(128, 256, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16))
SMALL = (SQUARE[0][:64], SQUARE[1])


def one(impl: Any, args: Any, arch: int, **config: Any) -> Any:
    (binary,) = record(impl, config, args, arch)
    return binary


def test_gluon_kernels_are_recorded() -> None:
    binary = one(probes.turn, (torch.zeros(32, 32),), 90, PHASES=32)
    assert (binary.kernel, binary.warps, binary.shared_bytes) == ("_turn_kernel", 4, 4096)
    assert binary.constants["PHASES"] == 32


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("phases", "trips"), [(1, 31), (2, 15), (32, 0)], ids=["rows as they are", "2 phases", "32 phases"])
def test_bank_conflicts(phases: int, trips: int, arch: int) -> None:
    """32 threads that read a column of 32 floats a row: one bank, unless rows are turned against each other."""
    found = memory(one(probes.turn, (torch.zeros(32, 32),), arch, PHASES=phases)).conflicts
    assert [(c.op, c.extra_trips) for c in found] == [("write", 0), ("read", trips)]


def test_no_conflicts_where_each_bank_has_one_word() -> None:
    """Rows' numbers in a ring of their own, 4 floats a stage: too few for Triton's own count, which ends the process."""
    op = layer_norm_backward_op
    assert op.make is not None
    impl = next(impl for impl in op.impls if impl.name == "triton")
    args = op.make(Inputs("meta"), M=8, N=17001)
    found = record(impl, impl.space.default(device_named("h100"), op.problem(*args)), args, 90)
    rows = [c for binary in found for c in memory(binary).conflicts if c.tile == "4x1 f32"]
    assert rows
    assert {c.extra_trips for c in rows} == {0}


def test_sectors() -> None:
    """A warp reads rows and writes columns of a matrix that is 128 bytes wide."""
    load, store = memory(one(probes.turn, (torch.zeros(32, 32),), 90, PHASES=1)).accesses
    assert (load.op, load.thread_bytes, load.sectors, load.least_sectors, load.exact) == ("load", 4, 4, 4, True)
    assert (store.op, store.thread_bytes, store.sectors, store.least_sectors, store.exact) == ("store", 4, 32, 4, True)
    assert store.efficiency == 1 / 8


def test_sectors_of_every_kind_of_address() -> None:
    found = memory(one(probes.gather, (VECTOR,), 90, STEP=3)).accesses
    # (bytes a thread, sectors a warp, the least, whether all addresses are known)
    told = [(a.op, a.tile, a.thread_bytes, a.sectors, a.least_sectors, a.exact) for a in found]
    assert told == [
        ("load", "256 f32", 8, 8, 8, True),  # two neighbours a thread
        ("load", "256 f32", 4, 24, 4, True),  # every third: 2 * 3 * 4 bytes from thread to thread
        ("load", "256x8 f32", 4, 4, 4, False),  # rows of 32 bytes, a stride that the compiler does not know
        ("load", "256 i32", 8, 8, 8, True),  # the indices
        ("load", "256 f32", 4, 32, 4, False),  # what they point at
        ("store", "256 f32", 8, 8, 8, True),
    ]


@pytest.mark.parametrize(
    ("impl", "arch", "stages", "depth", "in_flight"),
    [
        # Where the tensor core reads registers, those are a stage: one buffer fewer.
        pytest.param(probes.matmul, 80, 4, 3, 4, id="mma, cp.async"),
        pytest.param(probes.matmul, 90, 4, 4, 4, id="wgmma, cp.async"),
        pytest.param(probes.matmul, 100, 3, 3, 2, id="tcgen05, cp.async"),
        pytest.param(probes.matmul_tma, 90, 3, 3, None, id="wgmma, TMA"),
        pytest.param(probes.matmul, 90, 1, 0, None, id="not pipelined"),
    ],
)
def test_pipeline_depth(impl: Any, arch: int, stages: int, depth: int, in_flight: int | None) -> None:
    found = memory(one(impl, SMALL, arch, num_stages=stages))
    assert (found.pipeline_depth, found.copies_in_flight) == (depth, in_flight)
    assert all(buffer.startswith(f"{depth} x ") for buffer in found.buffers)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        (
            80,
            [
                r"blocked: a thread holds 1x8 neighbours",
                r"swizzled: groups of 8 elements",
                r"accumulator \(mma.sync",
                "left operand",
            ],
        ),
        (
            90,
            [
                r"accumulator \(wgmma, four warps",
                r"as tensor cores and TMA read it: rows of 16-bit elements, swizzled over 128",
            ],
        ),
        (100, [r"tensor memory: an accumulator of 64x128", r"as tensor cores and TMA read it"]),
    ],
)
def test_layouts_in_words(arch: int, expected: list[str]) -> None:
    sentences = memory(one(probes.matmul, SMALL, arch)).layouts.values()
    for pattern in expected:
        assert any(re.search(pattern, sentence) for sentence in sentences), (pattern, list(sentences))
    assert not any("no words" in sentence for sentence in sentences)


def test_judgement() -> None:
    """The facts of one kernel come together, and what is wrong with it is said."""
    good, bad = judge(one(probes.matmul, SQUARE, 90)), judge(one(probes.matmul, SQUARE, 90, maxnreg=96))
    assert good.instructions["wgmma"] > 0
    assert good.instructions["cp.async"] > 0
    assert good.occupancy.blocks == good.facts.blocks_per_sm > 0
    assert good.warnings == ()
    assert any("serialises wgmma" in warning for warning in bad.warnings)
    spilled = judge(one(probes.matmul, SMALL, 80, maxnreg=64))
    assert spilled.instructions["local store"] > 0
    assert any(warning.startswith("spills ") for warning in spilled.warnings)
    unpipelined = judge(one(probes.matmul_tma, SMALL, 80, num_stages=2))
    assert unpipelined.memory.pipeline_depth > 0 or any("no loop is pipelined" in w for w in unpipelined.warnings)
