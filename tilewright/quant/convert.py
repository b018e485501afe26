"""`quantize`: replaces the float weights of linear layers and experts by quantised ones, in place, layer by layer.

    report = tw.quantize(model, "int8")
    print(report)

Accepts tilewright's models and any `torch.nn.Module` with `torch.nn.Linear` layers, which become `tilewright.nn.Linear`. The
peak memory is that of the model and one further layer. Everything is checked before the first layer is changed.

Some layers are not quantised, and the report states why: layers that `skip` names, layers whose weight two modules share (a
tied head), and subclasses of `torch.nn.Linear`, because their owner may read the weight directly, as
`torch.nn.MultiheadAttention` does.

Not here: quantising embeddings, convolutions or the KV cache; quantisation-aware training.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tilewright.formats import FORMATS, SMALLEST_AMAX
from tilewright.hw.device import Device, device_of
from tilewright.nn import ExpertLinear, Linear
from tilewright.ops import linear
from tilewright.ops.weights import WEIGHT_FORMATS, QuantizedWeight, ScaledWeight, StaticWeight, quantize_weight
from tilewright.quant.calibrate import Seen, observe
from tilewright.quant.compensate import compensated
from tilewright.quant.migrate import migrate_into_norms
from tilewright.quant.report import LayerReport, Report

__all__ = ["DEFAULT_SKIP", "check_card", "convert_layer", "find_layers", "quantize"]

DEFAULT_SKIP = ("lm_head",)
"""The usual name of the head of a language model. This is the only pattern that may match nothing."""
_HEADS = {"lm_head": ("lm_head", "head")}
_ACTIVATIONS = {"dynamic": tuple(WEIGHT_FORMATS), "static": ("int8", "fp8"), "static-zero": ("int8",)}
"""Kind of activation scale -> the formats that support it."""
_OURS = (Linear, ExpertLinear)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Found(NamedTuple):
    """The linear layers of a model."""

    chosen: dict[str, nn.Module]
    stays: dict[str, str]
    """Name -> why the layer is not quantised."""


def quantize(
    model: nn.Module,
    format: str,
    skip: Sequence[str] = DEFAULT_SKIP,
    calibration: Iterable[Any] | None = None,
    *,
    migrate: float | None = None,
    activation: str = "dynamic",
) -> Report:
    """Quantise the linear layers of a model, in place.

    Args:
        model: a model with weights in bf16, fp16 or fp32, on its device.
        format: int8, fp8, fp8-block, mxfp8, int4 or int8-weight.
        skip: names of layers that are not quantised, for example "lm_head", "blocks.0.*", "*.down". A pattern may also match
            only the end of a name.
        calibration: batches of input for the model; a tuple is passed as positional arguments, a mapping as keyword arguments.
            With it, the report has the error of each layer's output instead of its weight, and int4 weights are chosen so that
            errors on this input cancel out (GPTQ, Frantar et al., 2022). Experts are rounded without calibration.
        migrate: 0 to 1, for int8 and fp8 with calibration: move outliers of the activations into the weights, for layers after
            a norm that can absorb the factors (SmoothQuant, Xiao et al., 2022; their choice is 0.5).
        activation: how int8 and fp8 quantise activations. "dynamic": a scale for each token, computed in every call. "static":
            one scale per layer, from the largest number in its calibration input. "static-zero", for int8: a zero point as
            well, for inputs whose values mostly have the same sign. With both, values outside of the calibrated range saturate.

    Returns:
        A report with one row for each linear layer.

    Raises:
        ValueError: the format or the kind of activation is unknown, or the card does not support it; K is not a multiple of the
            group; weights or calibration input are not finite; weights are quantised already; or a pattern matches nothing.
    """
    _check_format(format)
    found = find_layers(model, skip)
    _check_migrate(format, migrate, calibration)
    _check_activation(format, activation, calibration)
    _check_layers(found.chosen, format)
    experts = {name for name, module in found.chosen.items() if isinstance(module, ExpertLinear)}
    seen: dict[str, Seen] = {}
    if calibration is not None:
        seen = observe(model, {name: module for name, module in found.chosen.items() if name not in experts}, calibration)
    notes = {} if migrate is None else migrate_into_norms(model, found.chosen, seen, migrate)
    rows = []
    stays, chosen = found.stays, set(found.chosen)
    found.chosen.clear()  # a reference to a layer here would keep its float weight alive
    for name in [name for name, _ in model.named_modules()]:
        if name in stays:
            rows.append(_row_of_one_that_stays(name, model.get_submodule(name), stays[name]))
        elif name in chosen:
            module = model.get_submodule(name)
            note = notes.get(name, "")
            if calibration is not None and name in experts:
                note = (
                    "the weights of experts are rounded to nearest, without the calibration input; this is the error of "
                    "the weights"
                )
            rows.append(_quantize_layer(model, name, module, format, seen.pop(name, None), note, activation))
    return Report(format=format, layers=tuple(rows), calibrated=calibration is not None)


def _check_format(format: str) -> None:
    """Raise ValueError if `WEIGHT_FORMATS` does not have the format."""
    if format not in WEIGHT_FORMATS:
        near = get_close_matches(str(format), WEIGHT_FORMATS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"quantize: there is no format {format!r}; {hint}the formats are {', '.join(WEIGHT_FORMATS)}")


def find_layers(model: nn.Module, skip: Sequence[str] = DEFAULT_SKIP) -> Found:
    """The linear layers to quantise, and those that stay as they are.

    Raises:
        ValueError: a pattern matches no linear layer, or there is none to quantise.
    """
    if isinstance(skip, str):
        skip = (skip,)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (*_OURS, nn.Linear))}
    if "" in layers:
        raise ValueError(
            "quantize: the model is a single linear layer, which cannot be replaced in place; put it into another Module"
        )
    unused = [p for p in skip if p not in DEFAULT_SKIP and not any(_matches(name, p) for name in layers)]
    if unused:
        some = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(
            f"quantize: skip has {', '.join(map(repr, unused))}, which matches no linear layer; the linear layers are {some}"
        )
    owners = _owners(model)
    found = Found({}, {})
    for name, module in layers.items():
        others = [other for other in owners.get(id(module.weight), ()) if other != name]
        if others:
            found.stays[name] = f"shares its weight with {', '.join(others)}"
        elif any(_matches(name, pattern) for pattern in skip):
            found.stays[name] = "named in skip"
        elif type(module) not in (*_OURS, nn.Linear):
            found.stays[name] = f"is a {type(module).__name__}, whose parent module may read the weight directly"
        else:
            found.chosen[name] = module
    if not found.chosen:
        why = "".join(f"\n  {name}: {reason}" for name, reason in found.stays.items())
        raise ValueError(f"quantize: {type(model).__name__} has no linear layer that can be quantised{why and ':'}{why}")
    return found


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in _HEADS.get(pattern, (pattern,)))


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """id of a parameter -> names of the modules that have it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


