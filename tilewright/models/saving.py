"""Saving a quantised model as a folder that loads like any other: config.json, safetensors, the tokenizer's files.

Tensors have their Hugging Face names, merged projections are taken apart, and `quantization_config` in config.json lists the
layers that have codes with their formats (`layouts.Own`). Nothing is pickled.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tilewright.models.decoder import Decoder
from tilewright.models.errors import ModelError
from tilewright.models.files import read_json
from tilewright.models.fill import part_names
from tilewright.models.layouts import Own
from tilewright.models.weights import resolve
from tilewright.nn import Linear
from tilewright.ops.weights import QuantizedWeight

__all__ = ["save_quantized"]

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
            f"save_quantized: wanted a model that load_model gives, got {type(model).__name__}; of another module save "
            "model.state_dict() with safetensors, and load it into that module after tw.quantize with the same format"
        )
    target, origin = Path(folder), resolve(source)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"save_quantized: {target} has files; give a new or an empty folder")
    tensors, layers = _taken_apart(model)
    if not layers:
        raise ValueError("save_quantized: no layer of the model is quantised; call tw.quantize(model, format) first")
    raw = read_json(origin / "config.json")
    if raw.get("hidden_size") != model.config.hidden_size or raw.get("vocab_size") != model.config.vocab_size:
        raise ModelError(f"save_quantized: {source} is another model: its config.json has other sizes")
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


def _taken_apart(model: Decoder) -> tuple[dict[str, Tensor], dict[str, Own]]:
    """(tensors by their names in the checkpoint, the layouts of quantised layers)."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Own] = {}
    for path, parameter in model.named_parameters():
        module = model.get_submodule(path.rpartition(".")[0])
        rows = list(getattr(module, "parts", parameter.shape[:1]))
        for name, part in zip(part_names(path, len(rows)), parameter.detach().split(rows), strict=True):
            tensors[name] = part.contiguous().cpu()
    for layer, path, weight in _quantized(model):
        for name, part in zip(part_names(f"{path}.weight", len(layer.parts)), weight.split_rows(layer.parts), strict=True):
            own, base = Own.of(part), name.removesuffix(".weight")
            layers[base] = own
            tensors |= {f"{base}.{suffix}": tensor for suffix, tensor in own.take(part).items()}
    return tensors, layers


def _quantized(model: nn.Module) -> Iterator[tuple[Linear, str, QuantizedWeight]]:
    for path, module in model.named_modules():
        if isinstance(module, Linear) and isinstance(module.weight, QuantizedWeight):
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
