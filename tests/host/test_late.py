"""The next batch begins on a GPU shortly before the one before it has ended. The GPU is a stand-in (late.py).

The stand-in computes a batch in 2 ms by its own clock, which is less than these tests take to send the next one. They use
`expecting` for longer ones.
"""

import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.host.late import CAPACITY, LOST, SIGNATURE, WIDTH, Gpu, Late, Process
from tilewright.fuse import optimize
from tilewright.host import turns
from tilewright.host.computing import Begun
from tilewright.host.exported import Exported
from tilewright.host.intake import Arrived
from tilewright.host.loaded import Loaded, _Renamed

EARLY = ["begin 1", "begin 2", "end 1", "answer", "end 2", "answer"]
"""What happens if the second batch is there when the first one is about to end."""
BEHIND = ["begin 1", "end 1", "begin 2", "answer", "end 2", "answer"]
"""What happens if the second batch is there when the first one ends."""
ONE_BY_ONE = ["begin 1", "end 1", "answer", "begin 2", "end 2", "answer"]


class Makes:
    """Makes processes, and ends them after the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch, self.made = monkeypatch, list[Process]()

    def __call__(self, *, at_once: bool = True, warm: bool = True, **config: Any) -> Process:
        """`warm`: it has computed a batch in each memory, so that the places of outputs are known."""
        found = Process(self._monkeypatch, Late.on(Gpu(), at_once=at_once), **config)
        self.made.append(found)
        if warm:
            two_there(found, [8], [9])
            assert both_answered(found) == ([16], [18])
            found.log.clear()
        return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makes]:
    makes = Makes(monkeypatch)
    yield makes
    for one in makes.made:
        one.close()


def two_there(
    one: Process, first: list[float], second: list[float], parts: list[int] | None = None, parts_behind: list[int] | None = None
) -> None:
    """A batch is begun, and another one is behind it. `parts`: rows of the requests of each."""
    one.send(*first, parts=parts)
    assert one.gpu.waits.wait(20)
    one.send(*second, parts=parts_behind, behind=True)
    one.arrived()


def both_answered(one: Process) -> tuple[list[float], list[float]]:
    """The outputs of two batches that are there."""
    one.gpu.waits.clear()
    one.gpu.finish()
    found, errors = one.answer()
    assert not errors
    assert one.gpu.waits.wait(20)
    one.gpu.finish()
    other, errors = one.answer()
    assert not errors
    return found, other


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
    assert one.arenas[1].begun(CAPACITY)


def test_a_batch_that_begins_early_and_fails_costs_the_one_before_nothing(
    process: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = process()
    expecting(one, monkeypatch, 2.0, lead_s=2.0)
    one.send(1)
    wait_for(one, "begin 1")
    one.send(5, -1, parts=[1, 1], behind=True)
    wait_for(one, "begin 1", "begin 5")
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert one.answer() == ([10, 0], {"1": "the model raised RuntimeError: a poisoned row"})


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


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "outputs for the first time"])
def test_the_next_batch_begins_before_the_answer_if_it_comes_before_the_end(process: Makes, warm: bool) -> None:
    one = process(warm=warm)
    two_there(one, [1, 3], [2, 4, 5])
    assert one.log == ["begin 1"], "both are on the GPU together"
    one.gpu.waits.clear()
    one.gpu.finish()
    assert one.answer() == ([2, 6], {})
    assert one.gpu.waits.wait(20)
    assert one.log == ["begin 1", "end 1", "begin 2", "answer"]
    one.gpu.finish()
    assert one.answer() == ([4, 8, 10], {})
    assert one.log == BEHIND


def test_models_that_may_wait_or_run_code_of_their_own_begin_after_the_answer(process: Makes) -> None:
    one = process(at_once=False)
    two_there(one, [1], [2])
    assert both_answered(one) == ([2], [4])
    assert one.log == ONE_BY_ONE


def test_memory_that_is_not_locked_has_copies_that_wait(process: Makes) -> None:
    one = process()
    for place in one.places:
        place._waits = True
    two_there(one, [1], [2])
    assert both_answered(one) == ([2], [4])
    assert one.log == ONE_BY_ONE


def test_a_batch_that_comes_after_the_end_of_the_one_before(process: Makes) -> None:
    one = process()
    one.send(1)
    assert one.gpu.waits.wait(20)
    one.gpu.waits.clear()
    one.gpu.finish()
    assert one.answer() == ([2], {})
    one.send(2)
    assert one.gpu.waits.wait(20)
    one.gpu.finish()
    assert one.answer() == ([4], {})
    assert one.log == ONE_BY_ONE


def test_a_batch_can_be_recalled_until_the_one_before_has_ended(process: Makes) -> None:
    one = process()
    two_there(one, [1], [2])
    one.recall()
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert one.answer() is None
    assert one.log == ["begin 1", "end 1", "answer", "not begun"]
    two_there(one, [1], [2])
    one.gpu.waits.clear()
    one.gpu.finish()
    assert one.gpu.waits.wait(20)
    one.recall()  # too late
    one.gpu.finish()
    assert [one.answer(), one.answer()] == [([2], {}), ([4], {})]
    assert one.log[4:] == BEHIND


def test_a_batch_that_cannot_begin_costs_the_one_before_nothing(process: Makes) -> None:
    """Its requests are computed alone, after the answer to the other one."""
    one = process()
    two_there(one, [1], [5, -1, 7], parts_behind=[1, 1, 1])
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert one.answer() == ([10, 0, 14], {"1": "the model raised RuntimeError: a poisoned row"})
    began = ["begin 1", "end 1", "begin 5", "answer"]
    assert one.log == [*began, "begin 5", "end 5", "begin -1", "begin 7", "end 7", "answer"]
    two_there(one, [1], [-1])
    one.gpu.finish()
    assert one.answer() == ([2], {})
    assert one.answer() == (None, {"0": "the model raised RuntimeError: a poisoned row"})


def test_a_batch_that_costs_the_device_leaves_the_one_before_its_answer(process: Makes) -> None:
    one = process()
    two_there(one, [1], [-2, 3], parts_behind=[1, 1])
    one.gpu.finish()
    assert one.answer() == ([2], {})
    why = f"the model raised RuntimeError: {LOST}"
    assert one.answer() == (None, {"0": why, "1": why})
    assert one.ended()


def test_a_device_that_is_lost_during_a_batch(process: Makes) -> None:
    one = process()
    two_there(one, [1], [2])
    one.gpu.lose()
    assert one.answer() == (None, {"0": f"the model raised RuntimeError: {LOST}"})
    assert one.ended()
    assert one.log == ["begin 1", "answer"], "the other batch has begun"


def test_a_nan_is_the_error_of_its_request_while_the_next_batch_runs(process: Makes) -> None:
    one = process()
    two_there(one, [-4, 3], [2], parts=[1, 1])
    one.gpu.waits.clear()
    one.gpu.finish()
    found, errors = one.answer()
    assert found[1:] == [6]
    assert errors == {"0": "the model returned NaN in output 'output' for finite inputs"}
    assert one.gpu.waits.wait(20)
    one.gpu.finish()
    assert one.answer() == ([4], {})
    two_there(one, [-4], [2])
    torch.frombuffer(one.arenas[0].view, dtype=torch.float32, count=2)[1] = torch.inf
    assert both_answered(one)[1] == [4]  # without an error, because an input is not finite


def test_a_device_that_is_lost_before_the_inputs_of_a_nan_are_checked(process: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    one = process()
    two_there(one, [-4, 3], [2], parts=[1, 1])

    def lost(x: torch.Tensor) -> torch.Tensor:
        one.gpu.lose()
        raise RuntimeError(LOST)

    monkeypatch.setattr(torch, "isfinite", lost)
    one.gpu.finish()
    assert one.answer() == (None, {"0": "the device is lost", "1": "the device is lost"})
    assert one.ended()
    assert one.log.count("answer") == 1, "the requests of the other batch may be tried again"


def test_which_calls_only_replay_a_graph() -> None:
    """Those of shapes for which there is one, after they were padded; a CPU has none."""
    net = optimize(nn.Linear(WIDTH, WIDTH), torch.ones(4, WIDTH), "fp32", report=False, measure=False, compiled=False)
    loaded = Loaded(net, SIGNATURE, torch.device("cpu"), (4,))
    loaded.call([torch.ones(4, WIDTH)])
    assert not loaded.replays([torch.ones(4, WIDTH)])
    captured, graph = net.made[0].captured, cast(Any, object())
    assert captured is not None
    captured.graph = graph
    renamed = loaded._replace(module=_Renamed(net, ("output",)))
    for one in (loaded, renamed):
        assert [one.replays([torch.ones(rows, WIDTH)]) for rows in (1, 4, 5)] == [True, True, False]
        assert not one.replays([torch.ones(4, WIDTH, dtype=torch.float64)])
    assert not loaded._replace(module=net.model).replays([torch.ones(4, WIDTH)])
    exported = Exported({4: captured})
    assert [loaded._replace(module=exported).replays([torch.ones(rows, WIDTH)]) for rows in (2, 4, 5)] == [True, True, False]
    whole = loaded._replace(module=Exported({None: captured}), signature=SIGNATURE._replace(batched=False))
    assert whole.replays([torch.ones(4, WIDTH)])
    captured.graph = None
    assert not whole.replays([torch.ones(4, WIDTH)])


@pytest.mark.parametrize("at_once", [True, False])
def test_random_batches_at_random_times(process: Makes, at_once: bool) -> None:
    """Some are recalled, some have requests that fail; each has its own rows in its answer."""
    one, rng, ends = process(warm=False, at_once=at_once), random.Random(0), threading.Event()

    def finish() -> None:
        while not ends.is_set():
            ends.wait(rng.choice((0, 0, 1e-4, 1e-3)))
            one.gpu.finish()

    thread = threading.Thread(target=finish, daemon=True)
    thread.start()
    expected, behind, recalled = list[list[float]](), 0, 0
    for number in range(600):
        values = [float(10 * number + row + 1) for row in range(rng.randint(1, 8))]
        if rng.random() < 0.1:
            values[rng.randrange(len(values))] = rng.choice((-1.0, -4.0))
        is_behind = len(one.sent) == 1
        one.send(*values, parts=[1] * len(values), behind=is_behind)
        expected.append(values)
        if is_behind:
            behind += 1
            if rng.random() < 0.1:
                one.recall()
        elif rng.random() < 0.9:
            continue
        for _ in range(rng.randint(1, len(one.sent))):
            recalled += checked(one.answer(), expected.pop(0))
    while one.sent:
        recalled += checked(one.answer(), expected.pop(0))
    ends.set()
    thread.join()
    steps = list(pairwise(one.log))
    early = sum(step.startswith("begin") and step != "begin -1" and after == "answer" for step, after in steps)
    assert behind > 200
    assert recalled
    assert (early > 20) == at_once


def checked(answer: Any, values: list[float]) -> bool:
    """Check an answer; return whether the batch was recalled."""
    if answer is None:
        return True
    found, errors = answer
    bad = [number for number, value in enumerate(values) if value < 0]
    assert sorted(map(int, errors)) == bad
    if found is not None:
        assert [value for number, value in enumerate(found) if number not in bad] == [2 * v for v in values if v > 0]
    else:
        assert len(bad) == len(values)
    return False
