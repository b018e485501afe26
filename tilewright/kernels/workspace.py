"""Buffers that outlive a launch: the tickets by which the programs of one launch find out which of them is the last.

A split kernel writes partial results, then takes a ticket; whoever draws the last one combines them and puts the counter
back to zero. So the counters are zero between launches, and a CUDA graph can replay the launch any number of times.
"""

import torch
from torch import Tensor

__all__ = ["tickets"]

_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def tickets(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 counters, all zero between launches, one set a stream: launches there run in order.

    Where a CUDA graph is captured on a stream that has none yet, they are the graph's own, and each replay zeroes them first:
    a call that ran once before on that stream saves this.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _TICKETS.get((device, stream))
    if held is None or held.numel() < count:
        held = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _TICKETS[device, stream] = held
    return held
