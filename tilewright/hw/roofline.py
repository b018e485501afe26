"""How fast could it be: work against the two ceilings of a card (Williams, Waterman, Patterson, "Roofline", CACM 2009)."""

from dataclasses import dataclass

__all__ = ["Cost"]


@dataclass(frozen=True)
class Cost:
    """The work that a call cannot avoid.

    `flops` counts multiply and add as two. `bytes` counts each input read once and each output written once.
    """

    flops: int
    bytes: int

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The floor on a card with these two ceilings: the slower of arithmetic and memory."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)

    def bound(self, flops_per_s: float, bytes_per_s: float) -> str:
        """Which ceiling sets that floor: "flops" or "bytes"."""
        return "flops" if self.flops / flops_per_s > self.bytes / bytes_per_s else "bytes"
