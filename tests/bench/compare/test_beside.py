"""Engines beside the two that are compared, and the claims about the whole model."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tilewright.bench.compare.beside import beside, claims, equal_engine
from tilewright.bench.compare.engine import EngineError, Settings
from tilewright.bench.compare.measure import Contender
from tilewright.bench.compare.results import Run
from tilewright.bench.compare.watch import Watch
from tilewright.hw import nvml, state

CPU, CUDA = (Settings(device=torch.device(name), threads=1) for name in ("cpu", "cuda"))


class Named:
    """An engine that is its facts."""

    def __init__(self, **facts: Any):
        self.facts = facts

    def close(self) -> None:
        pass


def contender(name: str, seconds: list[float] | None = None, settings: Settings = CUDA, **facts: Any) -> Contender:
    side = Contender(name=name, engine=Named(**facts), settings=settings)  # pyright: ignore[reportArgumentType]
    side.runs = [Run(at=float(i), variant="whole", seconds=s) for i, s in enumerate(seconds or [])]
    return side


KINDS = [
    (("fp16", "cuda graph"), ("fp32 (tf32 convolutions)", False), "graph:fp16"),
    (("fp16", "cuda graph"), ("fp16", "cuda graph"), None),
    (("bf16", "cuda graph"), ("fp16", "cuda graph"), "graph:bf16"),
    (("fp16", "cuda graph"), ("fp16", False), "graph:fp16"),
    (("fp32", False), ("fp32", False), None),
    (("fp32", False), ("bf16", False), "eager:fp32"),
    (("int8", "cuda graph"), ("fp16", "cuda graph"), None),
]


@pytest.mark.parametrize(("ours", "baseline", "wanted"), KINDS)
def test_the_equal_engine(ours: tuple[str, Any], baseline: tuple[str, Any], wanted: str | None) -> None:
    sides = [contender(str(i), precision=p, graph=g) for i, (p, g) in enumerate((ours, baseline))]
    assert equal_engine(*sides) == wanted


def test_there_is_no_graph_on_a_processor() -> None:
    sides = [contender(str(i), settings=CPU, precision="fp32", graph=g) for i, g in enumerate(("cuda graph", False))]
    assert equal_engine(*sides) is None


def test_claims_are_in_the_order_of_their_worth() -> None:
    ours = contender("optimize:fp16", [1.0, 1.1, 0.9, 1.0, 1.0], precision="fp16", graph="cuda graph")
    eager = contender("eager", [4.0, 4.4, 3.6, 4.0, 4.0], precision="fp32", graph=False)
    called = contender("eager:fp16", [3.0] * 5, precision="fp16", graph=False)
    equal = contender("graph:fp16", [1.5, 1.65, 1.35, 1.5, 1.5], precision="fp16", graph="cuda graph")
    found = claims(ours, [eager, called, equal], 0.95, 0)
    assert [claim.engine for claim in found] == ["graph:fp16", "eager:fp16", "eager"]
    assert [claim.equal for claim in found] == [True, False, False]
    assert found[0].ratio.value == pytest.approx(1.5)
    assert found[0].ratio.low == pytest.approx(found[0].ratio.high), "what both share in a round cancels"
    assert found[2].words == "not equal: fp32 against fp16, calls against CUDA graph"
    assert found[1].ratio.low < 3.0 < found[1].ratio.high


def test_an_engine_that_is_compared_already_is_refused() -> None:
    sides = [contender(name, precision="fp32", graph=False) for name in ("optimize", "eager")]
    with ExitStack() as ends, pytest.raises(EngineError, match="engine eager is already compared; leave it out of --beside"):
        beside(*sides, ["eager"], CPU, ends, lambda words: None)


def test_the_clock_is_watched_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1980, 1700, 1500])
    monkeypatch.setattr(nvml, "clocks_mhz", lambda index: {"sm": next(clocks), "sm_max": 1980})
    reasons = iter([0, 0x04, 0x04 | 0x20])
    monkeypatch.setattr(nvml, "disturbances", lambda index: (next(reasons), 1))
    watch = Watch(cuda=0)
    for _ in range(3):
        watch.states.append(state.state(0))
    assert watch.summary() == {
        "samples": 3, "sm_mhz": [1500, 1700, 1980], "power_capped": 0.667, "slowdowns": ["software thermal slowdown"],
    }  # fmt: skip
    watch.look()
    assert len(watch.states) == 3, "the last look is not half a second old"
    assert Watch(cuda=None).summary() == {}
