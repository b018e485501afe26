"""`quantize`: which layers change, what the report says of them, and what is refused before anything has changed."""

import copy
import json
import math
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.models.running import run_logits
from tilewright import nn
from tilewright.engine.config import QUANTIZE
from tilewright.hw.device import device_named
from tilewright.models import ModelConfig, prompt_inputs, random_model
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight, StaticWeight
from tilewright.quant import check_card
from tilewright.quant import convert as convert_module

ALL = list(WEIGHT_FORMATS)
SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 48, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("attn.qkv", "attn.out", "ffn.gate_up", "ffn.down")]


def decoder(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return random_model(ModelConfig.from_hf({**SIZES, "tie_word_embeddings": tied}), device="cpu", dtype=dtype)


class Net(torch.nn.Module):
    """A module of somebody else, with all that may happen in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(128, 64)
        self.rest = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(64, 128, bias=False))
        self.attn = torch.nn.MultiheadAttention(128, 4, batch_first=True)
        self.lm_head = torch.nn.Linear(128, 10)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.rest(self.first(x * scale))
        return self.lm_head(self.attn(y, y, y, need_weights=False)[0])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_the_command_line_offers_every_format() -> None:
    assert tuple(WEIGHT_FORMATS) == QUANTIZE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ALL)
def test_our_models(format: str, tied: bool) -> None:
    model = decoder(tied=tied)
    tokens = list(range(30))
    exact = run_logits(model, tokens, 30)
    report = tw.quantize(model, format)
    assert [layer.name for layer in report.quantized] == LAYERS
    head = report.layers[-1]
    assert (head.name, head.format) == ("head", None)
    assert head.note == ("shares its weight with embed" if tied else "named in skip")
    assert model.head.weight.dtype == model.embed.weight.dtype == torch.float32
    logits = run_logits(model, tokens, 30)
    error = ((logits - exact).norm() / exact.norm()).item()
    assert 0 < error < (0.45 if format == "int4" else 0.2)
    decode = run_logits(model, tokens, 1)
    assert ((decode - exact).norm() / exact.norm()).item() < (0.45 if format == "int4" else 0.2)


@pytest.mark.parametrize("format", ALL)
def test_any_module(format: str) -> None:
    net = Net().eval()
    x = randn(2, 20, 128)
    exact = net(x)
    bias = net.first.bias
    report = tw.quantize(net, format)
    assert [layer.name for layer in report.quantized] == ["first", "rest.1"]
    notes = {layer.name: layer.note for layer in report.layers if layer.format is None}
    assert notes["lm_head"] == "named in skip"
    assert notes["attn.out_proj"].startswith("is a NonDynamicallyQuantizableLinear")
    assert isinstance(net.first, nn.Linear)
    assert isinstance(net.first.weight, QuantizedWeight)
    assert net.first.bias is bias
    assert not net.first.training
    assert ((net(x) - exact).norm() / exact.norm()).item() < 0.2


def test_a_layer_that_stands_in_two_places_is_one() -> None:
    shared = torch.nn.Linear(64, 64)
    net = torch.nn.Sequential(shared, torch.nn.Sequential(torch.nn.ReLU(), shared))
    report = tw.quantize(net, "int8")
    assert [layer.name for layer in report.layers] == ["0"]
    assert net[0] is net[1][1]
    assert isinstance(net[0].weight, QuantizedWeight)


def test_float_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in net]
    alive: list[int] = []
    whole = convert_module.quantize_weight

    def counting(weight: Tensor, format: str) -> QuantizedWeight:
        alive.append(sum(ref() is not None for ref in weights))
        return whole(weight, format)

    monkeypatch.setattr(convert_module, "quantize_weight", counting)
    tw.quantize(net, "int8")
    assert alive == [4, 3, 2, 1]


def test_the_report_counts_what_is_there() -> None:
    model = decoder()
    before = {name: module.weight.nbytes for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    exact = copy.deepcopy(model)
    report = tw.quantize(model, "int8")
    assert {layer.name: layer.bytes_before for layer in report.layers} == before
    assert report.bytes_after == sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    layer = report.layers[2]
    weight, codes = exact.blocks[0].ffn.gate_up.weight, model.blocks[0].ffn.gate_up.weight
    assert (layer.name, layer.shape) == ("blocks.0.ffn.gate_up", tuple(weight.shape))
    assert layer.error == pytest.approx(((codes.dequantize() - weight).norm() / weight.norm()).item(), rel=1e-4)
    assert not report.calibrated
    assert json.loads(json.dumps(report.to_json()))["layers"][2]["name"] == layer.name
    text = str(report)
    assert text.splitlines()[3].split()[:2] == ["blocks.0.ffn.gate_up", "int8"]
    assert f"{report.bytes_after:,} after" in text


@pytest.mark.parametrize("format", ALL)
def test_calibrated_errors_are_of_the_outputs(format: str) -> None:
    net = Net().eval()
    exact, x = copy.deepcopy(net), randn(2, 20, 128)
    report = tw.quantize(net, format, calibration=[x, (x,), {"x": x, "scale": 1.0}])
    rows = x.flatten(0, 1)
    want, got = exact.first(rows) - exact.first.bias, net.first(rows) - net.first.bias
    assert report.calibrated
    assert report.layers[0].error == pytest.approx(((got - want).norm() / want.norm()).item(), rel=1e-3)


def test_calibration_of_our_models() -> None:
    model = decoder()
    report = tw.quantize(model, "fp8", calibration=[prompt_inputs(model, range(40)), prompt_inputs(model, [3])])
    assert all(0.01 < layer.error < 0.06 for layer in report.quantized if layer.error is not None)
    assert all(layer.error is not None for layer in report.quantized)


@pytest.mark.parametrize(("activation", "format"), [("static", "int8"), ("static", "fp8"), ("static-zero", "int8")])
def test_static_scales_come_from_the_calibration_input(activation: str, format: str) -> None:
    """Bounds of all rows; a zero point halves the step of what has one sign, and the error with it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(128, 64))
    exact, x = copy.deepcopy(net), randn(3000, 128).abs()
    x[2999, 5] = 8.0
    report = tw.quantize(net, format, calibration=[x], activation=activation)
    weight = net[0].weight
    assert isinstance(weight, StaticWeight)
    steps = {"int8": 127.0, "fp8": 448.0}[format] if activation == "static" else 255.0
    assert float(weight.x_scale) == pytest.approx(8.0 / steps)
    assert (weight.x_zero is None) == (activation == "static")
    assert weight.x_zero is None or float(weight.x_zero) == -128
    layer = report.layers[0]
    assert (layer.note, layer.error is not None) == (f"{activation} scale", True)
    rows = x[:200]
    error = ((net(rows) - exact(rows)).norm() / (exact(rows) - exact[0].bias).norm()).item()
    assert error < {"static int8": 0.035, "static fp8": 0.042, "static-zero int8": 0.02}[f"{activation} {format}"]


