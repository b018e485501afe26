"""Records the inputs of linear layers on calibration data: a sample of the rows, and the range of each column.

Every batch runs through the float model once. At most `MOST_ROWS` rows per layer are kept, on the CPU.
"""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MOST_ROWS", "Seen", "observe"]

MOST_ROWS = 2048
_ROWS_OF_A_BATCH = 128
"""Rows that are kept of each batch if the number of batches is unknown. If it is known, `MOST_ROWS` is divided among them."""


@dataclass
class Seen:
    """What was recorded of the input of one layer."""

    most: int
    """The number of rows to keep of each batch."""
    rows: list[Tensor]
    """The kept rows of the input, on the CPU, in the dtype of the input."""
    low: Tensor | None = None
    """The minimum of each column over all rows, not only the kept ones: [K] float32, on the CPU."""
    high: Tensor | None = None
    """The maximum, likewise."""

    @property
    def amax(self) -> Tensor | None:
        """The largest magnitude of each column, [K], or None if the layer was never called."""
        return None if self.low is None or self.high is None else torch.maximum(-self.low, self.high)

    @property
    def sample(self) -> Tensor | None:
        """The kept rows [R, K], or None if the layer was never called."""
        return torch.cat(self.rows) if self.rows else None

    def add(self, x: Tensor) -> None:
        """Record an input [..., K]."""
        flat = x.detach().reshape(-1, x.shape[-1])
        if not flat.shape[0]:
            return
        low, high = (bound.float().cpu() for bound in flat.aminmax(dim=0))
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        room = min(self.most, MOST_ROWS - sum(rows.shape[0] for rows in self.rows))
        if room > 0:
            # Rows are taken at equal distances, because the first rows would only be beginnings of texts.
            self.rows.append(flat[:: -(-flat.shape[0] // room)][:room].cpu())


def observe(model: nn.Module, layers: Mapping[str, nn.Module], calibration: Iterable[Any]) -> dict[str, Seen]:
    """Run the model on each batch, without gradients, and record the inputs of the layers.

    Args:
        layers: name -> a module of the model.
        calibration: batches. A tuple or list is passed as positional arguments of the model, a mapping as keyword arguments,
            anything else as the only argument.

    Raises:
        ValueError: there are no batches, or a layer's input is not finite.
    """
    most = max(1, MOST_ROWS // max(1, len(calibration))) if isinstance(calibration, Sized) else _ROWS_OF_A_BATCH
    seen = {name: Seen(most, []) for name in layers}
    handles = [module.register_forward_pre_hook(_noting(seen[name])) for name, module in layers.items()]
    batches = 0
    try:
        with torch.no_grad():
            for batch in calibration:
                batches += 1
                _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not batches:
        raise ValueError("quantize: the calibration input is empty; give some inputs of the model, or leave calibration out")
    for name, found in seen.items():
        if found.amax is not None and not bool(found.amax.isfinite().all()):
            raise ValueError(
                f"quantize: with the calibration input, the input of {name} becomes infinite or NaN in "
                f"{int((~found.amax.isfinite()).sum())} of {found.amax.numel()} columns; check the input and the "
                "weights for values that are not finite, or calibrate in bfloat16 or float32 if the model overflows "
                "in float16"
            )
    return seen


def _noting(seen: Seen) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.add(args[0])

    return hook


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)
