"""How many blocks of a kernel an SM holds at once, what limits that, and how far the next step is in each direction.

The rules are those of NVIDIA's occupancy calculator (`cuda_occupancy.h`, and the CUDA C++ programming guide's table of
compute capabilities): registers are given to warps in units of 256, a quarter of the SM's registers to each of its four
parts; shared memory in units of 128 bytes, with 1 KB a block kept by the system; the SM is assumed to give shared memory all
it can. The same question put to a driver is `cuOccupancyMaxActiveBlocksPerMultiprocessor`; a test compares them.

Not here: clusters, tensor memory (a block of sm_100 may wait for columns), and whether occupancy matters: a kernel whose
warps never wait is fast at one block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = ["Cliff", "Occupancy", "SMLimits", "limits", "occupancy"]

_WARP = 32
_PARTS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024
MAX_REGISTERS = 255
"""Most registers that a thread can have."""


@dataclass(frozen=True, kw_only=True)
class SMLimits:
    """What one SM holds."""

    arch: int
    threads: int
    blocks: int
    registers: int
    shared_bytes: int
    """All shared memory of the SM, the system's part of each block included."""
    block_shared_bytes: int
    """What one block may ask for."""
    block_threads: int = 1024

    @property
    def warps(self) -> int:
        """Warps that the SM holds."""
        return self.threads // _WARP


def _sm(arch: int, threads: int, blocks: int, shared_kib: int) -> SMLimits:
    return SMLimits(
        arch=arch,
        threads=threads,
        blocks=blocks,
        registers=65536,
        shared_bytes=shared_kib << 10,
        block_shared_bytes=(shared_kib - 1) << 10,
    )


_LIMITS = {
    sm.arch: sm
    for sm in (
        _sm(80, 2048, 32, 164),
        _sm(86, 1536, 16, 100),
        _sm(87, 1536, 16, 164),
        _sm(89, 1536, 24, 100),
        _sm(90, 2048, 32, 228),
        _sm(100, 2048, 32, 228),
        _sm(103, 2048, 32, 228),
        _sm(120, 1536, 24, 100),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """The smallest change of one resource that changes the number of blocks."""

    resource: str
    """"registers" (of a thread), "shared memory" (bytes of a block) or "threads" (of a block)."""
    change: int
    """How many more (positive) or fewer."""
    blocks: int
    """Blocks an SM after the change."""
    gained: int
    """Blocks more (positive) or fewer than now."""

    def __str__(self) -> str:
        unit = {"registers": "registers", "shared memory": "bytes of shared memory", "threads": "threads"}[self.resource]
        way, what = ("more" if self.change > 0 else "fewer"), ("more" if self.gained > 0 else "fewer")
        unit = unit.removesuffix("s") if abs(self.change) == 1 and self.resource != "shared memory" else unit
        return f"{abs(self.change)} {unit} {way}: {abs(self.gained)} {what} block{'s' * (abs(self.gained) != 1)} an SM"


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """What an SM holds of one kernel."""

    blocks: int
    warps: int
    fraction: float
    """Warps held, of those that the SM can hold."""
    limiter: str
    """"registers", "shared memory", "warps" or "blocks": the scarcest; "too big" where not even one block fits."""
    cliffs: tuple[Cliff, ...]


def limits(arch: int) -> SMLimits:
    """The limits of `sm_<arch>`. Raises ValueError, naming the nearest, for one that is not in the table."""
    if arch not in _LIMITS:
        near = get_close_matches(str(arch), map(str, _LIMITS), n=1) or [str(min(_LIMITS, key=lambda a: abs(a - arch)))]
        known = ", ".join(f"sm_{a}" for a in _LIMITS)
        raise ValueError(f"no limits are known for sm_{arch}; wanted one of {known}; the nearest is sm_{near[0]}")
    return _LIMITS[arch]


def occupancy(arch: int, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Blocks an SM of `sm_<arch>` holds of a kernel.

    Args:
        threads: of a block.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic together.

    Raises:
        ValueError: no such architecture, or a number that no kernel can have.
    """
    sm = limits(arch)
    if not 1 <= threads <= sm.block_threads:
        raise ValueError(f"a block has {threads} threads, wanted 1 to {sm.block_threads}")
    if not 0 <= registers <= MAX_REGISTERS:
        raise ValueError(f"a thread has {registers} registers, wanted 0 to {MAX_REGISTERS}")
    if shared_bytes < 0:
        raise ValueError(f"a block has {shared_bytes} bytes of shared memory, wanted 0 or more")
    by = _blocks(sm, threads, registers, shared_bytes)
    blocks = min(by.values())
    limiter = min(by, key=lambda name: by[name]) if blocks else "too big"
    warps = blocks * -(-threads // _WARP)
    return Occupancy(
        blocks=blocks,
        warps=warps,
        fraction=warps / sm.warps,
        limiter=limiter,
        cliffs=tuple(_cliffs(sm, threads, registers, shared_bytes, blocks)),
    )


def _blocks(sm: SMLimits, threads: int, registers: int, shared_bytes: int) -> dict[str, int]:
    """Blocks that fit by each resource alone; of equals the first is named as the limiter."""
    warps = -(-threads // _WARP)
    per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    # A block must fit even if its warps do not spread evenly over the four parts.
    if per_warp * (-(-warps // _PARTS) * _PARTS) > sm.registers:
        by_registers = 0
    else:
        by_registers = sm.registers // _PARTS // per_warp * _PARTS // warps if per_warp else sm.blocks
    shared = -(-(shared_bytes + _RESERVED_SHARED) // _SHARED_UNIT) * _SHARED_UNIT
    by_shared = 0 if shared_bytes > sm.block_shared_bytes else sm.shared_bytes // shared
    return {
        "registers": by_registers,
        "shared memory": by_shared,
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
    }


def _cliffs(sm: SMLimits, threads: int, registers: int, shared_bytes: int, blocks: int) -> list[Cliff]:
    def fits(*, threads: int = threads, registers: int = registers, shared_bytes: int = shared_bytes) -> int:
        return min(_blocks(sm, threads, registers, shared_bytes).values())

    ways: list[tuple[str, Callable[[int], int], range]] = [
        ("registers", lambda r: fits(registers=r), range(registers - 1, 15, -1)),
        ("registers", lambda r: fits(registers=r), range(registers + 1, MAX_REGISTERS + 1)),
        ("shared memory", lambda s: fits(shared_bytes=s), range(shared_bytes - 1, -1, -1)),
        ("shared memory", lambda s: fits(shared_bytes=s), range(shared_bytes + 1, sm.block_shared_bytes + 1)),
        ("threads", lambda t: fits(threads=t), range(threads - _WARP, 0, -_WARP)),
        ("threads", lambda t: fits(threads=t), range(threads + _WARP, sm.block_threads + 1, _WARP)),
    ]
    found = []
    now = {"registers": registers, "shared memory": shared_bytes, "threads": threads}
    for resource, blocks_at, values in ways:
        at = _first(values, lambda value, f=blocks_at: f(value) != blocks)
        if at is not None:
            new = blocks_at(at)
            found.append(Cliff(resource=resource, change=at - now[resource], blocks=new, gained=new - blocks))
    return found


def _first(values: range, changed: Callable[[int], bool]) -> int | None:
    """The first value at which `changed` holds, given that it keeps holding from there on."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if changed(values[middle]):
            high = middle
        else:
            low = middle + 1
    return values[low] if low < len(values) else None
