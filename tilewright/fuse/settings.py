"""What a call of `optimize` asked for, decided once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["MAX_SHAPES", "PRECISIONS", "Dynamic", "Settings", "cast"]

Dynamic = bool | Mapping[int | str, Sequence[int]]
"""Which dimensions of the inputs may differ from the examples': all, none, or those of an argument by its place or its name."""
MAX_SHAPES = 8
"""How many shapes a model is optimised for unless one says otherwise. Each costs what the first one did, in time and memory."""

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
    measure: bool = False
    """Whether each graph is timed beside the model as given, which answers where it is the faster."""
    dynamic: Dynamic = True
    max_shapes: int = MAX_SHAPES

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
