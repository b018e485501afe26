"""Measures what several GPUs of one host can send each other: copies between two, and NCCL's all-reduce over all, by size.

All-reduce figures are "bus" bandwidth as NCCL's own tests define it: bytes x 2 (n - 1) / n / seconds, which a ring of n cards
would need of each link whatever n is.
"""

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.hw.device import cuda_count

__all__ = ["all_reduce", "peer_copies"]

_COPY_BYTES = 256 << 20
_SIZES = tuple(1 << i for i in range(10, 31, 2))


def peer_copies() -> list[list[float | None]]:
    """Bytes a second of a copy of 256 MiB from GPU i (row) to GPU j; None on the diagonal."""
    n = cuda_count()
    sources = [torch.randn(_COPY_BYTES // 4, device=f"cuda:{i}") for i in range(n)]
    targets = [torch.empty_like(x) for x in sources]
    return [[None if i == j else _COPY_BYTES / _copy_s(sources[i], targets[j]) for j in range(n)] for i in range(n)]


def _copy_s(source: Tensor, target: Tensor) -> float:
    times = []
    for turn in range(7):
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def all_reduce(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time of an all-reduce over every GPU, for sizes of 1 KiB to 1 GiB: [{"bytes", "us", "bus_gb_per_s"}].

    Raises:
        RuntimeError: NCCL fails in one of the processes.
    """
    n = cuda_count()
    say(f"all-reduce over {n} GPUs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "all_reduce.json")
        torch.multiprocessing.spawn(_rank, args=(n, port, str(out)), nprocs=n)  # pyright: ignore[reportPrivateImportUsage]
        return json.loads(out.read_text())


def _rank(rank: int, n: int, port: int, out: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    rows = []
    try:
        for size in _SIZES:
            x = torch.randn(size // 2, device="cuda").bfloat16()
            seconds = _reduce_s(x, repeats=20 if size < 1 << 24 else 4)
            bus = size * 2 * (n - 1) / n / seconds
            rows.append({"bytes": size, "us": round(seconds * 1e6, 2), "bus_gb_per_s": round(bus / 1e9, 2)})
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


def _reduce_s(x: Tensor, repeats: int) -> float:
    times = []
    for turn in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        for _ in range(repeats):
            dist.all_reduce(x)
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(start.elapsed_time(end) * 1e-3 / repeats)
    return statistics.median(times)