def test_static_scales_of_our_models() -> None:
    """Migration moves the bounds along; a layer of few rows keeps its activation in 16 bits."""
    model = decoder()
    batches = [prompt_inputs(model, range(40))]
    report = tw.quantize(model, "int8", calibration=batches, activation="static-zero", migrate=0.5)
    assert all(layer.error is not None and 0.003 < layer.error < 0.05 for layer in report.quantized)


def test_a_layer_that_calibration_does_not_reach_says_so() -> None:
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(16, 16), "unused": torch.nn.Linear(16, 16)})
    net.forward = lambda x: net["used"](x)
    report = tw.quantize(net, "int8", calibration=[randn(4, 16)])
    assert report.layers[0].error is not None
    assert (report.layers[1].error, report.layers[1].note) == (None, "the calibration input did not reach it")


@pytest.mark.parametrize(
    ("skip", "stays"),
    [
        (("lm_head",), []),
        ((), []),
        (("lm_head", "blocks.0.*"), LAYERS[:4]),
        (("down", "*.qkv"), [LAYERS[0], LAYERS[3], LAYERS[4], LAYERS[7]]),
        ("blocks.1.attn.out", [LAYERS[5]]),
    ],
)
def test_skip(skip: Any, stays: list[str]) -> None:
    report = tw.quantize(decoder(), "int8", skip=skip)
    head = [] if "lm_head" not in skip else ["head"]
    assert [layer.name for layer in report.layers if layer.format is None] == stays + head


