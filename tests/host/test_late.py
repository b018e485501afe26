"""The next batch begins on a GPU when the one before it has ended, before that is answered. The GPU is a stand-in (late.py)."""

import random
import threading
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.host.late import BEHIND, LOST, SIGNATURE, WIDTH, Makes, both_answered, two_there
from tilewright.fuse import optimize
from tilewright.host.exported import Exported
from tilewright.host.loaded import Loaded, _Renamed

ONE_BY_ONE = ["begin 1", "end 1", "answer", "begin 2", "end 2", "answer"]


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
