"""An analytical model of a launch: the work that it does (`Work`), and the time that a card needs for this (`predict`).

All kernels have the same formula. The time of one step of a block's main loop is that of the slowest resource that the blocks
of an SM share:

    math       multiply-adds on tensor cores, at a share of the ceiling that grows with the tile
    fetch      bytes between L2 and the SM
    issue      instructions: elementwise arithmetic, and loads of 16 bytes or of 2

To this the waits of each single block are added, `latency`: a round trip to memory, divided by the number of loads in flight
(Little's law); products and reductions that wait for one another; and the instruction rate of a block's own warps. The time of
a block is the sum of its steps, its start and its end. The grid runs in full waves and a tail, with as many blocks per SM as
registers and shared memory allow. If the loops of blocks differ in length, the longest block may take longer than that. The
time of a launch is the longer of this and of its bytes at the ceiling of `memory` (Williams, Waterman, Patterson, "Roofline",
CACM 2009). It is more if the two are close, and a `launch` is added.

The fields of `Work` and the values of a config may be numbers, or NumPy arrays with one entry per config, so that a whole space
is predicted at once.

The constants are fitted to measurements on an H100 (`constants.py`; docs/regret.md shows how good they are): in bf16, in a CUDA
graph, with arguments that are not in L2. Everything else is extrapolation, above all other cards.

A share of a ceiling can be above 1: products of microseconds run at a higher clock than the sustained products with which
ceilings are measured. This is harmless for ordering candidates. Times that are reported (`predict`, `predict_all`,
`unmeasured.rank`) are never below what the ceilings allow (`least_seconds`).
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
"""A number, or an array with one entry per config."""


class Work(NamedTuple):
    """What one launch really does with a config, including padding and repeated reads."""

    blocks: Numbers
    """Thread blocks that have work, at least 1; for a persistent kernel, the number of tiles."""
    flops: Numbers
    """Operations of all blocks on tensor cores (a multiply-add is two), including the padding of ragged tiles."""
    unit: str
    """The arithmetic unit of `flops`: "bf16", "fp16", "tf32", "int8", "fp8"; "fp32" without tensor cores."""
    dram_bytes: Numbers
    """Bytes that must be read from or written to memory, each once."""
    l2_bytes: Numbers
    """Bytes that the blocks request from L2 in all, including repeated ones."""
    steps: Numbers = 1
    """Iterations of a block's main loop, the average over all blocks; more than 0."""
    longest: Numbers = 0
    """Iterations of the block with the most; 0 if all blocks have the same number."""
    depth: Numbers = 1
    """Iterations whose loads are in flight at once; 1 if a step waits for its own loads."""
    operations: Numbers = 0
    """Elementwise operations of all blocks: conversions, exponentials, multiply-adds outside tensor cores."""
    vector: Numbers = 16
    """Bytes of one load."""
    chain: Numbers = 0
    """Products and reductions of a step that wait for one another."""
    end_bytes: Numbers = 0
    """Bytes that a block writes and reads again after its main loop, besides the result: partial sums."""
    rounds: Numbers = 0
    """Waits at a block's end, one after the other: reductions over warps, tickets."""
    tile_m: Numbers = 0
    """Rows of a block's tile on tensor cores (of the operand with more rows); 0 without tensor cores."""
    tile_n: Numbers = 0
    """Columns of that tile."""
    persistent: Numbers = False
    """The grid has one block per SM, and each block processes several tiles."""
    library: Numbers = False
    """The vendor's kernel, whose inner working is unknown. Only flops, dram_bytes and vector are used, and the kernels that
    follow it: `rounds` kernels that move `end_bytes` in all."""


class Facts(Protocol):
    """The part of `tilewright.asm.certificate.ConfigFacts` (a compiled config) that is needed here."""

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
    """The largest part: "math", "fetch", "issue", "latency", "start and end", "longest block", "memory" or "launch"; for a
    vendor's kernel "math", "memory", "launch", or "start and end" for the kernels after it."""
    waves: float
    """Blocks divided by the number that runs at once."""
    occupancy: float
    """Active warps as a share of those that an SM can hold; 0 for a vendor's kernel."""
    parts: dict[str, float]
    """Seconds of each part as if it were alone."""
    fitted: bool
    """Whether the constants were fitted to a card of this architecture."""


class Held(NamedTuple):
    """The resources of an SM that a config's kernel uses."""

    warps: Numbers
    resident: Numbers
    """Blocks that an SM runs at once, at least 1."""
    spill_bytes: Numbers


# ---- the formula