# ---- checks


def _check_migrate(format: str, migrate: float | None, calibration: Iterable[Any] | None) -> None:
    if migrate is None:
        return
    if format not in ("int8", "fp8"):
        raise ValueError(
            f"quantize: migrate is only for int8 and fp8, which have one scale per token; leave migrate out with {format}"
        )
    if calibration is None:
        raise ValueError("quantize: migrate needs calibration input, to know which activations are large")
    if not 0.0 <= migrate <= 1.0:
        raise ValueError(
            f"quantize: migrate is {migrate}, wanted 0 (the scale stays in the activations) to 1 (it moves to the weights)"
        )


def _check_activation(format: str, activation: str, calibration: Iterable[Any] | None) -> None:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"quantize: activation is {activation!r}, wanted {', '.join(_ACTIVATIONS)}")
    if format not in _ACTIVATIONS[activation]:
        formats = " and ".join(_ACTIVATIONS[activation])
        raise ValueError(
            f"quantize: {activation} scales of activations are supported only for {formats}; with {format}, leave "
            "activation out"
        )
    if activation != "dynamic" and calibration is None:
        raise ValueError(f"quantize: {activation} scales need calibration input, to know how large the activations are")


def _check_layers(layers: dict[str, nn.Module], format: str) -> None:
    """Check everything that could fail later, so that no error leaves a model partly quantised."""
    for name, module in layers.items():
        weight = _weight_of(module)
        if isinstance(weight, QuantizedWeight):
            raise ValueError(
                f"quantize: {name} is already quantised, as {weight.format}; quantise the float model instead, or "
                "list the layer in skip"
            )
        _check_weight(name, weight.shape, weight.dtype, format)
        if weight.is_cuda:
            check_card(format, device_of(weight.get_device()), weight.dtype)
        if not weight.is_meta and not bool(weight.isfinite().all()):
            raise ValueError(
                f"quantize: {int((~weight.isfinite()).sum())} of {weight.numel()} elements of the weight of {name} "
                "are not finite; the checkpoint is damaged, or training diverged"
            )


def check_card(format: str, card: Device, dtype: torch.dtype) -> None:
    """Raise ValueError if layers of this format and float dtype cannot run on the device. A CPU supports all of them."""
    form = WEIGHT_FORMATS[format]
    if card.kind != "cuda":
        return
    if card.arch < form.min_arch:
        raise ValueError(
            f"quantize: {format} needs the float8 instructions of sm_{form.min_arch}, but {card.name} is "
            f"sm_{card.arch}; use int8, int8-weight or int4"
        )
    if dtype == torch.float32:
        raise ValueError(
            f"quantize: the model is float32, but on a GPU layers of {format} need bfloat16 or float16; convert the "
            "model to one of these"
        )


