"""What `interleaved_us` does with times: a clock and graphs that are not a card's."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.bench import harness

US_OF_CALL = (3.0, 50.0, 7.0)


class FakeCard:
    """Graphs that take their call's time; the clock is theirs alone."""

    def __init__(self) -> None:
        self.now_us, self.replayed = 0.0, []

    def graph(self, call: Callable[[int], Any], sets: int, repeats: int) -> Any:
        card, number = self, call(0)

        class Graph:
            def replay(self) -> None:
                card.replayed.append(number)
                card.now_us += US_OF_CALL[number] * sets * repeats

        return Graph()

    def event(self, enable_timing: bool) -> Any:
        card = self

        class Event:
            at_us = 0.0

            def record(self) -> None:
                self.at_us = card.now_us

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return (end.at_us - self.at_us) / 1e3

        return Event()


def test_each_call_has_its_own_time_in_rounds_of_many_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard()
    monkeypatch.setattr(harness, "_graph", card.graph)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    calls = [lambda i, number=number: number for number in range(len(US_OF_CALL))]
    times = harness.interleaved_us(calls, sets=2, rounds=30)
    assert [us for us, _ in times] == pytest.approx(US_OF_CALL)
    assert [spread for _, spread in times] == pytest.approx([0, 0, 0], abs=1e-9)
    rounds = [tuple(card.replayed[i : i + 3]) for i in range(0, len(card.replayed), 3)]
    assert len(rounds) == 32
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert len(set(rounds)) == 6, "every order comes up"


@pytest.mark.parametrize(("call_us", "calls"), [(0.0, 16), (10.0, 16), (400.0, 12), (1000.0, 4), (1e5, 4)])
def test_a_turn_of_long_calls_is_short(call_us: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard()
    monkeypatch.setattr(harness, "_graph", card.graph)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    (us, _), *_ = harness.interleaved_us([lambda i: 0], sets=4, rounds=1, call_us=call_us)
    assert us == pytest.approx(US_OF_CALL[0])
    assert card.now_us == pytest.approx(3 * calls * US_OF_CALL[0]), "three rounds of so many calls"


class HotCard(FakeCard):
    """Draws what its calls do, on average over a tenth of a second, and a draw of 1 is half as much time again."""

    heat = 0.0

    def graph(self, call: Callable[[int], Any], sets: int, repeats: int) -> Any:
        card, draw = self, call(0)

        class Graph:
            def replay(self) -> None:
                us = 1000.0 * (1 + card.heat / 2) * sets * repeats
                card.heat = draw + (card.heat - draw) * math.exp(-us / 1e5)
                card.now_us += us

        return Graph()


def test_each_call_has_the_clock_that_it_would_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    card = HotCard()
    monkeypatch.setattr(harness, "_graph", card.graph)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    calls: list[Callable[[int], Any]] = [lambda i: 1.0, lambda i: 0.0]
    (hot, _), (cool, _) = harness.interleaved_us(calls, sets=2, rounds=20)
    assert hot / cool < 1.3, "in turns of 16 ms they share one clock"
    before = card.now_us
    (hot, _), (cool, _) = harness.interleaved_us(calls, sets=2, settle=0.5)
    assert (hot, cool) == pytest.approx((1500.0, 1000.0), rel=0.01)
    turns = (card.now_us - before) / 1e6
    assert 3 * 2 * 0.5 * 4 / 3 < turns < 1.3 * 3 * 2 * 0.5 * 4 / 3, (
        "half a second, and a third of it timed; at first it was cool"
    )
