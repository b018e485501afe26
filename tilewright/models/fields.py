"""The fields of config.json and generation_config.json: their types and bounds, checked before anything is built.

A damaged file must not cause a Python error deep inside, a loop over a hundred thousand layers, or a table of a billion
positions. The bounds are far above every published model, and low enough for a model within them to be described quickly.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tilewright.models.errors import ModelError

__all__ = ["MAX_LAYERS", "MAX_POSITIONS", "check_encoder_fields", "check_fields", "check_generation"]

MAX_LAYERS = 512
MAX_POSITIONS = 1 << 22
"""A table of angles for so many takes 2 GiB with heads of 128; the longest contexts of the supported families are a million."""

Width = Annotated[int, Field(ge=1, le=1 << 20)]
Tokens = Annotated[int, Field(ge=0, lt=1 << 31)]
Factor = Annotated[float, Field(gt=0, le=1e9)]
Positions = Annotated[int, Field(ge=1, le=MAX_POSITIONS)]
EndIds = Tokens | list[Tokens] | None


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Rope(_Fields):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Field(gt=0, le=1e18)] | None = None
    partial_rotary_factor: float | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    attention_factor: Factor | None = None
    mscale: Annotated[float, Field(ge=0, le=1e3)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e3)] | None = None
    truncate: bool | None = None
    short_factor: Annotated[list[Factor], Field(max_length=1 << 14)] | None = None
    alpha: Factor | None = None
    long_factor: Annotated[list[Factor], Field(max_length=1 << 14)] | None = None
    full_attention: "_Rope | None" = None
    sliding_attention: "_Rope | None" = None


class _Config(_Fields):
    architectures: list[str] | None = None
    vocab_size: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    hidden_size: Width | None = None
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    num_attention_heads: Annotated[int, Field(ge=1, le=1 << 14)] | None = None
    num_key_value_heads: Annotated[int, Field(ge=1, le=1 << 14)] | None = None
    head_dim: Annotated[int, Field(ge=1, le=1 << 14)] | None = None
    max_position_embeddings: Positions | None = None
    original_max_position_embeddings: Positions | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    rope_theta: Annotated[float, Field(gt=0, le=1e18)] | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float | None = None
    hidden_act: str | None = None
    attention_bias: bool | None = None
    layer_norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    layer_norm_epsilon: Annotated[float, Field(ge=0, le=1)] | None = None
    norm_epsilon: Annotated[float, Field(ge=0, le=1)] | None = None
    norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    n_embd: Width | None = None
    n_layer: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    n_head: Annotated[int, Field(ge=1, le=1 << 14)] | None = None
    n_positions: Positions | None = None
    n_inner: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    ffn_dim: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    word_embed_proj_dim: Width | None = None
    activation_function: str | None = None
    rotary_pct: float | None = None
    rotary_emb_base: Annotated[float, Field(gt=0, le=1e18)] | None = None
    use_qkv_bias: bool | None = None
    use_parallel_residual: bool | None = None
    qk_layernorm: bool | None = None
    scale_attn_weights: bool | None = None
    scale_attn_by_inverse_layer_idx: bool | None = None
    add_cross_attention: bool | None = None
    do_layer_norm_before: bool | None = None
    layer_norm_elementwise_affine: bool | None = None
    enable_bias: bool | None = None
    logit_scale: Factor | None = None
    attention_out_bias: bool | None = None
    use_bias: bool | None = None
    no_rope_layers: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None
    no_rope_layer_interval: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: EndIds = None
    eos_token_id: EndIds = None
    use_sliding_window: bool | None = None
    sliding_window: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    max_window_layers: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    layer_types: Annotated[list[str], Field(max_length=MAX_LAYERS)] | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    # Latent attention and mixtures of experts, by the names of several families.
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    rope_interleave: bool | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    moe_layer_freq: int | list[int] | None = None
    moe_intermediate_size: Width | None = None
    n_routed_experts: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    n_shared_experts: Annotated[int, Field(ge=1, le=1 << 10)] | None = None
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1 << 10)] | None = None
    n_group: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    topk_group: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    topk_method: str | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Factor | None = None
    num_experts: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    num_local_experts: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    decoder_sparse_step: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    mlp_only_layers: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    qkv_bias: bool | None = None
    use_qk_norm: bool | None = None
    clip_qkv: Factor | None = None
    moe_k: Annotated[int, Field(ge=1, le=1 << 10)] | None = None
    moe_num_experts: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    moe_num_shared_experts: Annotated[int, Field(ge=0, le=1 << 10)] | None = None
    moe_layer_start_index: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    moe_layer_end_index: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    moe_layer_interval: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    moe_norm_min: Annotated[float, Field(ge=0, le=1)] | None = None
    swiglu_alpha: Factor | None = None
    swiglu_limit: Factor | None = None
    # Caps, factors and windows of single families.
    hidden_activation: str | None = None
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    query_pre_attn_scalar: Factor | None = None
    attention_multiplier: Factor | None = None
    embedding_multiplier: Factor | None = None
    residual_multiplier: Factor | None = None
    logits_scaling: Factor | None = None
    rope_local_base_freq: Annotated[float, Field(gt=0, le=1e18)] | None = None
    sliding_window_pattern: (
        Annotated[int, Field(ge=0, le=MAX_LAYERS)] | Annotated[str, Field(pattern="^[LG]+$", max_length=MAX_LAYERS)] | None
    ) = None
    use_bidirectional_attention: bool | None = None


class _Generation(_Fields):
    """Of config.json too, where generation_config.json has none."""

    eos_token_id: EndIds = None
    bos_token_id: EndIds = None


class _Encoder(_Config):
    """Of an encoder's config.json, besides."""

    type_vocab_size: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    norm_bias: bool | None = None
    pad_token_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    position_embedding_type: str | None = None
    id2label: Annotated[dict[str, str], Field(max_length=1 << 16)] | None = None
    num_labels: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    is_decoder: bool | None = None
    local_attention: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    global_attn_every_n_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    global_rope_theta: Annotated[float, Field(gt=0, le=1e18)] | None = None
    local_rope_theta: Annotated[float, Field(gt=0, le=1e18)] | None = None
    classifier_pooling: str | None = None
    classifier_bias: bool | None = None
    classifier_activation: str | None = None
    is_matryoshka: bool | None = None
    matryoshka_dimensions: Annotated[list[Width], Field(max_length=1024)] | None = None


