"""The next batch begins on a GPU shortly before the one before it has ended (turns.py). The GPU is a stand-in (late.py).

The stand-in computes a batch in 2 ms by its own clock, which is less than these tests take to send the next one. They use
`expecting` for longer ones.
"""

import time
from typing import Any, cast

import pytest
import torch

from tests.host.late import BEHIND, CAPACITY, LOST, Late, Makes, Process, both_answered, two_there
from tilewright.host import turns
from tilewright.host.arena import SECONDS, TRAFFIC
from tilewright.host.computing import Begun, Computing
from tilewright.host.direct import Fetched
from tilewright.host.intake import Arrived

EARLY = ["begin 1", "begin 2", "end 1", "answer", "end 2", "answer"]
"""What happens if the second batch is there when the first one is about to end."""


def expecting(one: Process, monkeypatch: pytest.MonkeyPatch, seconds: float, *, lead_s: float = turns.LEAD_S) -> None:
    """Have the process expect that its batches take so long."""
    monkeypatch.setattr(turns, "LEAD_S", lead_s)
    monkeypatch.setattr(one.turns, "_expected_s", lambda batch: seconds)
    one.turns._followed = True


def wait_for(one: Process, *log: str) -> None:
    """Wait until this has happened."""
    end_s = time.monotonic() + 20
    while tuple(one.log) != log:
        assert time.monotonic() < end_s, one.log
        time.sleep(0.001)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "outputs for the first time"])
