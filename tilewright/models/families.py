"""Settings in config.json that only some model families have: special names, defaults, factors, mixtures of experts.

`prepared` renames fields and fills in defaults as in other families; `extras` reads the remaining settings.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.models import layer_norm_fields
from tilewright.models.defaults import DEFAULTS, GPT_OSS_ROPE
from tilewright.models.errors import ModelError
from tilewright.models.experts import Experts, check_count, positive, routing
from tilewright.models.latent import deepseek_experts

__all__ = ["extras", "prepared"]


def prepared(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json with the defaults of the family's config class, with the names that all families use.

    Raises:
        ModelError: a setting of the family has a value that is not supported.
    """
    known = {**DEFAULTS.get(architecture, {}), **raw}
    if architecture in _ALTERNATING:
        _fill_layer_types(known, architecture)
    if architecture in _PREPARERS:
        _PREPARERS[architecture](known)
    return known


_ALTERNATING = {
    "Cohere2ForCausalLM": 4, "Exaone4ForCausalLM": 4, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "GptOssForCausalLM": 2,
    "Olmo3ForCausalLM": 4,
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


def _prepare_gemma(raw: dict[str, Any]) -> None:
    raw["hidden_act"] = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention must be false (a decoder is causal), got true")


def _prepare_gpt_oss(raw: dict[str, Any]) -> None:
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw["rope_parameters"] = GPT_OSS_ROPE


def _prepare_olmo3(raw: dict[str, Any]) -> None:
    """Scaling is for layers without a window only."""
    raw.setdefault("rope_local_base_freq", raw["rope_theta"])


def _prepare_olmoe(raw: dict[str, Any]) -> None:
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv must be null (queries, keys and values are not clamped), got {raw['clip_qkv']}")


def _prepare_ernie4_5(raw: dict[str, Any]) -> None:
    raw["attention_bias"] = raw["mlp_bias"] = bool(raw.get("use_bias"))


def _prepare_ernie4_5_moe(raw: dict[str, Any]) -> None:
    if raw.get("use_bias"):
        raise ModelError("use_bias must be false in a mixture of experts, got true")


def _prepare_qwen2_moe(raw: dict[str, Any]) -> None:
    raw["attention_bias"] = bool(raw["qkv_bias"])  # of q, k and v
    if raw.get("layer_types") is None:  # every other one of the first layers has the window
        layers, below = raw.get("num_hidden_layers") or 0, raw["max_window_layers"]
        kinds = ("sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in range(layers))
        raw["layer_types"] = list(kinds)


def _prepare_qwen3_moe(raw: dict[str, Any]) -> None:
    """In transformers every layer has the window, if there is one."""
    raw["max_window_layers"] = 0


def _prepare_smollm3(raw: dict[str, Any]) -> None:
    """Layers without rotation, and the windows that these may have."""
    layers, every = raw.get("num_hidden_layers") or 0, raw["no_rope_layer_interval"]
    if raw.get("no_rope_layers") is None:
        raw["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
    if len(raw["no_rope_layers"]) < layers:
        raise ModelError(
            f"no_rope_layers must have one entry for each of the {layers} layers; got {len(raw['no_rope_layers'])}"
        )
    if raw.get("layer_types") is None:
        turned = raw["no_rope_layers"][:layers]
        raw["layer_types"] = ["full_attention" if turns else "sliding_attention" for turns in turned]


_PREPARERS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    **layer_norm_fields.PREPARE,
    "Ernie4_5ForCausalLM": _prepare_ernie4_5,
    "Ernie4_5_MoeForCausalLM": _prepare_ernie4_5_moe,
    "Gemma2ForCausalLM": _prepare_gemma,
    "Gemma3ForCausalLM": _prepare_gemma,
    "GptOssForCausalLM": _prepare_gpt_oss,
    "Olmo3ForCausalLM": _prepare_olmo3,
    "OlmoeForCausalLM": _prepare_olmoe,
    "Qwen2MoeForCausalLM": _prepare_qwen2_moe,
    "Qwen3MoeForCausalLM": _prepare_qwen3_moe,
    "SmolLM3ForCausalLM": _prepare_smollm3,
}


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
    return {"experts": Experts(**{"first_layer": 0, "shared": 0, **more}, inner=positive(raw, inner), routing=chosen)}


def _ernie4_5_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers, inner = raw.get("num_hidden_layers") or 0, positive(raw, "moe_intermediate_size")
    check_count(positive(raw, "moe_num_experts"), layers)
    if raw["moe_norm_min"] > 1e-6:
        raise ModelError(
            f"moe_norm_min must be at most 1e-6 (weights of experts are divided by their sum), got {raw['moe_norm_min']}"
        )
    chosen = routing(
        method="biased_softmax", experts=raw["moe_num_experts"], chosen=positive(raw, "moe_k"), normalise=True
    )  # fmt: skip
    last = layers - 1 if raw["moe_layer_end_index"] == -1 else raw["moe_layer_end_index"]
    dense = tuple(i for i in range(layers) if (i + 1) % raw["moe_layer_interval"] or i > last)
    shared = inner * (raw["moe_num_shared_experts"] or 0)
    first = raw["moe_layer_start_index"]
    return {"experts": Experts(first_layer=first, inner=inner, shared=shared, routing=chosen, dense_layers=dense)}


def _glm4_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**deepseek_experts(raw), "head_norms": bool(raw.get("use_qk_norm"))}


def _qwen2_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return _qwen3_moe(raw, shared=positive(raw, "shared_expert_intermediate_size"), shared_gate=True)


def _qwen3_moe(raw: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    step, given = positive(raw, "decoder_sparse_step"), set(raw.get("mlp_only_layers") or ())
    dense = tuple(i for i in range(raw.get("num_hidden_layers") or 0) if i in given or (i + 1) % step)
    return _experts_of(raw, "moe_intermediate_size", normalise=bool(raw["norm_topk_prob"]), dense_layers=dense, **more)


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


_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **layer_norm_fields.READ,
    "ArceeForCausalLM": lambda raw: {"gated": False},
    "Ernie4_5_MoeForCausalLM": _ernie4_5_moe,
    "Exaone4ForCausalLM": _exaone4,
    "SeedOssForCausalLM": lambda raw: {"attention_out_bias": bool(raw.get("attention_out_bias"))},
    "SmolLM3ForCausalLM": _smollm3,
    "DeepseekV2ForCausalLM": deepseek_experts,
    "DeepseekV3ForCausalLM": deepseek_experts,
    "Gemma2ForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "GraniteMoeForCausalLM": lambda raw: _granite(raw) | _experts_of(raw, "intermediate_size", normalise=True),
    "MixtralForCausalLM": lambda raw: _experts_of(raw, "intermediate_size", normalise=True),
    "OlmoeForCausalLM": lambda raw: _experts_of(raw, "intermediate_size", normalise=bool(raw["norm_topk_prob"])),
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
