"""How many blocks of a kernel an SM runs at once, which resource limits this number, and which change would change it.

The rules are those of NVIDIA's occupancy calculator (`cuda_occupancy.h` of the CUDA toolkit, and the table of compute
capabilities in the CUDA programming guide). Registers are allocated to warps in units of 256, and each of the SM's four parts
has a quarter of them. Shared memory is allocated in units of 128 bytes, with 1 KiB per block reserved for the system; by
default the SM uses as much of its L1 as possible for shared memory. The driver answers the same question with
`cuOccupancyMaxActiveBlocksPerMultiprocessor`; the tests compare with both.

Not here: clusters, tensor memory (a block of sm_100 may wait for columns), and whether occupancy matters: a kernel whose
warps never wait is fast with one block.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["MAX_REGISTERS", "Cliff", "Footprint", "Occupancy", "SMLimits", "limits", "occupancy"]

_WARP = 32
_PARTS = 4
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_RESERVED_SHARED = 1024
_FEWEST_REGISTERS = 16
MAX_REGISTERS = 255
"""The highest number of registers of a thread."""


@dataclass(frozen=True, kw_only=True)
class SMLimits:
    """The resources of one SM."""

    arch: int
    threads: int
    blocks: int
    registers: int
    shared_bytes: int
    """All shared memory of the SM, including the system's part of each block."""
    block_shared_bytes: int
    """The highest amount that one block may use."""
    barriers: int | None
    """Named barriers of all blocks together; None if they are not a limit (before sm_90)."""
    carveouts: tuple[int, ...]
    """The possible sizes of shared memory in bytes; the rest is L1."""
    block_threads: int = 1024

    @property
    def warps(self) -> int:
        """Warps that the SM can hold."""
        return self.threads // _WARP


_CARVEOUTS_KIB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)


def _sm(arch: int, threads: int, blocks: int, shared_kib: int, barriers: int | None = None) -> SMLimits:
    return SMLimits(
        arch=arch,
        threads=threads,
        blocks=blocks,
        registers=65536,
        shared_bytes=shared_kib << 10,
        block_shared_bytes=(shared_kib << 10) - _RESERVED_SHARED,
        barriers=barriers,
        carveouts=tuple(kib << 10 for kib in _CARVEOUTS_KIB if kib <= shared_kib),
    )


