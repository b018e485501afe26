"""Every engine answers as the module does and takes time; one that cannot be had, crashes, hangs or lies says so."""

import importlib.util
import os
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.awake import awake_s
from tilewright.bench.compare import models
from tilewright.bench.compare.engine import ENGINES, EngineError, Settings, engine_of, flat_outputs, limited
from tilewright.bench.compare.engines import command
from tilewright.bench.compare.engines.onnx_export import export_onnx
from tilewright.bench.compare.fairness import relative_error

CPU = Settings(device=torch.device("cpu"), threads=1, build_limit_s=60, run_limit_s=5)
ODD = Path(__file__).with_name("odd_engine.py")
EXAMPLE = Path(__file__).parents[3] / "examples" / "onnxruntime_engine.py"

PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxscript"),
    "openvino": ("openvino", "onnxscript"),
    "cmd": ("onnxruntime", "onnxscript"),
}


class Two(nn.Module):
    """Two inputs, one of integers; two outputs, one of integers."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.linear(x + self.table(places)))
        return y, y.argmax(-1)


def two() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return Two().eval(), (torch.randn(2, 4), torch.tensor([3, 6]))


def example() -> str:
    return f"cmd:{shlex.join([sys.executable, str(EXAMPLE)])}"


def odd(kind: str) -> str:
    return f"cmd:{shlex.join([sys.executable, str(ODD), kind])}"


@pytest.mark.parametrize(
    ("text", "precision", "limit"),
    [
        ("eager", "fp32", 1e-6),
        ("eager:bf16", "bf16", 3e-2),
        ("onnxruntime", "fp32", 1e-6),
        ("openvino:fp32", "fp32", 1e-6),
        (example(), "fp32", 1e-6),
    ],
    ids=lambda v: v.partition(":")[0] if isinstance(v, str) else "",
)
def test_an_engine_answers_as_the_module_does(text: str, precision: str, limit: float) -> None:
    for package in PACKAGES.get(text.partition(":")[0], ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'tilewright[compare]'")
    module, inputs = two()
    wanted = flat_outputs(module.double()(inputs[0].double(), inputs[1]))
    module.float()
    engine = engine_of(text, CPU)
    try:
        assert engine.facts["precision"] == precision
        assert {"device", "versions", "threads", "graph", "copies", "clock"} <= engine.facts.keys()
        first = engine.build(module, inputs, "whole")
        second = first
        if text != "onnxruntime" and "openvino" not in text:  # an export takes seconds
            second = engine.build(module.linear, (torch.randn(5, 4),), "linear")  # two are alive at once
            assert [x.shape for x in second.outputs()] == [(5, 3)]
        got = first.outputs()
        assert [x.shape for x in got] == [x.shape for x in wanted]
        assert float((got[0] - wanted[0]).norm() / wanted[0].norm()) < limit
        assert got[1].dtype == torch.int64
        assert torch.equal(got[1], wanted[1])
        # In turns, and often: on a busy machine threads that wait for each other may lose milliseconds in each of some calls.
        few, many = (min(times) for times in zip(*((first.time(1), first.time(50)) for _ in range(20)), strict=True))
        assert 0 < few < many
        assert first.facts["inputs"][0].endswith("[2,4]")
        if second is not first:
            second.close()
        assert first.time(1) > 0
        first.close()
    finally:
        engine.close()
    assert next(module.parameters()).dtype == torch.float32, "the module stays as it is"


def test_openvino_says_which_precision_it_took() -> None:
    """Its own choice is known when it has compiled; what its outputs are off says the same."""
    pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 256).eval(), torch.randn(64, 256)
    engine = engine_of("openvino", CPU)
    built = engine.build(layer, (x,), "whole")
    truth = flat_outputs(layer.double()(x.double()))
    off = relative_error(built.outputs(), truth)
    built.close()
    engine.close()
    assert built.facts["precision"] == ("bf16" if off > 1e-3 else "fp16" if off > 1e-5 else "fp32")


class Writes(nn.Module):
    """Doubles its input where it lies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


@pytest.mark.parametrize("text", ["eager", "eager:bf16"])
def test_a_module_that_writes_to_its_inputs_answers_the_same_at_every_call(text: str) -> None:
    x = torch.arange(6.0)
    built = engine_of(text, CPU).build(Writes(), (x,), "whole")
    for _ in range(2):
        built.time(100)
        assert torch.equal(built.outputs()[0], 2 * torch.arange(6.0).double() + 1)
    assert torch.equal(x, torch.arange(6.0)), "the other engine reads it too"


