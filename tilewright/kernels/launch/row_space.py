"""Small spaces for kernels whose blocks follow from the shape: the default's blocks, and how many warps share them.

A block that holds a row is as wide as the row; what is left to measure is the number of warps. So a space has two configs a
shape, and the certificates of an op stay short.
"""

from collections.abc import Callable
from typing import Any

from tilewright.hw.device import Device
from tilewright.tune.space import Config, Space

__all__ = ["row_space"]


def row_space(default: Callable[[Device, Any], Config], **axes: tuple[Any, ...]) -> Space:
    """A space around `default`, which may name any value of `axes`; `num_warps`, one of them, may be twice the default's."""

    def refusal(device: Device, problem: Any, config: Config) -> str | None:
        wanted = default(device, problem)
        if any(config[name] != value for name, value in wanted.items() if name != "num_warps"):
            return "the blocks follow from the shape"
        return None if config["num_warps"] in (wanted["num_warps"], 2 * wanted["num_warps"]) else "too few or too many warps"

    return Space(default=default, axes=axes, refusal=refusal)
