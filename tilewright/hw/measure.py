"""Measures the ceilings of a card: the bandwidth of memory and L2, and matrix products by the vendor's library.

Data are random. Times are medians of CUDA events around a graph of several calls. Clocks and power are read while a product
runs. This takes about 10 seconds and 5 GiB. A unit that the card or this version of torch does not have is left out, and the
reason is stored. Not here: transfers between GPUs (`links`), and the speed of our own kernels (`tilewright bench`).
"""

import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import triton

from tilewright.hw.ceilings import Ceilings
from tilewright.hw.device import cuda_count, device_of, free_bytes
from tilewright.hw.nvml import clocks_mhz, driver_version, power_w

__all__ = ["cards", "measure", "software"]

_N = 8192
_BYTES = 2 << 30
_NEEDED_BYTES = 5 << 30
Say = Callable[[str], None]


def cards() -> list[int]:
    """The index of the first CUDA device of each name. Other devices of the same name have the same ceilings."""
    first: dict[str, int] = {}
    for i in range(cuda_count()):
        first.setdefault(device_of(i).name, i)
    return list(first.values())


def software() -> dict[str, Any]:
    """The conditions that belong to every measurement: versions and the date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def measure(index: int, say: Say) -> tuple[Ceilings, dict[str, Any]]:
    """Measure a card.

    Args:
        index: the CUDA device.
        say: called with a text before each measurement.

    Returns:
        The ceilings, and the facts that are stored with them: device, versions, clocks, power, and failures with their reason.

    Raises:
        ValueError: other programs use too much of the card's memory.
    """
    device = device_of(index)
    free = free_bytes(torch.device("cuda", index))
    if free < _NEEDED_BYTES:
        raise ValueError(
            f"{device.name} (cuda:{index}) has {free >> 20} MiB free, measuring needs {_NEEDED_BYTES >> 20}: end other programs"
        )
    failed: dict[str, str] = {}
    facts = {"device": device.name, "sms": device.sms, "memory_bytes": device.memory_bytes, **software()}
    with torch.cuda.device(index), torch.inference_mode():
        say(f"{device.name}: memory")
        copy, read, write, l2 = _memory(device.l2_bytes)
        torch.cuda.empty_cache()
        facts |= _under_load(index)
        flops = {}
        for unit, make in _PRODUCTS.items():
            say(f"{device.name}: {unit}, a product of {_N} x {_N} x {_N}")
            try:
                flops[unit] = 2 * _N**3 / _seconds(make())
            except (RuntimeError, ValueError, AttributeError) as error:
                failed[unit] = str(error).splitlines()[0]
            torch.cuda.empty_cache()
    source = f"measured {facts['date'][:10]} on {device.name}, {facts['clocks_mhz'].get('sm', 'unknown')} MHz"
    found = Ceilings(copy=copy, read=read, write=write, l2=l2, flops=flops, source=source)
    return found, {**facts, "failed": failed}


def _graph(call: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    return graph


def _seconds(call: Callable[[], Any], repeats: int = 5, rounds: int = 9) -> float:
    """Median seconds of one call, from a graph of `repeats` calls."""
    graph = _graph(call, repeats)
    times = []
    for turn in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end) * 1e-3 / repeats)
    return statistics.median(times)


def _under_load(index: int) -> dict[str, Any]:
    """Clocks and power in the middle of half a second of products (clocks of an idle card mean nothing)."""
    call = _product(torch.bfloat16)
    graph, seconds = _graph(call, 5), _seconds(call)
    for _ in range(max(1, int(0.5 / (5 * seconds)))):
        graph.replay()
    time.sleep(0.3)
    found = {"clocks_mhz": clocks_mhz(index), "power_w": power_w(index)}
    torch.cuda.synchronize()
    return found


def _memory(l2_bytes: int) -> tuple[float, float, float, float]:
    """Bytes per second of a copy, a read, a write and a copy that fits in L2."""
    # The copy is an elementwise kernel: a memory-copy node of a graph is slower for large tensors.
    x = torch.randn(_BYTES // 4, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / _seconds(lambda: torch.neg(x, out=y))
    total = torch.empty((), device="cuda")
    read = x.nbytes / _seconds(lambda: torch.sum(x, dim=0, out=total))
    write = y.nbytes / _seconds(lambda: y.fill_(1.0))
    small, target = (t[: l2_bytes // 16] for t in (x, y))  # each a quarter of L2
    l2 = 2 * small.nbytes / _seconds(lambda: torch.neg(small, out=target), repeats=50)
    return copy, read, write, l2


def _product(dtype: torch.dtype, tf32: bool = False) -> Callable[[], Any]:
    a, b = (torch.randn(_N, _N, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty(_N, _N, device="cuda", dtype=dtype)

    def call() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            torch.mm(a, b.t(), out=out)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


def _fp8() -> Callable[[], Any]:
    a, b = (torch.randn(_N, _N, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one, fast = torch.ones((), device="cuda"), True  # sums in the tensor core's own precision give the highest rate
    return lambda: torch.ops.aten._scaled_mm(a, b.t(), one, one, None, None, torch.bfloat16, fast)


def _int8() -> Callable[[], Any]:
    a, b = (torch.randint(-127, 128, (_N, _N), device="cuda", dtype=torch.int8) for _ in range(2))
    return lambda: torch.ops.aten._int_mm(a, b.t())


_PRODUCTS: dict[str, Callable[[], Callable[[], Any]]] = {
    "bf16": lambda: _product(torch.bfloat16),
    "fp16": lambda: _product(torch.float16),
    "tf32": lambda: _product(torch.float32, tf32=True),
    "fp32": lambda: _product(torch.float32),
    "fp8": _fp8,
    "int8": _int8,
}
