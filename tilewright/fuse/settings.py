"""The settings of a call of `optimize`, with defaults filled in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MAX_SHAPES", "PRECISIONS", "Dynamic", "Settings", "cast"]

Dynamic = bool | Mapping[int | str, Sequence[int]]
"""Which dimensions may differ from those of the example inputs: all, none, or certain ones of arguments by position or name."""
MAX_SHAPES = 8
"""The default of `max_shapes`. Each shape costs as much time and memory as the first one."""

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float16}
"""The precisions of `optimize` -> the dtype of all values that are not quantised."""


class Settings(NamedTuple):
    """Settings of one `optimize`, for the whole model or for each of its children."""

    precision: str
    tolerance: float | None
    graph: bool
    copy_outputs: bool
    search: int | None
    tune: bool = False
    compiled: bool = False
    """Whether Inductor compiles the whole graph (on a CPU)."""
    progress: Callable[[str], None] = lambda words: None
    """Called with a text that describes the progress of a search (`tune`)."""
    measure: bool = False
    """Whether each graph is timed against the original model, so that the faster of the two is used."""
    dynamic: Dynamic = True
    max_shapes: int = MAX_SHAPES

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations that are not quantised."""
        return PRECISIONS[self.precision]

    @property
    def quantised(self) -> bool:
        """Whether matrix products and convolutions are quantised."""
        return self.precision == "int8"


def cast(dtype: torch.dtype, leaf: Any) -> Any:
    """Cast a floating-point tensor to `dtype`; anything else is returned unchanged."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
