"""The fairness card: what closes a point, what opens it, and engines that do not compute in what they say."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bench.compare.synthetic import resnet50
from tilewright.bench.compare.fairness import CLASSES, DRIFT, card, drifted_apart, precision_of, relative_error, yardsticks
from tilewright.bench.compare.results import Point, Run, Side
from tilewright.hw import nvml
from tilewright.hw.state import State, others_share, state

QUIET = State(at=0.0, load=0.3, ticks=(1000, 10_000), own_ticks=500, governor="performance")
AFTER = replace(QUIET, at=60.0, ticks=(3000, 20_000), own_ticks=2400)
GPU = {"sm": 1755, "sm_max": 1980, "slowdowns": [], "processes": 1}


# ----------------------------------------------------------------------------------------------------------------- precision


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.b(torch.relu(self.a(x))))


def residual_net() -> tuple[nn.Module, Tensor, int]:
    blocks = [Residual(16) for _ in range(6)]
    return (
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(16 * 64, 10)),
        torch.randn(2, 3, 8, 8),
        14,
    )


def encoder() -> tuple[nn.Module, Tensor, int]:
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(3)]
    return nn.Sequential(*layers), torch.randn(2, 8, 32), 18


def plain_net() -> tuple[nn.Module, Tensor, int]:
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(8, 128), 2


def rounded(significand_bits: int) -> Callable[[Tensor], Tensor]:
    """What a unit with so many bits makes of its operands."""

    def cut(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 2**significand_bits) / 2**significand_bits, exponent)

    return cut


def secretly(model: nn.Module, cut: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model on an engine that rounds the operands of every product."""
    engine = copy.deepcopy(model)
    for layer in engine.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.weight.data = cut(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, arguments: (cut(arguments[0]),))
    return engine


@pytest.mark.parametrize("make", [residual_net, encoder, plain_net])
@pytest.mark.parametrize("measured", [False, True])
def test_an_output_tells_what_it_was_computed_in(make: Callable[[], tuple[nn.Module, Tensor, int]], measured: bool) -> None:
    torch.manual_seed(0)
    model, x, depth = make()
    model.eval()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    # It takes the weights and leaves the hooks out.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode():
            truth = copy.deepcopy(model).double()(x.double())
            engines = {
                "fp64": truth,
                "fp32": model(x),
                "fp16/tf32": secretly(model, rounded(11))(x),
                "bf16": copy.deepcopy(model).bfloat16()(x.bfloat16()),
                "wrong": model(x).roll(1, -1),
            }
        known = yardsticks(model, (x,), [truth]) if measured else None
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    assert known is None or list(known) == ["fp32", "fp16/tf32", "bf16"]
    found = {name: precision_of(relative_error([output], [truth]), depth, known) for name, output in engines.items()}
    assert found == {name: name for name in engines}


@pytest.mark.parametrize(
    ("outputs", "truth", "wanted"),
    [
        ([torch.ones(4) * 1.5], [torch.ones(4)], 0.5),
        ([torch.ones(4)], [torch.ones(5)], math.inf),
        ([], [torch.ones(5)], math.inf),
        ([torch.tensor([math.nan, 1.0])], [torch.ones(2)], math.inf),
        ([torch.tensor([math.nan, math.inf, 3.0])], [torch.tensor([math.nan, math.inf, 2.0])], 0.5),
        ([torch.tensor([-math.inf, 2.0])], [torch.tensor([math.inf, 2.0])], math.inf),
        ([torch.tensor([0.0, 2.0])], [torch.tensor([math.nan, 2.0])], math.inf),
        ([torch.zeros(2)], [torch.zeros(2)], 0.0),
        ([torch.ones(2)], [torch.zeros(2)], math.inf),
    ],
)
def test_the_distance_of_outputs(outputs: list[Tensor], truth: list[Tensor], wanted: float) -> None:
    assert relative_error(outputs, truth) == pytest.approx(wanted)


def test_classes_follow_the_error() -> None:
    found = [precision_of(10 ** (quarter / 4), 16) for quarter in range(-56, 4)]
    assert [name for i, name in enumerate(found) if name not in found[:i]] == list(CLASSES)
    assert precision_of(math.nan, 1) == "wrong"


# ---------------------------------------------------------------------------------------------------------------------- card


def sides() -> tuple[Side, Side]:
    comparison = resnet50()
    return comparison.ours, comparison.baseline


def given(side: Side, **facts: Any) -> Side:
    return replace(side, facts={**side.facts, **facts})


