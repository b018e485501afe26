"""Reads and writes adapter_config.json of a LoRA adapter, in the format of the `peft` library."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tilewright.models.errors import ModelError
from tilewright.models.files import read_json

__all__ = ["CONFIG_NAME", "MAX_RANK", "AdapterConfig"]

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 1024
"""Largest rank that can be read or trained."""
MAX_PATTERN = 4096
MAX_PATTERNS = 4096
"""Most entries of rank patterns, and of alpha patterns."""

_UNSUPPORTED = {
    "use_dora": "magnitudes (DoRA)", "use_qalora": "pooled inputs (QALoRA)", "lora_bias": "separate biases",
    "modules_to_save": "completely trained layers", "trainable_token_indices": "trained embeddings of tokens",
    "layer_replication": "duplicated layers", "target_parameters": "adapters of single parameters",
    "alora_invocation_tokens": "adapters that start at a certain token", "fan_in_fan_out": "transposed weights",
    "arrow_config": "adapters that route", "exclude_modules": "excluded layers", "layers_pattern": "a pattern of layers",
}  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which layers have adapters, and how large they are.

    targets: names of layers, complete or only the last part ("q_proj"), or shell patterns of complete names ("*.layers.0.*"); a
        single string is "all-linear", or a regular expression for complete names.
    ranks, alphas: values for some layers, by regular expressions for the ends of their names.
    layers: numbers of the blocks with adapters; None: all.
    base: the model that it was trained on, if known.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] | str
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    base: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read the config of an adapter's folder.

        Raises:
            ModelError: the file is missing or broken, or needs something that is not supported.
        """
        path = folder / CONFIG_NAME
        if not path.exists():
            raise ModelError(f"{folder} has no {CONFIG_NAME}; wanted the folder of a LoRA adapter, as peft saves it")
        raw = read_json(path)
        if (kind := raw.get("peft_type")) != "LORA":
            raise ModelError(f"{path} has the peft_type {str(kind)[:80]!r}, wanted LORA")
        for name, words in _UNSUPPORTED.items():
            if raw.get(name):
                raise ModelError(f"{path} requires {words} ({name}), which is not supported")
        if raw.get("bias", "none") != "none":
            raise ModelError(f"{path} has trained biases (bias is {str(raw['bias'])[:80]!r}), which are not supported")
        if str(raw.get("init_lora_weights")).startswith(_CHANGES_BASE):
            begun = str(raw["init_lora_weights"])[:80]
            raise ModelError(f"{path} was initialised with {begun}, which changes the base model; have peft convert it to LoRA")
        try:
            return cls._from(raw)
        except (TypeError, ValueError, re.error) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error

    @classmethod
    def _from(cls, raw: Mapping[str, Any]) -> "AdapterConfig":
        targets, layers = raw.get("target_modules"), raw.get("layers_to_transform")
        if isinstance(layers, int):
            layers = [layers]
        return cls(
            rank=_whole("r", raw.get("r")), alpha=_number("lora_alpha", raw.get("lora_alpha")),
            rslora=bool(raw.get("use_rslora")), dropout=_number("lora_dropout", raw.get("lora_dropout", 0.0)),
            targets=targets if isinstance(targets, str) else tuple(_texts("target_modules", targets)),
            ranks={key: _whole("rank_pattern", value) for key, value in _mapping("rank_pattern", raw).items()},
            alphas={key: _number("alpha_pattern", value) for key, value in _mapping("alpha_pattern", raw).items()},
            layers=None if layers is None else tuple(_whole("layers_to_transform", layer, 0) for layer in layers),
            base=raw["base_model_name_or_path"] if isinstance(raw.get("base_model_name_or_path"), str) else None,
        )  # fmt: skip

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.ranks.values()):
            if not 1 <= rank <= MAX_RANK:
                raise ValueError(f"the rank of an adapter is {rank}, wanted 1 to {MAX_RANK}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"the dropout of an adapter is {self.dropout}, wanted 0 to below 1")
        for pattern in (*self.ranks, *self.alphas):
            _check_pattern(pattern)

    def chosen(self, names: Iterable[str], held: Collection[str] = ()) -> list[str]:
        """The layers' names that have an adapter, by the rules of peft.

        held: the layers whose tensors are in the folder. If `targets` is a regular expression, they decide instead: the
            expression is never run, because it might take forever.
        """
        if isinstance(self.targets, str) and self.targets != "all-linear":
            return [name for name in names if name in held]
        return [name for name in names if self._in_layers(name) and self._targets(name)]

    def _in_layers(self, name: str) -> bool:
        if self.layers is None:
            return True
        found = re.search(r"\.layers\.(\d+)\.", name)
        return found is not None and int(found.group(1)) in self.layers

    def _targets(self, name: str) -> bool:
        return isinstance(self.targets, str) or any(
            name == one or name.endswith(f".{one}") or fnmatchcase(name, one) for one in self.targets
        )

    def rank_of(self, name: str) -> int:
        """The rank for a layer."""
        return self.ranks.get(_key_of(self.ranks, name), self.rank)

    def scale_of(self, name: str) -> float:
        """The factor on the product of a layer's two matrices."""
        rank = self.rank_of(name)
        return self.alphas.get(_key_of(self.alphas, name), self.alpha) / (rank**0.5 if self.rslora else rank)

    def to_json(self, names: Iterable[str]) -> str:
        """The text of adapter_config.json; `names`: all layers that have adapters."""
        targets = self.targets
        if not isinstance(targets, str) and any(set("*?[") & set(one) for one in targets):
            targets = tuple(names)  # peft does not support shell patterns
        raw = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.base, "inference_mode": True,
            "r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "use_rslora": self.rslora,
            "target_modules": targets if isinstance(targets, str) else list(targets), "bias": "none",
            "fan_in_fan_out": False, "init_lora_weights": True, "modules_to_save": None, "use_dora": False,
            "rank_pattern": dict(self.ranks), "alpha_pattern": dict(self.alphas),
            "layers_to_transform": None if self.layers is None else list(self.layers),
        }  # fmt: skip
        return json.dumps(raw, indent=2) + "\n"


def _check_pattern(pattern: str) -> None:
    """Raise ValueError for a regular expression that may take long: it comes from a folder, and Python cannot interrupt it."""
    if len(pattern) > MAX_PATTERN or len(re.findall(r"[*+]", pattern)) > 2 or re.search(r"\)[*+?]|\{", pattern):
        most = f"more than two of the signs * and +, or more than {MAX_PATTERN} characters"
        raise ValueError(f"the pattern {pattern[:80]!r} has repeated groups, {most}, which is not supported")
    re.compile(pattern)


def _key_of(patterns: Mapping[str, Any], name: str) -> str:
    """The first pattern that matches the end of a name, as in peft; the name itself if none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), name)


def _whole(what: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {str(value)[:80]!r}, wanted an integer of at least {least}")
    return value


def _number(what: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e6 < value < 1e6:
        raise ValueError(f"{what} is {str(value)[:80]!r}, wanted a number")
    return float(value)


def _texts(what: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value) or len(value) > 65536:
        raise ValueError(f"{what} is {str(value)[:80]!r}, wanted a list of names or a regular expression")
    return value


def _mapping(what: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    value = raw.get(what) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise ValueError(f"{what} is {str(value)[:80]!r}, wanted a mapping of patterns to numbers")
    return value
