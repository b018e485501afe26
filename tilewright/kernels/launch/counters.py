"""Buffers that outlive a launch: the tickets by which the programs of one launch find out which of them is the last.

A split kernel writes partial results, then takes a ticket; whoever draws the last one combines them and puts the counter
back to zero. So the counters are zero between launches, and a CUDA graph can replay the launch any number of times.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["own_tickets", "tickets"]

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}
_OUTGROWN: list[Tensor] = []
"""A graph that was captured with them may still be replayed."""
_OWN: list[Tensor] = []
"""Of the graph that is being captured; the innermost last."""


@contextmanager
def own_tickets(device: torch.device, count: int = 1 << 16) -> Iterator[Tensor]:
    """Counters for one CUDA graph, around its capture: none is shared with another graph, none zeroed in a replay.

    Whoever keeps the graph keeps them.
    """
    held = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    _OWN.append(held)
    try:
        yield held
    finally:
        _OWN.pop()


def tickets(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 counters, all zero between launches, one set a stream: launches there run in order.

    Where a CUDA graph is captured on a stream that has none yet, they are the graph's own, and each replay zeroes them first:
    a call that ran once before on that stream saves this. Graphs that hold one stream's counters are replayed one after the
    other: side by side they would count each other's programs, and wait for ever or give wrong sums. With `own_tickets`
    each has its own.

    Raises:
        RuntimeError: a graph is captured with counters of its own (`own_tickets`), and a launch of it wants more than those.
    """
    if _OWN and _OWN[-1].device == device and torch.cuda.is_current_stream_capturing():
        if _OWN[-1].numel() < count:
            raise RuntimeError(
                f"a launch of the graph that is being captured wants {count} counters, the graph has {_OWN[-1].numel()}; "
                f"capture it with own_tickets(device, {count}) or more"
            )
        return _OWN[-1]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _TICKETS.get((device, stream))
    if held is None or held.numel() < count:
        if held is not None:
            _OUTGROWN.append(held)
        held = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _TICKETS[device, stream] = held
    return held
