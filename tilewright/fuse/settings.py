"""The settings of a call of `optimize`, after defaults are filled in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MAX_SHAPES", "PRECISIONS", "Dynamic", "Settings", "cast"]

Dynamic = bool | Mapping[int | str, Sequence[int]]
"""Which dimensions of the inputs may differ from the examples': all, none, or those of arguments by position or name."""
MAX_SHAPES = 8
"""The default of `max_shapes`. Each shape costs as much time and memory as the first one."""

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float16}
"""The precisions of `optimize`, with the dtype of everything that is not quantised."""


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
    """Called with a text as a search (`tune`) advances."""
    measure: bool = False
    """Whether each graph is timed beside the original model, which is used if it is faster."""
    dynamic: Dynamic = True
    max_shapes: int = MAX_SHAPES

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return PRECISIONS[self.precision]

    @property
    def quantised(self) -> bool:
        """Whether products are quantised."""
        return self.precision == "int8"


def cast(dtype: torch.dtype, leaf: Any) -> Any:
    """A floating-point tensor cast to `dtype`; anything else unchanged."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
