"""Loads encoders: from a Hugging Face folder to a model that returns features of tokens, and scores if it has a head for them.

`ENCODERS` lists what is supported. Modules have the names of transformers, so a checkpoint's tensors are looked up by the
parameters' names, with or without the prefix ("bert.", "roberta.", "model."). Heads for masked words are not loaded.

Not supported: relative positions, cross attention, quantised folders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.models.config import architecture_of
from tilewright.models.encoder import Bert
from tilewright.models.errors import ModelError, unknown
from tilewright.models.fields import check_encoder_fields
from tilewright.models.files import read_json
from tilewright.models.forms import FLOATS
from tilewright.models.modernbert import ModernBert
from tilewright.models.weights import Checkpoint
from tilewright.nn import LayerNorm, Lengths, Linear, unfilled

__all__ = ["ENCODERS", "Encoder", "EncoderConfig", "is_encoder", "load_encoder", "matryoshka", "means"]

# T tokens, B sequences, E features, L labels

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder.

    max_tokens: the longest sequence.
    token_types: kinds of tokens that it tells apart, as those of two texts.
    labels: scores of a sequence; 0 where the model has no head for them.
    pair_activation: "sigmoid" or "none": what a score of one label goes through, as the folder says.
    dimensions: to which an embedding may be cut; None: to none, () to any.
    raw: the contents of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_tokens: int
    token_types: int
    labels: int
    pair_activation: str
    dimensions: tuple[int, ...] | None
    dtype: torch.dtype
    raw: Mapping[str, Any]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "EncoderConfig":
        """From the contents of config.json. Raises ModelError."""
        architecture = architecture_of(raw)
        if architecture not in ENCODERS:
            raise ModelError(unknown(architecture, ENCODERS))
        check_encoder_fields(raw)
        for key, wanted in (("position_embedding_type", "absolute"), ("is_decoder", False)):
            if raw.get(key) not in (None, wanted):
                raise ModelError(f"config.json: {key} is {raw[key]!r}, wanted {wanted!r}: nothing else is supported")
        if raw.get("quantization_config"):
            raise ModelError("quantised encoders are not supported (quantization_config); use an unquantised folder")
        labels = len(raw["id2label"]) if raw.get("id2label") else int(raw.get("num_labels") or 2)
        activation = str((raw.get("sentence_transformers") or {}).get("activation_fn") or "")
        name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
        if name not in dtypes:
            raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(dtypes)}")
        return cls(
            architecture=architecture,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=_size(raw, "hidden_size"),
            max_tokens=_size(raw, "max_position_embeddings") - _first_position(architecture, raw),
            token_types=1 if architecture.startswith("ModernBert") else int(raw.get("type_vocab_size") or 2),
            labels=labels if architecture.endswith("SequenceClassification") else 0,
            pair_activation="none" if activation.endswith("Identity") else "sigmoid",
            dimensions=matryoshka(raw),
            dtype=dtypes[name],
            raw=raw,
        )


def matryoshka(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """To which sizes a config.json says that an embedding may be cut: None for none, () for any."""
    if raw.get("matryoshka_dimensions"):
        return tuple(raw["matryoshka_dimensions"])
    return () if raw.get("is_matryoshka") else None


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value}")
    return value


def _first_position(architecture: str, raw: Mapping[str, Any]) -> int:
    return int(raw.get("pad_token_id") or 0) + 1 if "oberta" in architecture.lower() else 0


class Encoder(nn.Module):
    """A body, and a head where there is one, under the names of the checkpoint.

    Args:
        config: the sizes.
        prefix: the body's name.
        body: (ids, lengths, positions, token types) -> [T, E].
        heads: the head's modules by their names.
        head: ([T, E], lengths) -> [B, L]; None for none.
    """

    def __init__(
        self, config: EncoderConfig, prefix: str, body: Bert | ModernBert, heads: Mapping[str, nn.Module] | None = None
    ):
        super().__init__()
        self.config, self.prefix = config, prefix
        self.add_module(prefix, body)
        for name, module in (heads or {}).items():
            self.add_module(name, module)

    @property
    def device(self) -> torch.device:
        """Of its parameters."""
        return next(self.parameters()).device

    def forward(self, ids: Tensor, lengths: Lengths, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Packed [T] int64 each -> [T, E]. Positions begin at 0 in each sequence."""
        body = self.get_submodule(self.prefix)
        if isinstance(body, Bert):
            return body(ids, lengths, positions, token_types)[0]
        return body(ids, lengths, positions)

    def logits(self, hidden: Tensor, lengths: Lengths) -> Tensor:
        """[T, E] -> [B, L]; only of a model with a head."""
        return _HEADS[self.prefix](self, hidden, lengths)


