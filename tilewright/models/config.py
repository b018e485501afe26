"""The config of a model, resolved once from a Hugging Face folder's config.json and generation_config.json.

Reads the keys of transformers 5 (`rope_parameters`, `dtype`) and of 4 (`rope_theta`, `rope_scaling`, `torch_dtype`). After that
no defaults and no rules about windows are left to apply, so all code reads the same numbers.

Refuses, with the name: rope types and activations without an implementation, partially rotated heads in families that do not
have them, and quantised weights that `quantization.py` does not support. Settings of single families are read by `families.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.models.errors import ModelError
from tilewright.models.experts import Experts
from tilewright.models.families import extras, prepared
from tilewright.models.fields import check_fields, check_generation
from tilewright.models.latent import LATENT, Latent
from tilewright.models.quantization import Quantization
from tilewright.models.rotation import Rotation
from tilewright.ops.pointwise import rope_frequencies

__all__ = ["ACTIVATIONS", "SHAPES", "UNGATED", "ModelConfig", "ModelError", "architecture_of"]

ACTIVATIONS = {"gelu": "gelu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul", "silu": "silu_mul", "swish": "silu_mul"}
"""`hidden_act` -> the activation of a gated feed-forward layer."""
UNGATED = {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""`hidden_act` -> the activation of a feed-forward layer without a gate."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes and options, with their Hugging Face names.

    windows: for each layer, how many positions a token sees, including itself; None: all.
    rope_scaling: None, or "rope_type" and the numbers of that type.
    dtype: of the weights on disk.
    eos_token_ids: tokens that end a sequence; from generation_config.json if it has any.
    quantization: which weights are quantised, and in which layout; None: all weights are floats.
    latent: sizes of latent attention; None: ordinary keys and values. With it, `head_dim` is that of queries and keys.
    experts: sizes of the mixtures of experts; None: only dense layers.
    partial_rotary_factor: the share of a head's dims that is rotated.
    local_rope: theta and scaling for layers with a window; None: the same as for the others.
    attention_out_bias: whether the projection behind attention has a bias, in families where q, k and v may differ from it.
    head_norms: whether queries and keys are normalised by head, in families where that is a setting.
    gated: whether feed-forward layers have a gate.
    parallel_blocks: whether attention and feed-forward layer read the same stream, in families where that is a setting.
    unrotated: layers without rotary positions.
    attention_scale: factor on q . k; None: 1 / sqrt(head_dim).
    attention_softcap, logit_softcap: c in c tanh(x / c), for the scores and for the logits; None: no cap.
    embedding_scale, residual_scale, logit_scale: factors on the embedding, on a layer's output, and on the logits.
    text_part_of: the architecture of a checkpoint that also takes images, of which this is the text part alone.
    raw: the contents of config.json if it was read from one; a saved model gets the same file.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    gated: bool = True
    parallel_blocks: bool = False
    unrotated: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    partial_rotary_factor: float = 1.0
    local_rope: tuple[float, Mapping[str, Any] | None] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    text_part_of: str | None = field(default=None, compare=False)
    raw: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        known = ACTIVATIONS if self.gated else UNGATED
        if self.hidden_act not in known:
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(known)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads must be a multiple of num_key_value_heads; "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        self._check_rotation()
        if len(self.windows) != self.num_hidden_layers:
            raise ModelError(f"each of the {self.num_hidden_layers} layers needs a window; got {len(self.windows)} windows")

    def _check_rotation(self) -> None:
        for theta, scaling in self.ropes if len(self.unrotated) < self.num_hidden_layers else ():
            try:
                table = rope_frequencies(self.rotated_dim, theta, scaling, self.max_position_embeddings)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ModelError(f"config.json requires a rotary embedding that is not supported: {error}") from error
            frequencies, factor = table
            if not (bool(torch.isfinite(frequencies).all()) and 0 < factor < float("inf")):
                numbers = f"rope_theta {theta:g} and scaling {dict(scaling or {})}"
                raise ModelError(f"config.json requires a rotary embedding whose angles are not finite, with {numbers}")

    @property
    def ropes(self) -> tuple[tuple[float, Mapping[str, Any] | None], ...]:
        """(theta, scaling) of the model's layers, and those of layers with a window if they differ."""
        return ((self.rope_theta, self.rope_scaling), *(() if self.local_rope is None else (self.local_rope,)))

    def limited(self, positions: int) -> "ModelConfig":
        """The config of a model that never sees more positions; angles that depend on the length are computed for this one."""
        stretches = any((scaling or {}).get("rope_type") in ("dynamic", "longrope") for _, scaling in self.ropes)
        if not stretches or positions >= self.max_position_embeddings:
            return self
        return replace(self, max_position_embeddings=positions)

    @property
    def rotated_dim(self) -> int:
        """The number of dims of a head that are rotated by position."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def activation(self) -> str:
        """The activation of a feed-forward layer for `hidden_act`."""
        return (ACTIVATIONS if self.gated else UNGATED)[self.hidden_act]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Resolve the contents of config.json, and of generation_config.json if there is one.

        Raises:
            ModelError: a key is missing or needs something that is not supported; the message names it.
        """
        architecture = architecture_of(raw)
        check_fields(raw)
        check_generation(generation or {})
        given, raw = raw, prepared(architecture, raw)
        rope, local = Rotation.from_hf(architecture, raw)
        heads = _integer(raw, "num_attention_heads")
        latent = Latent.from_hf(raw, rope.scaling) if architecture in LATENT else None
        return cls(
            architecture=architecture,
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=_integer(raw, "hidden_size"),
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=_integer(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_integer(raw, "num_key_value_heads", default=heads),
            head_dim=_head_dim(raw, heads) if latent is None else latent.nope_dim + latent.rope_dim,
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            windows=_windows(raw),
            rms_norm_eps=1e-6 if raw.get("rms_norm_eps") is None else float(raw["rms_norm_eps"]),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            partial_rotary_factor=rope.partial,
            local_rope=None if local is None else (local.theta, local.scaling),
            hidden_act=raw.get("hidden_act") or "silu",
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=_dtype(raw),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_eos(raw, generation or {}),
            quantization=_quantization(raw),
            latent=latent,
            raw=given,
            **extras(architecture, raw),
        )


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The one architecture that config.json names. Raises ModelError if it does not name exactly one."""
    names = raw.get("architectures") or ()
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        got = repr(names)[:200]
        raise ModelError(f'config.json must name one architecture, like "architectures": ["LlamaForCausalLM"]; got {got}')
    return names[0]


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value}")
    return value


def _head_dim(raw: Mapping[str, Any], heads: int) -> int:
    hidden = _integer(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json has no head_dim, and hidden_size {hidden} does not divide into {heads} heads")
    return _integer(raw, "head_dim", default=hidden // heads)


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The rule of transformers: `layer_types`, or sliding windows from layer `max_window_layers` on, if windows are used."""
    layers = _integer(raw, "num_hidden_layers")
    used = raw.get("use_sliding_window", True) and raw.get("sliding_window") is not None
    window = _integer(raw, "sliding_window") if used else None
    first = raw.get("max_window_layers", 0)
    types = raw.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer_types {', '.join(unknown)} are not supported; supported: full_attention, sliding_attention")
    if len(types) != layers:
        raise ModelError(f"layer_types must have one entry for each of the {layers} layers; got {len(types)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """The quantisation config; older versions of compressed-tensors call it `compression_config`."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found and found.get("quant_method") == "mxfp4":
        return None  # only experts are quantised, and they are read as floats (forms.py)
    return Quantization.from_hf(found) if found else None


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def _shape(architecture: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], **rest: Any) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        windows=(None,) * layers,
        dtype=torch.bfloat16,
        **rest,
    )


_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "eos_token_ids": (151645, 151643)}
_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, ModelConfig] = {
    "qwen3-0.6b": _shape("Qwen3ForCausalLM", 28, 1024, 3072, (16, 8, 128), tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": _shape("Qwen3ForCausalLM", 36, 4096, 12288, (32, 8, 128), **_QWEN3),
    "llama-1b": _shape(
        "LlamaForCausalLM", 16, 2048, 8192, (32, 8, 64),
        tie_word_embeddings=True, rope_scaling={**_LLAMA3_SCALING, "factor": 32.0}, **_LLAMA3,
    ),
    "llama-3b": _shape(
        "LlamaForCausalLM", 28, 3072, 8192, (24, 8, 128),
        tie_word_embeddings=True, rope_scaling={**_LLAMA3_SCALING, "factor": 32.0}, **_LLAMA3,
    ),
    "llama-8b": _shape(
        "LlamaForCausalLM", 32, 4096, 14336, (32, 8, 128), rope_scaling={**_LLAMA3_SCALING, "factor": 8.0}, **_LLAMA3
    ),
}  # fmt: skip
"""Shapes of well-known models, for benchmarks with random weights."""
