"""Makes Triton's interpreter convert as the hardware does (3.6 to 3.7.1), and keeps the garbage collector off what stays. Deals
tests to several processes, and stops in time, for scripts/test_gpu.py.

The interpreter's own float32 -> bfloat16 and float32 -> float8 drop the low bits, and a subnormal bfloat16 becomes another
float32. Errors are then half as large, and the limits of conformance need no room for a mistake that no GPU makes.
"""

import gc
import time

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_convert = interpreter._convert_float


def _as_hardware(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
    """What differs from the hardware is done here, anything else as Triton does it."""
    if source == tl.bfloat16 and target == tl.float32:
        return data.view(np.uint16).astype(np.uint32) << 16
    if source == tl.float32 and target == tl.bfloat16:
        return _to_bfloat16(data)
    if source == tl.float32 and target.name in _FP8:
        return _to_float8(data, _FP8[target.name])
    return _convert(data, source, target, mode)


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded).reshape(data.shape)


def _to_float8(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To the nearest, ties to even, saturating; NaN stays NaN (`cvt.rn.satfinite`)."""
    largest = torch.finfo(dtype).max
    codes = torch.from_numpy(np.array(data)).clamp(-largest, largest).to(dtype)
    return codes.view(torch.uint8).numpy().reshape(data.shape)


interpreter._convert_float = _as_hardware


def pytest_collection_finish() -> None:
    """Modules and thousands of collected cases live to the end: to walk them at each collection took 9 % of a run's time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of scripts/test_gpu.py."""
    parser.addoption("--shard", default="0/1", help="I/N: every N-th test, from the I-th on")
    parser.addoption("--until", type=float, default=None, help="seconds since 1970 after which no test begins")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's share."""
    shard, count = map(int, config.getoption("--shard").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != shard])
    items[:] = items[shard::count]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test when the time is up."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("not run: the time of this run was up")
