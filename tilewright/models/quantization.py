"""Reads `quantization_config` of config.json: which layers have quantised weights, and in which layout.

Supported: compressed-tensors (int8 and fp8 with activations by token or with one static scale, fp8 in blocks of 128, symmetric
int4), fp8 as in DeepSeek-V3 (`weight_block_size`) and with one scale per tensor, 4-bit GPTQ and AWQ, and the output of
`save_quantized`.

Refused, with advice: zero points of activations, static scales of blocks, other numbers of bits, activation order (`desc_act`),
rules by layer, a quantised KV cache, more than one scheme in a checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.models.errors import ModelError
from tilewright.models.layouts import AWQ, GPTQ, Blocks, Layout, Own, Packed, Scaled

__all__ = ["Quantization"]

_HEAD = "lm_head"
_GROUPS = (32, 64, 128)
MAX_PATTERN_CHARS = 500
_NESTED = re.compile(r"[*+}]\)[*+{]")
"""A repeated group that ends with a repeat, as in `(a+)+`: time that doubles with every character."""


@dataclass(frozen=True)
class Quantization:
    """Which layers of a checkpoint are quantised, and how."""

    method: str
    layout: Layout | None
    """Of all layers but the ignored ones; None where `layers` lists them."""
    ignored: tuple[str, ...] = ()
    """Names or "re:" expressions; a name stands for all below it, too."""
    layers: tuple[tuple[str, Own], ...] = ()

    def layout_of(self, name: str) -> Layout | None:
        """The layout of a linear layer, by its name in the checkpoint; None: it has a float weight."""
        if self.layout is None:
            return dict(self.layers).get(name)
        return None if any(_ignores(pattern, name) for pattern in self.ignored) else self.layout

    @property
    def format(self) -> str:
        """In words, for plans and bundles."""
        if self.layout is not None:
            return f"{self.method} {self.layout}"
        return f"{self.method} {' '.join(sorted({f'{own}' for _, own in self.layers}))}"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Quantization":
        """From the contents of `quantization_config`.

        Raises:
            ModelError: the method or one of its settings is not supported; the message names it and says what to do.
        """
        method = str(raw.get("quant_method"))
        if method not in _READERS:
            raise _refused("quant_method", raw.get("quant_method"), " or ".join(_READERS), "or use the unquantised model")
        try:
            return _READERS[method](raw)
        except (AttributeError, KeyError, TypeError, re.error) as error:  # an object where a list should be, and the like
            words = (
                f"quantization_config has a field of the wrong type or form ({error}); correct it, or download the model again"
            )
            raise ModelError(words) from error


def _ignores(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(pattern + ".") or name.endswith("." + pattern)


def _refused(key: str, got: Any, wanted: str, advice: str) -> ModelError:
    return ModelError(f"quantization_config: {key} is {got!r}, wanted {wanted}; {advice}")


def _names(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = raw.get(key) or ()
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise _refused(key, names, "a list of names", "the config is damaged")
    for name in names:
        if name.startswith("re:"):
            re.compile(name[3:])
            if len(name) > MAX_PATTERN_CHARS or _NESTED.search(name):
                raise _refused(
                    key, name[:60], "a regular expression without nested repetitions, which can take forever", _ADVICE
                )
    return tuple(names)


_ADVICE = "quantise the model again that way, or load its unquantised folder with --quantize"


# ---- compressed-tensors


def _compressed_tensors(raw: Mapping[str, Any]) -> Quantization:
    groups = list((raw.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise _refused("config_groups", f"{len(groups)} groups", "one", _ADVICE)
    group = groups[0]
    if list(group.get("targets") or ()) != ["Linear"]:
        raise _refused("targets", group.get("targets"), '["Linear"]', "list the layers to leave out in ignore")
    if raw.get("kv_cache_scheme"):
        raise _refused("kv_cache_scheme", "given", "null", "the KV cache has the dtype of the model here; set it to null")
    if raw.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise _refused("sparsity_config", raw["sparsity_config"]["format"], "dense", _ADVICE)
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if not weights.get("symmetric", True):
        raise _refused("weights.symmetric", False, "true", _ADVICE)
    if weights.get("actorder") == "group":
        raise _refused("weights.actorder", "group", 'null or "weight"', _ADVICE)
    kind, strategy = f"{weights.get('type')}{weights.get('num_bits')}", weights.get("strategy")
    return Quantization("compressed-tensors", _compressed_layout(kind, strategy, weights, inputs), _names(raw, "ignore"))


def _compressed_layout(kind: str, strategy: Any, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Layout:
    if kind == "int4":
        if strategy != "group" or weights.get("group_size") not in _GROUPS or inputs is not None:
            got = f"{strategy} of {weights.get('group_size')}, activations {'quantised' if inputs else 'not quantised'}"
            raise _refused("weights of 4 bits", got, "groups of 32, 64 or 128, and activations not quantised", _ADVICE)
        return Packed(weights["group_size"])
    if kind not in ("int8", "float8"):
        raise _refused("weights", kind, "int8, float8 or int4", _ADVICE)
    blocks = strategy == "block" and kind == "float8" and list(weights.get("block_structure") or ()) == [128, 128]
    if not blocks and strategy not in ("channel", "tensor"):
        raise _refused("weights.strategy", strategy, "channel, tensor, or block of 128 x 128 for float8", _ADVICE)
    activation = "none" if inputs is None else _compressed_activation(kind, inputs, blocks)
    return Blocks("weight_scale") if blocks else Scaled("I8" if kind == "int8" else "F8_E4M3", activation)


def _compressed_activation(kind: str, inputs: Mapping[str, Any], blocks: bool) -> str:
    """dynamic or static, as `Scaled.activation` has it; beside weights with a scale for each block only the first."""
    if f"{inputs.get('type')}{inputs.get('num_bits')}" != kind or not inputs.get("symmetric", True):
        raise _refused("input_activations", inputs, f"symmetric {kind} like the weights, or null", _ADVICE)
    dynamic, strategy = inputs.get("dynamic"), inputs.get("strategy")
    if dynamic is not True and (blocks or dynamic is not False):
        raise _refused("input_activations.dynamic", dynamic, "true" if blocks else "true or false", _ADVICE)
    if not blocks and strategy != "tensor" and (strategy != "token" or not dynamic):
        raise _refused("input_activations.strategy", strategy, "token" if dynamic else "tensor", _ADVICE)
    return "dynamic" if dynamic else "static"


# ---- fp8, GPTQ, AWQ, our own


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    scheme = raw.get("activation_scheme", "dynamic")
    if raw.get("fmt", "e4m3") != "e4m3":
        raise _refused("fmt", raw["fmt"], "e4m3", _ADVICE)
    block = raw.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise _refused("weight_block_size", block, "[128, 128] or null", _ADVICE)
    known = ("dynamic", "static") if block is None else ("dynamic",)
    if scheme not in known:
        raise _refused("activation_scheme", scheme, " or ".join(known), _ADVICE)
    ignored = (*_names(raw, "modules_to_not_convert"), *_names(raw, "ignored_layers"), _HEAD)
    return Quantization("fp8", Scaled("F8_E4M3", scheme) if block is None else Blocks(), ignored)


def _four_bits(raw: Mapping[str, Any]) -> int:
    if raw.get("bits") != 4:
        raise _refused("bits", raw.get("bits"), "4", _ADVICE)
    if raw.get("group_size") not in _GROUPS:
        raise _refused("group_size", raw.get("group_size"), "32, 64 or 128", _ADVICE)
    if raw.get("lm_head"):
        raise _refused("lm_head", True, "false, because quantised heads are not supported", _ADVICE)
    return raw["group_size"]


def _gptq(raw: Mapping[str, Any]) -> Quantization:
    group = _four_bits(raw)
    if raw.get("desc_act"):
        raise _refused(
            "desc_act",
            True,
            "false, because columns in activation order are not supported",
            "quantise again with desc_act=False",
        )
    if raw.get("dynamic"):
        raise _refused("dynamic", raw["dynamic"], "null, because rules for single layers are not supported", _ADVICE)
    written = raw.get("checkpoint_format") or "gptq"
    if written not in ("gptq", "gptq_v2"):
        raise _refused("checkpoint_format", written, "gptq or gptq_v2", _ADVICE)
    if raw.get("modules_in_block_to_quantize"):
        raise _refused(
            "modules_in_block_to_quantize", "given", "null, because all linear layers of a block must be quantised", _ADVICE
        )
    symmetric = raw.get("sym", True) is True
    return Quantization("gptq", GPTQ(group, symmetric, stored_minus_one=written == "gptq"), (_HEAD,))


def _awq(raw: Mapping[str, Any]) -> Quantization:
    group = _four_bits(raw)
    if str(raw.get("version", "gemm")).lower() != "gemm":
        raise _refused("version", raw["version"], "gemm", _ADVICE)
    if not raw.get("zero_point", True):
        raise _refused("zero_point", False, "true", _ADVICE)
    return Quantization("awq", AWQ(group), (*_names(raw, "modules_to_not_convert"), _HEAD))


def _own(raw: Mapping[str, Any]) -> Quantization:
    layers = raw.get("layers")
    if not isinstance(layers, Mapping) or not layers or not all(isinstance(value, Mapping) for value in layers.values()):
        raise _refused("layers", layers, "an object from layer names to format, codes, block and zeros", "save the model again")
    return Quantization("tilewright", None, layers=tuple((name, Own.from_json(value)) for name, value in layers.items()))


_READERS = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "awq": _awq, "tilewright": _own}