def _firsts(hidden: Tensor, lengths: Lengths) -> Tensor:
    return hidden[lengths.cu[:-1].long()]


def _bert_logits(model: Encoder, hidden: Tensor, lengths: Lengths) -> Tensor:
    body = model.get_submodule(model.prefix)
    assert isinstance(body, Bert)
    assert body.pooler is not None
    pooled = ops.activation(body.pooler["dense"](_firsts(hidden, lengths)), "tanh")
    return model.get_submodule("classifier")(pooled)


def _roberta_logits(model: Encoder, hidden: Tensor, lengths: Lengths) -> Tensor:
    dense, out = (model.get_submodule(f"classifier.{name}") for name in ("dense", "out_proj"))
    return out(ops.activation(dense(_firsts(hidden, lengths)), "tanh"))


def _modernbert_logits(model: Encoder, hidden: Tensor, lengths: Lengths) -> Tensor:
    raw = model.config.raw
    pooled = means(hidden, lengths) if raw.get("classifier_pooling") == "mean" else _firsts(hidden, lengths)
    activation = _activation(raw.get("classifier_activation") or "gelu")
    dense, norm = model.get_submodule("head.dense"), model.get_submodule("head.norm")
    return model.get_submodule("classifier")(norm(dense(pooled, activation)))


_HEADS: Mapping[str, Callable[[Encoder, Tensor, Lengths], Tensor]] = {
    "bert": _bert_logits,
    "roberta": _roberta_logits,
    "model": _modernbert_logits,
}


def means(hidden: Tensor, lengths: Lengths) -> Tensor:
    """The mean of each sequence's rows, float32 sums: [T, E] -> [B, E]."""
    counts = lengths.cu.diff().long()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=hidden.device), counts, output_size=hidden.shape[0])
    sums = torch.zeros(len(counts), hidden.shape[1], device=hidden.device).index_add_(0, owner, hidden.float())
    return (sums / counts[:, None]).to(hidden.dtype)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"the activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


Build = Callable[[EncoderConfig, dict[str, Any]], Encoder]


def _bert(config: EncoderConfig, place: dict[str, Any]) -> Encoder:
    """BERT: a pooler before the head, and only there."""
    raw, size = config.raw, config.hidden_size
    heads = {"classifier": Linear(size, config.labels, bias=True, **place)} if config.labels else None
    return Encoder(config, "bert", _bert_body(raw, config, place, pooler=bool(config.labels)), heads)


def _roberta(config: EncoderConfig, place: dict[str, Any]) -> Encoder:
    """RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020): no pooler, a head of two layers."""
    raw, size, heads = config.raw, config.hidden_size, None
    if config.labels:
        layers = {"dense": Linear(size, size, bias=True, **place), "out_proj": Linear(size, config.labels, bias=True, **place)}
        heads = {"classifier": nn.ModuleDict(layers)}
    return Encoder(config, "roberta", _bert_body(raw, config, place, pooler=False), heads)


def _bert_body(raw: Mapping[str, Any], config: EncoderConfig, place: dict[str, Any], *, pooler: bool) -> Bert:
    _check_heads(raw, config)
    return Bert(
        config.vocab_size, config.hidden_size, _size(raw, "num_hidden_layers"), _size(raw, "num_attention_heads"),
        _size(raw, "intermediate_size"), _size(raw, "max_position_embeddings"), config.token_types,
        float(1e-12 if raw.get("layer_norm_eps") is None else raw["layer_norm_eps"]),
        activation=_activation(raw.get("hidden_act") or "gelu"), pooler=pooler,
        first_position=_first_position(config.architecture, raw), **place,
    )  # fmt: skip


def _check_heads(raw: Mapping[str, Any], config: EncoderConfig) -> None:
    heads = _size(raw, "num_attention_heads")
    if config.hidden_size % heads:
        raise ModelError(f"config.json: hidden_size {config.hidden_size} is not a multiple of the number of heads, {heads}")


