"""What the analytical model knows of an architecture beyond its ceilings: one table, fitted, with where it comes from.

Times are seconds; rates are of one SM, or of one warp; shares are of a ceiling (`tilewright.hw.ceilings`).
"""

from typing import NamedTuple

__all__ = ["CONSTANTS", "Constants", "constants_of"]


class Constants(NamedTuple):
    """The formula's numbers for a family of architectures."""

    source: str
    """Where they come from; "fitted ..." only if to measurements on such a card."""
    warpgroup_rows: int
    """Rows of a tile from which on the tensor cores take it by warpgroups; 0 where they have no such instruction."""
    launch_s: float
    """A launch in a graph that does nothing."""
    start_s: float
    """A block's start: its first answer from memory."""
    round_s: float
    """One of `Work.rounds`."""
    latency_s: float
    """A round trip to memory, under load."""
    step_s: float
    """What a step costs beyond: a barrier, the loop."""
    chain_s: float
    """One of `Work.chain`."""
    fetch: float
    """Bytes a second between L2 and one SM."""
    operations: float
    """Elementwise operations a second of one SM."""
    load: float
    """Operations that a thread's load counts as."""
    warp_fetch: float
    """Bytes a second that one warp's loads into registers bring."""
    warp_operations: float
    """Elementwise operations a second of one warp."""
    warpgroup: float
    """Share of the tensor cores' ceiling that warpgroup instructions reach."""
    warp: float
    """Share that instructions of a warp reach with a large tile."""
    warp_tile: float
    """Elements of a tile, a warp, at which they reach half of that."""
    memory: float
    """Share of `Ceilings.read` that a kernel reaches."""
    serial: float
    """Share of the smaller of two, the bytes from memory and the work of the SMs, that the larger does not hide."""
    spill: float
    """By how much a step slows down for each KB that a thread spills."""
    hidden: float
    """Share of a block's start and end that other blocks of its SM hide."""
    library: float
    """Share of the arithmetic ceiling that the vendor's library reaches."""
    library_narrow: float
    """The same where rows do not start at 16 bytes."""
    library_narrow_memory: float
    """Share of `Ceilings.read` that it reaches there."""
    library_s: float
    """What it needs beyond, a launch."""


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

_SCALED = "those of sm_90, unmeasured here"
CONSTANTS = {
    80: _SM90._replace(source=_SCALED, warpgroup_rows=0),
    90: _SM90,
    100: _SM90._replace(source=_SCALED),
    120: _SM90._replace(source=_SCALED, warpgroup_rows=0),
}
"""By family: the first architecture that it holds for, up to the next."""


def constants_of(arch: int) -> Constants:
    """The constants of `sm_<arch>`. Raises ValueError for one older than all families."""
    family = max((known for known in CONSTANTS if known <= arch), default=None)
    if family is None:
        raise ValueError(f"the model knows no sm_{arch}; wanted sm_{min(CONSTANTS)} or newer")
    return CONSTANTS[family]
