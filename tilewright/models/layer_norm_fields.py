"""Settings in config.json of families with layer norms (layer_norms.py): their names for common fields, and refusals."""

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.models.errors import ModelError

__all__ = ["PREPARE", "READ"]


def _must(raw: Mapping[str, Any], key: str, wanted: bool, why: str) -> None:
    """Refuse another value of a switch; what is left out counts as wanted."""
    if raw.get(key) is not None and raw[key] != wanted:
        raise ModelError(f"{key} must be {str(wanted).lower()} ({why}), got {str(raw[key]).lower()}")


def _alike_heads(raw: dict[str, Any]) -> None:
    """As many heads for keys and values as for queries, whose size follows from the width."""
    raw["num_key_value_heads"], raw["head_dim"] = raw.get("num_attention_heads"), None


def _cohere(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"] = raw["layer_norm_eps"]
    _must(raw, "use_qk_norm", False, "layer norms over heads are not supported")


def _cohere2(raw: dict[str, Any]) -> None:
    _cohere(raw)
    raw["head_dim"] = None  # it follows from the width


def _stablelm(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"], raw["attention_bias"] = raw["layer_norm_eps"], bool(raw.get("use_qkv_bias"))
    raw["head_dim"] = None
    _must(raw, "qk_layernorm", False, "layer norms over heads are not supported")


def _starcoder2(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"] = raw["norm_epsilon"]
    raw["attention_bias"] = raw["mlp_bias"] = bool(raw["use_bias"])


def _gpt_neox(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"], raw["mlp_bias"] = raw["layer_norm_eps"], True
    raw["rope_theta"] = raw.get("rotary_emb_base") or raw.get("rope_theta")
    raw["partial_rotary_factor"] = raw.get("rotary_pct") or 0.25
    _alike_heads(raw)


def _phi(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"], raw["attention_bias"], raw["mlp_bias"] = raw["layer_norm_eps"], True, True
    _must(raw, "qk_layernorm", False, "layer norms over heads are not supported")


def _nemotron(raw: dict[str, Any]) -> None:
    raw["rms_norm_eps"] = raw["norm_eps"]


def _gpt2(raw: dict[str, Any]) -> None:
    _must(raw, "scale_attn_by_inverse_layer_idx", False, "scales that differ by layer are not supported")
    _must(raw, "add_cross_attention", False, "cross-attention is not supported")
    raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"] = raw["n_embd"], raw["n_layer"], raw["n_head"]
    raw["max_position_embeddings"], raw["hidden_act"] = raw["n_positions"], raw["activation_function"]
    raw["intermediate_size"] = 4 * (raw["n_embd"] or 0) if raw.get("n_inner") is None else raw["n_inner"]
    raw["rms_norm_eps"], raw["attention_bias"], raw["mlp_bias"] = raw["layer_norm_epsilon"], True, True
    raw["use_sliding_window"] = False
    _alike_heads(raw)


def _opt(raw: dict[str, Any]) -> None:
    _must(raw, "do_layer_norm_before", True, "norms after the layers are not supported")
    _must(raw, "_remove_final_layer_norm", False, "a model without this norm is not supported")
    _must(raw, "layer_norm_elementwise_affine", True, "norms without weights are not supported")
    width = raw.get("word_embed_proj_dim")
    if width is not None and width != raw.get("hidden_size"):
        raise ModelError(
            f"word_embed_proj_dim is {width}, but must be hidden_size, {raw.get('hidden_size')}, because a projection is "
            "not supported"
        )
    raw["intermediate_size"], raw["hidden_act"], raw["rms_norm_eps"] = raw["ffn_dim"], raw["activation_function"], 1e-5
    raw["attention_bias"] = raw["mlp_bias"] = bool(raw["enable_bias"])
    raw["use_sliding_window"] = False
    _alike_heads(raw)


def _read_cohere(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": 1.0 if raw.get("logit_scale") is None else float(raw["logit_scale"])}


def _read_cohere2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Only layers with a window have a rotation."""
    windows = raw.get("sliding_window") is not None
    still = (i for i, kind in enumerate(raw["layer_types"]) if kind != "sliding_attention" or not windows)
    return {**_read_cohere(raw), "unrotated": tuple(still)}


def _read_learned(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Learned positions, so no layer has a rotation."""
    scale = {} if raw.get("scale_attn_weights") is not False else {"attention_scale": 1.0}
    return {**scale, "gated": False, "unrotated": tuple(range(raw.get("num_hidden_layers") or 0))}


PREPARE: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "Cohere2ForCausalLM": _cohere2,
    "CohereForCausalLM": _cohere,
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
    "NemotronForCausalLM": _nemotron,
    "OPTForCausalLM": _opt,
    "PhiForCausalLM": _phi,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
}
"""Architecture -> what fills in the names that all families use."""

READ: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "Cohere2ForCausalLM": _read_cohere2,
    "CohereForCausalLM": _read_cohere,
    "GPT2LMHeadModel": _read_learned,
    "GPTNeoXForCausalLM": lambda raw: {"gated": False, "parallel_blocks": bool(raw["use_parallel_residual"])},
    "NemotronForCausalLM": lambda raw: {"gated": False},
    "OPTForCausalLM": _read_learned,
    "PhiForCausalLM": lambda raw: {"gated": False},
    "StableLmForCausalLM": lambda raw: {"parallel_blocks": bool(raw.get("use_parallel_residual"))},
    "Starcoder2ForCausalLM": lambda raw: {"gated": False},
}
"""Architecture -> what reads its arguments of `ModelConfig`."""