def check_encoder_fields(raw: Mapping[str, Any]) -> None:
    """Check the contents of an encoder's config.json, as `check_fields` does."""
    _check(raw, _Encoder, "config.json")


def check_fields(raw: Mapping[str, Any]) -> None:
    """Check the contents of config.json. Raises ModelError naming the field, what it is, and what it may be."""
    _check(raw, _Config, "config.json")


def check_generation(raw: Mapping[str, Any], file: str = "generation_config.json") -> None:
    """Check which tokens begin and end a text, in the contents of `file`. Raises ModelError."""
    _check(raw, _Generation, file)


def _check(raw: Mapping[str, Any], fields: type[_Fields], file: str) -> None:
    try:
        fields.model_validate(dict(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = [str(part) for part in first["loc"] if isinstance(part, int) or part in _KNOWN]
        wanted = first["msg"].removeprefix("Input should be ").replace("a valid ", "")
        raise ModelError(f"{file}: {'.'.join(names)} is {_short(first['input'])}, wanted {wanted}; {_ADVICE}") from None


_KNOWN = {*_Encoder.model_fields, *_Rope.model_fields}
"""Of a location in a union pydantic also names the branch."""
_ADVICE = "correct it, or download the model again"


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    words = repr(value) if not isinstance(value, str) else repr(value[:60])
    return words if len(words) <= 60 else words[:57] + "..."
