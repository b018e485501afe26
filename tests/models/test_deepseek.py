"""DeepSeek-V2 and V3 against transformers: the same folder, the same logits and ids, whatever the form of the attention."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.engine.fake_runner import byte_tokenizer
from tests.models.folders import LLAMA, rewrite_config
from tests.models.running import run_logits
from tilewright import LLM, SamplingParams
from tilewright.cli import app
from tilewright.models import Model, ModelConfig, ModelError, kv_bytes_per_token, load_model
from tilewright.nn import MLA

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

VOCAB = 257
TOKENS = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "eos_token_id": 256,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", {"topk_method": "greedy", "q_lora_rank": None, "n_shared_experts": 2}),
    "v2": ("DeepseekV2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}),
    "v2-yarn": ("DeepseekV2", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v3": ("DeepseekV3", {"n_shared_experts": 2}),
    "v3-yarn": ("DeepseekV3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "v3-halves": (
        "DeepseekV3",
        {"rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 0, "attention_bias": True},
    ),
    "v3-dense-tied": ("DeepseekV3", {"first_k_dense_replace": 2, "tie_word_embeddings": True}),
}


def make_oracle(family: str, changes: dict[str, Any]) -> Any:
    """A model of transformers where no weight is trivial."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in oracle.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
    for name, buffer in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3, generator=generator)
    return oracle


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.Tensor]:
    """A model loaded from the oracle's folder, and the oracle's logits."""
    oracle = make_oracle(*request.param)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    return load_model(folder, device="cpu"), oracle(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("chunk", [len(TOKENS), 7, 1], ids=["whole", "chunks", "token by token"])
@pytest.mark.parametrize("expand_from", [1, 10**6], ids=["expanded", "absorbed"])
def test_logits_equal_transformers(pair: tuple[Model, torch.Tensor], chunk: int, expand_from: int) -> None:
    model, want = pair
    for block in model.blocks:
        assert isinstance(block.attn, MLA)
        block.attn.expand_from = expand_from
    got = run_logits(model, TOKENS, chunk)
    assert want.std() > 0.5  # else the limit below would say nothing
    assert (got - want).abs().max().item() < 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("deepseek")
    make_oracle(*CASES["v3-yarn"]).save_pretrained(folder)
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 6}], ids=str)
def test_engine_gives_the_ids_of_transformers(folder: Path, options: dict[str, Any]) -> None:
    """A batch of prompts that share a prefix, over the paged cache of latents, in chunks and not."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 256, (20,), generator=generator).tolist()
    prompts = [[*shared, *torch.randint(0, 256, (n,), generator=generator).tolist()] for n in (1, 9, 30)] + [shared[:3]]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    llm = LLM(str(folder), device="cpu", max_seqs=4, page_size=8, max_tokens_per_step=64, kv_cache_bytes=1 << 20, **options)
    done = [llm.generate(prompts, params), llm.generate(prompts[::-1], params)[::-1]]  # the second time from cached pages
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, first, second in zip(prompts, *done, strict=True):
        ids = torch.tensor([prompt])
        want = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == want[0, len(prompt) :].tolist()


def test_invariant_is_refused_on_a_cpu(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^invariant is set, but on a CPU the bits of a row depend on .*; take a GPU"):
        LLM(str(folder), device="cpu", invariant=True)


def test_the_cache_holds_latents_alone(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    cache = model.empty_cache(3, 8)
    assert [[tuple(t.shape) for t in layer] for layer in cache.layers] == [[(3, 8, 40)]] * 2
    assert kv_bytes_per_token(model.config, torch.bfloat16) == 2 * 40 * 2
    for (rows,) in cache.layers:
        rows.copy_(torch.arange(3.0)[:, None, None])
    cache.copy_pages(torch.tensor([2]), torch.tensor([0]))
    assert all(rows[:, 0, 0].tolist() == [2, 1, 2] for (rows,) in cache.layers)


def test_run_from_the_command_line(folder: Path) -> None:
    arguments = ["run", str(folder), "--prompt", "Once", "--max-tokens", "4", "--temperature", "0", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, arguments, prog_name="tilewright")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    llm = LLM(str(folder), device="cpu")
    assert answer["text"] == llm.generate(["Once"], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].text


def test_a_layer_that_predicts_a_second_token_is_left_out(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.2.enorm.weight": torch.ones(64), "model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(
        run_logits(load_model(tmp_path, device="cpu"), TOKENS, 23), run_logits(load_model(folder, device="cpu"), TOKENS, 23)
    )
    del extra["model.layers.2.enorm.weight"]
    save_file({**tensors, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.layers.2.eh_proj.weight: unexpected"):
        load_model(tmp_path, device="cpu")


V3 = {**LLAMA, **SIZES, "architectures": ["DeepseekV3ForCausalLM"]}
REFUSED = {
    "routing": ({"topk_method": "soft"}, "routing method 'soft' is not supported; supported: greedy, group_limited_greedy"),
    "groups": ({"n_group": 3}, "groups is 3 and chosen_groups is 2"),
    "chosen groups": ({"topk_group": 5}, "groups is 4 and chosen_groups is 5"),
    "chosen experts": ({"num_experts_per_tok": 5}, "5 experts cannot be chosen from 2 groups of 2"),
    "groups of one": ({"n_group": 8, "num_experts_per_tok": 2}, "each group needs at least two experts"),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantised checkpoints of DeepSeek models are not supported",
    ),
    "some layers": ({"moe_layer_freq": 2}, r"moe_layer_freq is 2, but must be 1"),
    "only part of a merged projection would have a bias": (
        {"attention_bias": True, "q_lora_rank": None},
        "attention_bias without q_lora_rank is not supported",
    ),
    "rank": ({"kv_lora_rank": 0}, "kv_lora_rank is 0, wanted greater than or equal to 1"),
    "odd rotation": ({"qk_rope_head_dim": 7}, "must be even and positive, got 7"),
    "dense layers": ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, wanted greater than or equal to 0"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**V3, **changes})


def test_published_defaults() -> None:
    """What a config.json of V3 leaves out is what its config class fills in."""
    lacking = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config = ModelConfig.from_hf({**lacking, "architectures": ["DeepseekV3ForCausalLM"]})
    assert config.latent is not None
    assert config.experts is not None
    assert (config.latent.cached, config.latent.q_rank, config.head_dim) == (576, 1536, 192)
    routing = config.experts.routing
    assert (routing.experts, routing.chosen, routing.groups, routing.chosen_groups) == (256, 8, 8, 4)
    assert (routing.method, routing.normalise, routing.scale) == ("noaux_tc", True, 2.5)


def test_transformers_4_config_gives_the_same_logits(folder: Path, tmp_path: Path) -> None:
    for file in (*folder.glob("*.json"), folder / "model.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    rope = {**raw["rope_parameters"]}
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    rewrite_config(
        tmp_path, rope_parameters=None, dtype=None, torch_dtype="float32", rope_theta=theta, rope_scaling=rope,
        scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=None, ep_size=1, moe_layer_freq=1,
    )  # fmt: skip
    assert torch.equal(
        run_logits(load_model(tmp_path, device="cpu"), TOKENS, 23), run_logits(load_model(folder, device="cpu"), TOKENS, 23)
    )