def points(ours: Side, baseline: Side, before: State = QUIET, after: State = AFTER, **more: Any) -> dict[str, Point]:
    on_gpu = str(ours.facts["device"]).startswith("cuda")
    if on_gpu and not before.gpu:
        before, after = replace(before, gpu=GPU), replace(after, gpu=GPU)
    return {point.name: point for point in card(ours, baseline, depth=54, before=before, after=after, **more)}


def test_a_fair_comparison_has_no_open_point() -> None:
    found = points(*sides())
    assert [point.name for point in found.values() if point.open] == []
    assert len(found) == 14
    assert all(point.why for point in found.values())
    assert "Mapping" not in str(found)
    assert found["versions"].baseline == "torch 2.11.0+cu130, cudnn 9.19"


def on_cpu(ours: Side, baseline: Side) -> tuple[Side, Side]:
    alike = {"device": "cpu", "threads": 2, "precision": "fp32", "graph": False, "copies": "none", "clock": "wall clock"}
    return tuple(replace(given(side, **alike), output_error=2e-7) for side in (ours, baseline))  # type: ignore[return-value]


def shifted(side: Side, seconds: float) -> Side:
    return replace(side, runs=[replace(run, at=run.at + seconds) for run in side.runs])


def slower_at_the_end(side: Side) -> Side:
    last = max(run.at for run in side.runs)
    return replace(side, runs=[replace(run, seconds=run.seconds * (1 + 0.3 * run.at / last)) for run in side.runs])


