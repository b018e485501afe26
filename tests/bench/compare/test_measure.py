"""Measuring in turns: what is checked before anything is timed, how rounds are made, when they end. Engines are made up."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tilewright.bench.compare import clocks, measure
from tilewright.bench.compare.attribution import Border, Design
from tilewright.bench.compare.ballast import only_whole
from tilewright.bench.compare.engine import EngineError, Settings, flat_outputs
from tilewright.bench.compare.fairness import yardsticks
from tilewright.bench.compare.measure import Contender, build_all, race, truth_of
from tilewright.bench.compare.plan import Plan

LAYERS = 4
SETTINGS = Settings(device=torch.device("cpu"), threads=1, build_limit_s=5, run_limit_s=5)
ON_A_GPU = Settings(device=torch.device("cuda", 0), threads=1)


@dataclass
class Part:
    """The first layers of a chain, as a variant."""

    depth: int

    @property
    def name(self) -> str:
        return "whole" if self.depth == LAYERS else f"prefix {self.depth}"

    @property
    def part(self) -> tuple[int, ...]:
        return tuple(range(self.depth))

    @property
    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(6, 6), nn.Tanh())][: 2 * self.depth])

    inputs = (torch.linspace(-1, 1, 12).reshape(2, 6),)

    def release(self) -> None:
        pass


PARTS = [Part(LAYERS), *(Part(k) for k in range(1, LAYERS))]
DESIGN = Design(
    layers=tuple(f"layer{i}" for i in range(LAYERS)), groups=tuple(range(LAYERS)), flops=(1.0,) * LAYERS, bytes=(1.0,) * LAYERS,
    parts={p.name: tuple(range(p.depth)) for p in PARTS}, border={p.name: Border(1.0, 1.0) for p in PARTS},
    dear=Border(1e-9, 1e-9, 1e-6, 1e-6),
)  # fmt: skip


class Spy:
    """An engine that computes eagerly, changes the answer as it is told, and notes every call."""

    facts: dict[str, Any] = {"precision": "fp32"}  # noqa: RUF012

    def __init__(self, change: Callable[[list[Tensor], int], list[Tensor]] = lambda x, depth: x, build_s: float = 0.0):
        self.change, self.build_s, self.noted = change, build_s, []

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Any:
        time.sleep(self.build_s)
        spy, depth = self, len(list(module)) // 2  # pyright: ignore

        class Built:
            facts: dict[str, Any] = {}  # noqa: RUF012

            def time(self, calls: int) -> float:
                spy.noted.append((name, calls))
                return calls * depth * 1e-5

            def outputs(self) -> list[Tensor]:
                return spy.change(flat_outputs(module(*inputs)), depth)

            def close(self) -> None:
                spy.noted.append((name, "closed"))

        return Built()

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SETTLE_S", 0.0)


def contender(engine: Any, name: str = "spy") -> Contender:
    return Contender(name=name, engine=engine, settings=SETTINGS)


def build(*sides: Contender, budget_s: float = 100.0, needed: int = len(PARTS)) -> list[str]:
    plan: Any = SimpleNamespace(variants=PARTS, needed=PARTS[:needed], rest=[], design=DESIGN)
    return build_all(sides, [plan for _ in sides], budget_s, lambda words: None)[0][0]


def spoilt(at: int) -> Callable[[list[Tensor], int], list[Tensor]]:
    """From layer `at` on the third number of the second row is wrong."""

    def change(x: list[Tensor], depth: int) -> list[Tensor]:
        if depth >= at:
            x[0][1, 2] = 7.5
        return x

    return change


def test_truth_is_float64_and_changes_nothing() -> None:
    part = Part(2)
    module = part.module
    truth = truth_of(module, part.inputs)
    assert truth[0].dtype == torch.float64
    assert next(module.parameters()).dtype == torch.float32
    near = flat_outputs(module(*part.inputs))[0]
    assert 0 < float((truth[0] - near).abs().max()) < 1e-6


def test_a_model_that_has_no_float64_is_told_where() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(3, 3)

    with pytest.raises(ValueError, match=r"does not run in float64.*\(at .*test_measure.py:\d+, in forward: return x @ torch"):
        truth_of(Mixed(), (torch.randn(2, 3),))


WRONG = [
    (lambda x, depth: [x[0].T], "spy, whole: the outputs have shapes [(6, 2)], but the model's have [(2, 6)]"),
    (
        lambda x, depth: [x[0].T] if depth > 1 else x,
        "first wrong at layer layer1; there: spy, prefix 2: the outputs have shapes",
    ),
    (lambda x, depth: [], "the outputs have shapes []"),
    (spoilt(3), "output 0, element [1, 2]: 7.5, but the model's is"),
    (spoilt(3), "first wrong at layer layer2"),
    (spoilt(1), "first wrong at layer layer0"),
    (spoilt(4), "first wrong at layer layer3"),
    (lambda x, depth: [torch.full_like(x[0], float("nan"))], "spy, whole: wrong numbers, with an error of inf"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_wrong_answers_stop_it_with_the_layer_and_both_values(change: Callable, words: str) -> None:
    with pytest.raises(EngineError) as caught:
        build(contender(Spy()), contender(Spy(change)))
    assert words in str(caught.value)


@pytest.mark.parametrize(("alone", "words"), [(None, "at layer layer2; there"), (2, "at one of the layers layer0 ... layer3")])
def test_the_wrong_layer_is_found_when_the_whole_model_is_built_by_itself(alone: int | None, words: str) -> None:
    """As `compare` builds it before all else: the prefixes are of a later plan. One that cannot be built hides nothing."""
    side, spoil = contender(Spy()), spoilt(3)

    def change(x: list[Tensor], depth: int) -> list[Tensor]:
        if depth == alone:
            raise RuntimeError("no such operator: paint")
        return spoil(x, depth)

    parts: Any = PARTS
    planned = Plan(chain=cast(Any, None), variants=parts, needed=parts, rest=[], design=DESIGN)
    with pytest.raises(EngineError, match=f"7.5, but the model's is .*; first wrong {words}"):
        build_all([side, contender(Spy(change))], [only_whole(planned)] * 2, 100.0, lambda words: None)


def test_rounding_is_not_wrong_and_is_kept() -> None:
    half = contender(Spy(lambda x, depth: [x[0].half().double()]))
    build(half)
    assert 1e-5 < half.errors["whole"] < 1e-3


class Forgetful(nn.Sequential):
    """What it is given disappears beside a larger number: bfloat16 keeps half a unit of 64."""

    def forward(self, input: Tensor) -> Tensor:
        return (super().forward(input) + 64) - 64


@pytest.mark.parametrize(("off", "wrong"), [(0.0, False), (0.15, False), (0.45, True)])
def test_a_program_that_rounding_disturbs_may_be_off_as_much(off: float, wrong: bool) -> None:
    part: Any = SimpleNamespace(name="only", module=Forgetful(), inputs=(torch.linspace(-1, 1, 240).reshape(2, 120),))
    truth = truth_of(part.module, part.inputs)
    rounded = yardsticks(part.module, part.inputs, truth)
    assert rounded["fp32"] < 1e-4
    assert 0.1 < rounded["bf16"] < 0.21
    one = contender(Spy(lambda x, depth: [x[0] * (1 + off)]))
    if not wrong:
        one.build(part, truth)
        assert one.errors["only"] == pytest.approx(off, abs=1e-4)
        return
    with pytest.raises(
        EngineError, match=r"spy, only: wrong numbers, with an error of 0\.45, while rounding explains at most 0"
    ):
        one.build(part, truth)


def test_an_engine_that_fails_is_named() -> None:
    class Broken(Spy):
        def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> Any:
            raise AttributeError("no such attribute: luck")

    with pytest.raises(EngineError, match="mine building whole failed: AttributeError: no such attribute: luck"):
        build(contender(Broken(), "mine"))
    slow = contender(Spy(build_s=30))
    slow.settings = Settings(device=torch.device("cpu"), threads=1, build_limit_s=0.1)
    with pytest.raises(EngineError, match="spy building whole took longer than"):
        build(slow)


def test_building_ends_with_its_share_of_the_budget() -> None:
    one, other = contender(Spy(build_s=0.05)), contender(Spy())
    assert build(one, other, budget_s=0.04) == ["whole", "prefix 1"], "the whole model counts for nothing"
    assert list(one.built) == list(other.built) == ["whole", "prefix 1"]
    everything = contender(Spy())
    assert build(everything) == ["whole", "prefix 1", "prefix 2", "prefix 3"]
    spares = contender(Spy(build_s=0.2))
    assert build(spares, budget_s=0.8, needed=2) == ["whole", "prefix 1"], "spares may take less"


def test_rounds_have_every_variant_once_in_new_orders() -> None:
    sides = [contender(Spy()), contender(Spy())]
    build(*sides)
    for side in sides:
        side.engine.noted.clear()  # pyright: ignore
    looks = []

    def decided() -> bool:
        looks.append(len(sides[0].runs))
        return len(looks) == 3

    started = time.monotonic()
    assert race(sides, decided, started + 30, 1, started, lambda words: None) == "decided"
    assert looks == [8 * len(PARTS), 16 * len(PARTS), 32 * len(PARTS)], "asked when the rounds have doubled"
    for side in sides:
        assert Counter(run.variant for run in side.runs) == dict.fromkeys(side.built, 32)
        orders = {tuple(run.variant for run in side.runs[i : i + len(PARTS)]) for i in range(0, len(side.runs), len(PARTS))}
        assert len(orders) > 8
        assert all(set(order) == set(side.built) for order in orders)
        assert [run.at for run in side.runs] == sorted(run.at for run in side.runs)
        # A call that is not timed goes before each batch, and a batch is at least a millisecond.
        noted = side.engine.noted  # pyright: ignore
        assert all(calls == 1 for _, calls in noted[::2])
        assert all(calls * len(DESIGN.parts[name]) * 1e-5 >= 1e-3 for name, calls in noted[1::2])
        for run in side.runs:
            assert run.seconds == pytest.approx(len(DESIGN.parts[run.variant]) * 1e-5), "of one forward pass"
    merged = sorted([(run.at, s) for s, side in enumerate(sides) for run in side.runs])
    assert sum(a[1] != b[1] for a, b in pairwise(merged)) > len(merged) / 4, "the sides take turns"


def test_it_ends_with_the_budget_or_ctrl_c() -> None:
    side = contender(Spy())
    build(side)
    started = time.monotonic()
    assert race([side], lambda: False, started, 1, started, lambda words: None) == "budget"
    assert len(side.runs) == 8 * len(PARTS), "eight rounds whatever they take"

    told = []

    def interrupt(words: str) -> None:
        told.append(words)
        if len(told) == 2 + 5:  # the first two rounds warm up
            raise KeyboardInterrupt

    side.runs.clear()
    assert race([side], lambda: False, started + 60, 1, started, interrupt) == "interrupted"
    assert len(side.runs) == 5 * len(PARTS), "what was measured stays"

    side.runs.clear()
    told[:] = [""] * 3  # so that it comes in the second round that counts
    with pytest.raises(KeyboardInterrupt):
        race([side], lambda: False, started + 60, 1, started, interrupt)
    assert len(side.runs) == 2 * len(PARTS)


def test_rounds_count_once_clocks_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for so long, and nothing decided for as long again."""
    monkeypatch.setattr(measure, "_SETTLE_S", 0.3)
    side, looked = contender(Spy()), []
    build(side)

    def decided() -> bool:
        looked.append(time.monotonic())
        return True

    started = time.monotonic()
    assert race([side], decided, started + 60, 1, started, lambda words: None) == "decided"
    assert min(run.at for run in side.runs) >= 0.29
    assert looked[0] - started >= 0.6


