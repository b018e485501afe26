"""What a call of `optimize` asked for, decided once."""

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["PRECISIONS", "Settings"]

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
