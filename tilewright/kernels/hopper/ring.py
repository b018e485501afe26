"""A ring of pipeline stages in shared memory, between the producer warp and the consumer warpgroups.

Each stage has two barriers: `full` completes when its bytes have arrived, `empty` when every consumer has released the stage.
Both sides use the stages in the same order. They share a `Ring`. Each has a `Place`, its position in the ring: the index
`stage`, and the parity `phase` of the round, by which a barrier distinguishes its last two rounds.

    producer                                    consumer
    at = ring.to_fill()                         at = ring.after(passed)
    bar = at.fill(bytes)                        at.wait()
    load_box(..., bar, bufs.index(at.stage))    ... multiply from bufs.index(at.stage)
    at = at.next()                              at.give_back()
                                                at = at.next()

A consumer that keeps wgmma in flight releases the preceding stage instead, after waiting for its wgmma (`give_back_last`).
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportCallIssue=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from tilewright.kernels.hopper.primitives import release

__all__ = ["Place", "Ring", "barriers", "new_ring"]


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """COUNT barriers, each of which completes a phase after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@aggregate
class Place:
    """The position of a group of warps in a ring."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full: Any, empty: Any, stage: Any, phase: Any, STAGES: Any):
        self.full = full
        self.empty = empty
        self.stage = stage
        self.phase = phase
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def next(self):
        """The place of the next stage."""
        stage = self.stage + 1
        phase = self.phase
        if stage == self.STAGES:
            stage = 0
            phase ^= 1
        return Place(self.full, self.empty, stage, phase, self.STAGES)

    @gluon.jit
    def skip(self, stages: gl.constexpr):
        """The place `stages` stages further."""
        stage = self.stage + stages
        phase = self.phase
        while stage >= self.STAGES:
            stage -= self.STAGES
            phase ^= 1
        return Place(self.full, self.empty, stage, phase, self.STAGES)

    @gluon.jit
    def fill(self, size: gl.constexpr):
        """Wait until the stage may be written. Returns the barrier that expects `size` bytes."""
        mbarrier.wait(self.empty.index(self.stage), self.phase)
        bar = self.full.index(self.stage)
        mbarrier.expect(bar, size)
        return bar

    @gluon.jit
    def wait(self):
        """Wait until the stage's bytes have arrived."""
        mbarrier.wait(self.full.index(self.stage), self.phase)

    @gluon.jit
    def give_back(self):
        """Release the stage, so that it may be written again."""
        release(self.empty.index(self.stage))

    @gluon.jit
    def give_back_last(self, pred=True):
        """Release the preceding stage."""
        release(self.empty.index(gl.where(self.stage == 0, self.STAGES, self.stage) - 1), pred=pred)


@aggregate
class Ring:
    """The barriers of STAGES stages."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, full: Any, empty: Any, STAGES: Any):
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def to_fill(self):
        """The producer's first place. A new barrier counts as having completed its odd phase: the first round does not wait."""
        return Place(self.full, self.empty, gl.to_tensor(0), gl.to_tensor(1), self.STAGES)

    @gluon.jit
    def after(self, passed):
        """A consumer's place after `passed` stages have been filled."""
        return Place(self.full, self.empty, passed % self.STAGES, passed // self.STAGES & 1, self.STAGES)


@gluon.jit
def new_ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring in which READERS groups of warps release each stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(full, empty, STAGES)
