"""An analytical model of a launch: what a launch does (`Work`), and how long a card needs for that (`predict`).

One formula for every kernel. A step of a block's main loop takes as long as the slowest of what the blocks of its SM share,

    math       multiply-adds on tensor cores, at a share of the ceiling that grows with the tile
    fetch      bytes between L2 and the SM
    issue      instructions: elementwise arithmetic, and loads of 16 bytes or of 2

and then what each block waits for alone: `latency`, a round trip to memory shared by the loads under way at once (Little's
law), products and reductions that wait for one another, the rate of a block's own warps. Steps, and a start and an end for
each block, give full waves and a tail, with as many blocks an SM as registers and shared memory allow; where walks differ in
length, the longest may outlast them. The launch takes the slower of that and of its bytes at the ceiling of `memory`
(Williams, Waterman, Patterson, "Roofline", CACM 2009), more where the two are near each other, and a `launch` on top.

`Work` and what a config holds may be numbers or NumPy arrays, one entry a config: a whole space is predicted at once.

The constants are fitted to measurements on an H100 (`constants.py`; docs/regret.md says how good they are). Measured were
arguments that are not in L2, in a CUDA graph, in bf16. Everything else is extrapolation, other cards most of all.

Shares of a ceiling may be fitted above 1: products of microseconds run at a higher clock than the sustained ones by which
ceilings are measured. Such a number orders candidates; a time that is told (`predict`, `predict_all`, `unmeasured.rank`) is
never below what the ceilings allow (`least_seconds`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilewright.hw.ceilings import Ceilings, ceilings
from tilewright.hw.device import Device
from tilewright.hw.occupancy import limits, occupancy
from tilewright.tune.constants import Constants, constants_of
from tilewright.tune.space import Config

__all__ = [
    "Facts",
    "Held",
    "Prediction",
    "Work",
    "columns_of",
    "held_by",
    "least_seconds",
    "library_seconds",
    "predict",
    "predict_all",
    "seconds_of",
]

Numbers = Any
"""A number, or an array with one entry a config."""


class Work(NamedTuple):
    """What one launch really does with a config, padding and repeated reads included."""

    blocks: Numbers
    """Thread blocks that have something to do, at least 1; of a persistent kernel the tiles that they share."""
    flops: Numbers
    """Multiply-adds of all blocks on tensor cores, each as two, with the padding of ragged tiles."""
    unit: str
    """Their arithmetic ceiling: "bf16", "fp16", "tf32", "int8", "fp8"; "fp32" without tensor cores."""
    dram_bytes: Numbers
    """What must come from or go to memory, each byte once."""
    l2_bytes: Numbers
    """What the blocks ask of L2 in all, repeats included."""
    steps: Numbers = 1
    """Trips of a block's main loop, the mean of all blocks; more than 0."""
    longest: Numbers = 0
    """Trips of the block with the most; 0 when all blocks have the same."""
    depth: Numbers = 1
    """Trips whose loads are under way at once; 1 when a step waits for its own."""
    operations: Numbers = 0
    """Elementwise arithmetic of all blocks: conversions, exponentials, multiply-adds outside tensor cores."""
    vector: Numbers = 16
    """Bytes of one load."""
    chain: Numbers = 0
    """Products and reductions of a step that wait for one another."""
    end_bytes: Numbers = 0
    """What a block writes, and reads again, after its main loop, beyond the result: parts of a sum."""
    rounds: Numbers = 0
    """Waits one after another at a block's end: reductions over warps, tickets."""
    tile_m: Numbers = 0
    """Rows of a block's product on tensor cores, the tall operand's; 0 without."""
    tile_n: Numbers = 0
    """Its columns."""
    persistent: Numbers = False
    """The grid is one block an SM, and each takes tile after tile."""
    library: Numbers = False
    """The vendor's kernel, of which nothing is known: only flops, dram_bytes and vector count; and what is launched behind it,
    `rounds` kernels that move `end_bytes` in all."""


