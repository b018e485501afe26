"""The names of a model's parameters in Hugging Face checkpoints: one table for each architecture.

A table maps a parameter of a block, by its name in `models.decoder`, to its names below "model.layers.N." (or the prefix in
`_LAYERS`) and its form there (forms.py). A name with "{}" is repeated for each expert. Most architectures use `LLAMA` with
some rows changed.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tilewright.models.forms import ONE_ROW, PARTS, PLUS_ONE, TRANSPOSED, WHOLE, Bank, Experts, Form, PerHead

__all__ = ["TABLES", "Stored", "aliases", "ignored", "outer", "stored"]


class Stored(NamedTuple):
    """The names of a parameter's tensors, and their form."""

    names: tuple[str, ...]
    form: Form = PARTS


class _Stacked(NamedTuple):
    """Stacked experts, whose number follows from the parameter; each has `projections` projections."""

    name: str
    projections: int


class _Bank(NamedTuple):
    """All experts in one tensor, output before input."""

    name: str


class _PerHead(NamedTuple):
    """Queries, keys and values of a head follow each other."""

    name: str


class _Above(NamedTuple):
    """A tensor above the layers."""

    name: str


Row = tuple[str, ...] | Stored | _Stacked | _Bank | _PerHead | _Above
Table = Mapping[str, Row]