def _modernbert(config: EncoderConfig, place: dict[str, Any]) -> Encoder:
    """ModernBERT: its head norms what it has pooled."""
    raw, size = config.raw, config.hidden_size
    _check_heads(raw, config)
    layers, every = _size(raw, "num_hidden_layers"), int(raw.get("global_attn_every_n_layers") or 3)
    kinds = raw.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ModelError(f"layer_types must have one entry for each of the {layers} layers; got {len(kinds)}")
    reach = int(raw.get("local_attention") or 128) // 2
    norm = {"eps": 1e-5 if raw.get("norm_eps") is None else float(raw["norm_eps"]), "bias": bool(raw.get("norm_bias"))}
    activation = _activation(raw.get("hidden_activation") or "gelu") + "_mul"
    if activation not in ("gelu_mul", "silu_mul"):
        raise ModelError(f"hidden_activation {raw['hidden_activation']!r} is not supported; supported: gelu, silu")
    body = ModernBert(
        config.vocab_size, size, _size(raw, "num_attention_heads"), _size(raw, "intermediate_size"), config.max_tokens,
        reaches=[reach if kind == "sliding_attention" else None for kind in kinds], thetas=_thetas(raw), eps=norm["eps"],
        norm_bias=norm["bias"], attention_bias=bool(raw.get("attention_bias")), mlp_bias=bool(raw.get("mlp_bias")),
        activation=activation, **place,
    )  # fmt: skip
    heads: dict[str, nn.Module] = {}
    if config.labels:
        dense = Linear(size, size, bias=bool(raw.get("classifier_bias")), **place)
        heads["head"] = nn.ModuleDict({"dense": dense, "norm": LayerNorm(size, **norm, **place)})
        heads["classifier"] = Linear(size, config.labels, bias=True, **place)
    return Encoder(config, "model", body, heads)


def _thetas(raw: Mapping[str, Any]) -> tuple[float, float]:
    given = raw.get("rope_parameters") or {}
    full, local = (given.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    for each in (full, local, raw.get("rope_scaling") or {}):
        if each.get("rope_type", each.get("type", "default")) != "default":
            raise ModelError(f"ModernBERT with scaled rotary embeddings ({dict(each)}) is not supported")
    return (
        float(full.get("rope_theta") or raw.get("global_rope_theta") or 160_000.0),
        float(local.get("rope_theta") or raw.get("local_rope_theta") or 10_000.0),
    )


_FOR = ("Model", "ForMaskedLM", "ForSequenceClassification")
ENCODERS: Mapping[str, Build] = {
    **{f"Bert{what}": _bert for what in _FOR},
    **{f"ModernBert{what}": _modernbert for what in _FOR},
    **{f"Roberta{what}": _roberta for what in _FOR},
    **{f"XLMRoberta{what}": _roberta for what in _FOR},
}
"""Architecture, as config.json calls it -> the function that builds it."""

_LEFT_OUT = ("cls.", "lm_head.", "pooler.", "bert.pooler.", "roberta.pooler.", "head.", "decoder.")
"""Heads of what a model was trained with; in a model with a head for labels it is only the pooler."""


def is_encoder(folder: Path) -> bool:
    """Whether a folder's config.json names one of `ENCODERS`. Raises ModelError where it is missing or broken."""
    return architecture_of(read_json(folder / "config.json")) in ENCODERS


def load_encoder(folder: Path, *, device: torch.device | str, dtype: torch.dtype | None = None) -> Encoder:
    """The encoder of a folder, on a device.

    Raises:
        ModelError: the folder cannot be used.
    """
    config = EncoderConfig.from_hf(read_json(folder / "config.json"))
    checkpoint = Checkpoint(folder)
    with unfilled():
        model = ENCODERS[config.architecture](config, {"device": device, "dtype": dtype or config.dtype})
    parameters = dict(model.named_parameters())
    found = {name: _found(name, model.prefix, checkpoint) for name in parameters}
    wrong = [f"{name}: missing" for name, source in found.items() if source is None]
    for name, source in found.items():
        if source is not None and checkpoint.shapes[source] != tuple(parameters[name].shape):
            shapes = list(checkpoint.shapes[source]), list(parameters[name].shape)
            wrong.append(f"{source}: shape is {shapes[0]}, config.json requires {shapes[1]}")
        elif source is not None and checkpoint.dtypes[source] not in FLOATS:
            wrong.append(f"{source}: dtype is {checkpoint.dtypes[source]}, wanted {' or '.join(FLOATS)}")
    taken = {source for source in found.values() if source is not None}
    wrong += [f"{name}: unexpected" for name in checkpoint.shapes if name not in taken and not _ignored(name, config)]
    if wrong:
        more = f"\n  and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        shown = "".join(f"\n  {line}" for line in wrong[:12])
        raise ModelError(f"config.json and the weights contradict each other in {len(wrong)} tensors:{shown}{more}")
    with torch.no_grad():
        for name, source in found.items():
            assert source is not None
            parameters[name].copy_(checkpoint.read(source))
    return model.eval()


def _found(name: str, prefix: str, checkpoint: Checkpoint) -> str | None:
    """Where a parameter lies; the oldest checkpoints have other names for the weights of norms."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    for each in (name, old):
        for candidate in (each, each.removeprefix(f"{prefix}.")):
            if candidate in checkpoint.shapes:
                return candidate
    return None


def _ignored(name: str, config: EncoderConfig) -> bool:
    left_out = ("roberta.pooler.",) if config.labels else _LEFT_OUT
    return name.endswith("position_ids") or name.startswith(left_out)
