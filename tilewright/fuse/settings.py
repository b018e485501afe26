"""What a call of `optimize` asked for, decided once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PRECISIONS", "Settings", "cast"]

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float16}
"""What `optimize` takes, and the dtype of everything that is not quantised."""


class Settings(NamedTuple):
    """Of one `optimize`, for the whole model or for each of its children."""

    precision: str
    tolerance: float | None
    graph: bool
    copy_outputs: bool
    search: int | None
    tune: bool = False
    compiled: bool = False
    """Whether Inductor compiles the whole graph: on a CPU."""
    progress: Callable[[str], None] = lambda words: None
    """Told in words how far a search is (`tune`)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return PRECISIONS[self.precision]

    @property
    def quantised(self) -> bool:
        """Whether products are quantised."""
        return self.precision == "int8"


def cast(dtype: torch.dtype, leaf: Any) -> Any:
    """A floating-point tensor in that dtype; anything else as it is."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
