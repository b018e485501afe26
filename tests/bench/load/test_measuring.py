"""What a load test measures, on simulated time: services whose answers come exactly when a formula says.

The event loop's clock moves only when everybody waits, so that each latency has one right value and nothing depends on how busy
the machine is.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from tests.simulation.loop import SimulatedExecutor, SimulatedLoop
from tilewright.bench.load.drive import Drive, drive
from tilewright.bench.load.sample import FAILED, OK, REJECTED, Sample
from tilewright.bench.load.schedule import Planned, Stage, arrivals
from tilewright.bench.load.slo import Slo
from tilewright.bench.load.summary import spread, summarise

T = TypeVar("T")


def simulated(work: Callable[[], Awaitable[T]]) -> T:
    loop = SimulatedLoop(SimulatedExecutor(), 0)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class Service:
    """Answers after `first_s`, in `pieces` that are `gap_s` apart; stands still from `stalls[0]` to `stalls[1]`."""

    def __init__(
        self, first_s: float, gap_s: float = 0.0, pieces: int = 1, stalls: tuple[float, float] = (0, 0), room: int = 1 << 30
    ):
        self.first_s, self.gap_s, self.pieces, self.stalls, self.room = first_s, gap_s, pieces, stalls, room
        self.inside = 0

    def prepare(self, planned: Planned) -> bytes:
        return b""

    async def send(self, body: bytes, sample: Sample, clock: Callable[[], float]) -> None:
        sample.sent_s = clock()
        if self.inside >= self.room:
            sample.status, sample.detail, sample.end_s = REJECTED, "429 full", clock()
            return
        self.inside += 1
        for piece in range(self.pieces):
            await asyncio.sleep(self.gap_s if piece else self.first_s)
            begin_s, end_s = self.stalls
            if begin_s <= clock() < end_s:
                await asyncio.sleep(end_s - clock())
            sample.pieces_s.append(clock())
        self.inside -= 1
        sample.status, sample.end_s, sample.output_tokens = OK, clock(), self.pieces


def test_a_stall_is_felt_by_everybody_who_would_have_asked_in_it() -> None:
    """Requests at 0, 0.1 ... for 20 s, 10 ms each, and 2 s in which nothing is answered: the latency of each is known."""
    planned = [Planned(n / 10, 1, 1) for n in range(200)]
    # With room for four, most requests of the stall cannot even be sent: their users wait all the same.
    found = simulated(lambda: drive(Stage(label="x", planned=planned), Service(0.01, stalls=(5.0, 7.0)), most_in_flight=4))
    wanted = sorted(max(0.01, 7.0 - n / 10) if 5.0 <= n / 10 + 0.01 < 7.0 else 0.01 for n in range(200))
    got = sorted(sample.e2e or 0 for sample in found.samples)
    late = sum(sample.sent_s - sample.planned_s > 0.1 for sample in found.samples)
    assert late >= 10, "the cap on open requests has held nobody back: the test shows nothing"
    # Those behind the cap are answered in groups of four, 10 ms a group, at the end of the stall.
    assert np.allclose(got, wanted, atol=0.06)
    assert np.percentile(got, 99) == pytest.approx(np.percentile(wanted, 99), rel=0.02)
    naive = [sample.end_s - sample.sent_s for sample in found.samples]
    assert np.percentile(naive, 95) < 0.1 * np.percentile(wanted, 95), "counted from the real sending the stall would be hidden"


def test_every_latency_of_a_stream() -> None:
    stage = Stage(label="x", planned=[Planned(n / 4, 1, 5) for n in range(40)])
    found = simulated(lambda: drive(stage, Service(0.2, 0.05, 5)))
    summary = summarise("x", found.samples, Slo(), begin_s=0, end_s=10)
    for name, value in {"ttft": 0.2, "itl": 0.05, "tpot": 0.05, "e2e": 0.4}.items():
        for p in ("p50", "p90", "p99", "mean", "max"):
            assert summary.latencies[name][p] == pytest.approx(value), name
    assert summary.latencies["itl"]["count"] == 160
    assert summary.user_token_rate == pytest.approx(20)


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    stage = Stage(label="x", planned=itertools.repeat(Planned(0, 1, 1)), concurrency=3, duration_s=10.0)
    found = simulated(lambda: drive(stage, Service(0.5)))
    summary = summarise("x", found.samples, Slo(), begin_s=2, end_s=10, concurrency=3)
    assert summary.request_rate == pytest.approx(6, abs=0.4), "Little's law: 3 users, 0.5 s each"
    assert summary.latencies["e2e"]["p99"] == pytest.approx(0.5)


def test_refused_requests_are_never_good() -> None:
    stage = Stage(label="x", planned=[Planned(n / 10, 1, 1) for n in range(100)])
    found = simulated(lambda: drive(stage, Service(0.35, room=2)))
    summary = summarise("x", found.samples, Slo(e2e=0.4), begin_s=0, end_s=10)
    assert summary.completed + summary.rejected == 100
    assert summary.rejected >= 40
    assert summary.good == summary.completed
    assert summary.good_share == pytest.approx(summary.completed / 100)
    assert summary.problems == {"429 full": summary.rejected}
    assert summarise("x", found.samples, Slo(e2e=0.3), begin_s=0, end_s=10).good == 0


def test_only_the_window_counts() -> None:
    samples = [Sample(planned_s=t, sent_s=t, end_s=t + 1, pieces_s=[t + 1], output_tokens=4, status=OK) for t in range(10)]
    samples += [Sample(planned_s=5.5, end_s=5.6, status=FAILED, detail="cut")]
    summary = summarise("x", samples, Slo(), begin_s=4, end_s=8)
    assert (summary.requests, summary.completed, summary.failed) == (5, 4, 1)
    assert summary.token_rate == pytest.approx(4.0), "one answer of four tokens arrives in each second"
    assert summary.request_rate == pytest.approx(1.0)


def test_a_stage_stops_when_it_is_told_to() -> None:
    def look(state: Drive) -> None:
        state.stopped = state.elapsed_s > 3

    stage = Stage(label="x", planned=(Planned(at_s, 1, 1) for at_s in arrivals(20, "poisson", 1)), duration_s=100)
    found = simulated(lambda: drive(stage, Service(0.5), look=look))
    assert 3 < found.elapsed_s < 4.5
    assert found.sent == len(found.samples)
    assert found.in_flight == 0


@pytest.mark.parametrize("kind", ["poisson", "constant"])
def test_arrivals_have_their_rate(kind: str) -> None:
    times = list(itertools.islice(arrivals(25, kind, 3), 20_000))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 25, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 25 if kind == "poisson" else 0, rel=0.03, abs=1e-9)


def test_spread_sees_a_service_that_grows_slower() -> None:
    def answers(latency: Callable[[float], float]) -> list[Sample]:
        return [Sample(planned_s=t, end_s=t + latency(t), status=OK) for t in np.arange(0, 30, 0.1).tolist()]

    assert (spread(answers(lambda t: 0.05), 0, 30) or 0) < 0.05
    assert (spread(answers(lambda t: 0.05 + t / 100), 0, 30) or 0) > 0.5
    assert spread(answers(lambda t: 0.05)[:3], 0, 30) is None
