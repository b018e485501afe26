"""What the config classes of transformers fill in for fields that config.json leaves out."""

from collections.abc import Mapping
from typing import Any

from tilewright.models.latent import LATENT_DEFAULTS

__all__ = ["DEFAULTS", "GPT_OSS_ROPE"]

_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_GLM = {"use_sliding_window": False, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_QWEN3 = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}
_RMS_5 = {"use_sliding_window": False, "rms_norm_eps": 1e-5}

_ROPE_5E5 = {"use_sliding_window": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **LATENT_DEFAULTS,
    "ArceeForCausalLM": {**_RMS_5, "hidden_act": "relu2"},
    "Cohere2ForCausalLM": {"sliding_window": 4096, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "CohereForCausalLM": {
        "use_sliding_window": False, "rope_theta": 5e5, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    "Ernie4_5ForCausalLM": {**_ROPE_5E5, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    "Ernie4_5_MoeForCausalLM": {
        **_ROPE_5E5, "num_key_value_heads": 4, "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_norm_min": 1e-12,
    },
    "Exaone4ForCausalLM": {
        "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "GPT2LMHeadModel": {
        "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
    },
    "GPTNeoXForCausalLM": {
        "use_sliding_window": False, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True,
        "rotary_pct": 0.25, "attention_bias": True,
    },
    "Gemma2ForCausalLM": {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "Gemma3ForCausalLM": {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072},
    "Glm4ForCausalLM": {**_GLM, "attention_bias": True, "num_key_value_heads": 2},
    "Glm4MoeForCausalLM": {
        "use_sliding_window": False, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "GlmForCausalLM": {**_GLM, "attention_bias": True, "num_key_value_heads": 2},
    "GptOssForCausalLM": {
        "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True,
        "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    "GraniteForCausalLM": {"use_sliding_window": False},
    "GraniteMoeForCausalLM": {"use_sliding_window": False, "num_local_experts": 8, "num_experts_per_tok": 2},
    "HunYuanDenseV1ForCausalLM": _RMS_5,
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "NemotronForCausalLM": {
        "use_sliding_window": False, "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
    "OPTForCausalLM": {
        "activation_function": "relu", "ffn_dim": 3072, "do_layer_norm_before": True, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
    },
    "Olmo2ForCausalLM": _RMS_5,
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
    "OlmoeForCausalLM": {**_RMS_5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "PhiForCausalLM": {
        "use_sliding_window": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    },
    "Qwen2ForCausalLM": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen2MoeForCausalLM": {
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "qkv_bias": True,
    },
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": {
        "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
    },
    "SeedOssForCausalLM": {
        "use_sliding_window": False, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
        "max_position_embeddings": 524288,
    },
    "SmolLM3ForCausalLM": {
        "use_sliding_window": False, "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "no_rope_layer_interval": 4,
    },
    "StableLmForCausalLM": {
        "use_sliding_window": False, "num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
    },
    "Starcoder2ForCausalLM": {
        "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Architecture -> defaults of its config class in transformers, where families differ."""