def test_two_formats_in_one_model() -> None:
    model = decoder()
    tw.quantize(model, "int8", skip=("lm_head", "down"))
    tw.quantize(model, "int4", skip=("lm_head", "qkv", "out", "gate_up"))
    assert [module.weight.format for module in model.blocks.modules() if isinstance(module, nn.Linear)] == [
        *("int8", "int8", "int8", "int4"),
        *("int8", "int8", "int8", "int4"),
    ]


def correlated(rows: int, seed: int) -> Tensor:
    """Inputs as layers see them: some directions carry most of the energy."""
    rng = torch.Generator().manual_seed(seed)
    basis = torch.randn(128, 128, generator=torch.Generator().manual_seed(9)) * torch.logspace(0, -2, 128)[:, None]
    return torch.randn(rows, 128, generator=rng) @ basis


def test_int4_with_calibration_loses_less_also_on_other_input() -> None:
    plain, better = (torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)) for _ in range(2))
    better.load_state_dict(plain.state_dict())
    exact, other = copy.deepcopy(plain), correlated(500, 2)
    tw.quantize(plain, "int4")
    report = tw.quantize(better, "int4", calibration=[correlated(500, 1)])
    assert report.layers[0].note == "compensated on the calibration input"
    errors = [((net(other) - exact(other)).norm() / exact(other).norm()).item() for net in (plain, better)]
    assert errors[1] < 0.75 * errors[0]
    assert report.layers[0].error == pytest.approx(errors[1], rel=0.3)
    assert better[0].weight.block == (1, 128)


def test_int4_calibrates_with_one_row_and_with_columns_that_are_never_used() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(128, 64))
    x = randn(1, 128)
    x[:, 5:90] = 0
    exact = net(x)
    tw.quantize(net, "int4", calibration=[x])
    assert ((net(x) - exact).norm() / exact.norm()).item() < 0.05


# ---- migration


def outliers() -> Any:
    """A model whose norms make a column a hundred times larger, as trained ones do."""
    model = decoder()
    for block in model.blocks:
        block.ffn_norm.weight[7] = 100.0
    return model


def test_migration_leaves_the_float_model_and_makes_outliers_cheaper() -> None:
    model = outliers()
    exact = run_logits(model, list(range(40)), 40)
    moved = outliers()
    inputs = [prompt_inputs(model, range(40))]
    plain = tw.quantize(model, "int8", calibration=inputs)
    report = tw.quantize(moved, "int8", calibration=[prompt_inputs(moved, range(40))], migrate=0.5)
    notes = [layer.note for layer in report.quantized]
    assert all(note.startswith("migrated into the norm") for note in notes[::2])
    assert all(note == "nothing migrated, because there is no norm before it" for note in notes[1::2])
    for i in (2, 6):
        assert report.quantized[i].error < 0.6 * plain.quantized[i].error
    errors = [(run_logits(m, list(range(40)), 40) - exact).norm().item() for m in (model, moved)]
    assert errors[1] < errors[0]


def test_migration_alone_changes_nothing() -> None:
    """Factors are powers of two: before rounding the product is the same."""
    from tilewright.quant.calibrate import observe
    from tilewright.quant.migrate import migrate_into_norms

    model = outliers().to(torch.bfloat16)
    exact = run_logits(model, list(range(40)), 40)
    layers = {name: model.get_submodule(name) for name in LAYERS}
    seen = observe(model, layers, [prompt_inputs(model, range(40))])
    migrate_into_norms(model, layers, seen, 0.5)
    assert (model.blocks[0].ffn_norm.weight[7] < 100).item()
    torch.testing.assert_close(run_logits(model, list(range(40)), 40), exact, rtol=0.02, atol=0.02)


