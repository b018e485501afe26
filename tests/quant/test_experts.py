"""Quantised mixtures of experts: layers and models against the same with the weights that the codes mean, saved and loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.models.folders import write_folder
from tests.models.layouts import LAYOUTS
from tests.models.running import run_logits
from tilewright import nn, ops
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import load
from tilewright.models import ModelConfig, load_model, prompt_inputs, random_model, save_model
from tilewright.ops.expert_weights import ExpertWeights
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight, quantize_weight

COMMON = {
    "vocab_size": 48, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3-MoE": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
EXACT = ("int4", "int8-weight")
"""Formats whose activations are never quantised."""
TOKENS = [(7 * i + 3) % 48 for i in range(40)]


def model_of(name: str) -> Any:
    return random_model(ModelConfig.from_hf({**COMMON, **MODELS[name]}), device="cpu", dtype=torch.float32)


def what_it_means(layer: Any) -> Any:
    """The same layer or model with float weights that are what its codes mean."""
    exact = copy.deepcopy(layer)
    for module in exact.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.ExpertLinear)) and isinstance(weight, QuantizedWeight):
            del module.weight
            module.weight = torch.nn.Parameter(weight.dequantize(), requires_grad=False)
    return exact


def apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("inner", [128, 96])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_layer_is_that_of_its_dequantised_weights(format: str, inner: int, rows: int) -> None:
    if format == "int4" and inner == 96:
        inner = 192  # groups of 64 have to divide it
    routing = nn.Routing(method="greedy", experts=4, chosen=2, normalise=True)
    torch.manual_seed(0)
    layer = nn.MoE(128, inner, shared=64, routing=routing, device="cpu", dtype=torch.float32).requires_grad_(False)
    wanted = ["shared.gate_up", "shared.down", "experts_gate_up", "experts_down"]
    assert [row.name for row in tw.quantize(layer, format).quantized] == wanted
    x = torch.randn(rows, 128)
    error = apart(layer(x), what_it_means(layer)(x))
    # Where activations are codes too, half a step is 1/254 of a row's largest number in int8, 1/16 of a number in fp8.
    assert error < (1e-5 if format in EXACT or 2 * rows <= 16 * 4 else 0.02 if format == "int8" else 0.06)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, format: str, tmp_path: Path) -> None:
    model = model_of(name)
    float_bytes = sum(p.nbytes for p in model.parameters())
    save_model(model, tmp_path / "float")
    report = tw.quantize(model, format)
    chosen = {row.name for row in report.quantized}
    assert {f"blocks.{i}.ffn.{part}" for i in range(2) for part in ("experts_gate_up", "experts_down")} < chosen
    assert all(0 < row.error < 0.12 for row in report.quantized if row.error is not None)
    assert report.bytes_after < 0.35 * report.bytes_before < 0.35 * float_bytes
    want = run_logits(what_it_means(model), TOKENS, 40)
    assert apart(run_logits(model, TOKENS, 1), want) < 1e-4
    assert apart(run_logits(model, TOKENS, 40), want) < (1e-4 if format in EXACT else 0.2)
    tw.save_quantized(model, tmp_path / "codes", tmp_path / "float")
    again = load_model(tmp_path / "codes", device="cpu")
    assert torch.equal(run_logits(again, TOKENS, 7), run_logits(model, TOKENS, 7))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_an_engine_quantises_experts_while_it_loads(format: str, tmp_path: Path) -> None:
    """`--quantize`: the same codes as `tw.quantize` makes, and a plan with their bytes."""
    model = model_of("Qwen3-MoE")
    save_model(model, tmp_path / "float")
    tw.quantize(model, format)
    loaded = load(tmp_path / "float", EngineConfig(quantize=format, device="cpu", max_model_len=32, kv_cache_bytes=1 << 20))
    codes = model.blocks[1].ffn.experts_down.weight, loaded.runner.model.blocks[1].ffn.experts_down.weight
    assert torch.equal(codes[0].stored, codes[1].stored)
    assert torch.equal(codes[0].scales, codes[1].scales)
    assert (
        loaded.plan.weights_bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - loaded.plan.tables_bytes
    )
    assert format in loaded.plan.weights_format


def test_calibration_leaves_experts_to_themselves() -> None:
    model, floats = model_of("Mixtral"), model_of("Mixtral")
    report = tw.quantize(model, "int4", calibration=[prompt_inputs(floats, TOKENS)])
    rows = {row.name: row for row in report.quantized}
    assert "rounded to nearest" in rows["blocks.0.ffn.experts_down"].note
    assert "compensated" in rows["blocks.0.attn.out"].note
    tw.quantize(floats, "int4")
    same = model.blocks[0].ffn.experts_down.weight, floats.blocks[0].ffn.experts_down.weight
    assert torch.equal(same[0].stored, same[1].stored)


MIXTRAL = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    **{f"block_sparse_moe.experts.{e}.{w}": (192, 128) for e in range(4) for w in ("w1", "w3")},
    **{f"block_sparse_moe.experts.{e}.w2": (128, 192) for e in range(4)},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["compressed-tensors int8", "compressed-tensors int4", "gptq", "awq", "deepseek fp8", "fp8 static"]
)
def test_published_layouts_have_experts_too(name: str, tmp_path: Path) -> None:
    """A checkpoint in which each expert's projection is a quantised layer of its own."""
    quantization, pack, _ = LAYOUTS[name]
    rng = torch.Generator().manual_seed(5)
    floats: dict[str, Tensor] = {"model.embed_tokens.weight": torch.randn(48, 128, generator=rng)}
    floats |= {"lm_head.weight": torch.randn(48, 128, generator=rng) * 0.1, "model.norm.weight": torch.ones(128)}
    codes: dict[str, Tensor] = {}
    for i in range(2):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            floats[f"{layer}.{norm}.weight"] = torch.ones(128)
        floats[f"{layer}.block_sparse_moe.gate.weight"] = torch.randn(4, 128, generator=rng)
    meant = dict(floats)
    for i in range(2):
        for part, shape in MIXTRAL.items():
            tensors, weight = pack(rng, *shape)
            codes |= {f"model.layers.{i}.{part}.{suffix}": t for suffix, t in tensors.items()}
            meant[f"model.layers.{i}.{part}.weight"] = weight
    config = {**COMMON, **MODELS["Mixtral"], "torch_dtype": "float32"}
    write_folder(tmp_path / "codes", {**config, "quantization_config": quantization}, {**floats, **codes})
    write_folder(tmp_path / "floats", config, meant)
    model, exact = (load_model(tmp_path / kind, device="cpu") for kind in ("codes", "floats"))
    weight = model.blocks[1].ffn.experts_gate_up.weight
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), exact.blocks[1].ffn.experts_gate_up.weight)
    torch.testing.assert_close(run_logits(model, TOKENS, 1), run_logits(exact, TOKENS, 40), rtol=1e-3, atol=1e-3)


