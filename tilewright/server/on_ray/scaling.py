"""How many replicas there should be: a pure decision, which Ray Serve's controller asks for again and again.

Each replica says how loaded it is (`language_load`, `ordinary_load`): 1 is as much as one of them should have. All loads are
added and rounded up, so two replicas at 0.4 become one at 0.8, and one at 1.3 becomes two. Ray waits before it follows
(`Scaling`): a burst starts nothing that ends at once.
"""

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["METRIC", "Scaling", "language_load", "ordinary_load", "wanted_replicas"]

METRIC = "load"
"""The name under which replicas report it."""
PLACES = 0.75
"""The share of a replica's places that should be taken, counting who waits."""
PAGES = 0.8
"""The share of its KV cache; beyond it requests are put back for want of pages."""
BATCHES = 2
"""Batches that ordinary models should have: one that runs and one that waits."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the number of replicas follows their load.

    Args:
        least, most: of replicas.
        window_s: loads are averaged over it.
        up_after_s, down_after_s: how long more, or fewer, must be wanted before the number changes.

    Raises:
        ValueError: a number out of range.
    """

    least: int
    most: int
    window_s: float = 15.0
    up_after_s: float = 5.0
    down_after_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"max_replicas is {self.most}, wanted at least the {self.least} of --replicas")

    def options(self, policy: Any) -> dict[str, Any]:
        """As Ray Serve's `autoscaling_config`. `policy`: what it asks for the number of replicas."""
        return {
            "min_replicas": self.least,
            "initial_replicas": self.least,
            "max_replicas": self.most,
            "look_back_period_s": self.window_s,
            "upscale_delay_s": self.up_after_s,
            "downscale_delay_s": self.down_after_s,
            "policy": policy,
        }


def language_load(running: int, waiting: int, places: int, pages_used: int, pages: int) -> float:
    """Of a language model's replica: by its queue, or by its KV cache where that is fuller."""
    return max((running + waiting) / (PLACES * places), pages_used / (PAGES * max(1, pages)))


def ordinary_load(open_requests: int, max_batch: int, instances: int) -> float:
    """Of an ordinary model: requests that wait or are computed, in batches of as many as it takes."""
    return open_requests / (BATCHES * max_batch * instances)


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy. A replica that has not reported yet counts as one that has what it should have.

    Args:
        context: Ray's `AutoscalingContext`.
    """
    loads = (context.aggregated_metrics or {}).get(METRIC, {})
    unknown = max(0, context.current_num_replicas - len(loads))
    # Averages of a window are a little off: 2.0000001 is two.
    return max(1, math.ceil(sum(loads.values()) + unknown - 1e-6)), {}
