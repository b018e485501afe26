"""The pipeline schedules of torch.distributed.pipelining by name, and a stage that hands over gradients per micro-batch.

This is a separate module because the library takes two seconds to import. It is imported only if a run has a pipeline.
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
    """A pipeline stage that calls `taken` when the weight gradients of a micro-batch are complete."""

    taken: Callable[[], None]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:  # fmt: skip
        """As in torch; then calls `taken`, if this also computed the weight gradients."""
        found = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.taken()
        return found

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """As in torch; then calls `taken`."""
        found = super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.taken()
        return found
