"""An engine over quantised weights: what is planned is what is loaded, and both ways to the same model give the same tokens."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tilewright as tw
from tests.models.layouts import LAYOUTS, SIZES, write_layout
from tilewright import nn
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import load_engine
from tilewright.engine.loading import facts_of, load, make_bundle
from tilewright.engine.request import SamplingParams
from tilewright.hw.device import device_named
from tilewright.models import ModelConfig, load_config, load_model, weight_bytes_of
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight

CONFIG = ModelConfig.from_hf(SIZES)


def options(**more: Any) -> EngineConfig:
    return EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=4, **more)


def generated(model: Path, **more: Any) -> list[int]:
    engine = load_engine(model, options(**more))
    engine.submit(list(range(1, 30)), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    return [token for delta in iter_deltas(engine) for token in delta.token_ids]


def iter_deltas(engine: Any) -> list[Any]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_plan_counts_codes(format: str) -> None:
    loaded = load(CONFIG, options(quantize=format, dtype="bfloat16"))
    plan, model = loaded.plan, loaded.runner.model
    assert plan.weights_bytes == weight_bytes_of(model)
    assert plan.weights_bytes < load(CONFIG, options(dtype="bfloat16")).plan.weights_bytes
    assert plan.tables_bytes == model.blocks[0].attn.rope.cos_sin.nbytes
    assert plan.weights_format == format
    assert f"bytes  {format}" in str(plan)
    widest = 384 * 128 * 2 if format in ("int4", "int8-weight") else 8192 * 192 * 33 // 32
    assert plan.working_bytes == load(CONFIG, options(dtype="bfloat16")).plan.working_bytes + widest
    assert {m.weight.format for m in model.blocks.modules() if isinstance(m, nn.Linear)} == {format}
    assert model.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["awq", "deepseek fp8"])
def test_a_plan_counts_the_codes_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, name)
    loaded = load(folder, options())
    assert loaded.plan.weights_bytes == weight_bytes_of(loaded.runner.model)
    assert loaded.plan.weights_format == LAYOUTS[name][2]


@pytest.mark.parametrize("format", ["int8", "mxfp8", "int4"])
def test_quantised_while_loading_or_saved_gives_the_same_tokens(format: str, tmp_path: Path) -> None:
    _, floats = write_layout(tmp_path, "awq")
    model = load_model(floats, device="cpu", dtype=torch.float32)
    tw.quantize(model, format)
    tw.save_quantized(model, tmp_path / "saved", floats)
    assert generated(tmp_path / "saved") == generated(floats, quantize=format)


def test_float_weights_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When a layer is quantised, the float weights of those before it are gone and those after it have no memory yet."""
    _, floats = write_layout(tmp_path, "awq")
    weights: list[weakref.ref[Any]] = []
    alive: list[int] = []
    replace = nn.Linear.replace_weight

    def counting(self: nn.Linear, weight: QuantizedWeight) -> None:
        if weight.device.type != "meta":
            alive.append(sum(ref() is not None for ref in weights))
            weights.append(weakref.ref(self.weight))
        replace(self, weight)

    monkeypatch.setattr(nn.Linear, "replace_weight", counting)
    for model in (floats, CONFIG):
        weights.clear()
        load(model, options(quantize="int8"))
    assert alive == [0] * 16


def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _ = write_layout(tmp_path, "gptq")
    with pytest.raises(ValueError, match=r"quantize is 'int8', but the model's folder has quantised weights already \(gptq\)"):
        load(folder, options(quantize="int8"))


def test_formats_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="quantize is 'int9', wanted one of int8, fp8"):
        EngineConfig(quantize="int9")
    wide = ModelConfig.from_hf({**SIZES, "intermediate_size": 200})
    with pytest.raises(ValueError, match=r"blocks.0.ffn.down has K = 200 inputs"):
        load(wide, options(quantize="int4"))


def test_a_bundle_is_for_one_format(tmp_path: Path) -> None:
    plain, quantized = (facts_of(CONFIG, torch.bfloat16, options(quantize=format)) for format in (None, "int8"))
    assert (plain["quantize"], quantized["quantize"]) == (None, "int8")
    folder, _ = write_layout(tmp_path, "awq")
    assert facts_of(load_config(folder), torch.bfloat16, options())["quantize"].startswith("awq AWQ(group=64")
    with pytest.raises(ValueError, match=r"fp8 needs the float8 instructions of sm_89, but .* is sm_80"):
        make_bundle(
            tmp_path / "b", CONFIG, options(quantize="fp8", dtype="bfloat16"), card=device_named("a100"), jobs=1, progress=print
        )


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """A merged layer quantised while loading has the bits of `quantize` on the whole model."""
    _, floats = write_layout(tmp_path, "awq")
    tensors = load_file(floats / "model.safetensors")
    model = load(floats, options(quantize="int8")).runner.model
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    want = tw.formats.quantize(torch.cat(parts), "int8")
    assert torch.equal(model.blocks[1].attn.qkv.weight.codes, want.values)
