"""Saving a model as a folder that loads like any other, in transformers too: config.json, safetensors, the tokenizer's files.

Tensors have their Hugging Face names, merged projections are separated, and `quantization_config` in config.json lists the
quantised layers with their formats (`layouts.Own`). Nothing is pickled.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tilewright.models.config import ModelConfig, architecture_of
from tilewright.models.decoder import Decoder
from tilewright.models.errors import ModelError
from tilewright.models.families import prepared
from tilewright.models.files import read_json
from tilewright.models.fill import part_names, parts_of
from tilewright.models.forms import PLUS_ONE
from tilewright.models.layouts import Own
from tilewright.models.multimodal import MULTIMODAL
from tilewright.models.weights import resolve
from tilewright.nn import ExpertLinear, Linear
from tilewright.ops.weights import QuantizedWeight

__all__ = ["hf_config", "save_model", "save_quantized"]

_SHARD_BYTES = 4 << 30
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "*.jinja")


def save_quantized(model: Decoder, folder: str | Path, source: str | Path) -> None:
    """Write a model that `tw.quantize` has changed.

    Args:
        folder: new or empty; it is made.
        source: the model it was loaded from, a folder or a name: config.json and the tokenizer's files come from there.

    Raises:
        TypeError: not one of tilewright's models.
        FileExistsError: the folder has files.
        ModelError: the source cannot be found.
        ValueError: no layer of the model is quantised.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"save_quantized: got a {type(model).__name__}, wanted a model from load_model; for another module, save "
            "model.state_dict() with safetensors, and load it into the module after tw.quantize with the same format"
        )
    target, origin = Path(folder), resolve(source)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"save_quantized: {target} is not empty; give a new or an empty folder")
    tensors, layers = _taken_apart(model)
    if not layers:
        raise ValueError("save_quantized: no layer of the model is quantised; call tw.quantize(model, format) first")
    raw = read_json(origin / "config.json")
    if architecture_of(raw) in MULTIMODAL:  # only the text part was loaded, and it is saved as a decoder
        raw = hf_config(model.config)
    given = prepared(architecture_of(raw), raw)
    if given.get("hidden_size") != model.config.hidden_size or given.get("vocab_size") != model.config.vocab_size:
        raise ModelError(f"save_quantized: {source} is the folder of another model, because its config.json has other sizes")
    raw.pop("compression_config", None)
    raw["torch_dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    raw.pop("dtype", None)
    raw["quantization_config"] = {"quant_method": "tilewright", "layers": {name: own.to_json() for name, own in layers.items()}}
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for path in origin.glob(pattern):
            shutil.copyfile(path, target / path.name)
    _write(target, tensors)
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def save_model(model: Decoder, folder: str | Path, tokenizer: str | Path | None = None) -> None:
    """Save an unquantised model, in its dtype, as a Hugging Face folder. What stands there under the same names is replaced.

    Args:
        folder: it is made.
        tokenizer: the folder whose tokenizer and generation settings are copied.

    Raises:
        ModelError: `tokenizer` cannot be found.
        ValueError: a layer of the model is quantised, or it is of an architecture that `hf_config` cannot write.
    """
    target, raw = Path(folder), hf_config(model.config)
    tensors, layers = _taken_apart(model)
    if layers:
        raise ValueError("save_model: layers of the model are quantised; use save_quantized")
    raw["dtype"] = raw["torch_dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED if tokenizer is not None else ():
        for path in resolve(tokenizer).glob(pattern):  # pyright: ignore[reportArgumentType]
            shutil.copyfile(path, target / path.name)
    _write(target, tensors)
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


_MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
_MODEL_TYPES |= {"Qwen3ForCausalLM": "qwen3"}
_SAME_NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "bos_token_id",
)  # fmt: skip


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a model, with keys that transformers 4 and 5 read; `ModelConfig.from_hf` gives it back.

    Of the four families that need nothing else it is made from the config; of others it is the file that the config was read
    from, with the end of a text as it is now.

    Raises:
        ValueError: another architecture, of a config that was not read from a file; or windows of several sizes.
    """
    if config.architecture not in _MODEL_TYPES:
        if config.raw is None:
            raise ValueError(
                f"a config.json can be written for {config.architecture} only if it was read from one; it can also "
                f"be made for {', '.join(_MODEL_TYPES)}"
            )
        given = {key: value for key, value in config.raw.items() if key not in ("quantization_config", "compression_config")}
        return given | _ends(config)
    sizes = sorted({window for window in config.windows if window is not None})
    if len(sizes) > 1:
        raise ValueError(f"config.json cannot express windows of several sizes ({sizes})")
    raw: dict[str, Any] = {"architectures": [config.architecture], "model_type": _MODEL_TYPES[config.architecture]}
    raw |= {name: getattr(config, name) for name in _SAME_NAMES}
    raw["rope_scaling"] = None if config.rope_scaling is None else dict(config.rope_scaling)
    raw |= {"sliding_window": sizes[0] if sizes else None, "use_sliding_window": bool(sizes)}
    if sizes and config.architecture != "MistralForCausalLM":
        raw["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return raw | _ends(config)


def _ends(config: ModelConfig) -> dict[str, Any]:
    ends, dtype = config.eos_token_ids, str(config.dtype).removeprefix("torch.")
    return {"eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None, "dtype": dtype, "torch_dtype": dtype}


def _taken_apart(model: Decoder) -> tuple[dict[str, Tensor], dict[str, Own]]:
    """(tensors by their names in the checkpoint, the layouts of quantised layers)."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Own] = {}
    for path, parameter in model.named_parameters():
        module = model.get_submodule(path.rpartition(".")[0])
        parts = parts_of(module, parameter)
        names, form = part_names(model, path, parts)
        for name, view in zip(names, form.views(parameter.detach(), parts), strict=True):
            dtype = model.embed.weight.dtype if form is PLUS_ONE else view.dtype
            tensors |= {each: tensor.to(dtype).contiguous().cpu() for each, tensor in form.get(view, name).items()}
    for layer, path, weight in _quantized(model):
        names, form = part_names(model, f"{path}.weight", layer.parts)
        for name, part in zip(names, weight.split_rows(form.rows(layer.parts)), strict=True):
            own, base = Own.of(part), name.removesuffix(".weight")
            layers[base] = own
            tensors |= {f"{base}.{suffix}": tensor for suffix, tensor in own.take(part).items()}
    return tensors, layers


def _quantized(model: nn.Module) -> Iterator[tuple[Linear | ExpertLinear, str, QuantizedWeight]]:
    for path, module in model.named_modules():
        if isinstance(module, (Linear, ExpertLinear)) and isinstance(module.weight, QuantizedWeight):
            yield module, path, module.weight


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One file, or shards of at most 4 GiB (or one larger tensor) with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, Any] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
