"""The names of a model's parameters in Hugging Face checkpoints: one table for each architecture.

A table maps a parameter of a block, by its name in `models.decoder`, to its names below "model.layers.N." and its form there
(forms.py). A name with "{}" is repeated for each expert. Most architectures use `LLAMA` with some rows changed.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tilewright.models.forms import PARTS, PLUS_ONE, WHOLE, Experts, Form

__all__ = ["EMBED", "HEAD", "TABLES", "Stored", "stored"]


class Stored(NamedTuple):
    """The names of a parameter's tensors, and their form."""

    names: tuple[str, ...]
    form: Form = PARTS


class _Stacked(NamedTuple):
    """Stacked experts, whose number follows from the parameter; each has `projections` projections."""

    name: str
    projections: int


Row = tuple[str, ...] | Stored | _Stacked
Table = Mapping[str, Row]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {"embed.weight": EMBED, "norm.weight": "model.norm.weight", "head.weight": HEAD}

LLAMA: Table = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "attn.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attn.q_norm": ("self_attn.q_norm.weight",),
    "attn.k_norm": ("self_attn.k_norm.weight",),
    "attn.sinks": ("self_attn.sinks",),
    "attn.out.weight": ("self_attn.o_proj.weight",),
    "attn.out.bias": ("self_attn.o_proj.bias",),
    "hidden_norm.weight": ("hidden_norm.weight",),  # of a draft head
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "ffn.up.weight": ("mlp.up_proj.weight",),  # without a gate
    "ffn.up.bias": ("mlp.up_proj.bias",),
    "ffn.down.weight": ("mlp.down_proj.weight",),
    "ffn.down.bias": ("mlp.down_proj.bias",),
}
_ROUTED: Table = {
    "ffn.router.weight": ("mlp.gate.weight",),
    "ffn.experts_gate_up.weight": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "ffn.experts_down.weight": ("mlp.experts.{}.down_proj.weight",),
}
_DEEPSEEK: Table = {
    **LLAMA,
    **_ROUTED,
    "attn.q_norm.weight": ("self_attn.q_a_layernorm.weight",),
    "attn.down.weight": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "attn.down.bias": ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"),
    "attn.q_and_down.weight": ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "attn.q_up.weight": ("self_attn.q_b_proj.weight",),
    "attn.kv_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attn.kv_up": ("self_attn.kv_b_proj.weight",),
    "ffn.router.bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
_MIXTRAL: Table = {
    **LLAMA,
    "ffn.router.weight": ("block_sparse_moe.gate.weight",),
    "ffn.experts_gate_up.weight": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "ffn.experts_down.weight": ("block_sparse_moe.experts.{}.w2.weight",),
}
_GPT_OSS: Table = {
    **LLAMA,
    "ffn.router.weight": ("mlp.router.weight",),
    "ffn.router.logit_bias": ("mlp.router.bias",),
    "ffn.experts_gate_up.weight": _Stacked("mlp.experts.gate_up_proj", 2),
    "ffn.experts_gate_up.bias": _Stacked("mlp.experts.gate_up_proj_bias", 2),
    "ffn.experts_down.weight": _Stacked("mlp.experts.down_proj", 1),
    "ffn.experts_down.bias": _Stacked("mlp.experts.down_proj_bias", 1),
}
_PHI3: Table = {
    **LLAMA,
    "attn.qkv.weight": Stored(("self_attn.qkv_proj.weight",), WHOLE),
    "ffn.gate_up.weight": Stored(("mlp.gate_up_proj.weight",), WHOLE),
}
_GLM: Table = {**LLAMA, "ffn.gate_up.weight": Stored(("mlp.gate_up_proj.weight",), WHOLE)}
_GLM4: Table = {
    **_GLM,
    "attn_post_norm.weight": ("post_self_attn_layernorm.weight",),
    "ffn_post_norm.weight": ("post_mlp_layernorm.weight",),
}
_OLMO2: Table = {
    **LLAMA,
    "attn_post_norm.weight": ("post_attention_layernorm.weight",),
    "ffn_post_norm.weight": ("post_feedforward_layernorm.weight",),
}
_GEMMA: Table = {
    **LLAMA,
    "norm.weight": Stored(("model.norm.weight",), PLUS_ONE),
    "attn_norm.weight": Stored(("input_layernorm.weight",), PLUS_ONE),
    "attn_post_norm.weight": Stored(("post_attention_layernorm.weight",), PLUS_ONE),
    "ffn_norm.weight": Stored(("pre_feedforward_layernorm.weight",), PLUS_ONE),
    "ffn_post_norm.weight": Stored(("post_feedforward_layernorm.weight",), PLUS_ONE),
    "attn.q_norm": Stored(("self_attn.q_norm.weight",), PLUS_ONE),
    "attn.k_norm": Stored(("self_attn.k_norm.weight",), PLUS_ONE),
}

_HUNYUAN: Table = {
    **LLAMA,
    "attn.q_norm": ("self_attn.query_layernorm.weight",),
    "attn.k_norm": ("self_attn.key_layernorm.weight",),
}

TABLES: Mapping[str, Table] = {
    "ArceeForCausalLM": LLAMA,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Ernie4_5ForCausalLM": LLAMA,
    "Exaone4ForCausalLM": _OLMO2,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Glm4ForCausalLM": _GLM4,
    "GlmForCausalLM": _GLM,
    "GptOssForCausalLM": _GPT_OSS,
    "GraniteForCausalLM": LLAMA,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": _MIXTRAL,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "Phi3ForCausalLM": _PHI3,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": {**LLAMA, **_ROUTED},
    "SeedOssForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
}


def stored(architecture: str, parameter: str, parts: int, experts: int = 0) -> Stored:
    """The names and the form of a model's parameter in a checkpoint.

    Args:
        architecture: as in config.json.
        parameter: its path in the model.
        parts: the number of stacked parts of a merged parameter.
        experts: number of experts in the architecture's mixtures.
    """
    table = TABLES[architecture]
    if parameter in _OUTER:
        row = table.get(parameter, (_OUTER[parameter],))
        prefix = ""
    else:
        _, layer, inner = parameter.split(".", 2)
        row, prefix = table[inner], f"model.layers.{layer}."
    if isinstance(row, _Stacked):
        return Stored((prefix + row.name,), Experts(experts, row.projections))
    names, form = row if isinstance(row, Stored) else (row, PARTS)
    if "{}" in names[0]:
        names = tuple(name.format(expert) for expert in range(parts // len(names)) for name in names)
    return Stored(tuple(prefix + name for name in names), form)