# ---- bad input


def spoiled(value: float) -> Any:
    model = decoder()
    model.blocks[1].ffn.down.weight[3, 4] = value
    return model


def twice() -> Any:
    model = decoder()
    tw.quantize(model, "int8")
    return model


BAD = {
    "format": (decoder, "int9", {}, "no format 'int9'; did you mean int8 or int4? the formats are int8, fp8, fp8-block"),
    "group": (
        lambda: torch.nn.Sequential(torch.nn.Linear(100, 8)), "int4", {},
        "a multiple of its group size 128 or 64, but 0 has K = 100 inputs; list the layer in skip, or use int8",
    ),
    "mx group": (lambda: torch.nn.Sequential(torch.nn.Linear(40, 8)), "mxfp8", {}, "group size 32, but 0 has K = 40"),
    "twice": (twice, "int8", {}, "blocks.0.attn.qkv is already quantised, as int8; quantise the float model instead"),
    "pattern": (decoder, "int8", {"skip": ("lm_head", "mlp.*")}, "skip has 'mlp.*', which matches no linear layer"),
    "nan": (lambda: spoiled(math.nan), "fp8", {}, "1 of 24576 elements of the weight of blocks.1.ffn.down are not finite"),
    "inf": (lambda: spoiled(-math.inf), "int4", {}, "1 of 24576 elements of the weight of blocks.1.ffn.down are not finite"),
    "no layers": (lambda: torch.nn.Sequential(torch.nn.ReLU()), "int8", {}, "no linear layer that can be quantised"),
    "all skipped": (decoder, "int8", {"skip": ("*",)}, "blocks.0.attn.qkv: named in skip"),
    "one layer": (lambda: torch.nn.Linear(16, 16), "int8", {}, "a single linear layer"),
    "double": (lambda: torch.nn.Sequential(torch.nn.Linear(16, 16)).double(), "int8", {}, "is torch.float64, wanted bfloat16"),
    "empty calibration": (decoder, "int8", {"calibration": []}, "the calibration input is empty"),
    "calibration of nan": (
        lambda: torch.nn.Sequential(torch.nn.Linear(16, 16)), "int8", {"calibration": [torch.full((2, 16), math.nan)]},
        "the input of 0 becomes infinite or NaN in 16 of 16 columns",
    ),
    "activation": (decoder, "int8", {"activation": "fixed"}, "activation is 'fixed', wanted dynamic, static, static-zero"),
    "static what": (decoder, "int4", {"activation": "static"}, "supported only for int8 and fp8; with int4"),
    "zero point of what": (decoder, "fp8", {"activation": "static-zero"}, "static-zero scales of activations are supported"),
    "static from what": (decoder, "int8", {"activation": "static"}, "static scales need calibration input"),
    "migrate what": (decoder, "int4", {"migrate": 0.5}, "migrate is only for int8 and fp8"),
    "migrate from what": (decoder, "int8", {"migrate": 0.5}, "migrate needs calibration input"),
    "migrate how far": (decoder, "int8", {"migrate": 2.0, "calibration": [1]}, "migrate is 2.0, wanted 0"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "format", "more", "message"), BAD.values(), ids=list(BAD))
def test_bad_input_changes_nothing(make: Any, format: str, more: dict[str, Any], message: str) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        tw.quantize(model, format, **more)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before if before[name].is_floating_point()
    )


@pytest.mark.parametrize("format", ALL)
def test_a_card_that_lacks_a_format_is_told(format: str) -> None:
    check_card(format, device_named("h100"), torch.bfloat16)
    check_card(format, device_named("l40s"), torch.float16)
    if "fp8" in format:
        with pytest.raises(ValueError, match=f"{format} needs the float8 instructions of sm_89, but .* is sm_80; use int8"):
            check_card(format, device_named("a100"), torch.bfloat16)
    else:
        check_card(format, device_named("a100"), torch.bfloat16)
    with pytest.raises(ValueError, match="the model is float32, but on a GPU"):
        check_card(format, device_named("h100"), torch.float32)
