"""Makes Triton's interpreter convert as the hardware does (3.6 to 3.7.1).

float32 -> fp8 drops bits there, and subnormal bfloat16 -> float32 is another number.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_convert = interpreter._convert_float


def _as_hardware(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    """float32 -> fp8: to nearest, ties to even, saturating, NaN stays NaN (`cvt.rn.satfinite`). bfloat16 -> float32: exact."""
    if source == tl.bfloat16 and target == tl.float32:
        return data.view(np.uint16).astype(np.uint32) << 16
    if source != tl.float32 or target.name not in _FP8:
        return _convert(data, source, target, mode)
    dtype = _FP8[target.name]
    largest = torch.finfo(dtype).max
    codes = torch.from_numpy(np.array(data)).clamp(-largest, largest).to(dtype)
    return codes.view(torch.uint8).numpy().reshape(data.shape)


interpreter._convert_float = _as_hardware
