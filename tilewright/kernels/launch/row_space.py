"""Problems of ops over rows, and small config spaces for kernels whose block sizes follow from the shape.

A block that contains a row is as wide as the row, so only the number of warps remains to be measured. Such a space has two
configs per shape, and the certificates of an op stay short.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import Device
from tilewright.tune.space import Config, Space

__all__ = ["Flat", "Rows", "flat_problem", "row_problem", "row_space"]


class Rows(NamedTuple):
    """Everything that a config of an op over rows may depend on. The number of rows is not part of it."""

    dtype: torch.dtype
    cols: int


def row_problem(x: Tensor, *_: Any) -> Rows:
    """The problem of an op whose first argument contains the rows."""
    return Rows(x.dtype, x.shape[-1])


class Flat(NamedTuple):
    """Everything that a config of a contiguous elementwise kernel may depend on; sizes are not part of it."""

    dtype: torch.dtype


def flat_problem(x: Tensor, *_: Any) -> Flat:
    """The problem of an elementwise op that reads its first argument in storage order."""
    return Flat(x.dtype)


def row_space(default: Callable[[Device, Any], Config], **axes: tuple[Any, ...]) -> Space:
    """A space that accepts, for each problem, the config `default` and the same with twice its `num_warps`.

    `axes` must contain `num_warps`, and all values that `default` may return.
    """

    def refusal(device: Device, problem: Any, config: Config) -> str | None:
        wanted = default(device, problem)
        if any(config[name] != value for name, value in wanted.items() if name != "num_warps"):
            return "the shape determines the blocks: only num_warps may differ from the default"
        return (
            None
            if config["num_warps"] in (wanted["num_warps"], 2 * wanted["num_warps"])
            else "num_warps must be the default or its double"
        )

    return Space(default=default, axes=axes, refusal=refusal)
