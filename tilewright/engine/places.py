"""The device and the dtype of a model, from the engine's options."""

import torch

from tilewright.engine.config import EngineConfig
from tilewright.hw.device import cuda_count, default_device

__all__ = ["dtype_of", "place_of"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype with this name; None for None. Raises ValueError."""
    if name is not None and name not in _DTYPES:
        raise ValueError(f"dtype is {name!r}, wanted one of {', '.join(_DTYPES)}")
    return None if name is None else _DTYPES[name]


def _device(name: str | None) -> torch.device:
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, wanted cpu, cuda or cuda:N") from error
    count = cuda_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device is {name!r}, but this machine has {count} CUDA devices; take cpu, or leave it out")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, wanted cpu, cuda or cuda:N")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def place_of(options: EngineConfig) -> tuple[torch.device, torch.dtype | None]:
    """(device, dtype or None if the options name none). Raises ValueError: no such device or dtype, or `invariant` on a CPU."""
    on = _device(options.device)
    if options.invariant and on.type == "cpu":
        raise ValueError(
            "invariant is set, but on a CPU the bits of a row depend on the rows beside it (its products are torch's own); "
            "take a GPU, or leave --invariant out"
        )
    return on, dtype_of(options.dtype)
