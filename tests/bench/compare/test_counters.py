"""Engines' own counters: what they say is looked over, laid beside our layers by name, and costs a comparison nothing."""

import importlib.util
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.awake import awake_s
from tests.bench.compare.fake_engine import FUSED_SHARE, seconds_of
from tests.bench.compare.synthetic import resnet50
from tests.bench.compare.test_fake_engine import LAYERS, SPEED, model
from tilewright.bench.compare.claims import table
from tilewright.bench.compare.counters import attributed, counted, looked_over
from tilewright.bench.compare.engine import Counting, EngineError, Operation, Settings, engine_of
from tilewright.bench.compare.engines.onnx_runtime import counters_of
from tilewright.bench.compare.engines.operations import exported_operations
from tilewright.bench.compare.layers import trace
from tilewright.bench.compare.measure import Contender
from tilewright.bench.compare.models import load_model
from tilewright.bench.compare.results import Comparison, Counter, Interval

CPU = Settings(device=torch.device("cpu"), threads=1, build_limit_s=60, run_limit_s=5)
HERE = Path(__file__).parent


def program(name: str, *arguments: str) -> str:
    return f"cmd:{shlex.join([sys.executable, str(HERE / name), *arguments])}"


class Block(nn.Module):
    """What makes places hard to tell: one ReLU called three times, a shortcut with a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.relu, self.fc = nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y = self.relu(y + self.downsample(x))
        return self.relu(self.fc(y.mean((2, 3))))


def block() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Block().eval(), (torch.randn(1, 3, 8, 8),)


# ---- whose layers


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("conv2d", ["conv1"]),
        ("relu", ["conv1"]),
        ("relu_1", ["downsample.0"]),  # the sum waits for both, and the last of them is the shortcut's
        ("relu_2", ["fc"]),
        ("conv2d + batch_norm + relu", ["conv1"]),
        ("fused(conv2d_1,add)/Relu", ["conv2"]),  # the sum is the shortcut's layer, but does not begin it
        ("conv2d_1 + conv2d_2", ["conv2", "downsample.0"]),
        ("linear/WithoutBiases", ["fc"]),
        ("fc", ["fc"]),  # a layer's own name
        ("Reorder_1", []),
        ("input_f32_conv2d_abcd", []),  # a name within a word says nothing
        ("", []),
    ],
)
def test_a_counter_finds_its_layers_by_name(name: str, layers: list[str]) -> None:
    module, inputs = block()
    chain = trace(module, inputs)
    assert [layer.name for layer in chain.layers] == ["conv1", "conv2", "downsample.0", "mean", "fc"]
    operations = exported_operations(torch.export.export(module, inputs))
    (found,) = attributed([Counter(name=name, seconds=1.0)], operations, chain)
    assert found == Counter(name=name, seconds=1.0, layers=layers)


def test_a_module_that_only_earlier_layers_know_is_not_guessed() -> None:
    module, inputs = block()
    known = [
        Operation(names=("a",), scope="fc", op="linear", reads=()),
        Operation(names=("b",), scope="relu", op="relu", reads=(0,)),
        Operation(names=("c",), scope="bn1", op="batch_norm", reads=(1,)),
        Operation(names=("d",), scope="nowhere", op="relu", reads=(2,)),
        Operation(names=("e",), scope="", op="add", reads=(3,)),
    ]
    found = attributed([Counter(name=name, seconds=0.0) for name in "abcde"], known, trace(module, inputs))
    # bn1 is in one layer only, whatever it reads; the sum's layer is over when d has run.
    assert [one.layers for one in found] == [["fc"], ["fc"], ["conv1"], [], ["downsample.0"]]


def test_counters_of_a_closed_engine_are_its_layers_true_times() -> None:
    module, inputs = model(), (torch.randn(4, 32),)
    chain = trace(module, inputs)
    for speed, fused in ((SPEED, ""), (1.0, "64x64+8x64")):
        engine = engine_of(program("fake_engine.py", str(speed), fused), CPU)
        built = engine.build(module, inputs, "whole")
        assert isinstance(built, Counting)
        found = attributed(looked_over(built.counters(), "fake"), built.operations, chain)
        engine.close()
        together = [[name] for name in LAYERS] if not fused else [["0"], ["2"], ["3"], ["5", "6"]]
        assert [one.layers for one in found] == together
        for one in found:
            share = FUSED_SHARE if len(one.layers) > 1 else 1
            assert one.seconds == pytest.approx(share * sum(seconds_of(*LAYERS[name]) for name in one.layers) / speed)


# ---- what nobody vouches for


LIES = {
    "negative": "counter 'a' reports -1e-09 seconds, wanted a finite number of 0 or more",
    "not a number": "counter 'a' reports nan seconds",
    "endless": "counter 'a' reports inf seconds",
    "a word": "'seconds': 'soon'}, wanted an object with name, kind and seconds",
    "yes": "'seconds': True}, wanted an object",
    "nameless": "wanted an object with name",
    "a row": "one is ['a', '', 0.0], wanted an object",
    "an object": "{'a': 0.0}, wanted a list",
    "nothing": "has no counters to report",
    "too many": "reports 5000 counters, wanted at most 4096",
    "a million": "a line of more than 1048576 bytes",
    "a long name": "name and kind of counter 0 have 1001 and 0 characters, but at most 1000 and 100 are allowed",
    "a long kind": "name and kind of counter 0 have 1 and 101 characters",
    "hang": "no answer within 0.3 s",
    "counters 1": 'has no counters, because the facts in its hello do not contain "counters": true',
}


def side(engine: Any, built: Any) -> Contender:
    found = Contender(name="cmd:odd", engine=engine, settings=CPU)
    found.built["whole"] = built
    return found


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_a_note_and_no_error(kind: str) -> None:
    engine = engine_of(program("odd_engine.py", kind), replace(CPU, run_limit_s=0.3 if kind == "hang" else 5))
    module, inputs = nn.Sequential(nn.Linear(4, 3)).eval(), (torch.randn(2, 4),)
    odd = side(engine, engine.build(module, inputs, "whole"))
    began = awake_s()
    measured = resnet50()
    found = counted(measured, [odd, odd], trace(module, inputs))
    engine.close()
    assert awake_s() - began < 30
    assert LIES[kind] in found.ours.counters_note
    assert len(found.ours.counters_note) <= 600
    assert found.ours.counters == []
    for is_note in (found.ours, found.baseline):
        assert is_note.counters_note
    # Nothing else is any different.
    assert replace(found, ours=measured.ours, baseline=measured.baseline) == measured
    assert replace(found.ours, counters_note="") == measured.ours


def test_what_cannot_be_printed_is_replaced() -> None:
    engine = engine_of(program("odd_engine.py", "a strange name"), CPU)
    built = engine.build(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), "whole")
    assert isinstance(built, Counting)
    (found,) = looked_over(built.counters(), "odd")
    engine.close()
    assert found.name == "a???b"


@pytest.mark.parametrize(
    ("raised", "note"),
    [
        (EngineError("out of ink"), "out of ink"),
        (RuntimeError("broken"), "cmd:odd counting failed: RuntimeError: broken"),
        (KeyboardInterrupt(), "cmd:odd was interrupted while reading its counters"),
        (None, "cmd:odd has no counters of its own"),
    ],
)
def test_a_failure_is_a_note(raised: BaseException | None, note: str) -> None:
    class Built:
        operations = ()

        def counters(self) -> list[Counter]:
            assert raised is not None
            raise raised

    built = side(None, Built() if raised is not None else object())
    found = counted(resnet50(), [built, built], trace(nn.Linear(2, 2).eval(), (torch.randn(1, 2),)))
    assert (found.ours.counters, found.ours.counters_note) == ([], note)


# ---- engines that have a profiler


EXAMPLE = f"cmd:{shlex.join([sys.executable, str(HERE.parents[2] / 'examples' / 'onnxruntime_engine.py')])}"


@pytest.mark.parametrize("name", ["onnxruntime", "openvino:fp32", EXAMPLE], ids=["onnxruntime", "openvino", "cmd"])
def test_an_engine_with_a_profiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("openvino" if "openvino" in name else "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'tilewright[compare]'")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small = load_model("small_cnn")
    chain = trace(small.module, small.inputs)
    engine = engine_of(name, CPU)
    try:
        built = engine.build(small.module, small.inputs, "whole")
        assert isinstance(built, Counting)
        found = attributed(looked_over(built.counters(), name), built.operations, chain)
        assert built.time(1) > 0, "it is still there"
    finally:
        engine.close()
    assert list(tmp_path.iterdir()) == [], "nothing of the profile stays"
    told = [one for one in found if one.layers]
    assert {layer for one in told for layer in one.layers} == {"0", "3", "6", "9", "11"}
    assert all(len(one.layers) == 1 for one in told)
    assert sum(one.seconds for one in told) > 0.5 * sum(one.seconds for one in found) > 0
    for layer, word in (("0", "conv"), ("11", "")):
        assert any(word in one.kind.lower() for one in told if one.layers == [layer])


def test_operators_of_eager_have_the_modules_that_call_them(capfd: pytest.CaptureFixture[str]) -> None:
    module, inputs = block()
    engine = engine_of("eager", CPU)
    built = engine.build(module, inputs, "whole")
    assert isinstance(built, Counting)
    wanted = [
        ("conv1", "conv2d", "conv1"), ("bn1", "batch_norm", "conv1"), ("relu", "relu", "conv1"),
        ("conv2", "conv2d", "conv2"), ("bn2", "batch_norm", "conv2"),
        ("downsample.0", "conv2d", "downsample.0"), ("downsample.1", "batch_norm", "downsample.0"),
        ("", "add", "downsample.0"), ("relu", "relu", "downsample.0"),
        ("", "mean", "mean"), ("fc", "linear", "fc"), ("relu", "relu", "fc"),
    ]  # fmt: skip
    for _ in range(2):  # the first leaves nothing behind
        found = attributed(looked_over(built.counters(), "eager"), built.operations, trace(module, inputs))
        assert [(one.name, one.kind, one.layers) for one in found] == [
            (f"{i + 1}: {path}", f"aten::{op}", [layer]) for i, (path, op, layer) in enumerate(wanted)
        ]
        assert all(one.seconds > 0 for one in found)
    engine.close()
    print("still there", file=sys.stderr)
    assert capfd.readouterr().err == "still there\n"


def test_a_module_that_runs_other_operators_from_call_to_call_has_no_median() -> None:
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.relu() if self.calls % 2 else x.exp()

    built = engine_of("eager", CPU).build(Fickle().eval(), (torch.randn(2),), "whole")
    assert isinstance(built, Counting)
    with pytest.raises(EngineError, match="different operators from call to call"):
        built.counters()
    assert built.time(1) > 0


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
def test_a_variant_is_not_counted() -> None:
    engine = engine_of("onnxruntime", CPU)
    built = engine.build(nn.Linear(2, 2).eval(), (torch.randn(1, 2),), "only 0")
    engine.close()
    assert isinstance(built, Counting)
    with pytest.raises(EngineError, match="only for the whole model"):
        built.counters()


def profile(*runs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of ONNX Runtime: a session's start, and in each run nodes of so many microseconds."""
    events: list[dict[str, Any]] = [{"cat": "Session", "name": "session_initialization", "ts": 0, "dur": 5}]
    at = 10.0
    for run in runs:
        began = at
        for name, took in run.items():
            # A name with a star is the same node once more: the body of a loop.
            args = {"op_name": "Gemm", "node_index": name.strip("*")}
            events += [
                {"cat": "Node", "name": f"{name.strip('*')}_kernel_time", "ts": at, "dur": took, "args": args},
                {"cat": "Node", "name": f"{name.strip('*')}_fence_after", "ts": at, "dur": 1000, "args": args},
            ]
            at += took
        events.append({"cat": "Session", "name": "model_run", "ts": began, "dur": at - began})
        at += 10
    return events


