"""All that can be said of a compiled kernel without a GPU, in one value, and what of it deserves attention."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewright.asm.compile import Binary
from tilewright.asm.facts import Facts, facts, instruction_mix
from tilewright.asm.memory import Memory, memory
from tilewright.hw.occupancy import Occupancy, occupancy

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One kernel on one architecture."""

    kernel: str
    arch: int
    facts: Facts
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
    "barrier": ("BAR", "SYNCS"),
    "shuffle": ("SHFL",),
    "special function": ("MUFU",),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "HADD2", "HMUL2", "HFMA2", "F2F", "F2FP", "FADD2", "FMUL2"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def judge(binary: Binary) -> Judgement:
    """Everything about one binary; half a second, most of it the disassembler's.

    Raises:
        subprocess.CalledProcessError: a tool of the Triton wheel rejects the code.
    """
    found, seen = facts(binary), memory(binary)
    held = occupancy(binary.arch, threads=32 * found.warps, registers=found.registers, shared_bytes=found.shared_bytes)
    kinds: dict[str, int] = dict.fromkeys(_KINDS, 0)
    for name, count in instruction_mix(binary).items():
        kind = _KIND_OF.get(name.partition(".")[0], "other")
        kinds[kind] = kinds.get(kind, 0) + count
    return Judgement(
        kernel=binary.kernel,
        arch=binary.arch,
        facts=found,
        occupancy=held,
        instructions={kind: count for kind, count in kinds.items() if count},
        memory=seen,
        warnings=tuple(_warnings(binary, found, seen)),
    )


def _warnings(binary: Binary, found: Facts, seen: Memory) -> Iterator[str]:
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
                f"{access.op} of {access.value} ({access.tile}) asks for {access.sectors} sectors where {access.least_sectors} "
                "hold its bytes: neighbouring threads should read neighbouring addresses"
            )
    for conflict in seen.conflicts:
        if conflict.extra_trips and conflict.looped:
            trips = f"{conflict.extra_trips} further trips an access"
            yield f"{conflict.op} of shared memory, {conflict.tile}: {trips} (bank conflicts)"
    asked = binary.stages
    if asked > 1 and not seen.pipeline_depth and (found.mma or found.wgmma or found.tcgen05):
        yield f"num_stages is {asked}, and no loop is pipelined: loads that the compiler cannot move ahead, or no loop"