def test_masked_rooms_and_gradients() -> None:
    weight = ExpertWeights(quantize_weight(torch.randn(3 * 40, 64), "int8"), 3)
    x, counts = torch.randn(3, 9, 64), torch.tensor([9, 0, 4], dtype=torch.int32)
    want = torch.einsum("xmk,xnk->xmn", x, weight.dequantize(torch.float32))
    want[1], want[2, 4:] = 0.0, 0.0
    torch.testing.assert_close(ops.masked_grouped_linear(x, weight, counts), want, rtol=1e-4, atol=1e-4)
    order = ops.sort_by_expert(torch.tensor([[0], [2], [2], [1]], dtype=torch.int32), 3)
    rows = torch.randn(4, 64, requires_grad=True)
    y = ops.grouped_linear(rows, weight, order)
    y.backward(torch.ones_like(y))
    each = weight.dequantize(torch.float32)[[0, 1, 2, 2]].sum(1)
    torch.testing.assert_close(rows.grad, each)


def test_it_traces_whole() -> None:
    routing = nn.Routing(method="greedy", experts=4, chosen=2)
    layer = nn.MoE(64, 32, shared=0, routing=routing, device="cpu", dtype=torch.float32).requires_grad_(False)
    tw.quantize(layer, "int8")
    x = torch.randn(70, 64)
    want = layer(x)
    torch.compiler.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)


def test_shapes_of_quantised_experts_are_checked() -> None:
    weight = quantize_weight(torch.randn(8, 16), "int8")
    order = ops.sort_by_expert(torch.tensor([[0], [1]], dtype=torch.int32), 2)
    with pytest.raises(ValueError, match=r"weight \[2, 4, 16\]"):
        ops.grouped_linear(torch.randn(2, 8), ExpertWeights(weight, 2), order)
