"""Constants of the analytical model for each family of architectures, besides the ceilings of a card, with their source.

Times are seconds; rates are of one SM or one warp; shares are of a ceiling (`tilewright.hw.ceilings`).
"""

from typing import NamedTuple

__all__ = ["CONSTANTS", "Constants", "constants_of"]


class Constants(NamedTuple):
    """The constants of the formula for a family of architectures."""

    source: str
    """The source; "fitted ..." only if they were fitted to measurements on such a card."""
    warpgroup_rows: int
    """Rows of a tile from which tensor cores are used by warpgroups; 0 if the architecture has no such instruction."""
    launch_s: float
    """An empty launch in a graph."""
    start_s: float
    """A block's start, until its first data arrive from memory."""
    round_s: float
    """One of `Work.rounds`."""
    latency_s: float
    """A round trip to memory under load."""
    step_s: float
    """The fixed cost of a step: a barrier, the loop."""
    chain_s: float
    """One of `Work.chain`."""
    fetch: float
    """Bytes per second between L2 and one SM."""
    operations: float
    """Elementwise operations per second of one SM."""
    load: float
    """The number of operations as which one load of a thread counts."""
    warp_fetch: float
    """Bytes per second that the loads of one warp bring into registers."""
    warp_operations: float
    """Elementwise operations per second of one warp."""
    warpgroup: float
    """Share of the tensor cores' ceiling that warpgroup instructions reach."""
    warp: float
    """Share that warp instructions reach with a large tile."""
    warp_tile: float
    """Elements of a tile per warp with which they reach half of that share."""
    memory: float
    """Share of `Ceilings.read` that a kernel reaches."""
    serial: float
    """Share of a block's waits (memory, start, end) that adds to the launch, because it does not overlap with anything."""
    spill: float
    """Slowdown of a step for each KB that a thread spills."""
    hidden: float
    """Share of a block's start and end that other blocks of its SM hide."""
    library: float
    """Share of the arithmetic ceiling that the vendor's library reaches."""
    library_narrow: float
    """The same if rows do not start at multiples of 16 bytes."""
    library_narrow_memory: float
    """Share of `Ceilings.read` that the library reaches in that case."""
    library_s: float
    """Its additional fixed time per launch."""


# Written by scripts/fit_model.py.
_SM90 = Constants(
    source="fitted by scripts/fit_model.py to 5200 measurements on NVIDIA H100 80GB HBM3",
    warpgroup_rows=64,
    launch_s=1e-07,
    start_s=8.989e-07,
    round_s=6.226e-08,
    latency_s=5.842e-07,
    step_s=9.24e-08,
    chain_s=1.305e-07,
    fetch=9.465e10,
    operations=1.873e11,
    load=4.727,
    warp_fetch=3.602e10,
    warp_operations=2.684e10,
    warpgroup=1.215,
    warp=0.4756,
    warp_tile=578.2,
    memory=0.9355,
    serial=0.9155,
    spill=2.391,
    hidden=0.3456,
    library=1.186,
    library_narrow=0.1982,
    library_narrow_memory=0.4303,
    library_s=3.793e-06,
)

_SCALED = "those of sm_90, not measured on this architecture"
CONSTANTS = {
    80: _SM90._replace(source=_SCALED, warpgroup_rows=0),
    90: _SM90,
    100: _SM90._replace(source=_SCALED),
    120: _SM90._replace(source=_SCALED, warpgroup_rows=0),
}
"""By family: the first architecture to which the constants apply, up to the next family."""


def constants_of(arch: int) -> Constants:
    """The constants of `sm_<arch>`. Raises ValueError for an architecture older than all families."""
    family = max((known for known in CONSTANTS if known <= arch), default=None)
    if family is None:
        raise ValueError(f"the model has no constants for sm_{arch}; it supports sm_{min(CONSTANTS)} and newer")
    return CONSTANTS[family]
