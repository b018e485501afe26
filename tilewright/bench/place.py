"""`tilewright place`: finds the fastest device of this machine for each batch size of a model.

The model is called with some batch sizes on each device, `tilewright.placement` is fitted to the times, and predicts every
size. Inputs and outputs are in host memory, so a card's time includes transfers.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tilewright.fuse.structure import flatten
from tilewright.host.loaded import rows_of
from tilewright.hw.device import cuda_count
from tilewright.placement.choose import choose, crossovers
from tilewright.placement.cost import DeviceCost, Measurement, Work, fit

__all__ = ["Placement", "place", "sizes_up_to", "work_of"]

REPEATS = 5
LINK_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The result. `errors`: for each device, the median relative error of its prediction at the measured sizes."""

    devices: tuple[DeviceCost, ...]
    errors: tuple[float, ...]
    spans: tuple[tuple[int, str], ...]
    """(batch size, device): from this size on, the device is the fastest."""
    lines: tuple[str, ...]
    """One sentence for each measured size, which says which device is chosen and why."""


def sizes_up_to(most: int) -> list[int]:
    """About 20 batch sizes up to `most`, small ones closer together. Raises ValueError if `most` is too small for a fit."""
    if most < 8:
        raise ValueError(f"--max-batch is {most}, wanted at least 8, because a fit needs several sizes")
    return sorted({*range(1, 5), *(round(most ** (i / 15)) for i in range(16)), most})


def work_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Work, float, float]:
    """(the work of a call, bytes of its inputs, bytes of its outputs)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs, _ = flatten(module(*inputs))
    weights = _bytes([*module.parameters(), *module.buffers()])
    taken, given = _bytes(inputs), _bytes(outputs)
    return Work(flops=float(counter.get_total_flops()), bytes=weights + taken + given), taken, given


def place(
    module: nn.Module, examples: Sequence[Tensor], most: int, progress: Callable[[str], None] = lambda words: None
) -> Placement:
    """Measure and predict.

    Args:
        module: on the CPU, in evaluation mode; the first dimension of its inputs is the batch.
        examples: its inputs, with any number of rows.
        most: rows of the largest batch.

    Raises:
        ValueError: `most` is too small.
    """
    sizes, found, errors = sizes_up_to(most), list[DeviceCost](), list[float]()
    works = {rows: work_of(module, [rows_of(x, rows) for x in examples]) for rows in (*sizes,)}
    for name in ("cpu", *(f"cuda:{index}" for index in range(cuda_count()))):
        device = torch.device(name)
        here = module.to(device)
        measured = list[Measurement]()
        for rows in sizes:
            progress(f"{name}, {rows} rows")
            inputs = [rows_of(x, rows).to(device) for x in examples]
            seconds = _seconds(functools.partial(here, *inputs), device)
            measured.append(Measurement(work=works[rows][0], seconds=seconds))
        rate, least_s = (float("inf"), 0.0) if device.type == "cpu" else _link(device)
        cost = fit(name, measured, link_bytes_per_s=rate, link_s=least_s)
        found.append(cost)
        errors.append(statistics.median(abs(cost.seconds(one.work) / one.seconds - 1) for one in measured))
    module.to("cpu")
    slope = {rows: works[rows] for rows in sizes}

    def of(rows: int) -> tuple[Work, float, float]:
        """The work of a call with so many rows, interpolated linearly between two sizes."""
        below = max(size for size in sizes if size <= rows)
        above = min(size for size in sizes if size >= rows)
        (low, taken, given), (high, *_) = slope[below], slope[above]
        part = 0.0 if above == below else (rows - below) / (above - below)
        work = Work(flops=low.flops + part * (high.flops - low.flops), bytes=low.bytes + part * (high.bytes - low.bytes))
        return work, taken / below * rows, given / below * rows

    spans = crossovers(found, of, most)
    lines = []
    for rows in sizes:
        work, taken, given = of(rows)
        choice = choose(found, work, bytes_in=taken, bytes_out=given)
        lines.append(f"{rows} rows: {choice.name}, {choice.seconds * 1e3:.3f} ms. {choice.why}")
    return Placement(devices=tuple(found), errors=tuple(errors), spans=tuple(spans), lines=tuple(lines))


def _bytes(tensors: Sequence[Tensor]) -> float:
    return float(sum(x.numel() * x.element_size() for x in tensors))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls, because other programs may run on this machine."""
    best = float("inf")
    with torch.no_grad():
        call()
        for _ in range(REPEATS):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began_s = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began_s)
    return best


def _link(device: torch.device) -> tuple[float, float]:
    """(bytes per second, seconds of the smallest copy) from the host's memory to a card."""
    small, large = (torch.empty(count, dtype=torch.uint8) for count in (1, LINK_BYTES))
    least_s = _seconds(lambda: small.to(device), device)
    return LINK_BYTES / max(_seconds(lambda: large.to(device), device) - least_s, 1e-9), least_s
