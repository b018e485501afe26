"""Recording, facts and the compile counter, on probe kernels of which we know what they must compile to."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.asm import probes
from tilewright.asm.compile import CompileFailed, record, stand_in
from tilewright.asm.facts import facts, instruction_mix, ptxas_version, sass
from tilewright.asm.jit import CompileCounter
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")

VECTOR = torch.zeros(4096)
SQUARE = (torch.zeros(128, 256, dtype=torch.bfloat16), torch.zeros(256, 128, dtype=torch.bfloat16))


def one(impl: Any, args: Any, arch: int, **config: Any) -> Any:
    (binary,) = record(impl, config, args, arch)
    return binary


@pytest.mark.parametrize(
    ("x", "bytes_wide"),
    [
        pytest.param(VECTOR, 16, id="aligned"),
        pytest.param(VECTOR[1:], 4, id="offset by one element"),
        pytest.param(VECTOR[4:], 16, id="offset by 16 bytes"),
        pytest.param(VECTOR[::3], 4, id="strided"),
        pytest.param(VECTOR.to(torch.float8_e4m3fn), 16, id="one byte each"),
    ],
)
def test_stand_ins_are_specialised_as_the_tensors_are(x: torch.Tensor, bytes_wide: int) -> None:
    binary = one(probes.copy, (x,), 90, BLOCK=2048, num_warps=4)
    assert max(facts(binary).loads) == bytes_wide
    assert binary.constants["BLOCK"] == 2048
    # Triton makes an integer argument of 1 a constant, and must not do so for those that it is told to leave alone.
    assert binary.constants.get("stride") == (1 if x.stride(0) == 1 else None)
    assert "n" not in binary.constants


def test_stand_in_keeps_layout() -> None:
    x = torch.zeros(8, 6)[1:, 2:5].t()
    y = stand_in(x)
    assert (y.shape, y.stride(), y.storage_offset(), y.dtype) == (x.shape, x.stride(), x.storage_offset(), x.dtype)
    assert y.device.type == "meta"
    assert stand_in(1.5) == 1.5


def test_record_keeps_order() -> None:
    binaries = record(probes.twice, {"BLOCK": 256}, (VECTOR,), 90)
    assert [b.constants["BLOCK"] for b in binaries] == [128, 256]
    assert binaries[0].key != binaries[1].key


@pytest.mark.parametrize(
    ("arch", "unit", "machine"), [(80, "mma", r"HMMA"), (90, "wgmma", r"HGMMA"), (100, "tcgen05", r"UTCHMMA")]
)
def test_tensor_cores(arch: int, unit: str, machine: str) -> None:
    """Each card's own tensor-core instruction is counted, and the disassembly has it too."""
    binary = one(probes.matmul, SQUARE, arch)
    found = facts(binary)
    counts = {name: getattr(found, name) for name in ("mma", "wgmma", "tcgen05")}
    assert {name for name, count in counts.items() if count} == {unit}
    assert any(re.match(machine, name) for name in instruction_mix(sass(binary)))
    assert found.shared_bytes > 0
    assert not found.wgmma_serialised
    assert (found.tmem_columns > 0) == (arch == 100)


@pytest.mark.parametrize("arch", CARD_OF_ARCH)
def test_tensor_descriptors(arch: int) -> None:
    """A descriptor argument is the copy engine's on a card that has one, and plain pointers elsewhere."""
    binary = one(probes.matmul_tma, SQUARE, arch)
    found, mix = facts(binary), instruction_mix(sass(binary))
    assert (found.tma_loads > 0) == (found.tma_stores > 0) == (arch >= 90)
    assert any(name.startswith("UTMALDG") for name in mix) == (arch >= 90)
    assert any(name.startswith("UTMASTG") for name in mix) == (arch >= 90)


@pytest.mark.parametrize("arch", CARD_OF_ARCH)
@pytest.mark.parametrize(("x", "suffix"), [(VECTOR, ".128"), (VECTOR[1:], "")], ids=["16", "4"])
def test_widths_are_the_machine_codes(arch: int, x: torch.Tensor, suffix: str) -> None:
    """A width counted in the PTX is the width in the disassembly, and there is no other."""
    binary = one(probes.copy, (x,), arch, BLOCK=2048, num_warps=4)
    assert list(facts(binary).loads) == [16 if suffix else 4]
    mix = instruction_mix(sass(binary))
    assert {name for name in mix if name.startswith("LDG")} == {f"LDG.E{suffix}"}
    assert not any(name.startswith(("LDL", "STL")) for name in mix)


