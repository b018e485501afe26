"""The pipeline schedules of torch.distributed.pipelining by name, and a stage that takes gradients after each micro-batch.

A separate module, imported only if a run has a pipeline, because the library takes two seconds to import.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

__all__ = ["SCHEDULES", "Stage"]

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip


class Stage(PipelineStage):
    """A part of the layers whose gradients are taken after each micro-batch."""

    taken: Callable[[], None]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:  # fmt: skip
        """As torch's; if it also computes the gradients of weights, they are taken."""
        found = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.taken()
        return found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """As torch's; then the gradients are taken."""
        found = super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.taken()
        return found
