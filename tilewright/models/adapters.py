"""Reads and writes LoRA adapters of language models as folders in the format of the `peft` library.

    adapter_config.json          rank, alpha, which layers (adapter_config.py)
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight [R, K] and lora_B.weight [N, R]

Layers have their Hugging Face names; a merged layer of the model has one adapter for each of its parts. Nothing is pickled: an
adapter_model.bin is refused. Not here: adapters of embeddings, heads and routed experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilewright.models.adapter_config import CONFIG_NAME, AdapterConfig
from tilewright.models.decoder import Decoder
from tilewright.models.errors import ModelError
from tilewright.models.files import check_plain_file
from tilewright.models.fill import part_names
from tilewright.models.names import PARTS
from tilewright.nn import Linear, Lora
from tilewright.ops.weights import QuantizedWeight

__all__ = ["Adapter", "Pair", "Target", "adapter_of", "attach", "detach", "merge", "read_adapter", "save_adapter", "targets_of"]

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = ("BF16", "F16", "F32", "F64")


class Target(NamedTuple):
    """A layer that may have an adapter: part `part`, [rows, cols], of the model's layer `path`."""

    path: str
    part: int
    rows: int
    cols: int


class Pair(NamedTuple):
    """One layer's adapter, which adds scale * B (A x)."""

    a: Tensor
    """[R, K]"""
    b: Tensor
    """[N, R]"""
    scale: float


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter; its tensors may be on any device. pairs: by the layers' Hugging Face names."""

    config: AdapterConfig
    pairs: Mapping[str, Pair]

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(pair.a.shape[0] for pair in self.pairs.values())


def targets_of(model: Decoder) -> dict[str, Target]:
    """The layers that may have adapters, by their Hugging Face names. `model` may be on "meta".

    Raises:
        ModelError: the model is an encoder, or has latent attention.
    """
    if not isinstance(model, Decoder):
        raise ModelError("adapters are supported for decoders only, and this model is not a decoder")
    if model.config.latent is not None:
        raise ModelError(f"{model.config.architecture}: adapters are not supported for latent attention")
    return {
        name: Target(path, part, layer.parts[part], layer.weight.shape[1])
        for path, layer in _layers(model)
        for part, name in enumerate(_names(model, path, layer))
    }


def _layers(model: Decoder) -> Iterator[tuple[str, Linear]]:
    found = model.blocks.named_modules(prefix="blocks")
    return ((path, module) for path, module in found if isinstance(module, Linear))


def _names(model: Decoder, path: str, layer: Linear) -> list[str]:
    """The names of the layer's parts; none if the checkpoint has them as one layer, because its adapter would be for all."""
    names, form = part_names(model, f"{path}.weight", layer.parts)
    return [name.removesuffix(".weight") for name in names] if form is PARTS and len(names) == len(layer.parts) else []


# ---- folders


def read_adapter(folder: str | Path, targets: Mapping[str, Target], *, max_rank: int | None = None) -> Adapter:
    """Read the adapter in a folder, and check it against the model's layers. Sizes are checked before tensors are read.

    Raises:
        ModelError: it is damaged, for another model, larger than `max_rank`, or needs something that is not supported.
    """
    home = Path(folder).expanduser()
    if not home.is_dir():
        raise ModelError(f"the folder {home} does not exist; wanted the folder of a LoRA adapter")
    config = AdapterConfig.read(home)
    path = home / WEIGHTS_NAME
    if not path.exists():
        pickled = " (an adapter_model.bin is pickled, and is not read)" if (home / "adapter_model.bin").exists() else ""
        raise ModelError(f"{home} has no {WEIGHTS_NAME}{pickled}; save the adapter as safetensors")
    check_plain_file(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118 (no mapping)
            chosen = config.chosen(targets, layers)
            _check(path, file, config, {name: targets[name] for name in chosen}, targets, max_rank)
            pairs = {name: _pair(path, file, config, name) for name in chosen}
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error}); copy it again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); check its permissions") from error
    return Adapter(config=config, pairs=pairs)


