"""What ops over rows choose by, and small spaces for kernels whose blocks follow from the shape.

A block that holds a row is as wide as the row; what is left to measure is how many warps share it. So a space has two configs a
shape, and the certificates of an op stay short.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.tune.space import Config, Space

__all__ = ["Flat", "Rows", "flat_problem", "row_problem", "row_space"]


class Rows(NamedTuple):
    """All that a config of an op over rows may depend on: not how many there are."""

    dtype: torch.dtype
    cols: int


def row_problem(x: Tensor, *_: Any) -> Rows:
    """The problem of an op whose first argument is its rows."""
    return Rows(x.dtype, x.shape[-1])


class Flat(NamedTuple):
    """All that a config of a walk over memory may depend on: it has no sizes to choose by."""

    dtype: torch.dtype


def flat_problem(x: Tensor, *_: Any) -> Flat:
    """The problem of an op that walks over its first argument's memory."""
    return Flat(x.dtype)


def row_space(default: Callable[[Device, Any], Config], **axes: tuple[Any, ...]) -> Space:
    """A space around `default`, which may name any value of `axes`; `num_warps`, one of them, may be twice the default's."""

    def refusal(device: Device, problem: Any, config: Config) -> str | None:
        wanted = default(device, problem)
        if any(config[name] != value for name, value in wanted.items() if name != "num_warps"):
            return "the blocks follow from the shape"
        return None if config["num_warps"] in (wanted["num_warps"], 2 * wanted["num_warps"]) else "too few or too many warps"

    return Space(default=default, axes=axes, refusal=refusal)
