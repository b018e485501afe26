"""Creates the LoRA adapter to train, either a new one or one from a folder, and saves it after training."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tilewright.models import Model, ModelConfig, empty_model, load_model
from tilewright.models.adapter_config import AdapterConfig
from tilewright.models.adapters import Adapter, Pair, adapter_of, attach, read_adapter, save_adapter, targets_of
from tilewright.nn import ExpertLinear, Linear
from tilewright.quant import convert_layer, quantize
from tilewright.train.config import TrainConfig

__all__ = ["adapted", "adapter_config", "empty_base", "load_base", "save_trained"]

_BASE_FORMATS = {"float": None, "int4": "int4"}
_LAYERS = (Linear, ExpertLinear)


def empty_base(config: TrainConfig, shape: ModelConfig, dtype: torch.dtype) -> Model:
    """The frozen model under an adapter, on "meta". Raises ValueError if a layer does not support the format `lora_base`."""
    model = empty_model(shape, device="meta", dtype=dtype)
    if (format := _BASE_FORMATS[config.lora_base]) is not None:
        quantize(model, format)
    return model


def load_base(config: TrainConfig, device: torch.device, dtype: torch.dtype, planned: Model) -> Model:
    """As `empty_base`, with weights. Each layer is quantised as soon as it is read. `planned`: the result of `empty_base`."""
    format = _BASE_FORMATS[config.lora_base]
    chosen = set()
    if format is not None:
        found = planned.named_modules()
        chosen = {name for name, one in found if isinstance(one, _LAYERS) and not isinstance(one.weight, Tensor)}

    def convert(name: str, layer: Linear | ExpertLinear) -> None:
        if format is not None and name in chosen:
            convert_layer(name, layer, format)

    return load_model(config.model, device=device, dtype=dtype, convert=convert)


def adapter_config(config: TrainConfig) -> AdapterConfig:
    """The settings of the adapter: those of the run, or those of the folder if training continues from an adapter in a folder.

    Raises:
        ModelError: the folder cannot be read.
        ValueError: the rank of the adapter in the folder differs from the run's rank.
    """
    if config.lora_adapter is None:
        return AdapterConfig(
            rank=config.lora_rank, alpha=config.lora_alpha, rslora=config.lora_rslora, dropout=config.lora_dropout,
            targets=config.lora_targets or "all-linear", base=config.model,
        )  # fmt: skip
    found = AdapterConfig.read(Path(config.lora_adapter).expanduser())
    if found.rank != config.lora_rank:
        raise ValueError(
            f"lora_rank is {config.lora_rank}, but the adapter in {config.lora_adapter} has rank {found.rank}; set "
            "lora_rank to that"
        )
    return found


def adapted(config: TrainConfig, model: Model) -> Model:
    """The frozen model, with a trainable adapter on its layers.

    A new adapter is initialised as in peft: the elements of A are uniform within 1 / sqrt(K), drawn from the run's seed. B is
    zero, so the adapter adds nothing at first.

    Raises:
        ModelError: the folder of the adapter is damaged, or for another model.
        ValueError: no layer has one of the names in `lora_targets`.
    """
    model.requires_grad_(False)
    settings, targets = adapter_config(config), targets_of(model)
    if config.lora_adapter is not None:
        adapter = read_adapter(config.lora_adapter, targets)
    else:
        chosen = settings.chosen(targets)
        for pattern in config.lora_targets:
            if not AdapterConfig(rank=1, alpha=1.0, targets=(pattern,)).chosen(targets):
                kinds = sorted({name.rpartition(".")[2] for name in targets})
                raise ValueError(f"lora_targets has {pattern!r}, which matches no layer; the layers are {', '.join(kinds)}")
        generator = torch.Generator().manual_seed(config.seed)
        begin = partial(_new, generator, config.lora_rank)
        pairs = {name: Pair(*begin(targets[name].rows, targets[name].cols), settings.scale_of(name)) for name in chosen}
        adapter = Adapter(config=settings, pairs=pairs)
    attach(model, adapter, dropout=config.lora_dropout)
    return model


def _new(generator: torch.Generator, rank: int, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    bound = cols**-0.5
    return torch.empty(rank, cols).uniform_(-bound, bound, generator=generator), torch.zeros(rows, rank)


def save_trained(config: TrainConfig, model: Model, folder: Path) -> None:
    """Save the trained adapter in peft's format, which `tilewright serve` also reads."""
    save_adapter(adapter_of(model, adapter_config(config)), folder)