def _check(
    path: Path, file: Any, config: AdapterConfig, chosen: Mapping[str, Target], targets: Mapping[str, Target],
    max_rank: int | None,
) -> None:  # fmt: skip
    """Raise ModelError unless the file has exactly the tensors of the chosen layers, by its header."""
    wanted: dict[str, tuple[int, int]] = {}
    for name, target in chosen.items():
        rank = config.rank_of(name)
        if max_rank is not None and rank > max_rank:
            raise ModelError(f"{path.parent} has an adapter of rank {rank}, but the limit here is {max_rank}")
        wanted |= {f"{_PREFIX}{name}.lora_A.weight": (rank, target.cols), f"{_PREFIX}{name}.lora_B.weight": (target.rows, rank)}
    if not wanted:
        raise ModelError(f"{path.parent / CONFIG_NAME} names no layer of this model, so the adapter is for another model")
    names = set(file.keys())
    for name in sorted(names - wanted.keys()):
        kinds = sorted({target.rpartition(".")[2] for target in targets})
        raise ModelError(
            f"{path} has the tensor {name[:200]!r}, which belongs to no layer that {CONFIG_NAME} names; adapters are "
            f"possible for {', '.join(kinds)} of {len(targets)} layers"
        )
    for name, shape in wanted.items():
        if name not in names:
            raise ModelError(
                f"{path} has no tensor {name}, which {CONFIG_NAME} implies; the adapter is damaged, or for another model"
            )
        header = file.get_slice(name)
        if (got := tuple(header.get_shape())) != shape:
            raise ModelError(f"{path} has {name} of shape {list(got)}, wanted {list(shape)}; the adapter is for another model")
        if (dtype := header.get_dtype()) not in _FLOATS:
            raise ModelError(f"{path} has {name} of dtype {dtype}, wanted one of {', '.join(_FLOATS)}")


def _pair(path: Path, file: Any, config: AdapterConfig, name: str) -> Pair:
    found = [file.get_tensor(f"{_PREFIX}{name}.lora_{letter}.weight") for letter in "AB"]
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        raise ModelError(f"{path} has numbers that are not finite (NaN or infinity) in {name}; the adapter is damaged")
    return Pair(found[0], found[1], config.scale_of(name))


def save_adapter(adapter: Adapter, folder: str | Path) -> None:
    """Save as a folder that peft can load; existing files of the same names are replaced."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, pair in adapter.pairs.items():
        for letter, tensor in (("A", pair.a), ("B", pair.b)):
            tensors[f"{_PREFIX}{name}.lora_{letter}.weight"] = tensor.detach().cpu().contiguous()
    save_file(tensors, target / WEIGHTS_NAME, metadata={"format": "pt"})
    (target / CONFIG_NAME).write_text(adapter.config.to_json(adapter.pairs), encoding="utf-8")


# ---- adding to a model


def attach(model: Decoder, adapter: Adapter, *, dropout: float = 0.0) -> None:
    """Add an adapter to the layers of a model, as trainable parameters of the model's dtype and device."""
    targets, dtype = targets_of(model), model.embed.weight.dtype
    by_path: dict[str, dict[int, Pair]] = {}
    for name, pair in adapter.pairs.items():
        by_path.setdefault(targets[name].path, {})[targets[name].part] = pair
    for path, pairs in by_path.items():
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        place = {"device": layer.weight.device, "dtype": dtype}
        moved = {part: (pair.a.to(**place, copy=True), pair.b.to(**place, copy=True)) for part, pair in pairs.items()}
        layer.adapter = Lora(layer.parts, moved, {part: pair.scale for part, pair in pairs.items()}, dropout)


def adapter_of(model: Decoder, config: AdapterConfig) -> Adapter:
    """The adapter that `attach` has added, in its present state; `config` is the adapter's."""
    pairs = {}
    for path, layer in _layers(model):
        if isinstance(layer.adapter, Lora):
            for part, name in enumerate(_names(model, path, layer)):
                if str(part) in layer.adapter.a:
                    a, b = layer.adapter.a[str(part)], layer.adapter.b[str(part)]
                    pairs[name] = Pair(a, b, layer.adapter.scales[part])
    return Adapter(config=replace(config), pairs=pairs)


def detach(model: Decoder) -> None:
    """Remove the adapters."""
    for _, layer in _layers(model):
        layer.adapter = None


@torch.no_grad()
def merge(model: Decoder, adapter: Adapter) -> None:
    """Add scale * B A to the weights, in place. The product is float32, and the sum is rounded once to the weight's dtype.

    Raises:
        ModelError: a layer is quantised.
    """
    targets = targets_of(model)
    for name, pair in adapter.pairs.items():
        path, part, rows, _ = targets[name]
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        if isinstance(layer.weight, QuantizedWeight):
            raise ModelError(f"{name} is quantised, so no adapter can be merged into it; merge into the unquantised model")
        weight = layer.weight.narrow(0, sum(layer.parts[:part]), rows)
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight += (pair.b.to(weight.device, wide) @ pair.a.to(weight.device, wide)) * pair.scale
