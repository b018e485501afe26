"""Settings in config.json that only some model families have: special names, defaults, factors, mixtures of experts.

`prepared` renames fields and fills in defaults as in other families; `extras` reads the remaining settings.
"""

from collections.abc import Mapping
from typing import Any

from tilewright.models.defaults import DEFAULTS, GPT_OSS_ROPE
from tilewright.models.errors import ModelError
from tilewright.models.experts import Experts, check_count, positive, routing
from tilewright.models.latent import deepseek_experts

__all__ = ["extras", "prepared"]


def prepared(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json with the defaults of the family's config class, with the names that all families use.

    Raises:
        ModelError: attention is not causal.
    """
    known = {**DEFAULTS.get(architecture, {}), **raw}
    if architecture in _ALTERNATING:
        _fill_layer_types(known, architecture)
    if architecture.startswith("Gemma"):
        known["hidden_act"] = known.get("hidden_activation") or "gelu_pytorch_tanh"
        if known.get("use_bidirectional_attention"):
            raise ModelError("use_bidirectional_attention must be false (a decoder is causal), got true")
    if architecture == "GptOssForCausalLM" and not (known.get("rope_parameters") or known.get("rope_scaling")):
        known["rope_parameters"] = GPT_OSS_ROPE
    if architecture == "Olmo3ForCausalLM":
        # Scaling is for layers without a window only.
        known.setdefault("rope_local_base_freq", known["rope_theta"])
    if architecture == "Ernie4_5ForCausalLM":
        known["attention_bias"] = known["mlp_bias"] = bool(known.get("use_bias"))
    if architecture == "SmolLM3ForCausalLM":
        _fill_smollm3(known)
    if architecture == "Qwen3MoeForCausalLM":
        known["max_window_layers"] = 0  # in transformers every layer has the window, if there is one
    return known


_ALTERNATING = {
    "Exaone4ForCausalLM": 4, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "GptOssForCausalLM": 2, "Olmo3ForCausalLM": 4,
}  # fmt: skip
"""Every n-th layer has no window."""


def _fill_layer_types(raw: dict[str, Any], architecture: str) -> None:
    if not raw.get("layer_types"):
        every = raw.get("sliding_window_pattern") or _ALTERNATING[architecture]
        layers = raw.get("num_hidden_layers") or 0
        if isinstance(every, str):  # one letter a layer, L for a window and G for none, repeated; the last layer has none
            windowed = [every[i % len(every)] == "L" and i < layers - 1 for i in range(layers)]
            raw["layer_types"] = ["sliding_attention" if has else "full_attention" for has in windowed]
            return
        raw["layer_types"] = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]


def _fill_smollm3(raw: dict[str, Any]) -> None:
    """Layers without rotation, and the windows that these may have."""
    layers, every = raw.get("num_hidden_layers") or 0, raw["no_rope_layer_interval"]
    if raw.get("no_rope_layers") is None:
        raw["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
    if len(raw["no_rope_layers"]) < layers:
        raise ModelError(f"no_rope_layers must have one entry a layer, {layers} in all; got {len(raw['no_rope_layers'])}")
    if raw.get("layer_types") is None:
        turned = raw["no_rope_layers"][:layers]
        raw["layer_types"] = ["full_attention" if turns else "sliding_attention" for turns in turned]


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


def _smollm3(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers = raw.get("num_hidden_layers") or 0
    return {"unrotated": tuple(i for i, turns in enumerate(raw["no_rope_layers"][:layers]) if not turns)}


def _exaone4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """In a model with windows, layers without one have no rotation."""
    if raw.get("sliding_window") is None:
        return {}
    return {"unrotated": tuple(i for i, kind in enumerate(raw["layer_types"]) if kind == "full_attention")}


_READERS = {
    "ArceeForCausalLM": lambda raw: {"gated": False},
    "Exaone4ForCausalLM": _exaone4,
    "SeedOssForCausalLM": lambda raw: {"attention_out_bias": bool(raw.get("attention_out_bias"))},
    "SmolLM3ForCausalLM": _smollm3,
    "DeepseekV2ForCausalLM": deepseek_experts,
    "DeepseekV3ForCausalLM": deepseek_experts,
    "Gemma2ForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "MixtralForCausalLM": lambda raw: _experts_of(raw, "intermediate_size", normalise=True),
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
