"""Measures the links between the GPUs of one host: copies between two, and NCCL's all-reduce over all, by size.

All-reduce figures are "bus" bandwidth as defined by NCCL's own tests: bytes x 2 (n - 1) / n / seconds, the rate that a ring of
n cards needs of each link, independent of n. The all-reduce runs in one process per GPU; the processes are ended if NCCL hangs.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from tilewright.hw.ceilings import folder, write_json
from tilewright.hw.device import card_slug, cuda_count, device_of
from tilewright.hw.measure import software

__all__ = ["all_reduce", "copies_by_size", "measure_links", "path_of_links", "peer_copies", "read_links"]

_COPY_BYTES = 256 << 20
_COPY_SIZES = tuple(1 << i for i in range(12, 29, 2))
_REDUCE_SIZES = tuple(1 << i for i in range(10, 31, 2))
_ALL_REDUCE_TIMEOUT_S = 45
Say = Callable[[str], None]


def path_of_links() -> Path:
    """The file with the measurement of these GPUs together."""
    return folder() / f"links-{cuda_count()}x-{card_slug(device_of(0).name)}.json"


def read_links() -> dict[str, Any] | None:
    """An earlier result of `measure_links`, if it was kept. Raises ValueError, with a remedy, for an invalid file."""
    path = path_of_links()
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); delete it, or measure again: tilewright hw --measure") from error
    if not (isinstance(found, dict) and isinstance(found.get("failed"), dict) and isinstance(found.get("date"), str)):
        raise ValueError(f"{path}: not a measurement of links; delete it, or measure again: tilewright hw --measure")
    return found


def measure_links(say: Say) -> dict[str, Any]:
    """All measurements, with versions and the date. "failed" contains the measurements that failed, with the reason."""
    failed: dict[str, str] = {}
    found: dict[str, Any] = {"devices": [device_of(i).name for i in range(cuda_count())], **software()}
    say("copies between GPUs")
    parts: dict[str, Callable[[], Any]] = {
        "peer_copy_bytes_per_s": peer_copies,
        "copies_0_to_1": copies_by_size,
        "all_reduce": lambda: all_reduce(say),
    }
    for name, part in parts.items():
        try:
            found[name] = part()
        except (RuntimeError, OSError, ProcessException) as error:
            failed[name] = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return {**found, "failed": failed}


def peer_copies() -> list[list[float | None]]:
    """Bytes per second of a copy of 256 MiB from GPU i (row) to GPU j; None on the diagonal."""
    n = cuda_count()
    sources = [torch.randn(_COPY_BYTES // 4, device=f"cuda:{i}") for i in range(n)]
    targets = [torch.empty_like(x) for x in sources]
    return [[None if i == j else _COPY_BYTES / _copy_s(sources[i], targets[j]) for j in range(n)] for i in range(n)]


def copies_by_size() -> list[dict[str, float]]:
    """Copies from GPU 0 to GPU 1, of 4 KiB to 256 MiB: [{"bytes", "us", "gb_per_s"}]."""
    source, target = (torch.randn(_COPY_BYTES // 4, device=f"cuda:{i}") for i in range(2))
    rows = []
    for size in _COPY_SIZES:
        seconds = _copy_s(source[: size // 4], target[: size // 4])
        rows.append({"bytes": size, "us": round(seconds * 1e6, 2), "gb_per_s": round(size / seconds / 1e9, 2)})
    return rows


def _copy_s(source: Tensor, target: Tensor, repeats: int = 5, rounds: int = 5) -> float:
    """Median seconds of a copy. It runs on the stream of the source's card, so the events are recorded there."""
    times = []
    with torch.cuda.device(source.device):
        for turn in range(rounds + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            if turn >= 2:
                times.append(start.elapsed_time(end) * 1e-3 / repeats)
    return statistics.median(times)


def all_reduce(say: Say) -> list[dict[str, float]]:
    """Time of an all-reduce over every GPU, for sizes of 1 KiB to 1 GiB: [{"bytes", "us", "bus_gb_per_s"}].

    Raises:
        torch.multiprocessing.spawn.ProcessException: NCCL fails in one of the processes.
        TimeoutError: NCCL hangs.
    """
    n = cuda_count()
    say(f"all-reduce over {n} GPUs")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "all_reduce.json")
        context = spawn(_rank, args=(n, str(Path(place, "store")), str(out)), nprocs=n, join=False)
        assert context is not None, "join=False gives the context"
        deadline = time.monotonic() + _ALL_REDUCE_TIMEOUT_S
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no all-reduce over {n} GPUs within {_ALL_REDUCE_TIMEOUT_S} s; NCCL_DEBUG=INFO tells more"
                    )
        finally:
            for process in filter(None, context.processes):
                process.kill()
        return json.loads(out.read_text())


def _rank(rank: int, n: int, store: str, out: str) -> None:
    torch.cuda.set_device(rank)
    limit = timedelta(seconds=_ALL_REDUCE_TIMEOUT_S)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=n, timeout=limit, device_id=torch.device("cuda", rank)
    )
    rows = []
    try:
        for size in _REDUCE_SIZES:
            x = torch.randn(size // 2, device="cuda").bfloat16()
            seconds = _reduce_s(x, repeats=20 if size < 1 << 24 else 4)
            bus = size * 2 * (n - 1) / n / seconds
            rows.append({"bytes": size, "us": round(seconds * 1e6, 2), "bus_gb_per_s": round(bus / 1e9, 2)})
    finally:
        dist.destroy_process_group()
    if rank == 0:
        write_json(Path(out), rows)


def _reduce_s(x: Tensor, repeats: int, rounds: int = 5) -> float:
    times = []
    for turn in range(rounds + 2):
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