class _Card:
    """A GPU with one stream, and a host whose calls take HOST seconds each: times of both, in seconds."""

    HOST, WORK = 3e-3, 1e-3

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def call(self) -> None:
        """Ten pieces of work, each started by the host, each as long on the device."""
        for _ in range(10):
            self.now += self.HOST / 10
            self.busy_until = max(self.busy_until, self.now) + self.WORK / 10

    def waiting_call(self) -> None:
        self.call()
        self.synchronize()

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.busy_until)

    def sleep(self, cycles: int) -> None:
        self.busy_until = max(self.busy_until, self.now) + cycles / 4e9  # twice as fast as is thought

    def event(self, enable_timing: bool = False) -> "_Event":
        return _Event(self)


class _Event:
    def __init__(self, card: _Card):
        self.card, self.at = card, 0.0

    def record(self) -> None:
        self.at = max(self.card.busy_until, self.card.now)

    def query(self) -> bool:
        return self.at <= self.card.now

    def synchronize(self) -> None:
        self.card.now = max(self.card.now, self.at)

    def elapsed_time(self, end: "_Event") -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("waits", [False, True], ids=["runs on", "waits for the device"])
def test_a_device_with_the_host_ahead(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead grows until all of a call's work is there before it begins; a call that waits inside never is that far."""
    card = _Card()
    monkeypatch.setattr(torch.cuda, "synchronize", card.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", card.sleep)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(time, "perf_counter", lambda: card.now)
    call = card.waiting_call if waits else card.call
    assert clocks.timed(call, 4, ON_A_GPU) == pytest.approx(4 * card.HOST, rel=0.05), "the host's, as a user has it"
    behind = clocks.Behind(call, ON_A_GPU)
    assert behind.time(4) == pytest.approx(4 * card.WORK, rel=1e-6)
    assert behind._lead == (8.0 if waits else pytest.approx(2.8125))


def test_a_call_from_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are emptied before each call, while the device waits for its host, and that is no time of the call's."""
    card, emptied = _Card(), []
    monkeypatch.setattr(torch.cuda, "synchronize", card.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", card.sleep)
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(time, "perf_counter", lambda: card.now)

    def empty(device: torch.device) -> None:
        emptied.append(card.now)
        card.sleep(int(4e9 * card.WORK))

    monkeypatch.setattr(clocks, "empty_caches", empty)
    behind = clocks.Behind(card.call, ON_A_GPU)
    assert behind.time(4, cold=True) == pytest.approx(4 * card.WORK, rel=1e-6)
    assert len(emptied) >= 4
    before = len(emptied)
    behind.time(2, cold=False)
    assert len(emptied) == before