def test_compile_asks_for_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    engine = engine_of("compile:bf16", CPU)
    module, inputs = two()
    answer = engine.build(module, inputs, "whole").outputs()
    assert asked == [{"mode": "max-autotune", "dynamic": False}]
    assert float((answer[0] - flat_outputs(module(*inputs))[0]).abs().max()) > 1e-5, "computed in bf16"


def test_optimize_is_ours_and_tells_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor's compiler takes half a minute and is tested where `optimize` is.
    monkeypatch.setattr(importlib.import_module("tilewright.fuse.inductor"), "compiled", lambda fused, *rest, **named: fused)
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(2, 4)
    built = engine_of("optimize", CPU).build(module, (x,), "whole")
    assert float((built.outputs()[0] - flat_outputs(module(x))[0]).abs().max()) < 1e-6
    assert built.time(2) > 0
    assert built.facts["optimize"]["precision"] == "fp32"
    assert any(decision["taken"] for decision in built.facts["report"]["decisions"])


REFUSED = [
    ("tensorrt", "no engine 'tensorrt'; wanted one of eager"),
    ("eager:", "nothing after the colon"),
    ("eager:fp8", "eager:fp8 is not known; wanted eager, or eager: followed by one of fp32, fp16, bf16"),
    ("graph", "graph needs a GPU, but the device is cpu; use eager"),
    ("optimize:fp64", "optimize:fp64 is not known"),
    ("onnxruntime:11", "wanted onnxruntime, or onnxruntime with an opset, such as onnxruntime:opset18"),
    ("openvino:int8", "openvino:int8 is not known"),
    ("cmd:'", "cannot be split into words"),
    ("cmd:/no/such/program --x", "did not start"),
    (odd("protocol"), "uses protocol 2, wanted 1"),
    (odd("facts"), "its facts are"),
    (odd("no json"), "answered 'hello!', wanted one line of JSON"),
    (odd("no ok"), 'wanted an object with "ok"'),
    (odd("long"), "a line of more than 1048576 bytes"),
    (f"cmd:{shlex.quote(sys.executable)} -c 'import sys; sys.exit(7)'", "it ended with code 7"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[t.rpartition("/")[2] for t, _ in REFUSED])
def test_what_cannot_be_had_is_said_at_once(text: str, words: str) -> None:
    package = text.partition(":")[0]
    if package in PACKAGES and package != "cmd" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'tilewright[compare]'")
    with pytest.raises(EngineError) as caught:
        engine_of(text, CPU)
    assert words in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match=r"openvino needs the package openvino: pip install 'tilewright\[compare\]'"):
        engine_of("openvino", CPU)