def test_a_profile_of_several_runs_becomes_medians() -> None:
    runs = [{"a": 900, "b_nchwc": 900}, *({"a": 1 + i, "b_nchwc": 10, "*a": 2} for i in (5, 1, 3))]
    found = counters_of(profile(*runs), 1)
    assert [(one.name, one.kind) for one in found] == [("a", "Gemm"), ("b", "Gemm, nchwc")]
    assert [one.seconds for one in found] == pytest.approx([6e-6, 10e-6])


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (profile({"a": 1.0}), "has 1 runs, wanted more than 1"),
        ([{"cat": "Node", "name": "a_kernel_time"}], "does not have the expected format"),
        (["a"], "does not have the expected format"),
    ],
)
def test_a_profile_that_is_none(events: list[Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        counters_of(events, 1)


# ---- the table


def counting(comparison: Comparison, *counters: tuple[float, list[str]]) -> Comparison:
    """With counters of the baseline, by layers."""
    found = [Counter(name=f"op {i}", seconds=s, layers=layers) for i, (s, layers) in enumerate(counters)]
    return replace(comparison, baseline=replace(comparison.baseline, counters=found))


def test_the_table_lays_claims_beside_estimates() -> None:
    measured = resnet50()
    times = Interval(2e-3, 1.5e-3, 2.5e-3), Interval(0.0, 0.0, 1e-3)
    segments = [
        replace(measured.segments[i], name=" + ".join(layers), layers=layers, baseline=times[i])
        for i, layers in enumerate((["a"], ["b", "c"]))
    ]
    baseline = replace(measured.baseline, whole=Interval(8e-3, 8e-3, 8e-3))
    small = replace(measured, segments=segments, baseline=baseline)
    assert table(small) is None
    found = table(
        counting(small, (1e-3, ["a"]), (5e-4, ["a"]), (1e-3, ["b"]), (1e-3, ["b", "c"]), (3e-3, ["a", "b"]), (5e-4, []))
    )
    assert found is not None
    assert found.columns == ["segment", "baseline", "baseline says", "ratio"]
    assert found.rows == [
        ["a", "2.00 ms", "1.50 ms", "0.75×"],
        ["b + c", "0 µs", "2.00 ms", "∞, outside"],
        ["of no segment", "", "3.50 ms", ""],
        ["whole model, measured; sum of all", "8.00 ms", "7.00 ms", "0.88×"],
    ]
    ((engine, rows),) = found.listed
    assert engine == "baseline: eager"
    assert [row[2] for row in rows] == ["3.00 ms", "1.00 ms", "1.00 ms", "1.00 ms", "500 µs", "500 µs"], "the longest first"
    assert rows[0] == ["op 4", "", "3.00 ms", "42.9%", "a, b"]
    silent = table(replace(small, ours=replace(small.ours, counters_note="no")))
    assert silent is not None
    assert (silent.rows, silent.notes) == ([], ["ours: no."])
