"""Decides how many replicas there should be. Ray Serve's controller calls this policy repeatedly; it has no state and no I/O.

Each replica reports its load (`language_load`, `ordinary_load`). A load of 1 is the target for one replica. The number of
replicas is the sum of all loads, rounded up: two replicas at 0.4 become one at 0.8, and one at 1.3 becomes two. Ray waits
before it changes the number (`Scaling`), so that a short burst does not start replicas that are stopped again at once.
"""

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["METRIC", "Scaling", "language_load", "ordinary_load", "wanted_replicas"]

METRIC = "load"
"""The name under which replicas report their load."""
PLACES = 0.75
"""Target share of a replica's places (samples in a batch) that are used, including waiting requests."""
PAGES = 0.8
"""Target share of its KV cache that is used. Above it, requests are preempted because pages are scarce."""
BATCHES = 2
"""Target number of batches per instance of an ordinary model: one that runs and one that waits."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the number of replicas follows their load.

    Args:
        least, most: smallest and largest number of replicas.
        window_s: the time over which loads are averaged.
        up_after_s, down_after_s: how long the policy must want more, or fewer, replicas before the number changes.

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
        """The values for Ray Serve's `autoscaling_config`. `policy`: its policy for the number of replicas."""
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
    """The load of a language model's replica: that of its batch and queue or that of its KV cache, whichever is larger."""
    return max((running + waiting) / (PLACES * places), pages_used / (PAGES * max(1, pages)))


def ordinary_load(open_requests: int, max_batch: int, instances: int) -> float:
    """The load of an ordinary model: waiting and running requests, as a share of `BATCHES` full batches per instance."""
    return open_requests / (BATCHES * max_batch * instances)


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy for Ray Serve: returns (number of replicas, {}). A replica that has not reported yet counts with a load of 1.

    Args:
        context: Ray's `AutoscalingContext`.
    """
    loads = (context.aggregated_metrics or {}).get(METRIC, {})
    unknown = max(0, context.current_num_replicas - len(loads))
    # Averages over a window have rounding errors: 2.0000001 means two.
    return max(1, math.ceil(sum(loads.values()) + unknown - 1e-6)), {}
