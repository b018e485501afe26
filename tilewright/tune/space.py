"""The config space of a kernel: the tuning parameters, which combinations are impossible, and the default.

A config is a plain dict of keyword arguments for the launch (`{"BLOCK_N": 64, "num_warps": 4}`). A running program never
searches: without a measured row it uses `default(device, problem)`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from tilewright.hw.device import Device

__all__ = ["NO_CHOICES", "Config", "Space"]

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The configs of one implementation.

    `default` chooses a config from the device and the problem alone. It must be deterministic, so that ranks with the same card
    make the same choice. `axes` maps each parameter to its values, in the order in which a table shows them. `refusal` returns
    the reason why a combination cannot work for a problem (too much shared memory, a tile wider than the matrix), or None.
    """

    default: Callable[[Device, Any], Config]
    axes: Mapping[str, tuple[Any, ...]]
    refusal: Callable[[Device, Any, Config], str | None] = lambda device, problem, config: None

    def configs(self, device: Device, problem: Any) -> Iterator[Config]:
        """All configs with which this problem can run, in the order of the axes."""
        for values in product(*self.axes.values()):
            config = dict(zip(self.axes, values, strict=True))
            if self.refusal(device, problem, config) is None:
                yield config


NO_CHOICES = Space(default=lambda device, problem: {}, axes={})
