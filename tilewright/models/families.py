"""Settings in config.json that only some model families have: special names, defaults, factors, mixtures of experts.

`prepared` renames fields and fills in defaults as in other families; `extras` reads the remaining settings.
"""

from collections.abc import Mapping
from typing import Any

from tilewright.models.errors import ModelError
from tilewright.models.experts import Experts, check_count, positive, routing
from tilewright.models.latent import LATENT_DEFAULTS, deepseek_experts

__all__ = ["extras", "prepared"]

_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_GLM = {"use_sliding_window": False, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_QWEN3 = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}
_RMS_5 = {"use_sliding_window": False, "rms_norm_eps": 1e-5}

# Defaults of the config classes in transformers that differ between families.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **LATENT_DEFAULTS,
    "Gemma2ForCausalLM": {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "Gemma3ForCausalLM": {**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072},
    "Glm4ForCausalLM": {**_GLM, "attention_bias": True, "num_key_value_heads": 2},
    "GlmForCausalLM": {**_GLM, "attention_bias": True, "num_key_value_heads": 2},
    "GptOssForCausalLM": {
        "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True,
        "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    "GraniteForCausalLM": {"use_sliding_window": False},
    "LlamaForCausalLM": {"use_sliding_window": False},
    "MistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "Olmo2ForCausalLM": _RMS_5,
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "Qwen2ForCausalLM": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": {
        "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1,
    },
}  # fmt: skip


def prepared(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json with the defaults of the family's config class, with the names that all families use.

    Raises:
        ModelError: attention is not causal.
    """
    known = {**_DEFAULTS.get(architecture, {}), **raw}
    if architecture in _ALTERNATING:
        _fill_layer_types(known, architecture)
    if architecture.startswith("Gemma"):
        known["hidden_act"] = known.get("hidden_activation") or "gelu_pytorch_tanh"
        if known.get("use_bidirectional_attention"):
            raise ModelError("use_bidirectional_attention must be false (a decoder is causal), got true")
    if architecture == "GptOssForCausalLM" and not (known.get("rope_parameters") or known.get("rope_scaling")):
        known["rope_parameters"] = _GPT_OSS_ROPE
    if architecture == "Qwen3MoeForCausalLM":
        known["max_window_layers"] = 0  # in transformers every layer has the window, if there is one
    return known


_ALTERNATING = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "GptOssForCausalLM": 2}
"""Every n-th layer has no window."""


def _fill_layer_types(raw: dict[str, Any], architecture: str) -> None:
    if not raw.get("layer_types"):
        every = raw.get("sliding_window_pattern") or _ALTERNATING[architecture]
        layers = raw.get("num_hidden_layers") or 0
        raw["layer_types"] = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]


def extras(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelConfig`, from prepared contents. Raises ModelError."""
    return _READERS[architecture](raw) if architecture in _READERS else {}


def _gemma(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logit_softcap": raw.get("final_logit_softcapping"),
        "embedding_scale": float(raw.get("hidden_size") or 1) ** 0.5,
    }


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    def factor(key: str) -> float:
        return 1.0 if raw.get(key) is None else float(raw[key])

    return {
        "attention_scale": factor("attention_multiplier"),
        "embedding_scale": factor("embedding_multiplier"),
        "residual_scale": factor("residual_multiplier"),
        "logit_scale": 1.0 / factor("logits_scaling"),
    }


def _experts_of(raw: Mapping[str, Any], inner: str, *, normalise: bool, **more: Any) -> dict[str, Any]:
    count = positive(raw, "num_local_experts" if raw.get("num_local_experts") is not None else "num_experts")
    check_count(count, raw.get("num_hidden_layers") or 0)
    chosen = routing(method="greedy", experts=count, chosen=positive(raw, "num_experts_per_tok"), normalise=normalise)
    return {"experts": Experts(first_layer=0, inner=positive(raw, inner), shared=0, routing=chosen, **more)}


def _qwen3_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    step, given = positive(raw, "decoder_sparse_step"), set(raw.get("mlp_only_layers") or ())
    dense = tuple(i for i in range(raw.get("num_hidden_layers") or 0) if i in given or (i + 1) % step)
    return _experts_of(raw, "moe_intermediate_size", normalise=bool(raw["norm_topk_prob"]), dense_layers=dense)


def _gpt_oss(raw: Mapping[str, Any]) -> dict[str, Any]:
    clamped = (float(raw["swiglu_alpha"]), float(raw["swiglu_limit"]))
    return _experts_of(raw, "intermediate_size", normalise=True, clamped=clamped)


_READERS = {
    "DeepseekV2ForCausalLM": deepseek_experts,
    "DeepseekV3ForCausalLM": deepseek_experts,
    "Gemma2ForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "MixtralForCausalLM": lambda raw: _experts_of(raw, "intermediate_size", normalise=True),
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
