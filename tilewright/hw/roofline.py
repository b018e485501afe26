"""Lower bounds of time: work against the two ceilings of a card (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""

from dataclasses import dataclass

from tilewright.hw.ceilings import Ceilings

__all__ = ["Cost", "Roof", "roof"]


@dataclass(frozen=True)
class Cost:
    """The work that a call has to do in any case.

    `flops` counts multiply and add as two. `bytes` counts each input read once and each output written once.
    """

    flops: int
    bytes: int

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The lower bound on a card with these two ceilings: the longer of arithmetic and memory time."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)

    def bound(self, flops_per_s: float, bytes_per_s: float) -> str:
        """Which ceiling sets that bound: "flops" or "bytes"."""
        return "flops" if self.flops / flops_per_s > self.bytes / bytes_per_s else "bytes"


@dataclass(frozen=True)
class Roof:
    """The least time that a card needs for some work, and why."""

    seconds: float
    bound: str
    """"bytes" or an arithmetic unit of `Ceilings.flops`."""
    source: str
    """The source of the limiting ceiling: a measurement or a data sheet."""


def roof(cost: Cost, found: Ceilings, unit: str) -> Roof:
    """The lower bound for `cost` with these ceilings; arithmetic runs in `unit` ("bf16", "int8", ...).

    Raises:
        ValueError: the card has no such unit.
    """
    if unit not in found.flops:
        raise ValueError(f"roof: the card has no {unit} unit; it has {', '.join(found.flops)}")
    flops = found.flops[unit]
    bound = unit if cost.bound(flops, found.copy) == "flops" else "bytes"
    return Roof(cost.seconds(flops, found.copy), bound, found.source_of(bound))
