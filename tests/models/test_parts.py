"""Parts that only some families have: their gradients, quantised weights, ranks that share a model, and old checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.models.folders import LLAMA, rewrite_config
from tests.models.oracles import FAMILIES, make_oracle
from tests.models.random_configs import ENGINE
from tests.models.running import run_logits
from tilewright.models import ModelConfig, ModelError, empty_model, load_model, save_quantized
from tilewright.models.fill import part_names, parts_of
from tilewright.models.forms import PLUS_ONE
from tilewright.nn import Packed, PackedKeysValues
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.part import refusal
from tilewright.parallel.plan import Plan
from tilewright.parallel.serving import ServedCut
from tilewright.quant import quantize
from tilewright.train.config import TrainConfig
from tilewright.train.setup import model_config

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

TOKENS = [5, 9, 31, 7, 80, 2, 44, 5, 60, 11]
TRAINED = [
    "arcee", "cohere2", "exaone4", "gpt-neox", "gpt2", "granite-moe", "hunyuan", "nemotron", "opt", "phi",
    "qwen2-moe", "smollm3",
]  # fmt: skip


@pytest.mark.parametrize("family", TRAINED)
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of every parameter that transformers stores under the same name."""
    oracle = make_oracle(family, ENGINE[family]).requires_grad_(True)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu").requires_grad_(True)
    ids, count = torch.tensor(TOKENS[:-1]), len(TOKENS) - 1
    packed = Packed(positions=torch.arange(count), cu_q=torch.tensor([0, count], dtype=torch.int32), max_q_len=count)
    losses = (model.logits(model(ids, packed, PackedKeysValues())), oracle(ids[None]).logits[0])
    for logits in losses:
        F.cross_entropy(logits, torch.tensor(TOKENS[1:]), reduction="sum").backward()
    theirs, compared = dict(oracle.named_parameters()), 0
    for path, parameter in model.named_parameters():
        parts = parts_of(model.get_submodule(path.rpartition(".")[0]), parameter)
        names, form = part_names(model, path, parts)
        assert parameter.grad is not None, path
        for name, view in zip(names, form.views(parameter.grad, parts), strict=True):
            got = view if form is PLUS_ONE else form.get(view, name)[name]
            name = "lm_head.weight" if name == "embed_out.weight" else name
            if name in theirs and theirs[name].grad is not None:
                torch.testing.assert_close(got, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("family", ["ernie4.5-moe", "glm4-moe"])
def test_biased_routers_are_not_trained(family: str, tmp_path: Path) -> None:
    make_oracle(family, ENGINE[family]).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="training is not supported yet for a router whose bias affects only the choice of experts"
    ):
        model_config(TrainConfig(model=str(tmp_path), data=("none",), row_tokens=32))


