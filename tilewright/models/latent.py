"""Settings of a DeepSeek config.json that other families do not have: latent attention and mixtures of experts.

Refuses, with the name: other kinds of routing, experts that are not in every layer after the dense ones, quantised weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.models.errors import ModelError
from tilewright.models.experts import Experts, check_count, positive, routing

__all__ = ["LATENT", "LATENT_DEFAULTS", "Latent", "deepseek_experts"]

LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures with latent attention."""

_COMMON = {"use_sliding_window": False, "rope_interleave": True, "num_experts_per_tok": 8, "hidden_act": "silu"}
# What the config classes of transformers fill in.
LATENT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **_COMMON, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64,
        "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "moe_intermediate_size": 1407,
    },
    "DeepseekV3ForCausalLM": {
        **_COMMON, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256,
        "n_shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_intermediate_size": 2048,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of `nn.MLA`.

    q_rank: of the queries' down-projection; None for none.
    score_factor: what yarn multiplies the scores by, beside 1 / sqrt(nope_dim + rope_dim).
    """

    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    interleaved: bool = True
    score_factor: float = 1.0

    @property
    def cached(self) -> int:
        """Numbers that the cache holds of a token and layer."""
        return self.kv_rank + self.rope_dim

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> "Latent":
        """`scaling` is the config's, resolved. Raises ModelError."""
        if raw.get("quantization_config") or raw.get("compression_config"):
            raise ModelError(
                "quantised checkpoints of DeepSeek models are not supported (quantization_config); use one in bfloat16"
            )
        if raw.get("attention_bias") and raw.get("q_lora_rank") is None:
            raise ModelError(
                "attention_bias without q_lora_rank is not supported, because only part of a merged projection would "
                "have a bias"
            )
        weight = (scaling or {}).get("mscale_all_dim")
        factor = (scaling or {}).get("factor", 1.0)
        # DeepSeek's yarn sharpens the softmax: (0.1 m ln factor + 1)^2, for queries and for keys.
        sharper = (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1 else 1.0
        return cls(
            nope_dim=positive(raw, "qk_nope_head_dim"),
            rope_dim=positive(raw, "qk_rope_head_dim"),
            value_dim=positive(raw, "v_head_dim"),
            kv_rank=positive(raw, "kv_lora_rank"),
            q_rank=None if raw.get("q_lora_rank") is None else positive(raw, "q_lora_rank"),
            interleaved=bool(raw["rope_interleave"]),
            score_factor=sharper,
        )


def deepseek_experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The mixtures of a DeepSeek model, as an argument of `ModelConfig`. Raises ModelError."""
    if raw.get("moe_layer_freq", 1) != 1:
        raise ModelError(
            f"moe_layer_freq is {raw['moe_layer_freq']}, but must be 1 (experts in every layer after the dense ones)"
        )
    inner = positive(raw, "moe_intermediate_size")
    method = raw["topk_method"]
    grouped = method != "greedy"
    chosen = routing(
        method=method,
        experts=positive(raw, "n_routed_experts"),
        chosen=positive(raw, "num_experts_per_tok"),
        groups=positive(raw, "n_group") if grouped else 1,
        chosen_groups=positive(raw, "topk_group") if grouped else 1,
        # DeepSeek-V2's code has the switch, its published models and transformers do not use it.
        normalise=bool(raw.get("norm_topk_prob")) and method == "noaux_tc",
        scale=float(raw["routed_scaling_factor"]),
    )
    check_count(chosen.experts, raw.get("num_hidden_layers") or 0)
    first = raw["first_k_dense_replace"]
    if not isinstance(first, int) or first < 0:
        raise ModelError(f"config.json: first_k_dense_replace must be a number of layers, got {first}")
    shared = inner * positive(raw, "n_shared_experts")
    return {"experts": Experts(first_layer=first, inner=inner, shared=shared, routing=chosen)}
