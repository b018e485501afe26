"""Records the GPU's clock during runs, and why it was not higher.

A card at its power limit runs at the clock that the limit allows, on both sides of a comparison alike, because runs alternate;
the report says so. Unintended reasons (heat, a hardware brake) are a point of the fairness card.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tilewright.hw.state import State, state

__all__ = ["Watch"]

_EVERY_S = 0.5


@dataclass(kw_only=True)
class Watch:
    """Looks at a GPU from time to time, between two turns."""

    cuda: int | None
    """Index of the device; None on a CPU, where nothing is looked at."""
    states: list[State] = field(default_factory=list)

    def look(self) -> None:
        """Take a sample, if the last one is half a second old."""
        if self.cuda is None or (self.states and time.monotonic() - self.states[-1].at < _EVERY_S):
            return
        self.states.append(state(self.cuda))

    def summary(self) -> dict[str, Any]:
        """{"samples", "sm_mhz": [lowest, median, highest], "power_capped": share of the samples, "slowdowns"}; or empty."""
        seen = [one.gpu for one in self.states if "sm" in one.gpu]
        if not seen:
            return {}
        clocks = [gpu["sm"] for gpu in seen]
        return {
            "samples": len(seen),
            "sm_mhz": [min(clocks), round(statistics.median(clocks)), max(clocks)],
            "power_capped": round(sum(bool(gpu.get("power_capped")) for gpu in seen) / len(seen), 3),
            "slowdowns": sorted({text for gpu in seen for text in gpu.get("slowdowns", [])}),
        }