@pytest.mark.parametrize(("format", "limit"), [("int8", 0.1), ("fp8", 0.3), ("int4", 0.5)])
@pytest.mark.parametrize("family", ["arcee", "ernie4.5-moe", "gpt-neox", "gpt2", "granite-moe", "nemotron", "phi", "qwen2-moe"])
def test_quantised_models_are_saved_and_loaded(family: str, format: str, limit: float, tmp_path: Path) -> None:
    """Forms that transpose or move rows, too: the same logits from the folder as from the model that was quantised."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "n_inner": 128, "moe_intermediate_size": 128}
    sizes |= {"shared_expert_intermediate_size": 128, "num_hidden_layers": 1}
    make_oracle(family, {**ENGINE[family], **sizes}).save_pretrained(tmp_path / "floats")
    model = load_model(tmp_path / "floats", device="cpu")
    floats = run_logits(model, TOKENS, 5)
    quantize(model, format)
    save_quantized(model, tmp_path / "codes", tmp_path / "floats")
    want = run_logits(model, TOKENS, 5)
    assert torch.equal(run_logits(load_model(tmp_path / "codes", device="cpu"), TOKENS, 5), want)
    assert 1e-4 < (want - floats).norm() < limit * floats.norm()


def config_of(family: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(make_oracle(family, {**ENGINE[family], **changes}).config.to_dict() | architecture(family))


def architecture(family: str) -> dict[str, Any]:
    return {"architectures": [FAMILIES[family][1]]}


@pytest.mark.parametrize("family", ["arcee", "cohere2", "gpt-neox", "gpt2", "hunyuan", "opt", "stablelm", "starcoder2"])
def test_the_slices_of_two_ranks_are_the_model(family: str) -> None:
    config, plan = config_of(family, num_hidden_layers=2), Plan(tp=2)
    whole = empty_model(config, device="meta", dtype=torch.float32)
    held = 0
    for rank in range(plan.ranks):
        model = empty_model(config, device="meta", dtype=torch.float32)
        cut = ServedCut(model, plan, plan.place(rank))
        cut.all(model)
        blocks = cut.part(model, Mesh()).blocks
        held += sum(p.numel() for name, p in blocks.named_parameters() if p.dim() > 1 and "positions" not in name)
    matrices = ((name, p) for name, p in whole.blocks.named_parameters() if p.dim() > 1)
    assert held == sum(p.numel() for name, p in matrices if "positions" not in name)


@pytest.mark.parametrize("family", ["gpt-neox", "gpt2", "phi", "starcoder2"])
def test_training_cuts_no_layer_norms(family: str) -> None:
    model = empty_model(config_of(family), device="meta", dtype=torch.float32)
    assert "use only dp and zero" in str(refusal(model, Plan(tp=2)))
    assert refusal(model, Plan(dp=2, zero=2)) is None


def test_gpt2_as_first_published(tmp_path: Path) -> None:
    """Names without a prefix, and masks among the weights."""
    oracle = make_oracle("gpt2", {})
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    save_file(tensors, path, metadata={"format": "pt"})
    want = oracle(torch.tensor([TOKENS])).logits[0]
    assert (run_logits(load_model(tmp_path, device="cpu"), TOKENS, 4) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "name"),
    [("ernie4.5-moe", "model.mtp_emb_norm.0.weight"), ("gpt-neox", "gpt_neox.layers.1.attention.masked_bias")],
)
def test_tensors_that_no_model_needs(family: str, name: str, tmp_path: Path) -> None:
    make_oracle(family, ENGINE[family]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: torch.ones(3)}, path, metadata={"format": "pt"})
    load_model(tmp_path, device="cpu")
    save_file({**tensors, "model.other": torch.ones(3)}, path)
    with pytest.raises(ModelError, match="unexpected"):
        load_model(tmp_path, device="cpu")


def test_foreign_codes_in_other_rows_are_refused(tmp_path: Path) -> None:
    make_oracle("gpt-neox", {"num_key_value_heads": 4}).save_pretrained(tmp_path)
    rewrite_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True})
    with pytest.raises(ModelError, match="GPTNeoXForCausalLM that another library has quantised are not supported"):
        load_model(tmp_path, device="cpu")


REFUSED = {
    "Cohere, norms over heads": ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm must be false .* got true"),
    "ERNIE 4.5, biases": ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias must be false in a mixture"),
    "ERNIE 4.5, sums": ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.1}, "moe_norm_min must be at most 1e-6 .* got 0.1"),
    "EXAONE 4, pattern": ("Exaone4ForCausalLM", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern.* is 'LXG'"),
    "GPT-2, scales": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be"),
    "GPT-2, activation": ("GPT2LMHeadModel", {"activation_function": "tanh"}, "hidden_act 'tanh' is not supported"),
    "OLMoE": ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv must be null .* got 8.0"),
    "OPT, norms behind": ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before must be true .* got false"),
    "OPT, a projection": ("OPTForCausalLM", {"word_embed_proj_dim": 8}, "proj_dim is 8, but must be hidden_size, 16"),
    "Phi": ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm must be false"),
    "SmolLM3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "must have one entry for each of the 2 layers; got 1"),
    "StableLM": ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm must be false"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED.values(), ids=list(REFUSED))
def test_settings_that_are_refused(name: str, changes: dict[str, Any], words: str) -> None:
    raw = {**LLAMA, "hidden_act": "gelu" if name.startswith("Phi") else "silu", "architectures": [name]}
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_hf({**raw, **changes})


@pytest.mark.parametrize(
    ("pattern", "layers", "windows"),
    [("LLG", 5, (6, 6, None, 6, None)), (2, 4, (6, None, 6, None)), ("LLLL", 2, (6, None))],
)
def test_exaone_windows_by_pattern(pattern: str | int, layers: int, windows: tuple[int | None, ...]) -> None:
    raw = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": layers, "sliding_window": 6}
    config = ModelConfig.from_hf({**raw, "sliding_window_pattern": pattern})
    assert config.windows == windows
    assert config.unrotated == tuple(i for i, window in enumerate(windows) if window is None)
