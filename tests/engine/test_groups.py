"""Requests that start together where there is no place for all, and at once where there is."""

import pytest

from tests.engine.fake_runner import scheduler
from tests.engine.pair import Pair, request
from tilewright.engine.groups import STEPS
from tilewright.engine.step import Step


def _started(step: Step | None) -> list[str]:
    """Whose prompt begins in a step."""
    return [row.request.id for row in step.rows if row.start == 0] if step is not None else []


def _full(budget: int = 200) -> Pair:
    """Sixteen have just started, twenty more wait, all of a low priority."""
    pair = Pair(scheduler(600, 4, max_seqs=16, budget=budget))
    pair.add(*(request(f"{i}", [1, i], 100, priority=1) for i in range(36)))
    assert len(_started(pair.step())) == 16
    return pair


def _end(pair: Pair, count: int) -> None:
    for name in [r.id for r in pair.scheduler.running][:count]:
        pair.scheduler.abort(name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_engine_computes_prompts_in_one_step_of_four(asynchronous: bool) -> None:
    pair = Pair(scheduler(600, 4, max_seqs=32, budget=200), asynchronous=asynchronous)
    for i in range(32):
        pair.add(request(f"{i}", [1, 2, 3], 40))
        assert _started(pair.step()) == [f"{i}"], "who finds no queue starts at once"
    pair.add(*(request(f"waits-{i}", [4, 5, 6], 40) for i in range(20)))
    while not _started(pair.step()):  # from here on one ends with each step
        pass
    groups = [len(_started(pair.step())) for _ in range(4 * STEPS)]
    assert [bool(group) for group in groups] == [False, False, False, True] * 4
    assert sum(groups) == 4 * STEPS, "no place stands empty for more than three steps"
    pair.finish()
    pair.check_outputs()


def test_a_place_that_comes_free_late_is_taken_at_once() -> None:
    pair = _full()
    for _ in range(STEPS):
        assert not _started(pair.step())
    _end(pair, 1)
    assert _started(pair.step()) == ["16"]
    _end(pair, 1)
    assert [_started(pair.step()) for _ in range(STEPS)] == [[], [], [], ["17"]]


def test_a_newcomer_of_high_priority_is_not_held_back() -> None:
    pair = _full()
    _end(pair, 2)
    assert not _started(pair.step()), "two places are free, and nobody takes them yet"
    pair.add(request("urgent", [7, 8], 3))
    assert sorted(_started(pair.step())) == ["16", "urgent"], "and who waits goes with it"


def test_nobody_is_held_back_once_a_quarter_has_ended() -> None:
    pair = _full()
    _end(pair, 3)
    assert not _started(pair.step())
    _end(pair, 1)
    assert len(_started(pair.step())) == 4


def test_who_waits_starts_beside_a_prompt_that_is_computed_anyway() -> None:
    pair = _full(budget=34)
    for _ in range(STEPS):
        pair.step()
    _end(pair, 1)
    pair.add(request("long", list(range(60)), 2))
    started = []
    for _ in range(5):  # the prompt takes four
        started.append(_started(pair.step()))
        pair.scheduler.abort(next(r.id for r in pair.scheduler.running if r.id != "long"))
    assert started == [["long"], ["16"], ["17"], ["18"], []]


def test_a_queue_that_a_step_has_no_tokens_for_goes_on_in_the_next() -> None:
    """There are places for all eight; a step has 20 tokens, for four prompts of five."""
    pair = Pair(scheduler(400, 4, max_seqs=16, budget=20))
    pair.add(*(request(f"{i}", [i, 2, 3, 4, 5], 30) for i in range(8)))
    assert [len(_started(pair.step())) for _ in range(2)] == [4, 4]
