"""Measures the ceilings of a card: memory, L2, and matrix products by the vendor's library, which is what there is to reach.

Random data, CUDA events round a graph of several calls, medians. Takes about 20 seconds. A unit that the card or this torch
does not have is left out, with the reason. Not here: NVLink (`links`), and how fast our own kernels are (`tilewright bench`).
"""

import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from tilewright.hw.ceilings import Ceilings, path_of, save
from tilewright.hw.device import device_of
from tilewright.hw.nvml import clocks_mhz, driver_version

__all__ = ["measure"]

_N = 8192
_BYTES = 2 << 30
Say = Callable[[str], None]


def measure(index: int, say: Say) -> tuple[Ceilings, dict[str, Any]]:
    """Measure a card and keep the result for `ceilings`.

    Args:
        index: the CUDA device.
        say: told what is being measured.

    Returns:
        The ceilings, and the facts that stand beside them in the file: device, versions, clocks, power limit, what failed.
    """
    device = device_of(index)
    failed: dict[str, str] = {}
    with torch.cuda.device(index), torch.inference_mode():
        say(f"{device.name}: memory")
        bandwidth = _memory(device.l2_bytes)
        flops = {}
        for unit, make in _PRODUCTS.items():
            say(f"{device.name}: {_N}^3 {unit}")
            try:
                flops[unit] = 2 * _N**3 / _seconds(make())
            except (RuntimeError, ValueError, AttributeError) as error:
                failed[unit] = str(error).splitlines()[0]
            torch.cuda.empty_cache()
        clocks = clocks_mhz(index)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    source = f"measured {date[:10]} on {device.name}, {clocks['sm']} MHz"
    found = Ceilings(**bandwidth, flops=flops, source=source)
    facts = {
        "device": device.name,
        "sms": device.sms,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "clocks_mhz": clocks,
        "date": date,
        "failed": failed,
    }
    save(found, path_of(device), facts)
    return found, facts


def _seconds(call: Callable[[], Any], repeats: int = 5, rounds: int = 9) -> float:
    """Median seconds of one call, from graphs of `repeats` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
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


def _memory(l2_bytes: int) -> dict[str, float]:
    """Bytes a second of copy, read, write and of a copy that fits in L2."""
    # A copy by an elementwise kernel: as a graph's memory-copy node it is slower for large tensors.
    x = torch.randn(_BYTES // 4, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / _seconds(lambda: torch.neg(x, out=y))
    total = torch.empty((), device="cuda")
    read = x.nbytes / _seconds(lambda: torch.sum(x, dim=0, out=total))
    write = y.nbytes / _seconds(lambda: y.fill_(1.0))
    small, target = (t[: l2_bytes // 16] for t in (x, y))  # each a quarter of L2
    l2 = 2 * small.nbytes / _seconds(lambda: torch.neg(small, out=target), repeats=50)
    return {"copy": copy, "read": read, "write": write, "l2": l2}


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
    one = torch.ones((), device="cuda")
    return lambda: torch.ops.aten._scaled_mm(a, b.t(), one, one, None, None, torch.bfloat16)


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