_OUTER = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "norm.bias": "model.norm.bias",
    "head.weight": "lm_head.weight", "head.bias": "lm_head.bias",
}  # fmt: skip

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
_BIASED: Table = {
    **LLAMA,
    **_ROUTED,
    "ffn.router.bias": ("mlp.gate.e_score_correction_bias",),
    "ffn.shared.gate_up.weight": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn.shared.down.weight": ("mlp.shared_experts.down_proj.weight",),
}
_DEEPSEEK: Table = {
    **_BIASED,
    "attn.q_norm.weight": ("self_attn.q_a_layernorm.weight",),
    "attn.down.weight": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "attn.down.bias": ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"),
    "attn.q_and_down.weight": ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "attn.q_up.weight": ("self_attn.q_b_proj.weight",),
    "attn.kv_norm.weight": ("self_attn.kv_a_layernorm.weight",),
    "attn.kv_up": ("self_attn.kv_b_proj.weight",),
}
_ERNIE4_5_MOE: Table = {
    **_BIASED,
    "ffn.router.bias": Stored(("mlp.moe_statics.e_score_correction_bias",), ONE_ROW),
}
_QWEN2_MOE: Table = {
    **LLAMA,
    **_ROUTED,
    "ffn.shared_gate": ("mlp.shared_expert_gate.weight",),
    "ffn.shared.gate_up.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "ffn.shared.down.weight": ("mlp.shared_expert.down_proj.weight",),
}
_GRANITE_MOE: Table = {
    **LLAMA,
    "ffn.router.weight": ("block_sparse_moe.router.layer.weight",),
    "ffn.experts_gate_up.weight": _Bank("block_sparse_moe.input_linear.weight"),
    "ffn.experts_down.weight": _Bank("block_sparse_moe.output_linear.weight"),
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

_NORM_BIASES: Table = {
    "attn_norm.bias": ("input_layernorm.bias",),
    "ffn_norm.bias": ("post_attention_layernorm.bias",),
}
_STABLELM: Table = {**LLAMA, **_NORM_BIASES}
_NEMOTRON: Table = {
    **_STABLELM,
    "norm.weight": Stored(("model.norm.weight",), PLUS_ONE),
    "attn_norm.weight": Stored(("input_layernorm.weight",), PLUS_ONE),
    "ffn_norm.weight": Stored(("post_attention_layernorm.weight",), PLUS_ONE),
}


def _mlp(up: str, down: str) -> Table:
    """A feed-forward layer without a gate."""
    return {f"ffn.{own}.{kind}": (f"{name}.{kind}",) for own, name in (("up", up), ("down", down)) for kind in _KINDS}


_KINDS = ("weight", "bias")
_STARCODER2: Table = {**_STABLELM, **_mlp("mlp.c_fc", "mlp.c_proj")}
_PHI: Table = {
    **_STABLELM,
    **_mlp("mlp.fc1", "mlp.fc2"),
    **{f"attn.out.{kind}": (f"self_attn.dense.{kind}",) for kind in _KINDS},
    **{f"norm.{kind}": (f"model.final_layernorm.{kind}",) for kind in _KINDS},
}
_GPT_NEOX: Table = {
    **_STABLELM,
    **_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    **{f"attn.qkv.{kind}": _PerHead(f"attention.query_key_value.{kind}") for kind in _KINDS},
    **{f"attn.out.{kind}": (f"attention.dense.{kind}",) for kind in _KINDS},
    **{f"norm.{kind}": (f"gpt_neox.final_layer_norm.{kind}",) for kind in _KINDS},
    "embed.weight": ("gpt_neox.embed_in.weight",),
    "head.weight": ("embed_out.weight",),
}
_GPT2: Table = {
    **{f"attn_norm.{kind}": (f"ln_1.{kind}",) for kind in _KINDS},
    **{f"ffn_norm.{kind}": (f"ln_2.{kind}",) for kind in _KINDS},
    "attn.qkv.weight": Stored(("attn.c_attn.weight",), TRANSPOSED),
    "attn.qkv.bias": Stored(("attn.c_attn.bias",), WHOLE),
    "attn.out.weight": Stored(("attn.c_proj.weight",), TRANSPOSED),
    "attn.out.bias": ("attn.c_proj.bias",),
    "ffn.up.weight": Stored(("mlp.c_fc.weight",), TRANSPOSED),
    "ffn.up.bias": ("mlp.c_fc.bias",),
    "ffn.down.weight": Stored(("mlp.c_proj.weight",), TRANSPOSED),
    "ffn.down.bias": ("mlp.c_proj.bias",),
    **{f"norm.{kind}": (f"transformer.ln_f.{kind}",) for kind in _KINDS},
    "embed.weight": ("transformer.wte.weight",),
    "positions.weight": _Above("transformer.wpe.weight"),
}
_OPT: Table = {
    **LLAMA,
    **_mlp("fc1", "fc2"),
    **{f"attn_norm.{kind}": (f"self_attn_layer_norm.{kind}",) for kind in _KINDS},
    **{f"ffn_norm.{kind}": (f"final_layer_norm.{kind}",) for kind in _KINDS},
    **{f"attn.out.{kind}": (f"self_attn.out_proj.{kind}",) for kind in _KINDS},
    **{f"norm.{kind}": (f"model.decoder.final_layer_norm.{kind}",) for kind in _KINDS},
    "embed.weight": ("model.decoder.embed_tokens.weight",),
    "positions.weight": _Above("model.decoder.embed_positions.weight"),
}

_LAYERS: Mapping[str, str] = {
    "GPT2LMHeadModel": "transformer.h.",
    "GPTNeoXForCausalLM": "gpt_neox.layers.",
    "OPTForCausalLM": "model.decoder.layers.",
}
"""The prefix of layers, where it is not "model.layers."."""

_IGNORED: Mapping[str, tuple[str, ...]] = {
    "GPT2LMHeadModel": (".attn.bias", ".attn.masked_bias"),
    "GPTNeoXForCausalLM": (".attention.bias", ".attention.masked_bias"),
}
"""Endings of tensors that old checkpoints have, and no model needs: masks."""
_BESIDE: Mapping[str, str] = {"Ernie4_5_MoeForCausalLM": "model.mtp_"}
"""Beginnings of tensors that predict a second token, which is not supported."""

TABLES: Mapping[str, Table] = {
    "ArceeForCausalLM": LLAMA,
    "Cohere2ForCausalLM": LLAMA,
    "CohereForCausalLM": LLAMA,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Ernie4_5ForCausalLM": LLAMA,
    "Ernie4_5_MoeForCausalLM": _ERNIE4_5_MOE,
    "Exaone4ForCausalLM": _OLMO2,
    "GPT2LMHeadModel": _GPT2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Glm4ForCausalLM": _GLM4,
    "Glm4MoeForCausalLM": _BIASED,
    "GlmForCausalLM": _GLM,
    "GptOssForCausalLM": _GPT_OSS,
    "GraniteForCausalLM": LLAMA,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": _MIXTRAL,
    "NemotronForCausalLM": _NEMOTRON,
    "OPTForCausalLM": _OPT,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "OlmoeForCausalLM": {**LLAMA, **_ROUTED},
    "Phi3ForCausalLM": _PHI3,
    "PhiForCausalLM": _PHI,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3ForCausalLM": LLAMA,
    "Qwen3MoeForCausalLM": {**LLAMA, **_ROUTED},
    "SeedOssForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
    "StableLmForCausalLM": _STABLELM,
    "Starcoder2ForCausalLM": _STARCODER2,
}


def outer(architecture: str) -> tuple[str, str]:
    """The names of embedding and head."""
    return stored(architecture, "embed.weight", 1).names[0], stored(architecture, "head.weight", 1).names[0]


def ignored(architecture: str, name: str) -> bool:
    """Whether a tensor of a checkpoint is none of the model's, and harmless."""
    if architecture in _BESIDE and name.startswith(_BESIDE[architecture]):
        return True
    return name.endswith((".rotary_emb.inv_freq", *_IGNORED.get(architecture, ())))


def aliases(architecture: str, names: Iterable[str]) -> dict[str, str]:
    """The names in the tables -> those in a checkpoint, for checkpoints whose names differ from the tables; else empty."""
    found = list(names)
    if architecture == "GPT2LMHeadModel" and not any(name.startswith("transformer.") for name in found):
        return {name if name.startswith("lm_head.") else f"transformer.{name}": name for name in found}
    return {}


def stored(architecture: str, parameter: str, parts: int, experts: int = 0, heads: int = 0) -> Stored:
    """The names and the form of a model's parameter in a checkpoint.

    Args:
        architecture: as in config.json.
        parameter: its path in the model.
        parts: the number of stacked parts of a merged parameter.
        experts: number of experts in the architecture's mixtures.
        heads: number of query heads.
    """
    table = TABLES[architecture]
    if parameter in _OUTER:
        row = table.get(parameter, (_OUTER[parameter],))
        prefix = ""
    else:
        _, layer, inner = parameter.split(".", 2)
        row, prefix = table[inner], f"{_LAYERS.get(architecture, 'model.layers.')}{layer}."
    if isinstance(row, _Above):
        return Stored((row.name,))
    if isinstance(row, _PerHead):
        return Stored((prefix + row.name,), PerHead(heads))
    if isinstance(row, _Stacked):
        return Stored((prefix + row.name,), Experts(experts, row.projections))
    if isinstance(row, _Bank):
        return Stored((prefix + row.name,), Bank(experts))
    names, form = row if isinstance(row, Stored) else (row, PARTS)
    if "{}" in names[0]:
        names = tuple(name.format(expert) for expert in range(parts // len(names)) for name in names)
    return Stored(tuple(prefix + name for name in names), form)
