"""Quantised checkpoints: published layouts against the float model that they mean, saving, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tilewright as tw
from tests.models.layouts import LAYOUTS, SIZES, write_layout
from tests.models.running import run_logits
from tilewright import nn
from tilewright.models import (
    Model,
    ModelError,
    empty_model,
    load_config,
    load_model,
    prompt_inputs,
    weight_bytes,
    weight_bytes_of,
)
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight, StaticWeight

TOKENS = [(7 * i + 3) % 48 for i in range(40)]


def formats_of(model: Model) -> set[str]:
    layers = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return {weight.format for weight in layers if isinstance(weight, QuantizedWeight)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_gives_the_logits_of_what_it_means(name: str, tmp_path: Path) -> None:
    quantised, floats = write_layout(tmp_path, name)
    model, exact = load_model(quantised, device="cpu"), load_model(floats, device="cpu")
    assert formats_of(model) == {LAYOUTS[name][2]}
    assert not isinstance(model.head.weight, QuantizedWeight)
    for ours, theirs in zip(model.blocks, exact.blocks, strict=True):
        for path in ("attn.qkv", "attn.out", "ffn.gate_up", "ffn.down"):
            weight, want = ours.get_submodule(path).weight, theirs.get_submodule(path).weight
            assert torch.equal(weight.dequantize(), want), path
    want = run_logits(exact, TOKENS, 40)
    # One token at a time activations are not rounded, and nothing is lost.
    torch.testing.assert_close(run_logits(model, TOKENS, 1), want, rtol=1e-3, atol=1e-3)
    assert (run_logits(model, TOKENS, 40) - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_empty_model_has_the_bytes_of_the_loaded_one(name: str, tmp_path: Path) -> None:
    """What memory plans and bundles are made from."""
    folder, _ = write_layout(tmp_path, name)
    config, model = load_config(folder), load_model(folder, device="cpu")
    empty = empty_model(config, device="meta", dtype=config.dtype)
    assert weight_bytes(config, config.dtype) == weight_bytes_of(model)
    shapes = [[(key, tensor.shape, tensor.dtype) for key, tensor in m.state_dict().items()] for m in (empty, model)]
    assert shapes[0] == shapes[1]
    assert config.quantization is not None
    assert config.quantization.method in config.quantization.format


MERGED = {"attn.qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "ffn.gate_up": ("mlp.gate", "mlp.up")}


@pytest.mark.parametrize("name", ["compressed-tensors int8 static", "fp8 static"])
def test_merged_layers_take_the_largest_static_scale(name: str, tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, name)
    model, tensors = load_model(folder, device="cpu"), load_file(folder / "model.safetensors")
    for i, block in enumerate(model.blocks):
        for path, parts in (
            ("attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("ffn.gate_up", ("mlp.gate", "mlp.up")),
        ):
            scales = [tensors[f"model.layers.{i}.{part}_proj.input_scale"] for part in parts]
            assert len({float(scale) for scale in scales}) == len(parts)
            weight = block.get_submodule(path).weight
            assert isinstance(weight, StaticWeight)
            assert weight.x_scale == max(scales)


def test_progress_counts_every_byte_of_codes(tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, "gptq")
    calls: list[tuple[int, int]] = []
    load_model(folder, device="cpu", progress=lambda done, total: calls.append((done, total)))
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert calls[-1] == (stored, stored)


def test_biases_of_zeros_that_some_writers_add(tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.down_proj.bias": torch.zeros(128)}, folder / "model.safetensors")
    load_model(folder, device="cpu")
    save_file({**tensors, "model.layers.0.mlp.down_proj.bias": torch.ones(128)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.bias: unexpected"):
        load_model(folder, device="cpu")


# ---- saving


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_saved_model_is_the_same_model(format: str, tmp_path: Path) -> None:
    _, source = write_layout(tmp_path, "awq")
    model = load_model(source, device="cpu", dtype=torch.bfloat16)
    tw.quantize(model, format)
    tw.save_quantized(model, tmp_path / "saved", source)
    again = load_model(tmp_path / "saved", device="cpu")
    assert formats_of(again) == {format}
    assert again.embed.weight.dtype == torch.bfloat16
    assert torch.equal(run_logits(again, TOKENS, 7), run_logits(model, TOKENS, 7))
    assert torch.equal(run_logits(again, TOKENS, 40), run_logits(model, TOKENS, 40))


@pytest.mark.parametrize(("format", "activation"), [("int8", "static"), ("fp8", "static"), ("int8", "static-zero")])
def test_static_scales_of_activations_are_saved(format: str, activation: str, tmp_path: Path) -> None:
    _, source = write_layout(tmp_path, "awq")
    model = load_model(source, device="cpu", dtype=torch.bfloat16)
    tw.quantize(model, format, calibration=[prompt_inputs(model, TOKENS)], activation=activation)
    tw.save_quantized(model, tmp_path / "saved", source)
    again = load_model(tmp_path / "saved", device="cpu")
    assert formats_of(again) == {f"{format}-static"}
    for name, buffer in model.named_buffers():
        assert torch.equal(again.get_buffer(name), buffer), name
    assert torch.equal(run_logits(again, TOKENS, 40), run_logits(model, TOKENS, 40))
    config = load_config(tmp_path / "saved")
    assert weight_bytes(config, config.dtype) == weight_bytes_of(again)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors[f"{DOWN}.input_scale"]
    save_file(tensors, tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{DOWN}\.input_scale: missing"):
        load_model(tmp_path / "saved", device="cpu")


def test_a_model_of_two_formats_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = write_layout(tmp_path, "awq")
    model = load_model(source, device="cpu")
    tw.quantize(model, "int4", skip=("lm_head", "down"))
    tw.quantize(model, "fp8", skip=("lm_head", "qkv", "out", "gate_up"))
    monkeypatch.setattr("tilewright.models.saving._SHARD_BYTES", 50_000)
    tw.save_quantized(model, tmp_path / "saved", source)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 3
    again = load_model(tmp_path / "saved", device="cpu")
    assert formats_of(again) == {"int4", "fp8"}
    assert torch.equal(run_logits(again, TOKENS, 40), run_logits(model, TOKENS, 40))


@pytest.mark.parametrize(
    "name", ["gptq", "awq", "compressed-tensors int8", "deepseek fp8", "compressed-tensors int4", "fp8 static"]
)
def test_a_published_checkpoint_can_be_saved(name: str, tmp_path: Path) -> None:
    source, _ = write_layout(tmp_path, name)
    model = load_model(source, device="cpu")
    tw.save_quantized(model, tmp_path / "saved", source)
    again = load_model(tmp_path / "saved", device="cpu")
    assert torch.equal(run_logits(again, TOKENS, 40), run_logits(model, TOKENS, 40))


def test_saving_refuses(tmp_path: Path) -> None:
    _, source = write_layout(tmp_path, "awq")
    model = load_model(source, device="cpu")
    with pytest.raises(ValueError, match=r"no layer of the model is quantised; call tw.quantize"):
        tw.save_quantized(model, tmp_path / "saved", source)
    tw.quantize(model, "int8")
    with pytest.raises(FileExistsError, match="is not empty; give a new or an empty folder"):
        tw.save_quantized(model, source, source)
    with pytest.raises(ModelError, match="bookworm is the folder of another model"):
        tw.save_quantized(model, tmp_path / "saved", "bookworm")
    other: Any = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(
        TypeError,
        match=r"got a Sequential, wanted a model from load_model; for another module, save model.state_dict",
    ):
        tw.save_quantized(other, tmp_path / "saved", source)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_any_quantised_module_goes_through_safetensors(format: str, tmp_path: Path) -> None:
    made, again = (torch.nn.Sequential(torch.nn.Linear(128, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8)) for _ in range(2))
    for module in (made, again):
        tw.quantize(module, format, skip=("2",))
    save_file(made.state_dict(), tmp_path / "module.safetensors")
    again.load_state_dict(load_file(tmp_path / "module.safetensors"))
    x = torch.randn(30, 128)
    assert torch.equal(again(x), made(x))


# ---- refusals


def _group(**changes: Any) -> dict[str, Any]:
    """compressed-tensors with other weights or activations."""
    config = json.loads(json.dumps(LAYOUTS["compressed-tensors int8"][0]))
    for key, value in changes.items():
        part, _, inner = key.partition("__")
        config["config_groups"]["group_0"][part] = (
            {**config["config_groups"]["group_0"][part], inner: value} if inner else value
        )
    return {"config_groups": config["config_groups"]}


REFUSED = {
    "method": ("awq", {"quant_method": "hqq"}, "quant_method is 'hqq', wanted compressed-tensors or fp8 or gptq or awq"),
    "bits": ("gptq", {"bits": 3}, "bits is 3, wanted 4; quantise the model again that way, or load its unquantised folder"),
    "activation order": ("gptq", {"desc_act": True}, "desc_act is True, wanted false, because columns in activation order"),
    "group": ("awq", {"group_size": -1}, "group_size is -1, wanted 32, 64 or 128"),
    "rules by layer": ("gptq", {"dynamic": {"-:mlp": {}}}, "dynamic is .* rules for single layers are not supported"),
    "checkpoint format": ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', wanted gptq or gptq_v2"),
    "quantised head": ("gptq", {"lm_head": True}, "lm_head is True, wanted false"),
    "gemv": ("awq", {"version": "gemv"}, "version is 'gemv', wanted gemm"),
    "static blocks": ("deepseek fp8", {"activation_scheme": "static"}, "activation_scheme is 'static', wanted dynamic; quan"),
    "some scheme": ("fp8 static", {"activation_scheme": "lazy"}, "activation_scheme is 'lazy', wanted dynamic or static;"),
    "block": ("deepseek fp8", {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], wanted \[128, 128\]"),
    "e5m2": ("deepseek fp8", {"fmt": "e5m2"}, "fmt is 'e5m2', wanted e4m3"),
    "static tokens": (
        "compressed-tensors int8", _group(input_activations__dynamic=False), "strategy is 'token', wanted tensor; quantise",
    ),
    "static beside blocks": (
        "compressed-tensors fp8 by block", {**_group(
            input_activations__dynamic=False, weights__type="float", input_activations__type="float",
            weights__strategy="block", weights__block_structure=[128, 128],
        )}, "input_activations.dynamic is False, wanted true; quantise",
    ),
    "local": ("compressed-tensors int8", _group(input_activations__dynamic="local"), "dynamic is 'local', wanted true or f"),
    "groups of inputs": (
        "compressed-tensors int8", _group(input_activations__strategy="group"), "strategy is 'group', wanted token",
    ),
    "inputs with zero points": (
        "compressed-tensors int8", _group(input_activations__symmetric=False), "input_activations is .* wanted symmetric int8",
    ),
    "asymmetric": ("compressed-tensors int8", _group(weights__symmetric=False), "weights.symmetric is False, wanted true"),
    "6 bits": ("compressed-tensors int8", _group(weights__num_bits=6), "weights is 'int6', wanted int8, float8 or int4"),
    "strategy": ("compressed-tensors int8", _group(weights__strategy="group"), "weights.strategy is 'group', wanted channel"),
    "targets": ("compressed-tensors int8", _group(targets=["re:.*mlp"]), "targets is .* list the layers to leave out"),
    "no groups": ("compressed-tensors int8", {"config_groups": {}}, "config_groups is '0 groups', wanted one"),
    "cache": ("compressed-tensors int8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is 'given', wanted null"),
    "half a merged layer": (
        "compressed-tensors int8", {"ignore": ["lm_head", "re:.*q_proj"]}, "only some of .*q_proj.* they form one layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_supported_is_named(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, name, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu")


DOWN = "model.layers.1.mlp.down_proj"
BROKEN = {
    "no scales": ("compressed-tensors int8", {f"{DOWN}.weight_scale": None}, f"{DOWN}.weight_scale: missing, of a quant"),
    "no inverse": ("deepseek fp8", {f"{DOWN}.weight_scale_inv": None}, f"{DOWN}.weight_scale_inv: missing"),
    "no zeros": ("gptq", {f"{DOWN}.qzeros": None}, f"{DOWN}.qzeros: missing"),
    "float scales of a wrong shape": (
        "compressed-tensors fp8", {f"{DOWN}.weight_scale": torch.ones(127, 1)}, rf"{DOWN}.weight_scale: shape is \[127, 1\]",
    ),
    "codes of a wrong dtype": (
        "compressed-tensors fp8", {f"{DOWN}.weight": torch.zeros(128, 192, dtype=torch.int8)}, f"{DOWN}.weight: dtype is I8",
    ),
    "activation order in the weights": (
        "gptq", {f"{DOWN}.g_idx": torch.arange(192).flip(0).int() // 64}, f"{DOWN}: read_gptq: g_idx is not column // 64",
    ),
    "zeros that are not symmetric": (
        "gptq", {f"{DOWN}.qzeros": torch.zeros(3, 16, dtype=torch.int32)}, f"{DOWN}: config.json sets sym",
    ),
    "no static scale": ("fp8 static", {f"{DOWN}.input_scale": None}, f"{DOWN}.input_scale: missing, of a quantised weight"),
    "a static scale of nothing": (
        "fp8 static", {f"{DOWN}.input_scale": torch.zeros(1)}, f"{DOWN}: input_scale is 0.0, wanted a finite number above 0",
    ),
    "a static scale": ("compressed-tensors fp8", {f"{DOWN}.input_scale": torch.ones(1)}, f"{DOWN}.input_scale: unexpected"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), BROKEN.values(), ids=list(BROKEN))
def test_a_damaged_checkpoint_is_told_which_tensor(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, name)
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu")


def test_codes_without_a_quantization_config(tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, "compressed-tensors int8")
    (folder / "config.json").write_text(json.dumps(SIZES))
    with pytest.raises(
        ModelError,
        match=r"is I8, but a tensor that is not quantised must be one of BF16, F16, F32, F64 \(config.json has no quantiz",
    ):
        load_model(folder, device="cpu")


def test_a_saved_description_that_was_changed(tmp_path: Path) -> None:
    _, source = write_layout(tmp_path, "awq")
    model = load_model(source, device="cpu")
    tw.quantize(model, "int8")
    tw.save_quantized(model, tmp_path / "saved", source)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["quantization_config"]["layers"]["model.layers.0.mlp.up_proj"]["format"] = "int5"
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"a layer is described as .*int5.*; wanted a format of int8, fp8"):
        load_model(tmp_path / "saved", device="cpu")
