"""Sends the requests of a stage at their scheduled times, and returns the results.

The clock is the event loop's, so that a test can run a stage on a loop whose time is simulated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tilewright.bench.load.sample import Sample
from tilewright.bench.load.schedule import Planned, Stage
from tilewright.bench.load.target import Target

__all__ = ["Drive", "drive"]


@dataclass(slots=True)
class Drive:
    """The state of a stage, during and after its run."""

    samples: list[Sample] = field(default_factory=list)
    """Finished requests, in the order in which they ended."""
    sent: int = 0
    in_flight: int = 0
    elapsed_s: float = 0.0
    stopped: bool = False
    """Set this to end the stage: nothing more is sent, and requests in flight are waited for."""
    stable_until_s: float | None = None
    """The time at which the stage was found to be steady, if that ended it."""


async def drive(
    stage: Stage,
    target: Target,
    *,
    most_in_flight: int = 4096,
    look: Callable[[Drive], None] = lambda state: None,
    look_every_s: float = 0.25,
) -> Drive:
    """Run one stage to its end, including its last answers.

    Args:
        most_in_flight: most requests in flight at once; a request that has to wait for another one keeps its scheduled time.
        look: called now and then while the stage runs; it may set `stopped`.
    """
    loop = asyncio.get_running_loop()
    state, began_s = Drive(), loop.time()

    def clock() -> float:
        return loop.time() - began_s

    async def ask(body: bytes, sample: Sample) -> None:
        state.sent += 1
        state.in_flight += 1
        try:
            await target.send(body, sample, clock)
        finally:
            state.in_flight -= 1
        state.samples.append(sample)

    async def watch() -> None:
        while True:
            state.elapsed_s = clock()
            look(state)
            await asyncio.sleep(look_every_s)

    watching = asyncio.ensure_future(watch())
    try:
        if stage.concurrency is None:
            await _open_loop(stage, target, state, clock, ask, most_in_flight)
        else:
            await _closed_loop(stage, target, state, clock, ask)
    finally:
        watching.cancel()
    state.elapsed_s = clock()
    look(state)
    return state


Ask = Callable[[bytes, Sample], Awaitable[None]]


async def _open_loop(
    stage: Stage, target: Target, state: Drive, clock: Callable[[], float], ask: Ask, most_in_flight: int
) -> None:
    room = asyncio.Semaphore(most_in_flight)

    async def within_room(body: bytes, sample: Sample) -> None:
        async with room:
            await ask(body, sample)

    async with asyncio.TaskGroup() as running:
        for planned in _until(stage):
            body = target.prepare(planned)
            # Sleep in short intervals, so that `stopped` is noticed during a pause of the schedule, too.
            while (left_s := planned.at_s - clock()) > 0 and not state.stopped:
                await asyncio.sleep(min(left_s, 0.5))
            if state.stopped:
                break
            running.create_task(within_room(body, Sample(planned_s=planned.at_s)))
            if left_s < -0.01:
                await asyncio.sleep(0)  # behind the schedule, but answers must still be read


def _until(stage: Stage) -> Iterable[Planned]:
    for planned in stage.planned:
        if stage.duration_s is not None and planned.at_s >= stage.duration_s:
            return
        yield planned


async def _closed_loop(stage: Stage, target: Target, state: Drive, clock: Callable[[], float], ask: Ask) -> None:
    requests = iter(stage.planned)

    async def user() -> None:
        while not state.stopped and (stage.duration_s is None or clock() < stage.duration_s):
            planned = next(requests, None)
            if planned is None:
                return
            body = target.prepare(planned)
            sample = Sample(planned_s=clock())
            await ask(body, sample)
            if sample.detail:
                await asyncio.sleep(0.05)  # a service that refuses at once must not be asked in a tight loop

    assert stage.concurrency is not None
    await asyncio.gather(*(user() for _ in range(stage.concurrency)))
