"""Facts about a compiled kernel, read from its PTX and its machine code with the tools in the Triton wheel.

`facts` takes about 5 ms per kernel. Registers and stack come from the resource record of the machine code. Instructions are
counted in the PTX, where each tensor-core, TMA and vector access is one line; ptxas keeps its kind and width, but not always
the count, because it unrolls loops. `instruction_mix` counts the real instructions in the disassembly, which takes half a
second per kernel.

Not here: timing, and layouts (tilewright.asm.layouts).
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from tilewright.asm.compile import Binary
from tilewright.hw.occupancy import occupancy

__all__ = ["Facts", "counts", "facts", "instruction_mix", "ptxas_version", "sass"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about one kernel for one architecture. Counts are those of instructions in the code, not of executions."""

    kernel: str
    warps: int
    """Warps of a block, including those of every partition of a warp-specialised kernel."""
    registers: int
    """Registers of a thread, at most 255."""
    spill_bytes: int
    """Bytes of local memory for a thread's spilled registers; each may be stored and loaded several times."""
    local_bytes: int
    """Bytes of a thread's arrays in local memory, which are indexed dynamically (libdevice's sin and cos have one)."""
    shared_bytes: int
    """Dynamic shared memory of a block in bytes."""
    tmem_columns: int
    mma: int
    """Tensor-core instructions of a warp (sm_80 and up)."""
    wgmma: int
    """Tensor-core instructions of a warpgroup (sm_90)."""
    wgmma_serialised: bool
    """Whether ptxas put a wait after each wgmma (its warnings C7510 to C7515), so that tensor cores idle between them."""
    tcgen05: int
    """Tensor-core instructions on tensor memory (sm_100)."""
    tma_loads: int
    tma_stores: int
    """Stores and reductions by the copy engine."""
    loads: Mapping[int, int]
    """Loads from global memory and cp.async: bytes of a thread's access -> count. A full vector is 16 (32 on sm_100)."""
    stores: Mapping[int, int]
    """Stores to global memory, likewise."""
    blocks_per_sm: int
    """Blocks that fit on a multiprocessor at once; 0 if not even one fits."""
    limiter: str
    """The resource that limits the number of blocks: "registers", "shared memory", "warps" or "blocks"; or "too big"."""


def facts(binary: Binary) -> Facts:
    """The facts of one binary. Raises subprocess.CalledProcessError if a tool of the Triton wheel rejects the code."""
    registers, stack_bytes = _resources(binary)
    threads = _threads(binary)
    held = occupancy(binary.arch, threads=threads, registers=registers, shared_bytes=binary.shared_bytes)
    local_bytes = sum(int(n) for n in _LOCAL_ARRAY.findall(binary.ptx))
    counted = counts(binary.ptx)
    return Facts(
        kernel=binary.kernel,
        warps=threads // 32,
        registers=registers,
        spill_bytes=max(0, stack_bytes - local_bytes),
        local_bytes=local_bytes,
        shared_bytes=binary.shared_bytes,
        tmem_columns=binary.tmem_columns,
        wgmma_serialised=counted["wgmma"] > 0 and "wgmma.mma_async instructions are serialized" in _ptxas_log(binary),
        blocks_per_sm=held.blocks,
        limiter=held.limiter,
        **counted,
    )


def counts(ptx: str) -> dict[str, Any]:
    """The facts that are counts of instructions in PTX."""
    return {
        "mma": len(_MMA.findall(ptx)),
        "wgmma": len(_WGMMA.findall(ptx)),
        "tcgen05": len(_TCGEN05.findall(ptx)),
        "tma_loads": len(_TMA_LOAD.findall(ptx)),
        "tma_stores": len(_TMA_STORE.findall(ptx)),
        "loads": _widths(_LOAD, ptx, _CP_ASYNC),
        "stores": _widths(_STORE, ptx),
    }


_MMA = re.compile(r"\bmma\.sync\.")
_WGMMA = re.compile(r"\bwgmma\.mma_async\.")
_TCGEN05 = re.compile(r"\btcgen05\.mma\.")
_TMA_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared")
_TMA_STORE = re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global")
_CP_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (0x[0-9a-f]+|\d+)")
# ld.global.L1::evict_last.v4.b32: qualifiers, an optional vector, then the element's type.
_LOAD = re.compile(r"\bld(?:\.\w+)*\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bfus](\d+)\b")
_STORE = re.compile(r"\bst(?:\.\w+)*\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bfus](\d+)\b")
_LOCAL_ARRAY = re.compile(r"\.local \.align \d+ \.b8 \w+\[(\d+)\]")
_THREADS = re.compile(r"\.(?:reqntid|maxntid) (\d+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


def _widths(access: re.Pattern[str], ptx: str, copy: re.Pattern[str] | None = None) -> dict[int, int]:
    """Bytes of an access -> number of such accesses, widest first."""
    found = Counter(int(lanes or 1) * int(bits) // 8 for lanes, bits in access.findall(ptx))
    if copy is not None:
        found.update(int(size, 0) for size in copy.findall(ptx))
    return dict(sorted(found.items(), reverse=True))


def _resources(binary: Binary) -> tuple[int, int]:
    """(registers, stack bytes) of a thread."""
    with _file(binary.cubin, ".cubin") as path:
        text = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
    found = _RESOURCES.search(text)
    if found is None:
        raise ValueError(f"cuobjdump reports no registers for {binary.kernel}: got {text!r}, wanted 'REG:<n> STACK:<n>'")
    return int(found[1]), int(found[2])


def _threads(binary: Binary) -> int:
    """Threads of a block. A warp-specialised kernel has more than the warps that its launch options name."""
    found = _THREADS.search(binary.ptx)
    return int(found[1]) if found else 32 * binary.warps


def _ptxas_log(binary: Binary) -> str:
    """The log of ptxas for the kernel. If it was not kept, the code is assembled again: warnings are not in machine code."""
    if binary.log is not None:
        return binary.log
    with _file(binary.ptx.encode(), ".ptx") as path, tempfile.TemporaryDirectory() as folder:
        return _run(get_ptxas(binary.arch).path, "-v", f"--gpu-name=sm_{binary.arch}a", path, "-o", f"{folder}/out.cubin")


def sass(binary: Binary) -> str:
    """The disassembled machine code, one instruction per line."""
    with _file(binary.cubin, ".cubin") as path:
        return _run(knobs.nvidia.nvdisasm.path, "-c", path)


def instruction_mix(code: str) -> dict[str, int]:
    """Machine instruction ("LDG.E.128", "HGMMA.64x128x16.F32.BF16") -> how often it stands in `sass`, most frequent first."""
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+\{?\s*(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    return dict(Counter(found).most_common())


def ptxas_version(arch: int) -> str:
    """The version of the assembler that Triton uses for an architecture. Wrong code has come from a single version."""
    text = _run(get_ptxas(arch).path, "--version")
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    if found is None:
        raise ValueError(f"ptxas for sm_{arch} does not tell its version: got {text!r}, wanted 'V<major>.<minor>.<build>'")
    return found[1]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@contextmanager
def _file(content: bytes, suffix: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"kernel{suffix}")
        path.write_bytes(content)
        yield str(path)
