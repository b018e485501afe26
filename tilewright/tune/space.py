"""The free choices of a kernel: axes, what rules a combination out, and the choice made without a measurement.

A config is a plain dict of keyword arguments for the launch (`{"BLOCK_N": 64, "num_warps": 4}`). A running program never
searches: it takes `default(device, problem)`.
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

    `default` picks one from a device and a problem alone, and must be deterministic: two ranks with one card choose alike.
    `axes` maps each choice to its values, in the order in which a table shows them.
    `refusal` names why a combination cannot work for a problem (too much shared memory, a tile wider than the matrix).
    """

    default: Callable[[Device, Any], Config]
    axes: Mapping[str, tuple[Any, ...]]
    refusal: Callable[[Device, Any, Config], str | None] = lambda device, problem, config: None

    def configs(self, device: Device, problem: Any) -> Iterator[Config]:
        """Every config that this problem can run with, in the axes' order."""
        for values in product(*self.axes.values()):
            config = dict(zip(self.axes, values, strict=True))
            if self.refusal(device, problem, config) is None:
                yield config


NO_CHOICES = Space(default=lambda device, problem: {}, axes={})
