"""The minimum cost of a grouped product, `Op.cost`, and the work of its kernels, `Impl.work`. Contains no kernels.

The number of rows per expert is read from the device, so the host waits for it. For meta tensors it is assumed to be even.
"""

# X experts, R rows, N rows of an expert's weight, K the shared dimension

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor

from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.work import cdiv, unit_of
from tilewright.tune.model import Work
from tilewright.tune.space import Config

__all__ = ["group_places", "group_sizes", "grouped_cost", "grouped_library_work", "grouped_sm90_work", "grouped_tile_work"]


def group_sizes(x: Tensor, bounds: Tensor, experts: int, order: Tensor | None) -> list[int]:
    """The number of rows of each expert."""
    masked = x.dim() == 3
    rows = x.shape[0] * x.shape[1] if masked else x.shape[0] if order is None else order.shape[0]
    if bounds.is_meta:
        return [rows // experts + (e < rows % experts) for e in range(experts)]
    values = bounds.tolist()
    if masked:
        return [min(max(count, 0), x.shape[1]) for count in values]
    return [max(min(end, rows) - max(start, 0), 0) for start, end in pairwise(values)]


def group_places(x: Tensor, bounds: Tensor, experts: int) -> Iterator[tuple[int, Any]]:
    """For each expert that has rows: (expert, index of its rows in x and y). x must already be in order."""
    start = 0
    for e, size in enumerate(group_sizes(x, bounds, experts, None)):
        if size:
            yield e, (e, slice(0, size)) if x.dim() == 3 else slice(start, start + size)
        start += size


def grouped_cost(
    x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str, order: Tensor | None, chosen: int,
    clear: bool = True,
) -> Cost:  # fmt: skip
    """Reads the weights of the experts that have rows once each, and the rows once; writes the result."""
    n, k = weight.shape[1:]
    sizes = group_sizes(x, bounds, weight.shape[0], order)
    rows, active = sum(sizes), sum(size > 0 for size in sizes)
    lead = x.shape[0] * x.shape[1] if x.dim() == 3 else x.shape[0] if order is None else order.shape[0]
    outputs = (lead if clear else rows) * (n // 2 if activation.endswith("_mul") else n)
    read = min(rows // max(chosen, 1) if order is not None else rows, x.numel() // max(k, 1)) * k
    moved = read + active * n * (k + (bias is not None)) + outputs
    return Cost(flops=2 * rows * n * k, bytes=moved * x.element_size() + bounds.nbytes)


def _work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, clear: bool, depth: object, vector: int, persistent: bool,
) -> Work:  # fmt: skip
    cost = grouped_cost(x, weight, bounds, bias, activation, order, chosen, clear)
    n, k, size = max(weight.shape[1], 1), max(weight.shape[2], 1), x.element_size()
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    sizes = [s for s in group_sizes(x, bounds, weight.shape[0], order) if s] or [1]
    high, across, steps = sum(cdiv(s, block_m) for s in sizes), cdiv(n, block_n), cdiv(k, block_k)
    return Work(
        blocks=high * across,
        flops=2.0 * high * block_m * across * block_n * steps * block_k,
        unit=unit_of(x.dtype),
        dram_bytes=cost.bytes,
        l2_bytes=size * k * (1.0 * sum(sizes) * across + 1.0 * n * high),
        steps=steps,
        depth=depth,
        vector=vector,
        rounds=1,
        tile_m=block_m,
        tile_n=block_n,
        persistent=persistent,
    )


def grouped_tile_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, clear: bool = True,
) -> Work:  # fmt: skip
    """The tiles of each expert's rows. An expert without rows has none."""
    size = x.element_size()
    vector = 16 if weight.shape[2] % 16 == 0 and x.stride(-2) % 16 == 0 else size
    depth = config["num_stages"] - 1 if vector >= 4 else 1
    return _work(device, config, x, weight, bounds, bias, activation, order, chosen, clear, depth, vector, False)


def grouped_sm90_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, clear: bool = True,
) -> Work:  # fmt: skip
    """The same with loads by the copy engine (TMA), which reads x in order: gathered rows are copied first."""
    work = _work(
        device, {**config, "BLOCK_K": 64}, x, weight, bounds, bias, activation, order, chosen, clear, 4, 1024, True
    )  # fmt: skip
    copied = 0 if order is None else 2 * order.shape[0] * x.shape[1] * x.element_size()
    return work._replace(dram_bytes=work.dram_bytes + copied, l2_bytes=work.l2_bytes + copied)


def grouped_library_work(
    device: Device, config: Config, x: Tensor, weight: Tensor, bounds: Tensor, bias: Tensor | None, activation: str,
    order: Tensor | None, chosen: int, clear: bool = True,
) -> Work:  # fmt: skip
    """Gathering the rows, the product, and the activation are separate kernels."""
    cost = grouped_cost(x, weight, bounds, bias, activation, order, chosen)
    rows = x.shape[0] if order is None else order.shape[0]
    product = rows * weight.shape[1] * x.element_size()
    gathered = 0 if order is None else 2 * rows * x.shape[1] * x.element_size()
    return Work(
        blocks=device.sms,
        flops=cost.flops,
        unit=unit_of(x.dtype),
        dram_bytes=cost.bytes,
        l2_bytes=cost.bytes,
        rounds=(activation != "none") + (order is not None),
        end_bytes=gathered + (2 * product if activation != "none" else 0),
        library=True,
    )
