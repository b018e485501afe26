"""Atomic counters that outlive a launch. With them the programs of one launch find out which of them finishes last.

In a split kernel, each program writes its partial results and then increments a counter (it "draws a ticket"). The program
that draws the last ticket combines the partial results and resets the counter to zero. So the counters are zero between
launches, and a CUDA graph can replay the launch any number of times.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["own_tickets", "tickets"]

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}
_OUTGROWN: list[Tensor] = []
"""Buffers that became too small. They are kept, because a graph that was captured with them may still be replayed."""
_OWN: list[Tensor] = []
"""The counters of the graphs that are being captured; the innermost graph comes last."""


@contextmanager
def own_tickets(device: torch.device, count: int = 1 << 16) -> Iterator[Tensor]:
    """Use this context around the capture of a CUDA graph to give it counters of its own.

    They are not shared with another graph, and a replay does not zero them. The caller must keep the returned tensor as long
    as the graph.
    """
    held = torch.zeros(count, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    _OWN.append(held)
    try:
        yield held
    finally:
        _OWN.pop()


def tickets(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 counters, all zero between launches.

    There is one set per stream, because the launches of a stream run in order. If a CUDA graph is captured on a stream that has
    no counters yet, the graph gets its own, and each replay zeroes them first. A call on that stream before the capture avoids
    this. Graphs that share one stream's counters must be replayed one after the other. If they ran at the same time, they
    would count each other's programs, and would wait forever or return wrong sums. With `own_tickets` each graph has its own
    counters.

    Raises:
        RuntimeError: the graph is captured with counters of its own (`own_tickets`), and one of its launches needs more.
    """
    if _OWN and _OWN[-1].device == device and torch.cuda.is_current_stream_capturing():
        if _OWN[-1].numel() < count:
            raise RuntimeError(
                f"a launch in the graph that is being captured needs {count} counters, but the graph has {_OWN[-1].numel()}; "
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
