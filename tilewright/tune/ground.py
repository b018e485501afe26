"""The environment in which a process measures on the first GPU: the card, its clocks, and a stopwatch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.hw.device import cuda_count, device_of
from tilewright.hw.nvml import NoDriver, clocks_mhz
from tilewright.tune.measure import POLICY, Stopwatch
from tilewright.tune.record import Environment, versions
from tilewright.tune.worker import Ground

__all__ = ["gpu_ground"]


def gpu_ground(op: Callable[[str], Any], arguments: Callable[[Any, Sequence[str], int], tuple[Any, ...]]) -> Ground:
    """A `Ground` for the first GPU. Raises RuntimeError if there is none.

    Args:
        op, arguments: as in `Ground`.
    """
    if not cuda_count():
        raise RuntimeError("there is no GPU that torch can use")
    device = device_of(0)
    return Ground(
        op=op,
        arguments=arguments,
        timer=Stopwatch(),
        environment=Environment(card=device.name, sms=device.sms, clocks=_clocks(), policy=POLICY, **versions()),
        l2_bytes=device.l2_bytes,
        synchronise=torch.cuda.synchronize,
    )


def _clocks() -> str:
    try:
        found = clocks_mhz(0)
    except NoDriver:
        return "unknown"
    most = {name: found[f"{name}_max"] for name in ("sm", "memory") if f"{name}_max" in found}
    return ", ".join(f"{name} at most {mhz} MHz" for name, mhz in most.items()) or "unknown"