def built(kind: str, limits: Settings = CPU):
    engine = engine_of(odd(kind), limits)
    module, inputs = two()
    return engine, lambda: engine.build(module.linear, (inputs[0],), "a layer")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("crash", "building a layer: it ended by signal SIGABRT; the end of its error output: "),
        ("refuse", "no such operator: paint"),
    ],
)
def test_a_program_that_does_not_build(kind: str, words: str) -> None:
    engine, build = built(kind)
    with pytest.raises(EngineError) as caught:
        build()
    engine.close()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 3000
    assert kind != "crash" or str(caught.value).endswith("out of paper")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hang", "running a layer: there was no answer within 0.3 s"),
        ("liar", "reports that 3 calls took 3600 s, but only"),
        ("backwards", "took -1.0, wanted a number of seconds above 0"),
        ("nan", "took nan"),
        ("text", "took 'soon'"),
        ("true", "took True"),
    ],
)
def test_a_program_whose_time_is_none(kind: str, words: str) -> None:
    engine, build = built(kind, Settings(device=torch.device("cpu"), threads=1, run_limit_s=0.3))
    began, answer = awake_s(), build()
    with pytest.raises(EngineError) as caught:
        answer.time(3)
    assert words in str(caught.value)
    answer.close()  # which asks nothing of what owes an answer: its error would hide the one above
    engine.close()
    assert awake_s() - began < 30, "what hangs is ended"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("well", None),
        ("pickle", "Object arrays cannot be loaded"),
        ("huge", "at most 1024 of"),
        ("names", "the file has result, wanted output_0"),
        ("no archive", "zip file"),
    ],
)
def test_outputs_are_read_with_care(kind: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MOST_OUTPUT_BYTES", 1 << 20)
    engine, build = built(kind)
    answer = build()
    if words is None:
        assert [x.tolist() for x in answer.outputs()] == [[[0.0] * 3] * 2]
        assert 0 < answer.time(3) < 1
        assert engine.facts["odd"] == "well"
    else:
        with pytest.raises(EngineError) as caught:
            answer.outputs()
        assert words in str(caught.value)
    engine.close()
    assert not Path("owned").exists()


def test_what_a_program_started_goes_with_it() -> None:
    engine, build = built("child")
    child = build().facts["child"]
    os.kill(child, 0)
    engine.close()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return  # ended; whoever inherits it has not looked yet
        time.sleep(0.05)
    pytest.fail(f"process {child} is still there")


def test_a_step_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(EngineError, match=r"sleeping took longer than 0\.1 s"), limited(0.1, "sleeping"):
        time.sleep(10)


def test_limits_within_limits() -> None:
    def both() -> None:
        with limited(0.3, "all"):
            with limited(0.1, "a part"):
                pass
            time.sleep(10)

    with pytest.raises(EngineError, match=r"all took longer than 0\.3 s"):
        both()


class NotInOnnx(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x).real


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")
@pytest.mark.parametrize(
    ("module", "opset", "words"),
    [
        (NotInOnnx(), None, "cannot be exported to ONNX: No ONNX function found"),
        (nn.ReLU(), 9, "does not support ONNX opset 9"),
    ],
    ids=["operator", "opset"],
)
def test_what_onnx_does_not_have_is_said(module: nn.Module, opset: int | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=words):
        export_onnx(module, (torch.randn(4, 4),), tmp_path / "model.onnx", "whole", opset)


def test_every_engine_has_its_class() -> None:
    for place in ENGINES.values():
        module, _, kind = place.partition(":")
        assert hasattr(importlib.import_module(module), kind)


# ---- models


@pytest.mark.parametrize(
    ("name", "parameters", "out"),
    [
        ("resnet18", 11_689_512, (1, 1000)),
        ("tabular_mlp@3", 148_481, (3, 1)),
        ("small_cnn@2", 94_762, (2, 10)),
        ("small_encoder", 396_544, (4, 64, 128)),
    ],
)
def test_built_in_models(name: str, parameters: int, out: tuple[int, ...]) -> None:
    before = torch.random.get_rng_state()
    model = models.load_model(name)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sum(p.numel() for p in model.module.parameters()) == parameters
    with torch.inference_mode():
        answer = model.module(*model.inputs)
    assert tuple(answer.shape) == out
    assert 0.01 < float(answer.abs().max()) < 100, "neither vanishes nor overflows in 16 bits"
    again, other = models.load_model(name), models.load_model(name, seed=1)
    assert torch.equal(again.inputs[0], model.inputs[0])
    assert not torch.equal(other.inputs[0], model.inputs[0])


USERS = """
import torch
def good(): return torch.nn.Linear(2, 3), torch.zeros(1, 2)
def odd(): return torch.nn.Linear(2, 3)
def nothing(): return torch.nn.Linear(2, 3), ()
def script(): return torch.jit.script(torch.nn.Linear(2, 3)), torch.zeros(1, 2)
def bad():
    x = torch.zeros(2, 3)
    return x @ x
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch", "no model 'nosuch'; wanted one of resnet18"),
        ("resnet18@0", "the batch of 'resnet18@0' is '0', wanted a number from 1 to 4096"),
        ("resnet18@many", "'many'"),
        ("no.such:build", "ModuleNotFoundError: No module named 'no'"),
        ("users_models:absent", "has no attribute 'absent'"),
        ("users_models:odd", "returned Linear, wanted (torch.nn.Module, example inputs)"),
        ("users_models:nothing", "example inputs of the model users_models:nothing are tuple"),
        ("users_models:script", "returned a TorchScript module"),
        ("users_models:bad", "users_models.py:9: RuntimeError: mat1 and mat2"),
        ("users_syntax:f", "users_syntax.py:2: SyntaxError"),
    ],
)
def test_what_a_user_gets_wrong_about_models(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for stem, text in (("users_models", USERS), ("users_syntax", "\ndef f(:\n")):
        Path(f"{stem}.py").write_text(text)
        monkeypatch.delitem(sys.modules, stem, raising=False)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its words are looked at below)
        models.load_model(name)
    assert words in str(caught.value)
    assert models.load_model("users_models:good").inputs[0].shape == (1, 2)