def _parts(
    work: Work, held: Held, sms: int, peak: Numbers, read: float, c: Constants, *, wanted: bool = True
) -> tuple[Numbers, dict[str, Numbers]]:
    """(seconds, seconds by limiter); the latter is empty unless `wanted`. `peak`: the card's operations per second in the
    unit of the work."""
    blocks, steps = work.blocks, work.steps
    together = np.where(work.persistent, 1, np.minimum(held.resident, np.ceil(blocks / sms)))
    each = blocks * steps
    # seconds of the resources that the blocks of an SM share, per step of a block
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
    # waits of each single block
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
    # While the first blocks wait for memory and the last ones end, nothing overlaps.
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
    """`_parts` for a vendor's kernel."""
    narrow = work.vector < 16
    math = work.flops / (peak * np.where(narrow, c.library_narrow, c.library))
    memory = work.dram_bytes / (read * np.where(narrow, c.library_narrow_memory, c.memory))
    after = work.rounds * c.launch_s + work.end_bytes / (read * c.memory)
    parts = {"math": math, "memory": memory, "launch": c.library_s, "start and end": after}
    return np.maximum(math, memory) + c.library_s + after, parts


def library_seconds(work: Work, found: Ceilings, c: Constants) -> float:
    """The formula's seconds for a library's kernel."""
    return float(_library(work, found.flops[work.unit], found.read, c)[0])


def least_seconds(work: Work, found: Ceilings) -> Numbers:
    """The time that the ceilings allow for the operations and bytes of some work: the lower bound of `hw.roofline`."""
    return np.maximum(work.flops / found.flops[work.unit], work.dram_bytes / found.copy)


def seconds_of(work: Work, held: Held, device: Device, found: Ceilings, c: Constants) -> Numbers:
    """The formula's seconds for every entry, all in the same arithmetic unit, for ordering. `found`: ceilings of `device`."""
    peak = found.flops[work.unit]
    own, _ = _parts(work, held, device.sms, peak, found.read, c, wanted=False)
    if not np.any(work.library):
        return own
    return np.where(work.library, _library(work, peak, found.read, c)[0], own)


# ---- one config


def predict(device: Device, work: Work, facts: Facts | None, found: Ceilings | None = None) -> Prediction:
    """How long a card needs for some work; all fields must be single numbers.

    Args:
        device: the card, which need not be present.
        work: the result of `Impl.work`.
        facts: facts of the compiled config; None for a library's kernel.
        found: the card's ceilings; by default `hw.ceilings.ceilings(device)`.

    Raises:
        ValueError: an unknown architecture, a kernel that does not fit on an SM, a unit that the card lacks, or no facts.
    """
    found, c = found or ceilings(device), constants_of(device.arch)
    if work.unit not in found.flops:
        raise ValueError(f"predict: {device.name} has no {work.unit} unit; it has {', '.join(found.flops)}")
    peak, occupied, waves = found.flops[work.unit], 0.0, 1.0
    if work.library:
        seconds, parts = _library(work, peak, found.read, c)
    elif facts is None:
        raise ValueError("predict: needs the facts of the compiled config, except for a library's kernel")
    else:
        held = held_by(device.arch, facts)
        if not held.resident:
            raise ValueError(
                f"predict: no block with {facts.shared_bytes} bytes of shared memory fits on an SM of sm_{device.arch}"
            )
        seconds, parts = _parts(work, held, device.sms, peak, found.read, c)
        occupied = float(held.resident * held.warps / limits(device.arch).warps)
        waves = float(np.max(work.blocks)) / (device.sms * (1 if work.persistent else held.resident))
    single = {name: float(np.max(value)) for name, value in parts.items()}
    limiter = max(single, key=lambda name: single[name])
    told = float(np.max(np.maximum(seconds, least_seconds(work, found))))
    return Prediction(told, limiter, waves, occupied, single, c.source.startswith("fitted"))


def held_by(arch: int, facts: Facts) -> Held:
    """The resources that a compiled config uses on an SM of `sm_<arch>`; `resident` is 0 if no block fits."""
    blocks = occupancy(arch, threads=32 * facts.warps, registers=facts.registers, shared_bytes=facts.shared_bytes).blocks
    return Held(facts.warps, blocks, facts.spill_bytes)


# ---- many


def predict_all(
    device: Device, work: Callable[..., Work], configs: Sequence[Config], facts: Sequence[Facts], args: Sequence[Any]
) -> list[float]:
    """Seconds of each config of one implementation (`Impl.work`), as in `predict`; infinity if no block fits on an SM."""
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
    """Configs of one space as one config whose values are arrays."""
    columns = {name: np.array([config[name] for config in configs]) for name in configs[0]}
    return {name: column.astype(float) if column.dtype.kind == "i" else column for name, column in columns.items()}
