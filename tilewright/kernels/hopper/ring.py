"""A ring of stages in shared memory, between the warp that fetches and the groups of warps that multiply.

Each stage has two barriers: `full` completes when its bytes have arrived, `empty` when every reader has given the stage back.
Both sides go around in the same order. A `Ring` is what they share, a `Place` where in it one of them stands: `stage`, and the
parity `phase` of the round, by which a barrier tells its last two rounds apart.

    producer                                    consumer
    at = ring.to_fill()                         at = ring.after(passed)
    bar = at.fill(bytes)                        at.wait()
    load_box(..., bar, bufs.index(at.stage))    ... multiply from bufs.index(at.stage)
    at = at.next()                              at.give_back()
                                                at = at.next()

A consumer with products in flight gives the stage before back, once those have been waited for (`give_back_last`).
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
    """So many barriers, each of which completes a round with ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@aggregate
class Place:
    """Where in a ring a group of warps stands."""

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
        """The place so many stages further."""
        stage = self.stage + stages
        phase = self.phase
        while stage >= self.STAGES:
            stage -= self.STAGES
            phase ^= 1
        return Place(self.full, self.empty, stage, phase, self.STAGES)

    @gluon.jit
    def fill(self, size: gl.constexpr):
        """Wait until the stage may be written; gives the barrier that `size` bytes are to arrive at."""
        mbarrier.wait(self.empty.index(self.stage), self.phase)
        bar = self.full.index(self.stage)
        mbarrier.expect(bar, size)
        return bar

    @gluon.jit
    def wait(self):
        """Wait until the stage is there."""
        mbarrier.wait(self.full.index(self.stage), self.phase)

    @gluon.jit
    def give_back(self):
        """Let the stage be written again."""
        release(self.empty.index(self.stage))

    @gluon.jit
    def give_back_last(self, pred=True):
        """The same of the stage before."""
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
        """The producer's start. A new barrier counts as having completed its odd phase: the first round waits for nobody."""
        return Place(self.full, self.empty, gl.to_tensor(0), gl.to_tensor(1), self.STAGES)

    @gluon.jit
    def after(self, passed):
        """A reader's place when `passed` stages have been filled before."""
        return Place(self.full, self.empty, passed % self.STAGES, passed // self.STAGES & 1, self.STAGES)


@gluon.jit
def new_ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring whose stages are given back by READERS groups each."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(full, empty, STAGES)
