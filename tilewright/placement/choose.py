"""Chooses the fastest device for a piece of work, and finds the batch sizes at which the choice changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.placement.cost import DeviceCost, Work

__all__ = ["Choice", "choose", "crossovers"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen device, and the reason. `seconds` includes transfers."""

    index: int
    name: str
    seconds: float
    why: str


def choose(devices: Sequence[DeviceCost], work: Work, *, bytes_in: float = 0.0, bytes_out: float = 0.0) -> Choice:
    """The fastest device for work whose inputs and results are in host memory. Raises ValueError without devices."""
    if not devices:
        raise ValueError("choose() needs at least one device, and the list of devices is empty")
    totals = [one.seconds(work) + one.transfer_s(bytes_in) + one.transfer_s(bytes_out) for one in devices]
    index = min(range(len(devices)), key=totals.__getitem__)
    lines = [
        f"{one.explain(work)}, transfers {(total - one.seconds(work)) * 1e6:.1f} us" for one, total in zip(devices, totals)
    ]
    return Choice(index=index, name=devices[index].name, seconds=totals[index], why="; ".join(lines))


def crossovers(
    devices: Sequence[DeviceCost], work_of: Callable[[int], tuple[Work, float, float]], most: int
) -> list[tuple[int, str]]:
    """(first batch, device) for each range of batch sizes up to `most`. `work_of`: batch -> work, bytes in, bytes out."""
    found: list[tuple[int, str]] = []
    for batch in range(1, most + 1):
        work, bytes_in, bytes_out = work_of(batch)
        name = choose(devices, work, bytes_in=bytes_in, bytes_out=bytes_out).name
        if not found or found[-1][1] != name:
            found.append((batch, name))
    return found
