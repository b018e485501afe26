"""The layouts of a quantised linear layer in checkpoints: which tensors represent it, and how to make a weight from them.

A layout is immutable data. `tensors(n, k)` lists the tensors for a weight [n, k], by suffix of the layer's name, so that a
checkpoint's headers can be checked before anything is read; `assemble` makes the weight from them, also on "meta".

| layout   | tensors                                                     | published as                                        |
|----------|-------------------------------------------------------------|-----------------------------------------------------|
| `Scaled` | weight, weight_scale: [N, 1], [N], [1] or a number;         | compressed-tensors int8 and fp8, fp8 by tensor      |
|          | with a static activation input_scale: [1] or a number       |                                                     |
| `Blocks` | weight, weight_scale_inv or weight_scale: [N/128, K/128]    | DeepSeek-V3's fp8, compressed-tensors fp8 by block  |
| `GPTQ`   | qweight [K/8, N], qzeros [K/g, N/8], scales [K/g, N], g_idx | GPTQ of 4 bits                                      |
| `AWQ`    | qweight [K, N/8], qzeros [K/g, N/8], scales [K/g, N]        | AWQ of 4 bits, `version: gemm`                      |
| `Packed` | weight_packed [N, K/8], weight_scale [N, K/g], weight_shape | compressed-tensors int4, symmetric                  |
| `Own`    | weight, weight_scale float32, weight_zero, input_scale, ... | what `save_quantized` writes                        |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewright.formats import Quantized, read_awq, read_gptq
from tilewright.models.errors import ModelError
from tilewright.ops.weights import (
    WEIGHT_FORMATS,
    BlockScaledWeight,
    MixedWeight,
    QuantizedWeight,
    ScaledWeight,
    StaticWeight,
)

__all__ = ["AWQ", "GPTQ", "Blocks", "Layout", "Own", "Packed", "Scaled", "Wanted"]

_SCALES = ("F32", "BF16", "F16")
_FP8 = ("F8_E4M3",)


class Wanted(NamedTuple):
    """What a checkpoint must have under a name."""

    shapes: tuple[tuple[int, ...], ...]
    """One of these."""
    dtypes: tuple[str, ...]
    """One of these, as safetensors call them."""
    optional: bool = False


class Layout(Protocol):
    """The tensors of a layer."""

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """Suffix of the layer's name -> what stands there for a weight [n, k]. ModelError where such a weight cannot be."""
        ...

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """The weight, on the tensors' device; `dtype` is that of the model. ValueError where a value does not fit."""
        ...


@dataclass(frozen=True)
class Scaled:
    """8-bit codes with a scale for each row, or for all of the layer."""

    codes: str
    """I8 or F8_E4M3."""
    activation: str = "dynamic"
    """How the activation is quantised: "dynamic", a scale for each token; "static", one scale, beside the weight; "none"."""

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """weight and weight_scale; of a static activation input_scale."""
        wanted = {"weight": Wanted(((n, k),), (self.codes,)), "weight_scale": Wanted(((n, 1), (n,), (1,), ()), _SCALES)}
        return wanted | ({"input_scale": Wanted(((1,), ()), _SCALES)} if self.activation == "static" else {})

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """A scale for all becomes one for each row: that is what the product takes."""
        scales = tensors["weight_scale"].float().flatten()
        scales = scales.expand(n).contiguous() if scales.shape[0] != n else scales
        if self.activation == "static":
            x_scale = tensors["input_scale"].float().reshape(())
            if not x_scale.is_meta and not 0.0 < float(x_scale) < float("inf"):
                raise ValueError(f"input_scale is {float(x_scale)}, wanted a finite number above 0; the checkpoint is damaged")
            return StaticWeight(tensors["weight"], scales, block=(1, 0), dtype=dtype, x_scale=x_scale)
        kind = MixedWeight if self.activation == "none" else ScaledWeight
        return kind(tensors["weight"], scales, block=(1, 0), dtype=dtype)


