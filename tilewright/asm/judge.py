"""Collects everything known about a compiled kernel without a GPU in one value, and points out what deserves attention."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewright.asm.compile import Binary
from tilewright.asm.facts import Facts, facts, instruction_mix, sass
from tilewright.asm.memory import Memory, memory
from tilewright.hw.occupancy import Occupancy, occupancy

__all__ = ["Judgement", "Partition", "judge", "kinds", "partitions", "warnings"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Warps of a warp-specialised kernel that run separate code, besides the first warps."""

    warps: int
    registers: int | None
    """Registers of a thread that the kernel requests (setmaxnreg); None if it does not."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One kernel on one architecture."""

    kernel: str
    arch: int
    facts: Facts
    partitions: tuple[Partition, ...]
    occupancy: Occupancy
    instructions: Mapping[str, int]
    """Kind of machine instruction -> how often it stands in the code (loops are unrolled, so not how often it runs)."""
    memory: Memory
    warnings: tuple[str, ...]


# Machine instructions by what they are for, as nvdisasm spells them.
_KINDS = {
    "mma": ("HMMA", "IMMA", "DMMA", "QMMA", "OMMA"),
    "wgmma": ("HGMMA", "IGMMA", "QGMMA"),
    "tcgen05 mma": ("UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"),
    "TMA load": ("UTMALDG",),
    "TMA store": ("UTMASTG", "UTMAREDG"),
    "cp.async": ("LDGSTS",),
    "global load": ("LDG",),
    "global store": ("STG",),
    "atomic": ("ATOM", "ATOMG", "RED", "REDG"),
    "shared load": ("LDS",),
    "ldmatrix": ("LDSM",),
    "shared store": ("STS",),
    "stmatrix": ("STSM",),
    "local load": ("LDL",),
    "local store": ("STL",),
    "tensor memory load": ("LDTM",),
    "tensor memory store": ("STTM",),
    "barrier": ("BAR", "SYNCS"),
    "shuffle": ("SHFL",),
    "special function": ("MUFU",),
    "float": (
        *("FADD", "FMUL", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FHADD", "FHFMA", "FADD2", "FMUL2", "FFMA2"),
        *("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSETP2", "DADD", "DMUL", "DFMA"),
    ),
    "conversion": ("F2F", "F2FP", "F2I", "I2F", "I2FP", "FRND"),
    "integer": (
        *("IMAD", "IADD3", "IABS", "IMNMX", "ISETP", "LEA", "LOP3", "SHF", "SEL", "SGXT", "PRMT", "POPC", "FLO", "IDP"),
        *("VIADD", "VIMNMX", "VIADDMNMX", "UIADD3", "UIMAD", "ULEA", "ULOP3", "USHF", "USEL", "USGXT", "UISETP", "UFLO"),
    ),
    "branch": ("BRA", "BRX", "EXIT", "CALL", "RET", "BSSY", "BSYNC", "WARPSYNC"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def judge(binary: Binary) -> Judgement:
    """Everything about one binary; half a second, most of it the disassembler's.

    Raises:
        subprocess.CalledProcessError: a tool of the Triton wheel rejects the code.
    """
    found, seen = facts(binary), memory(binary)
    held = occupancy(binary.arch, threads=32 * found.warps, registers=found.registers, shared_bytes=found.shared_bytes)
    return Judgement(
        kernel=binary.kernel,
        arch=binary.arch,
        facts=found,
        partitions=partitions(binary.ttgir),
        occupancy=held,
        instructions=kinds(sass(binary)),
        memory=seen,
        warnings=tuple(warnings(binary, found, seen)),
    )


def kinds(code: str) -> dict[str, int]:
    """Kind of machine instruction -> how often it stands in a disassembly, for kinds that do."""
    found = dict.fromkeys([*_KINDS, "other"], 0)
    for name, count in instruction_mix(code).items():
        found[_KIND_OF.get(name.partition(".")[0], "other")] += count
    return {kind: count for kind, count in found.items() if count}


def warnings(binary: Binary, found: Facts, seen: Memory) -> Iterator[str]:
    """Sentences about the facts that deserve attention, with advice."""
    if found.spill_bytes:
        yield f"spills {found.spill_bytes} bytes of registers a thread to local memory: a smaller tile, or more warps"
    if not found.blocks_per_sm:
        needs = f"{found.registers} registers, {found.warps} warps, {found.shared_bytes} bytes of shared memory"
        yield f"does not fit on an SM: {needs}"
    if found.wgmma_serialised:
        yield "ptxas serialises wgmma (its warnings C7510 to C7515): the tensor cores wait between products; fewer accumulators"
    if binary.arch == 90 and found.mma and not found.wgmma:
        yield "uses mma where sm_90 has wgmma: under 64 rows a warpgroup, or operands that wgmma does not take"
    for access in seen.accesses:
        if access.exact and access.efficiency < 0.5 and access.looped:
            yield (
                f"{access.op} of {access.value} ({access.tile}): a warp asks for {access.sectors} sectors where "
                f"{access.least_sectors} would do: neighbouring threads should take neighbouring addresses"
            )
    for conflict in seen.conflicts:
        if conflict.extra_trips and conflict.looped:
            trips = f"{conflict.extra_trips} extra trips per access"
            yield f"{conflict.op} of shared memory, {conflict.tile}: {trips} (bank conflicts)"
    if binary.stages > 1 and not seen.pipeline_depth and (found.mma or found.wgmma or found.tcgen05):
        yield f"num_stages is {binary.stages}, but no loop is pipelined: the loads cannot be moved ahead, or there is no loop"


def partitions(ttgir: str) -> tuple[Partition, ...]:
    """The partitions that a kernel's TTGIR declares, in order; none if the kernel is not warp-specialised."""
    warps = [int(n) for n in re.findall(r"^ *partition\d+\(.*\) num_warps\((\d+)\) ", ttgir, re.MULTILINE)]
    lists = re.findall(r"requestedRegisters = array<i32: ([\d, ]+)>", ttgir)
    asked = [int(n) for one in lists for n in one.split(",")]
    registers = asked if len(asked) == len(warps) else [None] * len(warps)
    return tuple(Partition(warps=n, registers=held) for n, held in zip(warps, registers, strict=True))
