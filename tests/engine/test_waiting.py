"""How long requests wait: who is refused at once, who is given up, who is let alone, and who goes first."""

import random
import re

import pytest

from tests.engine.fake_runner import scheduler
from tests.engine.pair import Pair, start_again
from tilewright.engine.request import QueueFull, Request, SamplingParams, State
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import StepResult


class Queue:
    """One slot, a clock of seconds, and requests that each hold the slot for two of them."""

    def __init__(self, slots: int = 1):
        self.now_s = 100.0
        blocks = scheduler().blocks
        self.sched = Scheduler(
            blocks=blocks, max_seqs=slots, max_tokens_per_step=8, max_model_len=50, max_waiting=50, clock=lambda: self.now_s
        )
        self.asked = 0

    def ask(self, max_wait_s: float | None) -> Request:
        self.asked += 1
        made = Request(str(self.asked), [1, 2], SamplingParams(max_tokens=2), max_wait_s=max_wait_s)
        self.sched.add(made)
        return made

    def second(self) -> list[tuple[Request, float]]:
        late = self.sched.expire()
        step = self.sched.schedule()
        assert step is not None
        self.now_s += 1
        self.sched.complete(step, StepResult.of([[7]]))
        return late


def test_a_request_waits_for_as_long_as_it_may_and_is_refused_where_it_would_wait_longer():
    queue = Queue()
    asked = [queue.ask(7.0) for _ in range(6)]
    late = [pair for _ in range(6) for pair in queue.second()]
    assert late == []
    assert [request.finish_reason for request in asked] == ["length"] * 3 + [None] * 3
    # Three wait; in the last five seconds two were started.
    with pytest.raises(QueueFull, match=r"3 requests wait, and this one would wait some 7\.5 s, wanted at most 7 s") as error:
        queue.ask(7.0)
    assert error.value.retry_after_s == 1.0
    with pytest.raises(QueueFull, match="wanted at most 2 s") as error:
        queue.ask(2.0)
    assert error.value.retry_after_s == pytest.approx(5.5)
    assert queue.ask(9.0).state is State.WAITING
    patient = queue.ask(None)
    late = [pair for _ in range(3) for pair in queue.second()]
    assert [request for request, _ in late] == asked[4:], "they came at 100 s, and are not started by 108"
    assert all(request.finish_reason == "expired" and retry_s >= 1 for request, retry_s in late)
    while patient.state is not State.FINISHED:
        queue.second()
    assert patient.finish_reason == "length"
    assert queue.sched.stats().expired == len(late)
    assert queue.ask(0.5).state is State.WAITING, "an empty queue takes the most impatient"


def test_where_nobody_starts_for_long_only_the_impatient_are_refused():
    """One step of eight seconds: a slow machine, or a long prompt. No start in the window of five says no more than that."""
    queue = Queue()
    for _ in range(3):
        queue.ask(None)
    queue.second()
    queue.now_s += 8
    with pytest.raises(QueueFull, match=r"2 requests wait, and this one would wait some 18\.0 s, wanted at most 17 s"):
        queue.ask(17.0)
    assert queue.ask(19.0).state is State.WAITING


def burst(count: int, since_s: float) -> Queue:
    """A queue that so many patient requests came to at once. Four of them started at once, and have run since then."""
    queue = Queue(slots=4)
    for _ in range(count):
        queue.ask(None)
    queue.sched.schedule()
    queue.now_s += since_s
    return queue


def test_where_nobody_has_started_yet_as_many_are_expected_to_start_together_as_run():
    """A burst: four run, and none of them has ended. After 1.5 s it is not known that the next four take 1.5 s each."""
    queue = burst(44, since_s=1.5)
    assert len(queue.sched.running) == 4
    with pytest.raises(QueueFull, match=r"40 requests wait, and this one would wait some 15\.0 s, wanted at most 14 s"):
        queue.ask(14.0)
    assert queue.ask(16.0).state is State.WAITING


def test_one_start_among_many_that_run_is_no_rate():
    """A burst: four run for 3 s each. When the first of them has ended, 20 others will not wait for 20 times as long."""
    queue = burst(24, since_s=3.0)
    queue.sched.finish(next(iter(queue.sched.running)), "abort")
    queue.sched.schedule()
    assert (len(queue.sched.running), len(queue.sched.waiting)) == (4, 19)
    with pytest.raises(QueueFull, match=r"19 requests wait, and this one would wait some 14\.2 s, wanted at most 14 s"):
        queue.ask(14.0)
    assert queue.ask(14.3).state is State.WAITING


@pytest.mark.parametrize("seed", range(40))
def test_the_room_is_how_many_more_may_wait(seed: int) -> None:
    """Told beforehand, as often as they are asked one by one; and the words of the first refusal."""
    rng, queue = random.Random(seed), Queue()
    told = 0
    for _ in range(60):
        if rng.random() < 0.5:
            queue.ask(None)
        if rng.random() < 0.2:
            low = Request(f"low {queue.asked}", [1], SamplingParams(max_tokens=2, priority=1))
            queue.sched.add(low)
            queue.asked += 1
        queue.second() if queue.sched.waiting or queue.sched.running else None
        queue.now_s += rng.random()
        most_s = rng.choice((0.5, 2.0, 7.0, 20.0))
        room = queue.sched.waiting.room(most_s)
        if room is None or len(queue.sched.waiting) > 30:
            continue
        before, told = len(queue.sched.waiting), told + 1
        taken = [queue.ask(most_s) for _ in range(room.left)]
        with pytest.raises(QueueFull, match=re.escape(str(room.refusal))) as refused:
            queue.ask(most_s)
        assert refused.value.retry_after_s == room.refusal.retry_after_s
        for request in taken:
            queue.sched.abort(request.id)
        assert len(queue.sched.waiting) == before
    assert told > 5


def test_the_samples_of_an_overdue_one_go_with_it():
    queue = Queue()
    queue.ask(None)
    samples = [Request("n", [1], SamplingParams(n=3), index=i, max_wait_s=None if i else 1.5) for i in range(3)]
    queue.sched.add(*samples)
    late = [pair for _ in range(2) for pair in queue.second()] + queue.sched.expire()
    assert [request for request, _ in late] == samples
    assert not queue.sched.waiting


def test_whoever_was_started_does_not_expire():
    queue = Queue()
    one = queue.ask(1.0)
    queue.second()
    start_again(queue.sched)
    queue.now_s += 100
    assert queue.sched.expire() == []
    while one.state is not State.FINISHED:
        queue.second()
    assert one.finish_reason == "length"


def test_a_newcomer_of_high_priority_goes_on_in_the_step_in_which_it_starts() -> None:
    for length in (1, 4):  # as much as the other has left, and more
        pair = Pair(scheduler(9, 3, max_seqs=3, budget=3))
        first, second, urgent = (
            Request(name, [token] * size, SamplingParams(max_tokens=1, priority=priority))
            for name, token, size, priority in (("a", 1, 12, 1), ("b", 2, 3, 1), ("c", 3, length + 1, 0))
        )
        pair.add(first, second)
        pair.step()
        assert 0 < second.computed < len(second)
        pair.add(urgent)
        step = pair.step()  # which checks that the first in order is in it
        assert step is not None
        assert urgent in {row.request for row in step.rows}
        pair.finish()