_LIMITS = {
    sm.arch: sm
    for sm in (
        _sm(80, 2048, 32, 164),
        _sm(86, 1536, 16, 100),
        _sm(87, 1536, 16, 164),
        _sm(89, 1536, 24, 100),
        _sm(90, 2048, 32, 228, 64),
        _sm(100, 2048, 32, 228, 64),
        _sm(103, 2048, 32, 228, 32),
        _sm(120, 1536, 24, 100, 24),
        _sm(121, 1536, 24, 100, 24),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """The smallest change of one resource that changes the number of blocks. Threads change by whole warps."""

    resource: str
    """"registers" (per thread), "shared memory" (bytes per block) or "threads" (per block)."""
    change: int
    """The change: more (positive) or fewer."""
    blocks: int
    """Blocks per SM after the change."""
    gained: int
    """Additional (positive) or lost blocks compared to now."""

    def __str__(self) -> str:
        """For example "4 registers fewer: 2 more blocks per SM"."""
        unit = "bytes of shared memory" if self.resource == "shared memory" else self.resource
        if abs(self.change) == 1:
            unit = unit.replace("bytes", "byte").removesuffix("s")
        change = f"{abs(self.change)} {unit} {'more' if self.change > 0 else 'fewer'}"
        if not self.blocks:
            return f"{change}: no block fits"
        what = "more" if self.gained > 0 else "fewer"
        return f"{change}: {abs(self.gained)} {what} block{'s' * (abs(self.gained) != 1)} per SM"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The resources that one block needs: the arguments of `occupancy`."""

    threads: int
    registers: int
    shared_bytes: int
    barriers: int
    carveout: int | None


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How many blocks of a kernel fit on an SM, and why."""

    blocks: int
    warps: int
    fraction: float
    """Active warps, as a share of those that the SM can hold."""
    limiter: str
    """The limiting resource: "registers", "shared memory", "warps", "blocks" or "barriers"; "too big" if no block fits."""
    sm: SMLimits = field(repr=False)
    footprint: Footprint = field(repr=False)

    @property
    def cliffs(self) -> tuple[Cliff, ...]:
        """The next step in each direction, if there is one: registers, shared memory, threads; fewer, then more."""
        return tuple(_cliffs(self.sm, self.footprint, self.blocks))


def limits(arch: int) -> SMLimits:
    """The limits of `sm_<arch>`. Raises ValueError, with the nearest architecture, if it is unknown."""
    if arch not in _LIMITS:
        known, near = ", ".join(f"sm_{a}" for a in _LIMITS), min(_LIMITS, key=lambda a: abs(a - arch))
        raise ValueError(f"no limits are known for sm_{arch}; wanted one of {known}; the nearest is sm_{near}")
    return _LIMITS[arch]


def occupancy(
    arch: int, *, threads: int, registers: int, shared_bytes: int, barriers: int = 0, carveout: int | None = None
) -> Occupancy:
    """The number of blocks of a kernel that an SM of `sm_<arch>` runs at once.

    Args:
        threads: threads per block.
        registers: registers per thread.
        shared_bytes: static and dynamic shared memory per block.
        barriers: named barriers per block (`ptxas -v` prints "used 3 barriers"); 0 if there are none or it is unknown.
        carveout: the percentage of the SM's largest shared memory that the kernel prefers, as in
            `cudaFuncAttributePreferredSharedMemoryCarveout`; the next size in `SMLimits.carveouts` is used. None: the largest.

    Raises:
        ValueError: an unknown architecture, or an impossible number.
    """
    sm = limits(arch)
    if not 1 <= threads <= sm.block_threads:
        raise ValueError(f"a block has {threads} threads, wanted 1 to {sm.block_threads}")
    if not 0 <= registers <= MAX_REGISTERS:
        raise ValueError(f"a thread has {registers} registers, wanted 0 to {MAX_REGISTERS}")
    if shared_bytes < 0:
        raise ValueError(f"a block has {shared_bytes} bytes of shared memory, wanted 0 or more")
    if not 0 <= barriers <= 16:
        raise ValueError(f"a block has {barriers} barriers, wanted 0 to 16")
    if carveout is not None and not 0 <= carveout <= 100:
        raise ValueError(f"the carve-out is {carveout} percent, wanted 0 to 100")
    footprint = Footprint(threads=threads, registers=registers, shared_bytes=shared_bytes, barriers=barriers, carveout=carveout)
    by = _blocks(sm, footprint)
    limiter = min(by, key=lambda name: by[name])
    blocks = by[limiter]
    warps = blocks * -(-threads // _WARP)
    return Occupancy(
        blocks=blocks,
        warps=warps,
        fraction=warps / sm.warps,
        limiter=limiter if blocks else "too big",
        sm=sm,
        footprint=footprint,
    )


def _blocks(sm: SMLimits, block: Footprint) -> dict[str, int]:
    """The number of blocks that each resource alone allows. Of equal numbers, the first is reported as the limit."""
    warps = -(-block.threads // _WARP)
    return {
        "registers": _by_registers(sm, warps, block.registers),
        "shared memory": _by_shared(sm, block.shared_bytes, block.carveout),
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
        "barriers": sm.barriers // block.barriers if sm.barriers and block.barriers else sys.maxsize,
    }


def _by_registers(sm: SMLimits, warps: int, registers: int) -> int:
    per_warp = _up(registers * _WARP, _REGISTER_UNIT)
    if not per_warp:
        return sys.maxsize
    # The hardware checks a launch as if each part got the same number of warps.
    if per_warp * _up(warps, _PARTS) > sm.registers:
        return 0
    return sm.registers // _PARTS // per_warp * _PARTS // warps


def _by_shared(sm: SMLimits, shared_bytes: int, carveout: int | None) -> int:
    if shared_bytes > sm.block_shared_bytes:
        return 0
    block = _up(shared_bytes + _RESERVED_SHARED, _SHARED_UNIT)
    wanted = sm.shared_bytes if carveout is None else carveout * sm.shared_bytes // 100
    # The preference is ignored if a block needs more.
    return next(size for size in sm.carveouts if size >= max(wanted, block)) // block


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _cliffs(sm: SMLimits, block: Footprint, blocks: int) -> Iterator[Cliff]:
    fewer_warps = range((block.threads - 1) // _WARP * _WARP, 0, -_WARP)
    more_warps = range(_up(block.threads + 1, _WARP), sm.block_threads + 1, _WARP)
    ways = (
        ("registers", "registers", range(block.registers - 1, _FEWEST_REGISTERS - 1, -1)),
        ("registers", "registers", range(block.registers + 1, MAX_REGISTERS + 1)),
        ("shared memory", "shared_bytes", range(min(block.shared_bytes - 1, sm.block_shared_bytes), -1, -1)),
        ("shared memory", "shared_bytes", range(block.shared_bytes + 1, sm.block_shared_bytes + 2)),
        ("threads", "threads", fewer_warps),
        ("threads", "threads", more_warps),
    )
    for resource, name, values in ways:

        def held(value: int, name: str = name) -> int:
            return min(_blocks(sm, Footprint(**{**vars(block), name: value})).values())

        at = _first(values, lambda value, held=held: held(value) != blocks)
        if at is not None:
            new, now = held(at), getattr(block, name)
            yield Cliff(resource=resource, change=at - now, blocks=new, gained=new - blocks)


def _first(values: range, changed: Callable[[int], bool]) -> int | None:
    """The first value for which `changed` holds, given that it holds for all values after it."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if changed(values[middle]):
            high = middle
        else:
            low = middle + 1
    return values[low] if low < len(values) else None