def _check_weight(name: str, shape: Sequence[int], dtype: torch.dtype, format: str) -> None:
    """Raise ValueError if a weight of this shape and dtype cannot be quantised to the format."""
    form = WEIGHT_FORMATS[format]
    if dtype not in _FLOATS:
        raise ValueError(f"quantize: the weight of {name} is {dtype}, wanted bfloat16, float16 or float32")
    if form.block_for(shape[1]) is None:
        groups = " or ".join(str(cols) for _, cols in form.blocks)
        raise ValueError(
            f"quantize: {format} needs a number of inputs that is a multiple of its group size {groups}, but {name} "
            f"has K = {shape[1]} inputs; list the layer in skip, or use int8, fp8, fp8-block or int8-weight"
        )


# ---- one layer


def convert_layer(name: str, layer: Linear | ExpertLinear, format: str) -> None:
    """Replace the float weight of one layer by a quantised one, without a report.

    Raises:
        ValueError: the weight is not finite, or cannot be quantised to the format.
    """
    _check_layers({name: layer}, format)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    layer.replace_weight(quantize_weight(weight.detach(), format))


def _quantize_layer(
    model: nn.Module, name: str, module: nn.Module, format: str, seen: Seen | None, note: str, activation: str
) -> LayerReport:
    weight = _weight_of(module)
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    sample = None if seen is None else seen.sample
    block = WEIGHT_FORMATS[format].block_for(weight.shape[1])
    if format == "int4" and sample is not None and block is not None:
        quantized, note = compensated(weight, sample, block), "compensated on the calibration input"
    else:
        quantized = quantize_weight(weight, format)
    if activation != "dynamic" and seen is not None and sample is not None:
        quantized, note = _with_static_scale(quantized, seen, zero=activation == "static-zero"), note or f"{activation} scale"
    if seen is None:
        error = None if weight.is_meta else _weight_error(weight, quantized)
    elif sample is None:
        error, note = None, note or "the calibration input did not reach it"
    else:
        error = _output_error(sample.to(weight.device), weight, quantized)
    if isinstance(module, _OURS):
        module.replace_weight(quantized)
    else:
        _replace(model, module, _as_ours(module, quantized))
    return LayerReport(
        name=name, format=format, shape=(weight.shape[0], weight.shape[1]), error=error, bytes_before=weight.nbytes,
        bytes_after=quantized.nbytes, note=note,
    )  # fmt: skip


def _with_static_scale(weight: QuantizedWeight, seen: Seen, *, zero: bool) -> StaticWeight:
    """The same quantised weight, with a static scale (and zero point) whose range covers the calibration input."""
    assert isinstance(weight, ScaledWeight)
    assert seen.low is not None
    assert seen.high is not None
    # The range must include 0, because padding of the matrix has the value 0.
    low, high = seen.low.min().clamp_max(0.0), seen.high.max().clamp_min(0.0)
    largest = FORMATS[weight.value_format].largest
    scale = ((high - low) / 255 if zero else torch.maximum(-low, high) / largest).clamp_min(SMALLEST_AMAX / largest)
    point = (-128 - low / scale).round().clamp(-128, 127).to(weight.device) if zero else None
    scales = {"x_scale": scale.to(weight.device), "x_zero": point}
    return StaticWeight(weight.codes, weight.scales, block=weight.block, dtype=weight.dtype, **scales)


def _row_of_one_that_stays(name: str, module: nn.Module, why: str) -> LayerReport:
    weight = _weight_of(module)
    rows, cols = weight.shape
    return LayerReport(
        name=name, format=None, shape=(rows, cols), error=None, bytes_before=weight.nbytes, bytes_after=weight.nbytes, note=why
    )


def _as_ours(module: nn.Module, weight: QuantizedWeight) -> Linear:
    """The layer that replaces a `torch.nn.Linear`; it keeps the bias."""
    layer = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.replace_weight(weight)
    layer.bias = module.bias  # pyright: ignore[reportAttributeAccessIssue]
    return layer.train(module.training)


def _weight_of(module: nn.Module) -> Tensor | QuantizedWeight:
    return cast("Tensor | QuantizedWeight", module.weight)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a layer everywhere in the model, because it may be used in several places."""
    for parent in list(model.modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            setattr(parent, name, new)


def _weight_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """The relative RMS error of the weight, some rows at a time, because float32 copies of all rows could take gigabytes."""
    parts = [rows.shape[0] for rows in weight.split(1024)]
    wrong = right = 0.0
    for rows, codes in zip(weight.split(parts), quantized.split_rows(parts), strict=True):
        exact = rows.float()
        wrong += (codes.dequantize(torch.float32) - exact).square().sum(dtype=torch.float64).item()
        right += exact.square().sum(dtype=torch.float64).item()
    return (wrong / right) ** 0.5 if right else 0.0


def _output_error(sample: Tensor, weight: Tensor, quantized: QuantizedWeight) -> float:
    """The relative RMS error of the layer's output for the sample; the activation is quantised if the format includes that."""
    with torch.no_grad():
        exact = linear(sample, weight).double()
        wrong = linear(sample, quantized).double() - exact
    size = exact.square().mean().item()
    return (wrong.square().mean().item() / size) ** 0.5 if size else 0.0