Change = Callable[[Side, Side], tuple[Side, Side]]
OPEN: dict[str, tuple[str, str, Change]] = {
    "bf16 behind the word fp32": (
        "precision", "eager says fp32, but computes in bf16",
        lambda a, b: (a, replace(given(b, precision="fp32"), output_error=1.2e-2)),
    ),
    "tf32 behind the word fp32": (
        "precision", "says fp32, but computes in fp16/tf32",
        lambda a, b: (a, given(b, precision="fp32")),
    ),
    "fp32 behind the word fp16": (
        "precision", "as exact as fp32, so it does not compute in the stated precision",
        lambda a, b: (replace(a, output_error=3e-7), b),
    ),
    "fp32 behind the word int8": (
        "precision", "does not compute in the stated precision",
        lambda a, b: (replace(given(a, precision="int8"), output_error=3e-7), b),
    ),
    "another answer": ("outputs", "eager: the outputs differ too much", lambda a, b: (a, replace(b, output_error=1.4))),
    "no answer": ("outputs", "the outputs differ too much", lambda a, b: (replace(a, output_error=math.inf), b)),
    "two devices": ("device", "different devices", lambda a, b: (a, given(b, device="cpu"))),
    "another batch": ("batch and shapes", "different shapes", lambda a, b: (a, given(b, inputs=["float32[1,3,224,224]"]))),
    "threads": ("threads", "different numbers", lambda a, b: (on_cpu(a, b)[0], given(on_cpu(a, b)[1], threads=1))),
    "a graph on one side, it seems": ("graph capture", "does not state its graph", lambda a, b: (a, given(b, graph=None))),
    "copies in the baseline's time": (
        "copies in a call", "(in and out)",
        lambda a, b: (given(a, copies="none: static"), given(b, copies="in and out")),
    ),
    "copies nobody knows of": ("copies in a call", "does not state its copies", lambda a, b: (a, given(b, copies=None))),
    "another stop-watch for layers": (
        "stop-watch",
        "on the device alone",
        lambda a, b: (given(a, **{"clock of layers": "device"}), given(b, **{"clock of layers": "host"})),
    ),
    "16 bits instead of int8": (
        "precision",
        "was asked for int8 and answered in fp16",
        lambda a, b: (given(a, **{"precision": "int8", "computes in": "fp16"}), b),
    ),
    "another stop-watch": ("stop-watch", "on the device alone", lambda a, b: (a, given(b, clock="wall clock, synchronised"))),
    "no version": ("versions", "eager does not state its versions", lambda a, b: (a, given(b, versions={}))),
    "few runs": (
        "runs", "Only 3 of a variant",
        lambda a, b: (replace(a, runs=[*a.runs, *[Run(at=1.0, variant="x", seconds=1.0)] * 3]), b),
    ),
    "no runs": ("order of runs", "Nothing was timed", lambda a, b: (replace(a, runs=[]), b)),
    "one after the other": ("order of runs", "after the other", lambda a, b: (shifted(a, 120.0), b)),
    "only one side drifts": ("drift", "slower than the other", lambda a, b: (slower_at_the_end(a), b)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_what_opens_a_point(name: str) -> None:
    point, says, change = OPEN[name]
    found = points(*change(*sides()))
    assert found[point].open
    assert says in found[point].why


CLOSED: dict[str, tuple[str, Change]] = {
    "int8 with layers in 16 bits": ("precision", lambda a, b: (replace(given(a, precision="int8"), output_error=2e-3), b)),
    "bf16 diluted by skips": ("precision", lambda a, b: (replace(given(a, precision="bf16"), output_error=2e-3), b)),
    "an engine that says nothing of its precision": ("precision", lambda a, b: (a, given(b, precision=None))),
    "tf32 allowed and not used": ("precision", lambda a, b: (a, replace(b, output_error=3e-7))),
    "inputs of another type": ("batch and shapes", lambda a, b: (given(a, inputs=["float16[32,3,224,224]"]), b)),
    "threads on a GPU": ("threads", lambda a, b: (a, given(b, threads=1))),
    "a graph on our side, told": ("graph capture", lambda a, b: (a, given(b, graph=False))),
    "both drift": ("drift", lambda a, b: (slower_at_the_end(a), slower_at_the_end(b))),
    "all of it on a processor": ("graph capture", on_cpu),
    "copies on our side only": ("copies in a call", lambda a, b: (given(a, copies="in and out"), given(b, copies="none"))),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_stated_but_not_unfair(name: str) -> None:
    point, change = CLOSED[name]
    found = points(*change(*sides()))
    assert not found[point].open, found[point].why


def test_a_drift_that_changes_no_verdict_is_stated() -> None:
    ours, baseline = sides()
    drifting = slower_at_the_end(ours)
    assert drifted_apart(drifting.runs, baseline.runs) > DRIFT
    found = points(drifting, baseline, despite=True)["drift"]
    assert not found.open
    assert "the verdict is the same" in found.why


def test_yardsticks_tell_apart_what_theory_cannot() -> None:
    ours, baseline = sides()
    # By theory 54 layers may lose as much in float16; this model loses an eighth of it.
    suspect = replace(given(baseline, precision="fp16"), output_error=1.6e-3)
    assert not points(ours, suspect)["precision"].open
    known = {"fp32": 1e-7, "fp16/tf32": 2e-4, "bf16": 1.6e-3}
    found = points(replace(ours, output_error=2.2e-4), suspect, measured=known)["precision"]
    assert found.open
    assert "eager says fp16, but computes in bf16" in found.why


def test_a_busy_machine_opens_a_point_where_it_matters() -> None:
    busy = replace(AFTER, ticks=(7000, 20_000))  # 41 % of the processors went to others
    assert others_share(QUIET, busy) == pytest.approx(0.41)
    assert not points(*sides(), after=busy)["machine load"].open
    found = points(*on_cpu(*sides()), after=busy)["machine load"]
    assert found.open
    assert "Other processes used 41%" in found.why
    unknown = replace(QUIET, ticks=None)
    assert "cannot be read" in points(*on_cpu(*sides()), before=unknown)["machine load"].why


@pytest.mark.parametrize(
    ("gpu", "point", "says"),
    [
        ({**GPU, "slowdowns": ["hardware thermal slowdown"]}, "clocks", "throttles itself: hardware thermal slowdown"),
        ({**GPU, "processes": 3}, "machine load", "3 processes compute on the GPU"),
    ],
)
def test_a_disturbed_gpu_opens_a_point(gpu: dict[str, Any], point: str, says: str) -> None:
    found = points(*sides(), before=replace(QUIET, gpu=GPU), after=replace(AFTER, gpu=gpu))[point]
    assert found.open
    assert says in found.why


def test_clocks_nobody_told_are_an_open_point() -> None:
    ours, baseline = sides()
    found = {point.name: point for point in card(ours, baseline, depth=54, before=QUIET, after=AFTER)}
    assert found["clocks"].open


def test_the_machine_tells_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    spent = sum(i * i for i in range(2_000_000))
    after = state()
    assert spent > 0
    assert after.at > before.at
    assert after.own_ticks > before.own_ticks > 0
    share = others_share(before, after)
    assert share is None or 0 <= share <= 1
    assert state().gpu == {}
    monkeypatch.setattr(nvml, "clocks_mhz", lambda index: {"sm": 1000 + index})
    monkeypatch.setattr(nvml, "disturbances", lambda index: (0x40 | 0x04, 2))
    assert state(3).gpu == {"sm": 1003, "slowdowns": ["hardware thermal slowdown"], "power_capped": True, "processes": 2}