@dataclass(frozen=True)
class Blocks:
    """float8 with a scale for each 128 x 128."""

    scale_name: str = "weight_scale_inv"
    """A factor all the same: the inverse of what the weight was divided by."""

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """weight and the scales."""
        return {"weight": Wanted(((n, k),), _FP8), self.scale_name: Wanted(((-(-n // 128), -(-k // 128)),), _SCALES)}

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """As it is."""
        return BlockScaledWeight(tensors["weight"], tensors[self.scale_name], block=(128, 128), dtype=dtype)


def _check_group(what: str, n: int, k: int, group: int) -> None:
    if k % group or k % 8 or n % 8:
        raise ModelError(
            f"{what}: a weight with N = {n} and K = {k} cannot be divided into whole groups of {group} and whole "
            "words of 8 codes"
        )


@dataclass(frozen=True)
class GPTQ:
    """4 bits, columns in order."""

    group: int
    symmetric: bool
    stored_minus_one: bool

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """qweight, qzeros, scales, and g_idx, which many writers leave out."""
        _check_group("GPTQ", n, k, self.group)
        groups = k // self.group
        return {
            "qweight": Wanted(((k // 8, n),), ("I32",)),
            "qzeros": Wanted(((groups, n // 8),), ("I32",)),
            "scales": Wanted(((groups, n),), _SCALES),
            "g_idx": Wanted(((k,),), ("I32",), optional=True),
        }

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """Zero points of a symmetric checkpoint are all 8 and are left out."""
        order = tensors.get("g_idx")
        q = read_gptq(
            tensors["qweight"], tensors["qzeros"], tensors["scales"], None if order is None or order.is_meta else order,
            stored_minus_one=self.stored_minus_one,
        )  # fmt: skip
        return _int4(q, dtype, symmetric=self.symmetric)


@dataclass(frozen=True)
class AWQ:
    """4 bits with zero points, the outputs interleaved."""

    group: int

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """qweight, qzeros, scales."""
        _check_group("AWQ", n, k, self.group)
        groups = k // self.group
        return {
            "qweight": Wanted(((k, n // 8),), ("I32",)),
            "qzeros": Wanted(((groups, n // 8),), ("I32",)),
            "scales": Wanted(((groups, n),), _SCALES),
        }

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """In the order of `formats`."""
        return _int4(read_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"]), dtype, symmetric=False)


def _int4(q: Quantized, dtype: torch.dtype, *, symmetric: bool) -> MixedWeight:
    zeros = q.zeros
    if symmetric and zeros is not None:
        if not zeros.is_meta and not bool((zeros == 8).all()):
            raise ValueError("config.json sets sym (symmetric quantisation), but not all zero points are 8; set sym to false")
        zeros = None
    return MixedWeight(q.values, q.scales, zeros, block=q.block, dtype=dtype)


@dataclass(frozen=True)
class Packed:
    """4 bits, symmetric: eight neighbouring columns in an int32, the first in the lowest bits, code - 8 meant."""

    group: int

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """weight_packed, weight_scale, weight_shape."""
        _check_group("pack-quantized", n, k, self.group)
        return {
            "weight_packed": Wanted(((n, k // 8),), ("I32",)),
            "weight_scale": Wanted(((n, k // self.group),), _SCALES),
            "weight_shape": Wanted(((2,),), ("I64", "I32"), optional=True),
        }

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """The bytes of such an int32 are two codes each, the even column in the low half: they stay."""
        codes = tensors["weight_packed"].contiguous().view(torch.uint8)
        return MixedWeight(codes, tensors["weight_scale"], block=(1, self.group), dtype=dtype)


_OWN_FORMATS = (*WEIGHT_FORMATS, "int8-static", "fp8-static")
_SAFETENSORS = {torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


@dataclass(frozen=True)
class Own:
    """A `QuantizedWeight` as it is."""

    format: str
    """Of `WEIGHT_FORMATS`, or that of a `StaticWeight`."""
    codes: str
    """As safetensors call the dtype."""
    block: tuple[int, int]
    zeros: bool
    input_zero: bool = False
    """Whether the activation's codes have a zero point."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "Own":
        """The layout of a weight."""
        format = weight.format
        if format not in _OWN_FORMATS:
            raise ValueError(f"weights of format {format} cannot be saved; wanted one of {', '.join(_OWN_FORMATS)}")
        input_zero = isinstance(weight, StaticWeight) and weight.x_zero is not None
        return cls(format, _SAFETENSORS[weight.codes.dtype], weight.block, weight.zeros is not None, input_zero)

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> "Own":
        """From what `to_json` gave. ModelError where it is something else."""
        format, codes, block = raw.get("format"), raw.get("codes"), raw.get("block")
        known = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) for size in block)
        if format not in _OWN_FORMATS or codes not in _SAFETENSORS.values() or not known:
            raise ModelError(
                f"quantization_config: a layer is described as {dict(raw)}; wanted a format of {', '.join(_OWN_FORMATS)}, "
                f"codes of {', '.join(_SAFETENSORS.values())}, and a block [rows, columns]"
            )
        sizes = (block[0], block[1])  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        return cls(str(format), str(codes), sizes, bool(raw.get("zeros")), bool(raw.get("input_zero")))

    def to_json(self) -> dict[str, object]:
        """For config.json."""
        found: dict[str, object] = {
            "format": self.format, "codes": self.codes, "block": list(self.block), "zeros": self.zeros
        }  # fmt: skip
        return found | ({"input_zero": True} if self.input_zero else {})

    @property
    def _static(self) -> bool:
        return self.format not in WEIGHT_FORMATS

    def tensors(self, n: int, k: int) -> dict[str, Wanted]:
        """weight, weight_scale, weight_zero; with static scales input_scale, input_zero."""
        rows, cols = self.block
        scales = (-(-n // rows), -(-k // cols)) if cols else (n,)
        wanted = {
            "weight": Wanted(((n, k // 2 if self.codes == "U8" else k),), (self.codes,)),
            "weight_scale": Wanted((scales,), ("F32",)),
        }
        if self.zeros:
            wanted["weight_zero"] = Wanted((scales,), ("U8",))
        if self._static:
            wanted["input_scale"] = Wanted(((),), ("F32",))
        if self.input_zero:
            wanted["input_zero"] = Wanted(((),), ("F32",))
        return wanted

    def take(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors of a weight, by suffix; the inverse of `assemble`."""
        found = {"weight": weight.codes, "weight_scale": weight.scales, "weight_zero": weight.zeros}
        if isinstance(weight, StaticWeight):
            # Parts of a merged layer share theirs, and a file may not.
            zero = weight.x_zero
            found |= {"input_scale": weight.x_scale.clone(), "input_zero": None if zero is None else zero.clone()}
        return {suffix: tensor.contiguous().cpu() for suffix, tensor in found.items() if tensor is not None}

    def assemble(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> QuantizedWeight:
        """The weight that `take` took apart."""
        if self._static:
            return StaticWeight(
                tensors["weight"], tensors["weight_scale"], block=self.block, dtype=dtype, x_scale=tensors["input_scale"],
                x_zero=tensors.get("input_zero"),
            )  # fmt: skip
        kind = WEIGHT_FORMATS[self.format].kind
        return kind(tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), block=self.block, dtype=dtype)
