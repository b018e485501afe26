"""Configs of every decoder family for tests: random ones, and small ones with which an engine runs."""

import random
from typing import Any

__all__ = ["ENGINE", "random_config"]

ATTENTION_BIAS = (
    "arcee", "cohere", "cohere2", "gemma2", "gemma3", "glm", "glm4", "glm4-moe", "gpt-neox", "gpt-oss", "granite",
    "granite-moe", "hunyuan", "llama", "nemotron", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3-moe", "seed-oss", "smollm3",
)  # fmt: skip
MLP_BIAS = ("arcee", "granite", "llama", "nemotron", "seed-oss", "smollm3")
PARTIAL = ("glm", "glm4", "glm4-moe", "gpt-neox", "nemotron", "phi", "stablelm")
SWITCHES = {
    "ernie4.5": ["use_bias"],
    "glm4-moe": ["use_qk_norm", "norm_topk_prob"],
    "gpt-neox": ["use_parallel_residual"],
    "gpt2": ["scale_attn_weights"],
    "opt": ["enable_bias"],
    "qwen2-moe": ["qkv_bias"],
    "seed-oss": ["attention_out_bias"],
    "stablelm": ["use_parallel_residual", "use_qkv_bias"],
    "starcoder2": ["use_bias"],
}
WINDOWS_BY_LAYER = ("cohere2", "exaone4", "gemma2", "gemma3", "gpt-oss", "olmo3")
EPS = {"cohere": "layer_norm_eps", "cohere2": "layer_norm_eps", "gpt-neox": "layer_norm_eps", "gpt2": "layer_norm_epsilon"}
EPS |= {"nemotron": "norm_eps", "phi": "layer_norm_eps", "stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon"}


def random_config(family: str, seed: int) -> dict[str, Any]:
    """Sizes that nobody chose: odd numbers of heads, tied or not, with biases or not, windows, caps, factors."""
    rng = random.Random(f"{family} {seed}")
    groups, layers = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    heads, head_dim = groups * rng.choice((1, 2, 3)), rng.choice((8, 12, 16))
    found: dict[str, Any] = {
        "num_attention_heads": heads, "num_key_value_heads": groups, "num_hidden_layers": layers, "head_dim": head_dim,
        "hidden_size": heads * head_dim, "intermediate_size": rng.choice((20, 36, 50)), "vocab_size": rng.choice((61, 97)),
        "tie_word_embeddings": rng.random() < 0.5, "rms_norm_eps": rng.choice((1e-6, 1e-3)),
    }  # fmt: skip
    found |= _rope(rng, family)
    if family in ATTENTION_BIAS:
        found["attention_bias"] = rng.random() < 0.5
    if family in MLP_BIAS:
        found["mlp_bias"] = rng.random() < 0.5
    found |= {name: rng.random() < 0.5 for name in SWITCHES.get(family, ())}
    window = rng.choice((None, 3, 7))
    if family in WINDOWS_BY_LAYER:
        found |= {"sliding_window": window or 5, "layer_types": rng.choices(("sliding_attention", "full_attention"), k=layers)}
    elif family in ("mistral", "mixtral", "phi3", "starcoder2"):
        found["sliding_window"] = window
    if family == "smollm3":
        found |= {"no_rope_layers": rng.choices((0, 1), k=layers), "sliding_window": window, "use_sliding_window": True}
    if family in ("gpt-neox", "gpt2", "opt"):
        found["num_key_value_heads"] = heads
    if family in ("gpt2", "opt"):
        found[{"gpt2": "n_inner", "opt": "ffn_dim"}[family]] = found.pop("intermediate_size")
    if family in EPS:
        found[EPS[family]] = found.pop("rms_norm_eps")
    return found | _factors(rng, family) | _experts(rng, family)


def _rope(rng: random.Random, family: str) -> dict[str, Any]:
    theta = {"rope_theta": rng.choice((1e3, 1e4, 5e5))}
    if family in ("gpt2", "opt"):
        return {}
    if family in PARTIAL:
        return {"rope_parameters": {**theta, "rope_type": "default", "partial_rotary_factor": 0.5}}
    if family in ("gemma3", "olmo3"):
        full = {**theta, "rope_type": "default"}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 99.0}}}
    if family == "phi3":
        return {"rope_parameters": {**theta, "rope_type": "default", "partial_rotary_factor": rng.choice((0.5, 1.0))}}
    rope: dict[str, Any] = {
        **theta, "rope_type": rng.choice(("default", "linear", "dynamic", "llama3", "yarn")), "factor": 2.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    if rope["rope_type"] != "llama3":
        del rope["low_freq_factor"], rope["high_freq_factor"]
    return {"rope_parameters": rope}


def _factors(rng: random.Random, family: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.startswith("gemma"):
        found |= {"query_pre_attn_scalar": rng.choice((4, 10, 100)), "attn_logit_softcapping": None}
        found["final_logit_softcapping"] = rng.choice((None, 2.0))
        if family == "gemma2":
            found["attn_logit_softcapping"] = rng.choice((None, 1.0, 20.0))
    if family.startswith("granite"):
        names = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
        found |= {name: rng.choice((0.4, 1.0, 2.5)) for name in names}
    if family.startswith("cohere"):
        found["logit_scale"] = rng.choice((0.4, 1.0))
    return found


def _experts(rng: random.Random, family: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family in ("mixtral", "gpt-oss", "granite-moe"):
        found |= {"num_local_experts": rng.choice((3, 5)), "num_experts_per_tok": rng.choice((1, 3))}
    if family == "olmoe":
        found |= {"num_experts": 5, "num_experts_per_tok": rng.choice((1, 4)), "norm_topk_prob": rng.random() < 0.5}
    if family == "glm4-moe":
        found |= {"n_routed_experts": 6, "num_experts_per_tok": rng.choice((1, 2)), "moe_intermediate_size": 28}
        found |= {"n_group": rng.choice((1, 3)), "n_shared_experts": rng.choice((1, 2))}
        found |= {"first_k_dense_replace": rng.choice((0, 1)), "routed_scaling_factor": 1.5}
    if family == "ernie4.5-moe":
        found |= {"moe_num_experts": 6, "moe_k": rng.choice((1, 4)), "moe_num_shared_experts": rng.choice((0, 1, 2))}
        found |= {"moe_intermediate_size": 28, "moe_layer_interval": rng.choice((1, 2)), "moe_layer_start_index": 0}
    if family in ("qwen2-moe", "qwen3-moe"):
        found |= {"num_experts": 5, "num_experts_per_tok": rng.choice((1, 4)), "moe_intermediate_size": 28}
        found |= {"norm_topk_prob": rng.random() < 0.5, "decoder_sparse_step": rng.choice((1, 2))}
    if family == "qwen2-moe":
        found["shared_expert_intermediate_size"] = 20
    return found


ENGINE: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 9, "sliding_window_pattern": 2},
    "ernie4.5": {"head_dim": 16},
    "ernie4.5-moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20},
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 2},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0},
    "gemma3": {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4-moe": {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "gpt-neox": {"num_key_value_heads": 4},
    "gpt2": {},
    "gpt-oss": {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 0.5},
    "granite-moe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 0.5},
    "hunyuan": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {},
    "phi": {},
    "phi3": {"sliding_window": 20},
    "qwen2-moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3-moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "seed-oss": {"head_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_parallel_residual": True},
    "starcoder2": {"sliding_window": 9},
}
