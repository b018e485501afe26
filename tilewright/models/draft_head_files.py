"""Loads draft heads from the folders in which they are published.

- MTP: in the model's own folder, the layer N behind its last: model.layers.N. with enorm, hnorm, eh_proj, the tensors of a
  block, shared_head.norm, shared_head.head and embed_tokens.
- EAGLE: a folder of its own whose config is that of a Llama with few layers: fc, layers.M.* (the first one has no
  input_layernorm), embed_tokens.
- EAGLE-3: a folder of its own whose config may have draft_vocab_size: fc, midlayer.* (or layers.0.*) with hidden_norm, norm,
  lm_head, and d2t where the head knows fewer tokens.

An embedding or a head that is missing in the files is the model's. `t2d` is not read, because it says the same as `d2t`.
Refused: pickled weights, another vocabulary, hidden states of another size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.models.config import ModelConfig, ModelError
from tilewright.models.decoder import Block, Decoder
from tilewright.models.deepseek import deepseek
from tilewright.models.dense import llama
from tilewright.models.draft_heads import DraftHead, Eagle3Block, Eagle3Join, EagleJoin, Join, MTPJoin, NoNorm
from tilewright.models.files import read_json
from tilewright.models.fill import check, fill
from tilewright.models.forms import FLOATS
from tilewright.models.weights import Checkpoint, Renamed
from tilewright.nn import Linear, RMSNorm, unfilled
from tilewright.nn.filling import empty_parameter

__all__ = ["HeadFiles", "head_files", "mtp_files"]

EAGLE = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
MTP = ("DeepseekV3ForCausalLM",)
_OWN = ("fc.weight", "fc.bias", "enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Tensors of the part that joins a head's inputs."""


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """A head that was found and fits its model; nothing is allocated yet."""

    kind: str
    """mtp, eagle or eagle3."""
    config: ModelConfig
    """The config of the head as a model of one or a few layers, with the vocabulary of the model for which it guesses."""
    checkpoint: Checkpoint
    """The checkpoint, with tensor names as in a model, and those of `_OWN`."""
    layers: tuple[int, ...] = ()
    wide: int = 0
    """Numbers per token in the states of eagle3, over all layers that it reads."""
    draft_vocab: int | None = None
    normed_stream: bool = False

    def build(self, dtype: torch.dtype, device: torch.device | str = "meta") -> DraftHead:
        """The head with uninitialised weights."""
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        decoder = (deepseek if self.kind == "mtp" else llama)(self.config, torch.device(device), dtype)
        size, eps, shapes = self.config.hidden_size, self.config.rms_norm_eps, self.checkpoint.shapes
        join: Join
        with unfilled():
            if self.kind == "mtp":
                join = MTPJoin(size, eps=eps, **place)
            elif self.kind == "eagle":
                cast(Any, decoder.blocks[0]).attn_norm = NoNorm()
                cast(Any, decoder).norm = NoNorm()
                join = EagleJoin(size, bias="fc.bias" in shapes, **place)
            else:
                decoder.blocks[0] = self._first(decoder.blocks[0], **place)
                join = Eagle3Join(size, wide=self.wide, layers=self.layers, **place)
                decoder.head = Linear(size, self.draft_vocab or self.config.vocab_size, bias=False, **place)
        for name, part in (("model.embed_tokens.weight", "embed"), ("lm_head.weight", "head")):
            if name not in shapes:
                setattr(decoder, part, nn.Identity())
        tokens = None if self.draft_vocab is None else torch.empty(self.draft_vocab, dtype=torch.int64, device=device)
        return DraftHead(decoder, join, numbers=size, tokens=tokens)

    def _first(self, block: nn.Module, **place: Any) -> Eagle3Block:
        assert isinstance(block, Block)
        size, attn = self.config.hidden_size, cast(Any, block.attn)
        attn.qkv = Linear(2 * size, attn.qkv.parts, bias=self.config.attention_bias, **place)
        return Eagle3Block(
            hidden_norm=RMSNorm(size, eps=self.config.rms_norm_eps, **place), normed_stream=self.normed_stream,
            attn_norm=block.attn_norm, attn=attn, ffn_norm=block.ffn_norm, ffn=block.ffn,
        )  # fmt: skip

    def load(self, model: Decoder, *, device: torch.device, dtype: torch.dtype) -> DraftHead:
        """The head with its weights, for the model for which it guesses. Raises ModelError if files and config do not match."""
        head = self.build(dtype)
        inner = Renamed(self.checkpoint, {name: name for name in self.checkpoint.shapes if name not in (*_OWN, "d2t", "t2d")})
        check(head.decoder, inner, self.config.quantization)
        fill(head.decoder, inner, device, quantization=self.config.quantization)
        for name, parameter in list(head.join.named_parameters()):
            self._check_own(name, tuple(parameter.shape))
            made = empty_parameter(*parameter.shape, device=device, dtype=dtype)
            made.copy_(self.checkpoint.read(name))
            path, _, last = name.rpartition(".")
            setattr(head.join.get_submodule(path), last, made)
        if isinstance(head.decoder.embed, nn.Identity):
            head.decoder.embed = model.embed
        if isinstance(head.decoder.head, nn.Identity):
            head.decoder.head = model.head
        if self.draft_vocab is not None:
            head.tokens = self._tokens(self.draft_vocab).to(device)
        return head

    def _check_own(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.checkpoint.shapes.get(name)
        if found != shape or self.checkpoint.dtypes[name] not in FLOATS:
            got = "missing" if found is None else f"{list(found)} of {self.checkpoint.dtypes[name]}"
            raise ModelError(f"the draft head's {name} is {got}, wanted shape {list(shape)} and dtype {' or '.join(FLOATS)}")

    def _tokens(self, count: int) -> Tensor:
        """The model's ids of the head's tokens; d2t contains the differences."""
        if "d2t" not in self.checkpoint.shapes:
            if count == self.config.vocab_size:
                return torch.arange(count)
            raise ModelError(f"the draft head has {count} tokens but no d2t, which maps them to the model's tokens")
        if self.checkpoint.shapes["d2t"] != (count,) or self.checkpoint.dtypes["d2t"] not in ("I64", "I32"):
            raise ModelError(f"the draft head's d2t has shape {list(self.checkpoint.shapes['d2t'])}, wanted [{count}] integers")
        tokens = torch.arange(count) + self.checkpoint.read("d2t").long()
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab_size or tokens.unique().numel() < count:
            raise ModelError(f"the draft head's d2t does not map to {count} different tokens below {self.config.vocab_size}")
        return tokens


def mtp_files(folder: Path, config: ModelConfig) -> HeadFiles:
    """The layer after a model's last one, which predicts a second token. Raises ModelError if there is none."""
    if config.architecture not in MTP:
        raise ModelError(f"{folder.name} is a {config.architecture}, wanted one of {', '.join(MTP)}, which have MTP layers")
    checkpoint, layer = Checkpoint(folder), f"model.layers.{config.num_hidden_layers}."
    names: dict[str, str] = {}
    outer = {"shared_head.norm.weight": "model.norm.weight", "shared_head.head.weight": "lm_head.weight"}
    outer |= {"embed_tokens.weight": "model.embed_tokens.weight"}
    for old in checkpoint.shapes:
        if old.startswith(layer):
            inner = old.removeprefix(layer)
            names[inner if inner in _OWN else outer.get(inner, f"model.layers.0.{inner}")] = old
    if "eh_proj.weight" not in names:
        raise ModelError(f"{folder.name} has no MTP layer, because it has no tensor {layer}eh_proj.weight")
    assert config.experts is not None
    inner_config = replace(
        config, num_hidden_layers=1, windows=config.windows[:1], experts=replace(config.experts, first_layer=0),
        tie_word_embeddings=False,
    )  # fmt: skip
    return HeadFiles(kind="mtp", config=inner_config, checkpoint=Renamed(checkpoint, names))


def head_files(folder: Path, model: ModelConfig, positions: int) -> HeadFiles | None:
    """The head in a separate folder; None if the folder contains a whole model. `positions`: the longest text.

    Raises:
        ModelError: it is for another vocabulary, reads states of another size, or is of an unsupported kind.
    """
    raw = read_json(folder / "config.json")
    named = raw.get("architectures")
    named = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"
    checkpoint = Checkpoint(folder)
    names = {old.removeprefix("model."): old for old in checkpoint.shapes}
    if "fc.weight" not in names:
        if named in EAGLE3:
            raise ModelError(f"{folder.name} is a {named} without the tensor fc.weight; download it again")
        return None
    kind = "eagle3" if any(name.endswith(".hidden_norm.weight") for name in names) else "eagle"
    if named not in (wanted := EAGLE3 if kind == "eagle3" else EAGLE):
        raise ModelError(f"{folder.name} is a draft head for a {named[:80]!r}, wanted one for {', '.join(wanted)}")
    config = ModelConfig.from_hf({**raw, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False})
    if config.vocab_size != model.vocab_size:
        raise ModelError(f"{folder.name} is a draft head for {config.vocab_size} tokens, but the model has {model.vocab_size}")
    config = replace(config, max_position_embeddings=max(positions, config.max_position_embeddings))
    outer = {"embed_tokens.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    kept: dict[str, str] = {}
    for name, old in names.items():
        if name.startswith("midlayer."):
            kept[f"model.layers.0.{name.removeprefix('midlayer.')}"] = old
        elif name.startswith("layers."):
            kept[f"model.{name}"] = old
        else:
            kept[outer.get(name, name)] = old
    files = HeadFiles(kind=kind, config=config, checkpoint=Renamed(checkpoint, kept))
    if kind == "eagle":
        if config.hidden_size != model.hidden_size:
            raise _other_size(folder, config.hidden_size, model.hidden_size)
        return files
    return _eagle3(files, folder, raw, model)


def _eagle3(files: HeadFiles, folder: Path, raw: Mapping[str, Any], model: ModelConfig) -> HeadFiles:
    """The settings that only EAGLE-3 has."""
    told = raw.get("eagle_config")
    layers = (told if isinstance(told, dict) else raw).get("eagle_aux_hidden_state_layer_ids")
    count = model.num_hidden_layers
    if layers is None:
        layers = [2, count // 2, count - 3]
    if not isinstance(layers, list) or not layers or not all(type(i) is int and 0 <= i < count for i in layers):
        raise ModelError(f"{folder.name} reads the layers {layers!r:.80}, wanted layers of the model, 0 to {count - 1}")
    wide, shape = len(set(layers)) * model.hidden_size, files.checkpoint.shapes["fc.weight"]
    if len(set(layers)) < len(layers) or shape[-1] != wide:
        raise _other_size(folder, shape[-1], wide)
    if files.config.num_hidden_layers != 1:
        raise ModelError(f"{folder.name} has {files.config.num_hidden_layers} layers, wanted a draft head with one layer")
    draft_vocab = raw.get("draft_vocab_size", files.config.vocab_size)
    if type(draft_vocab) is not int or not 0 < draft_vocab <= files.config.vocab_size:
        raise ModelError(f"{folder.name} has draft_vocab_size {draft_vocab!r:.40}, wanted 1 to {files.config.vocab_size}")
    normed = raw.get("norm_before_residual") is True
    return replace(files, layers=tuple(layers), wide=wide, draft_vocab=draft_vocab, normed_stream=normed)


def _other_size(folder: Path, got: int, wanted: int) -> ModelError:
    return ModelError(f"{folder.name} is a draft head that reads {got} numbers per token, but the model provides {wanted}")