def test_spills() -> None:
    binary = one(probes.matmul, SQUARE, 80, maxnreg=64)
    found = facts(binary)
    assert found.registers <= 64
    assert found.spill_bytes > 0
    assert any(name.startswith("STL") for name in instruction_mix(sass(binary)))
    assert facts(one(probes.matmul, SQUARE, 80)).spill_bytes == 0


def test_serialised_wgmma() -> None:
    """Half of the registers that the accumulator needs."""
    assert facts(one(probes.matmul, SQUARE, 90, maxnreg=96)).wgmma_serialised


@pytest.mark.parametrize(
    ("impl", "args", "config", "reason"),
    [
        pytest.param(probes.nonsense, (VECTOR,), {}, "_nonsense_kernel .*power of 2", id="front end"),
        pytest.param(probes.nested, (VECTOR,), {}, "_nested_kernel .*power of 2", id="in a function that it calls"),
        pytest.param(probes.matmul, SQUARE, {"maxnreg": 64}, r"_matmul_kernel .*Insufficient registers \(64\)", id="ptxas"),
        pytest.param(probes.copy, (VECTOR,), {"BLOCK": 64, "num_warps": 3}, "_copy_kernel .*power of 2", id="options"),
    ],
)
def test_failure_is_one_line_and_leaves_no_trace(
    impl: Any, args: Any, config: Any, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (driver._active, JITFunction.run)
    with pytest.raises(CompileFailed, match=f"^{reason}[^\n]*$") as caught:
        record(impl, config, args, 90)
    assert "does not compile for sm_90" in str(caught.value)
    assert (driver._active, JITFunction.run) == before
    assert capfd.readouterr() == ("", "")


def test_ptxas_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ptxas_version(90))


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        kernels = (probes._copy_kernel, probes._matmul_kernel)
        for kernel in kernels:
            kernel.device_caches.clear()
        yield
    for kernel in kernels:
        kernel.device_caches.clear()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("arch", "maxnreg"), [(80, None), (90, None), (90, 96), (100, None)])
def test_the_log_of_ptxas_is_kept(
    arch: int, maxnreg: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Facts by the log of the compilation are those by assembling again, which is left out, and the log is not printed."""
    fresh = one(probes.matmul, SQUARE, arch, maxnreg=maxnreg)
    assert fresh.log is not None
    assert f"Used {facts(fresh).registers} registers" in fresh.log
    assert capfd.readouterr() == ("", "")
    probes._matmul_kernel.device_caches.clear()
    stored = one(probes.matmul, SQUARE, arch, maxnreg=maxnreg)
    assert stored.log is None
    found = facts(stored)
    assert (found.wgmma > 0) == (arch == 90)
    assert found.wgmma_serialised == (maxnreg is not None)
    monkeypatch.setattr("tilewright.asm.facts.get_ptxas", None)
    assert facts(fresh) == found


@pytest.mark.usefixtures("empty_cache")
def test_compile_counter() -> None:
    counter, other = CompileCounter().start(), CompileCounter().start()
    try:
        one(probes.copy, (VECTOR,), 90, BLOCK=512)
        one(probes.copy, (VECTOR,), 90, BLOCK=512)  # the process has it: nothing to count
        assert counter.after_ready == 0
        counter.mark_ready()
        one(probes.copy, (VECTOR,), 90, BLOCK=1024)
        probes._copy_kernel.device_caches.clear()
        one(probes.copy, (VECTOR,), 90, BLOCK=512)
        with pytest.raises(RuntimeError, match="started already"):
            counter.start()
    finally:
        other.stop()
        counter.stop()
    assert [(c.kernel, c.arch, c.from_disk) for c in counter.compiled] == [
        ("_copy_kernel", 90, False),
        ("_copy_kernel", 90, False),
        ("_copy_kernel", 90, True),
    ]
    assert [c.from_disk for c in counter.late] == [False, True]
    assert counter.after_ready == 1
    assert counter.compiled == other.compiled
    assert counter.compiled[0].seconds > 0
    assert "BLOCK: 512 -> 1024" in counter.compiled[1].reason
    with pytest.raises(RuntimeError, match="does not listen"):
        counter.stop()
    one(probes.copy, (VECTOR,), 90, BLOCK=2048)
    assert len(counter.compiled) == 3