def test_the_next_batch_begins_when_the_one_before_it_is_about_to_end(
    process: Makes, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    one = process(warm=warm)
    expecting(one, monkeypatch, 2.0, lead_s=2.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(2, behind=True)
    if not warm:  # the outputs of the second would overwrite those of the first, which have no other place yet
        one.arrived()
        assert one.log == ["begin 1"]
        assert both_answered(one) == ([2], [4])
        assert one.log == BEHIND
        return
    wait_for(one, "begin 1", "begin 2")
    one.gpu.finish(batches=1)
    assert one.answer() == ([2], {})
    one.send(6, behind=True)  # in the first memory, while the second is computed
    wait_for(one, *EARLY[:4], "begin 6")
    one.gpu.finish(batches=1)
    assert one.answer() == ([4], {})
    one.gpu.finish()
    assert one.answer() == ([12], {})
    assert one.log == [*EARLY[:4], "begin 6", *EARLY[4:], "end 6", "answer"]


def test_the_next_batch_does_not_begin_long_before_the_end(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it can be recalled."""
    one = process()
    expecting(one, monkeypatch, 0.3)
    began_s = time.monotonic()
    one.send(1)
    wait_for(one, "begin 1")
    one.send(2, behind=True)
    wait_for(one, "begin 1", "begin 2")
    assert time.monotonic() - began_s > 0.25
    one.gpu.finish()
    assert [one.answer(), one.answer()] == [([2], {}), ([4], {})]
    one.log.clear()
    expecting(one, monkeypatch, 30.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(2, behind=True)
    one.arrived()
    one.recall()
    one.gpu.finish()
    assert [one.answer(), one.answer()] == [([2], {}), None]
    assert one.log[-2:] == ["answer", "not begun"]


def test_who_shares_the_device_with_a_batch_that_costs_it_is_not_answered(
    process: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has both computed again."""
    one = process()
    expecting(one, monkeypatch, 2.0, lead_s=2.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(-2, behind=True)
    assert one.ended()
    assert one.log == ["begin 1", "begin -2"]
    one.recall()  # which came too late
    assert one.arenas[1].begun(CAPACITY)
    one.arenas[1].begin_by(CAPACITY)
    assert not one.arenas[1].begun(CAPACITY), "this is another batch"


def test_a_batch_that_begins_early_and_fails_costs_the_one_before_nothing(
    process: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, marks = process(), list[Any]()
    settled = Computing.settled
    monkeypatch.setattr(Computing, "settled", lambda self, *given: (marks.append(given[1]), settled(self, *given))[1])
    expecting(one, monkeypatch, 2.0, lead_s=2.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(5, -1, parts=[1, 1], behind=True)
    wait_for(one, "begin 1", "begin 5")
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert one.answer() == ([10, 0], {"1": "the model raised RuntimeError: a poisoned row"})
    assert marks[0] is not None
    assert marks[1:] == [None], "its rows were computed again behind its mark"


def test_the_time_before_the_last_batch_ends_is_not_the_next_ones(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = process()
    expecting(one, monkeypatch, 2.0, lead_s=2.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(2, behind=True)
    wait_for(one, "begin 1", "begin 2")
    expecting(one, monkeypatch, 0.0)
    time.sleep(0.2)
    one.gpu.finish()
    first, second = [SECONDS.unpack_from(one.channel.recv(1 << 16), TRAFFIC.size)[0] for _ in range(2)]
    one.sent.clear()
    assert second < 0.1 < 0.2 <= first


class _Copies:
    """Notes until when it waits."""

    def __init__(self) -> None:
        self.waited = list[Any]()

    def follow(self, event: Any) -> None:
        pass

    def wait(self, event: Any = None) -> None:
        self.waited.append(event)


def test_a_marked_batch_waits_for_its_own_work_only(process: Makes) -> None:
    one, copies = process(), _Copies()
    for mark in ("mark", None):
        assert one.places[0].settled(Fetched(torch.empty(8), [(0, 8)], set(), cast("Any", copies), None), cast("Any", mark))
    assert copies.waited == ["mark", None]


def test_batches_are_timed_only_where_one_follows_another(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = process()
    marks, mark = list[str](), one.places[0]._loaded.mark
    monkeypatch.setattr(type(one.places[0]._loaded), "mark", lambda _: (marks.append("mark"), mark())[1])
    for _ in range(2):
        one.send(1)
        one.gpu.waits.wait(20)
        one.gpu.finish()
        assert one.answer() == ([2], {})
    assert not marks
    one.log.clear()
    two_there(one, [1], [2])
    assert both_answered(one) == ([2], [4])
    assert one.log == BEHIND
    assert len(marks) == 2, "around the second, which began before the first was answered"


def test_a_batch_that_ends_sooner_than_expected_is_answered_soon(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = process()
    expecting(one, monkeypatch, 5.0)
    one.send(1)
    wait_for(one, "begin 1")
    began_s = time.monotonic()
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert time.monotonic() - began_s < 2.0


@pytest.mark.timeout(60)
def test_the_wait_for_a_batch_ends_in_time(process: Makes) -> None:
    """However short it is: CPython's `SimpleQueue` waits for ever if its timeout passes at a certain moment."""
    intake = process().intake
    for seconds in (0.0, 1e-7, 5e-7, 1e-6, 2e-6, 1e-5):
        for _ in range(3000):
            assert intake.next(within_s=seconds) is None


def test_what_is_expected_of_a_batch(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time that such a batch took; it rises slowly if all take longer."""
    one = process()
    batch, other = (Begun(Arrived(0, words, {}, None, 0), [1], 0.0) for words in (b"1", b"2"))
    for seconds in (3.0, 2.0, 4.0):
        monkeypatch.setattr(Begun, "device_s", lambda _, seconds=seconds: seconds)
        one.turns._expect(batch)
    one.turns._expect(other)
    assert one.turns._durations[b"1"] == pytest.approx(2.2)
    assert one.turns._durations[b"2"] == 4.0
    monkeypatch.setattr(turns, "MAX_KEPT", 3)
    for words in (b"3", b"3", b"4"):
        one.turns._expect(Begun(Arrived(0, words, {}, None, 0), [1], 0.0))
        assert len(one.turns._durations) == (3 if words == b"3" else 1)


class _Lost:
    """An event of a device that is lost."""

    def elapsed_time(self, end: Any) -> float:
        raise RuntimeError(LOST)


def test_a_device_that_is_lost_says_no_duration() -> None:
    batch = Begun(Arrived(0, b"", {}, None, 0), [1], 0.0, start=cast("Any", _Lost()), mark=cast("Any", _Lost()))
    assert batch.device_s() is None
    assert Begun(batch.arrived, [1], 0.0).device_s() is None


def test_a_device_that_is_lost_before_a_batch_begins_is_the_answer(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event cannot be recorded then."""

    def mark(self: Late) -> Any:
        raise RuntimeError(LOST)

    one = process()
    one.turns._followed = True
    monkeypatch.setattr(Late, "mark", mark)
    one.send(1)
    assert one.answer()[1] == {"0": f"the model raised RuntimeError: {LOST}"}