class Facts(Protocol):
    """What is asked of a compiled config: `tilewright.asm.certificate.ConfigFacts` has it."""

    @property
    def warps(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


class Prediction(NamedTuple):
    """How long a launch should take, and why."""

    seconds: float
    limiter: str
    """The largest part: "math", "fetch", "issue", "latency", "start and end", "longest block", "memory" or "launch"; of a
    vendor's kernel "math", "memory", "launch", or "start and end" for the kernels behind it."""
    waves: float
    """Blocks over those that run at once."""
    occupancy: float
    """Warps that an SM holds, of those that it could; 0 of a vendor's kernel."""
    parts: dict[str, float]
    """Seconds of each, as if it were alone."""
    fitted: bool
    """Whether the constants are fitted to a card of this architecture."""


class Held(NamedTuple):
    """What a config's kernel takes of an SM."""

    warps: Numbers
    resident: Numbers
    """Blocks that an SM holds, at least 1."""
    spill_bytes: Numbers


# ---- the formula


def _parts(
    work: Work, held: Held, sms: int, peak: Numbers, read: float, c: Constants, *, wanted: bool = True
) -> tuple[Numbers, dict[str, Numbers]]:
    """(seconds, if `wanted` the same by limiter), `peak` being the card's operations a second in the unit of the work."""
    blocks, steps = work.blocks, work.steps
    together = np.where(work.persistent, 1, np.minimum(held.resident, np.ceil(blocks / sms)))
    each = blocks * steps
    # what the blocks of an SM share, a block's step
    by_group = (work.tile_m >= c.warpgroup_rows) & (held.warps % 4 == 0) & (c.warpgroup_rows > 0)
    tile = work.tile_m * work.tile_n / held.warps
    share = np.where(by_group, c.warpgroup, c.warp * tile / (tile + c.warp_tile))
    slowed = 1 + held.spill_bytes * (c.spill / 1024)
    bytes_each, operations_each = work.l2_bytes / each, work.operations / each
    math = work.flops / each * (sms / peak) / (share + 1e-9) * slowed
    fetch = bytes_each / c.fetch * slowed
    instructions = operations_each + bytes_each / work.vector * c.load
    issue = instructions / c.operations * slowed
    shared = np.maximum(np.maximum(math, fetch), issue)
    # what a block waits for alone
    narrow = np.where(work.depth > 1, 0, np.maximum(16 / work.vector, 1))
    trip = c.latency_s / work.depth
    latency = c.step_s + c.chain_s * work.chain + instructions / (held.warps * c.warp_operations)
    latency = latency + bytes_each * narrow / (held.warps * c.warp_fetch)
    ends = c.start_s + c.round_s * work.rounds + work.end_bytes / c.fetch
    exposed = np.where(together > 1, ends * (1 - c.hidden), ends)

    def wave(resident: Numbers) -> Numbers:
        return steps * (np.maximum(resident * shared, trip) + latency) + exposed

    slots = sms * together
    full = np.floor(blocks / slots)
    tail = np.ceil((blocks - full * slots) / sms)
    even = full * wave(together) + np.where(tail > 0, wave(tail), 0.0)
    uneven = np.maximum(blocks / slots, 1) * wave(together)
    longest = work.longest * (np.maximum(shared, trip) + latency) + exposed
    busiest = np.where(work.longest > 0, np.maximum(uneven, longest), even) + (ends - exposed)
    memory = work.dram_bytes / (read * c.memory)
    # The first blocks wait for memory, and it for the last ones.
    alone = c.serial * (trip + latency + ends)
    squares = busiest * busiest, memory * memory
    total = np.sqrt(np.sqrt(squares[0] * squares[0] + squares[1] * squares[1])) + alone + c.launch_s
    if not wanted:
        return total, {}
    on_sms = np.maximum(blocks / sms, 1) * steps
    waves = np.maximum(blocks / slots, 1)
    return total, {
        "math": on_sms * math,
        "fetch": on_sms * fetch,
        "issue": on_sms * issue,
        "latency": waves * steps * (trip + latency),
        "start and end": waves * exposed,
        "longest block": np.where(longest > uneven, work.longest * (trip + latency), 0.0),
        "memory": memory,
        "launch": c.launch_s,
    }


def _library(work: Work, peak: Numbers, read: float, c: Constants) -> tuple[Numbers, dict[str, Numbers]]:
    """The same for the vendor's kernel."""
    narrow = work.vector < 16
    math = work.flops / (peak * np.where(narrow, c.library_narrow, c.library))
    memory = work.dram_bytes / (read * np.where(narrow, c.library_narrow_memory, c.memory))
    after = work.rounds * c.launch_s + work.end_bytes / (read * c.memory)
    parts = {"math": math, "memory": memory, "launch": c.library_s, "start and end": after}
    return np.maximum(math, memory) + c.library_s + after, parts


def library_seconds(work: Work, found: Ceilings, c: Constants) -> float:
    """The formula's seconds of a library's kernel."""
    return float(_library(work, found.flops[work.unit], found.read, c)[0])


def least_seconds(work: Work, found: Ceilings) -> Numbers:
    """What the ceilings allow for the operations and bytes of some work: the floor that `hw.roofline` has for such a cost."""
    return np.maximum(work.flops / found.flops[work.unit], work.dram_bytes / found.copy)


def seconds_of(work: Work, held: Held, device: Device, found: Ceilings, c: Constants) -> Numbers:
    """The formula's seconds of every entry, in one unit, which order them; `found` are the ceilings of `device`."""
    peak = found.flops[work.unit]
    own, _ = _parts(work, held, device.sms, peak, found.read, c, wanted=False)
    if not np.any(work.library):
        return own
    return np.where(work.library, _library(work, peak, found.read, c)[0], own)


# ---- one config


def predict(device: Device, work: Work, facts: Facts | None, found: Ceilings | None = None) -> Prediction:
    """How long a card needs for some work, all of whose entries are single numbers.

    Args:
        device: the card; it need not be here.
        work: as from `Impl.work`.
        facts: of the compiled config; None for a library's kernel.
        found: the card's ceilings, `hw.ceilings.ceilings(device)` unless given.

    Raises:
        ValueError: no such architecture, a kernel that fits no SM, a unit that the card lacks, or no facts.
    """
    found, c = found or ceilings(device), constants_of(device.arch)
    if work.unit not in found.flops:
        raise ValueError(f"predict: {device.name} has no {work.unit} unit; it has {', '.join(found.flops)}")
    peak, occupied, waves = found.flops[work.unit], 0.0, 1.0
    if work.library:
        seconds, parts = _library(work, peak, found.read, c)
    elif facts is None:
        raise ValueError("predict: got no facts of the compiled config; only a library's kernel goes without")
    else:
        held = held_by(device.arch, facts)
        if not held.resident:
            raise ValueError(
                f"predict: not one block fits an SM of sm_{device.arch}, with {facts.shared_bytes} bytes of shared memory"
            )
        seconds, parts = _parts(work, held, device.sms, peak, found.read, c)
        occupied = float(held.resident * held.warps / limits(device.arch).warps)
        waves = float(np.max(work.blocks)) / (device.sms * (1 if work.persistent else held.resident))
    single = {name: float(np.max(value)) for name, value in parts.items()}
    limiter = max(single, key=lambda name: single[name])
    told = float(np.max(np.maximum(seconds, least_seconds(work, found))))
    return Prediction(told, limiter, waves, occupied, single, c.source.startswith("fitted"))


def held_by(arch: int, facts: Facts) -> Held:
    """What a compiled config takes of an SM of `sm_<arch>`; `resident` is 0 where not one block fits."""
    blocks = occupancy(arch, threads=32 * facts.warps, registers=facts.registers, shared_bytes=facts.shared_bytes).blocks
    return Held(facts.warps, blocks, facts.spill_bytes)


# ---- many


def predict_all(
    device: Device, work: Callable[..., Work], configs: Sequence[Config], facts: Sequence[Facts], args: Sequence[Any]
) -> list[float]:
    """`predict`'s seconds of each config of one implementation (`Impl.work`); infinity where no block fits an SM."""
    if not configs:
        return []
    columns = columns_of(configs)
    held = [held_by(device.arch, f) for f in facts]
    found = ceilings(device)
    done = work(device, columns, *args)
    each = Held(*(np.array(column) for column in zip(*held, strict=True)))
    seconds = np.maximum(seconds_of(done, each, device, found, constants_of(device.arch)), least_seconds(done, found))
    seconds = np.broadcast_to(seconds, len(configs))
    return [float(s) if fits else float("inf") for s, fits in zip(seconds, each.resident, strict=True)]


def columns_of(configs: Sequence[Config]) -> dict[str, np.ndarray]:
    """Configs of one space as one config of arrays."""
    columns = {name: np.array([config[name] for config in configs]) for name in configs[0]}
    return {name: column.astype(float) if column.dtype.kind == "i" else column for name, column in columns.items()}
