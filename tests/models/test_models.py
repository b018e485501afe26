"""Models against transformers: the same folder, the same logits, however the prompt is cut into steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.folders import rewrite_config
from tests.models.oracles import make_oracle
from tests.models.running import make_batch, make_cache, run_logits
from tests.paths import SHARED
from tilewright.models import Model, load_model

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

TOKENS = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(0)).tolist()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20}
GLM_MOE = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-multi-query-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-multi-head-biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2-moe": ("qwen2-moe", {**MIXTURE, "shared_expert_intermediate_size": 28, "norm_topk_prob": True}),
    "qwen2-moe-window": (
        "qwen2-moe",
        {
            **MIXTURE, "shared_expert_intermediate_size": 28, "use_sliding_window": True, "sliding_window": 5,
            "num_hidden_layers": 4, "mlp_only_layers": [2], "qkv_bias": False,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True,
            "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "cohere": ("cohere", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "ernie4.5": ("ernie4.5", {"head_dim": 24, "use_bias": True}),
    "ernie4.5-moe": (
        "ernie4.5-moe", {**ERNIE_MOE, "num_hidden_layers": 4, "moe_layer_end_index": 2, "moe_layer_start_index": 1},
    ),
    "exaone4": ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "gemma2": (
        "gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 24}),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 10, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 24, "attention_bias": False, "num_key_value_heads": 1}),
    "glm4-moe": ("glm4-moe", {**GLM_MOE, "head_dim": 24, "use_qk_norm": True, "attention_bias": True}),
    "gpt-neox": ("gpt-neox", {"num_key_value_heads": 4}),
    "gpt-neox-serial": ("gpt-neox", {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False}),
    "gpt-oss": ("gpt-oss", {"head_dim": 16, "sliding_window": 6, "swiglu_limit": 1.0, **EXPERTS}),
    "gpt2": ("gpt2", {}),
    "gpt2-unscaled": ("gpt2", {"n_inner": 40, "scale_attn_weights": False, "tie_word_embeddings": False}),
    "granite": ("granite", FACTORS),
    "granite-moe": ("granite-moe", {**EXPERTS, **FACTORS}),
    "hunyuan": ("hunyuan", {"head_dim": 24, "rope_parameters": {**DYNAMIC, "alpha": 50.0}}),
    "hunyuan-dynamic": ("hunyuan", {"head_dim": 16, "rope_parameters": DYNAMIC}),
    "mixtral": ("mixtral", {"sliding_window": 9, **EXPERTS}),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "olmo2": ("olmo2", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 5, "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "opt": ("opt", {"ffn_dim": 40}),
    "opt-no-biases": ("opt", {"ffn_dim": 40, "enable_bias": False, "tie_word_embeddings": False}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3-short": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "phi3-long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "qwen3-moe": ("qwen3-moe", {**MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some": (
        "qwen3-moe",
        {**MIXTURE, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "seed-oss": ("seed-oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "attention_bias": True}),
    "smollm3-window": (
        "smollm3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False}),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 8, "rope_theta": 1e6}}),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.Tensor]:
    """A model loaded from the oracle's folder, and the oracle's logits."""
    oracle = make_oracle(*request.param)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    return load_model(folder, device="cpu"), oracle(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("chunk", [len(TOKENS), 7, 1], ids=["whole", "chunks", "token by token"])
def test_logits_equal_transformers(pair: tuple[Model, torch.Tensor], chunk: int) -> None:
    model, want = pair
    got = run_logits(model, TOKENS, chunk)
    assert want.std() > 0.5  # else the limit below would say nothing
    assert (got - want).abs().max().item() < 1e-4


def test_transformers_4_folder_gives_the_same_model(tmp_path: Path) -> None:
    """rope_theta, rope_scaling and torch_dtype at the top level."""
    oracle = make_oracle("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 2e4}})
    oracle.save_pretrained(tmp_path)
    rewrite_config(
        tmp_path, rope_parameters=None, dtype=None, torch_dtype="float32", rope_theta=2e4,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 32},
    )  # fmt: skip
    want = oracle(torch.tensor([TOKENS])).logits[0]
    assert (run_logits(load_model(tmp_path, device="cpu"), TOKENS, 23) - want).abs().max().item() < 1e-4


def test_sequences_in_one_batch_do_not_touch_each_other(pair: tuple[Model, torch.Tensor]) -> None:
    """A decode row, two prompt chunks, and padding, over shared pages, against each sequence alone."""
    model, want = pair
    cache = make_cache(model, 16, 4)
    a, b = [3, 9, 1, 12, 0, 7], [2, 15, 5, 4]
    model(torch.tensor(TOKENS[:20]), make_batch([(a, 0, 20)], 4), cache)
    shared = [*a[:2], 8, 6, 10, 11]  # a second sequence with the same first eight tokens: their pages are not written again
    batch = make_batch([(a, 20, 1), (b, 0, 9), (shared, 8, 15)], 4, padding=2)
    ids = [TOKENS[20], *TOKENS[:9], *TOKENS[8:23], 0, 0]
    hidden = model(torch.tensor(ids), batch, cache)
    got = model.logits(hidden[batch.logits_rows])
    assert got.shape == (25, 97)
    assert (got - torch.cat((want[20:21], want[:9], want[8:23]))).abs().max().item() < 1e-4
    assert torch.isfinite(hidden).all()


STORIES = SHARED / "models/stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no trained model at {STORIES}")
def test_trained_model_continues_as_recorded() -> None:
    """Greedy continuation of a published checkpoint: each recorded token is the likeliest after those before it."""
    recorded = json.loads((STORIES / "expected.json").read_text())
    prompt, greedy = recorded["prompt_token_ids"], recorded["greedy_token_ids"]
    logits = run_logits(load_model(STORIES, device="cpu"), [*prompt, *greedy[:-1]], 64, page_size=16)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == greedy
