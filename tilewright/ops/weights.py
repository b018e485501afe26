"""Weights of 8 and 4 bits, which replace the float parameter in `nn.Linear.weight`.

A quantised weight is a module with buffers, so it is moved, saved and loaded with its layer. It has the `shape` [N, K], the
`dtype` and the `device` of the float weight that it replaces. Its type decides which op runs (`ops/linear.py`).

| type                | formats           | product                                                        |
|---------------------|-------------------|----------------------------------------------------------------|
| `ScaledWeight`      | int8, fp8         | 8 bits x 8 bits, one scale for each token and for each output  |
| `StaticWeight`      | the same, static  | the same with one scale for every token, found by calibration  |
| `BlockScaledWeight` | fp8-block         | fp8 x fp8, a scale for each 128 of K                           |
| `MXWeight`          | mxfp8             | the same; the activation is quantised to mxfp8 first           |
| `MixedWeight`       | int8-weight, int4 | 16 bits x 8 or 4 bits: the activation is not quantised         |

Not here: gradients of the weight, quantising a whole model (`tilewright.quant`), layouts of checkpoints (`tilewright.models`).

    N outputs, K inputs, block (r, c): r rows and c columns share a scale
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.formats import Quantized, dequantize, encode
from tilewright.kernels.device.quantize import padded_width
from tilewright.kernels.gemm.weight_only.linear import prepare, restore
from tilewright.kernels.quantize.mx_to_block import fold_mx, fold_mx_weight

__all__ = [
    "WEIGHT_FORMATS",
    "BlockScaledWeight",
    "MXWeight",
    "MixedWeight",
    "QuantizedWeight",
    "ScaledWeight",
    "StaticWeight",
    "WeightFormat",
    "quantize_weight",
    "stack_rows",
]

_CHUNK_ELEMENTS = 1 << 24
"""Elements that are quantised at once. For a whole weight of 28672 x 8192, several float32 copies would take gigabytes."""
_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8-e5m2", torch.uint8: "int4-zero"}


class QuantizedWeight(nn.Module, ABC):
    """Quantised values and scales of a weight [N, K].

    Args:
        codes: the quantised values: int8 or float8 [N, K]; for int4 uint8 [N, K / 2], packed as by `formats.pack_int4`.
        scales: float32, [N] for one scale per row, or [N / r, K / c] (rounded up) for blocks (r, c).
        zeros: zero points, only for int4: uint8 in the shape of scales; None: all are 8.
        block: (1, 0) for one scale per row, otherwise (r, c).
        dtype: the dtype of the float weight that this one replaces, and of the layer's activations.
    """

    scales: Tensor
    zeros: Tensor | None
    stored: Tensor

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, block: tuple[int, int], dtype: torch.dtype
    ):
        super().__init__()
        self.block = block
        self.dtype = dtype
        packed = codes.dtype == torch.uint8
        self._cols = codes.shape[1] * (2 if packed else 1)
        if packed:
            codes = prepare(codes)
        # The products need rows that begin at multiples of 16 bytes.
        elif (padded := padded_width(self._cols)) != self._cols:
            codes = F.pad(codes.view(torch.uint8), (0, padded - self._cols)).view(codes.dtype)
        self.register_buffer("stored", codes.contiguous())
        self.register_buffer("scales", scales.to(torch.float32).contiguous())
        self.register_buffer("zeros", None if zeros is None else zeros.contiguous())

    @property
    def operand(self) -> Tensor:
        """The codes as the products read them: [N, K]; for int4 in the layout of `kernels/gemm/weight_only/int4_layout.py`."""
        stored = self.stored
        return stored if stored.dtype == torch.uint8 or stored.shape[1] == self._cols else stored[:, : self._cols]

    @property
    def codes(self) -> Tensor:
        """The codes as they were given: [N, K], or [N, K / 2] for int4."""
        return restore(self.stored, self._cols) if self.stored.dtype == torch.uint8 else self.operand

    @property
    @abstractmethod
    def format(self) -> str:
        """The name in `WEIGHT_FORMATS`. Formats that only checkpoints use have other names, such as "fp8-e5m2"."""

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.stored.shape[0], self._cols))

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.stored.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def dim(self) -> int:
        """2, as for a float weight."""
        return 2

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """(code - zero) * scale, [N, K], in the given dtype; None: `self.dtype`."""
        rows = self.block == (1, 0)
        q = Quantized(
            format=_STORED[self.stored.dtype],
            values=self.codes,
            scales=self.scales[:, None] if rows else self.scales,
            zeros=None if self.zeros is None else self.zeros[:, None] if rows else self.zeros,
            block=(1, max(1, self.shape[1])) if rows else self.block,
        )
        if self.zeros is None and self.stored.dtype == torch.uint8:
            q = Quantized(format="int4", values=q.values, scales=q.scales, block=q.block)
        return dequantize(q, dtype or self.dtype)

    def by_rows(self) -> Self:
        """The same weight with separate scales for each row; the weight itself if this is the case already."""
        rows = self.block[0]
        if rows == 1:
            return self
        scales = self.scales.repeat_interleave(rows, 0)[: self.shape[0]]
        return self._like(self.codes, scales, None, (1, self.block[1]))

    def _like(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Self:
        """A weight of the same kind from other rows."""
        return type(self)(codes, scales, zeros, block=block, dtype=self.dtype)

    def split_rows(self, parts: Sequence[int]) -> list[Self]:
        """Split the rows into several weights. If a part begins within a block, the scales of all parts are for single rows."""
        if any(sum(parts[:i]) % self.block[0] for i in range(len(parts))):
            return self.by_rows().split_rows(parts)
        scale_rows = [-(-part // self.block[0]) for part in parts]
        zeros = [None] * len(parts) if self.zeros is None else self.zeros.split(scale_rows)
        return [
            self._like(codes, scales, zero, self.block)
            for codes, scales, zero in zip(self.codes.split(list(parts)), self.scales.split(scale_rows), zeros, strict=True)
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by methods such as `to` and `half`: codes and scales are moved, and a new float dtype is only recorded."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        for name, buffer in self.named_buffers():
            moved = torch.empty_like(buffer, device=probe.device) if buffer.is_meta else buffer.to(probe.device)
            setattr(self, name, moved)
        self.dtype = probe.dtype
        return self

    def extra_repr(self) -> str:
        rows, cols = self.shape
        block = "rows" if self.block == (1, 0) else "{} x {}".format(*self.block)
        zeros = "" if self.zeros is None else ", zero points"
        return f"{self.format}, [{rows}, {cols}], scales of {block}{zeros}, {self.dtype}"


class ScaledWeight(QuantizedWeight):
    """int8 or float8 with one scale for each row; the activation is quantised to the same format, row by row."""

    @property
    def value_format(self) -> str:
        """int8, fp8 or fp8-e5m2: the format of the weight and of the activation."""
        return _STORED[self.stored.dtype]

    @property
    def format(self) -> str:
        """int8, fp8 or fp8-e5m2."""
        return self.value_format


class StaticWeight(ScaledWeight):
    """A `ScaledWeight` whose activation is quantised with one scale (for int8 also a zero point) that calibration has found.

    Args (in addition to those of `QuantizedWeight`):
        x_scale: one float32: the scale of the activation.
        x_zero: the activation's zero point, one float32 with an integer value from -128 to 127; None: 0.
    """

    x_scale: Tensor
    x_zero: Tensor | None
    offset: Tensor | None
    """[N] float32, added like a bias: it removes the contribution of the zero point from the product."""

    def __init__(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, block: tuple[int, int], dtype: torch.dtype,
        x_scale: Tensor, x_zero: Tensor | None = None,
    ):  # fmt: skip
        super().__init__(codes, scales, zeros, block=block, dtype=dtype)
        offset = None
        if x_zero is not None:
            # (q - zero) @ w = q @ w - zero * sum of w.
            offset = -x_scale.double() * x_zero * scales * codes.sum(1, dtype=torch.int64)
        self.register_buffer("x_scale", x_scale.to(torch.float32).reshape(()))
        self.register_buffer("x_zero", None if x_zero is None else x_zero.to(torch.float32).reshape(()))
        self.register_buffer("offset", None if offset is None else offset.to(torch.float32))

    @property
    def format(self) -> str:
        """int8-static or fp8-static. They are not in `WEIGHT_FORMATS`, which lists formats that need no calibration."""
        return f"{self.value_format}-static"

    @property
    def input_qparams(self) -> tuple[float, float]:
        """(scale, zero point) of the activation; (0, 0) on "meta", where they are unknown."""
        known = [0.0 if t is None or t.is_meta else t.item() for t in (self.x_scale, self.x_zero)]
        return known[0], known[1]

    def _like(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Self:
        return type(self)(codes, scales, zeros, block=block, dtype=self.dtype, x_scale=self.x_scale, x_zero=self.x_zero)


class BlockScaledWeight(QuantizedWeight):
    """float8 with a scale for each block of (128, 128) or (1, 128); the activation is quantised in blocks of (1, 128)."""

    @property
    def format(self) -> str:
        """fp8-block."""
        return "fp8-block"


class MXWeight(BlockScaledWeight):
    """mxfp8 with scales folded to blocks of (128, 128) or (1, 128) by `fold_mx_weight`.

    The activation is quantised to mxfp8 and folded as well.
    """

    @property
    def format(self) -> str:
        """mxfp8."""
        return "mxfp8"


class MixedWeight(QuantizedWeight):
    """int8, float8 or int4; the activation is not quantised."""

    @property
    def format(self) -> str:
        """int4, int8-weight, fp8-weight."""
        stored = _STORED[self.stored.dtype]
        return "int4" if stored == "int4-zero" else f"{stored}-weight"


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How `tw.quantize` stores a weight in one format."""

    kind: type[QuantizedWeight]
    stored: str
    """The name in `tilewright.formats.FORMATS`."""
    blocks: tuple[tuple[int, int], ...]
    """Possible blocks; with `divides` the first one whose columns divide K is used. (1, 0): a scale for each row."""
    divides: bool = False
    """Whether the columns of a block must divide K."""
    min_arch: int = 80
    meaning: str

    def block_for(self, cols: int) -> tuple[int, int] | None:
        """The block for a weight with `cols` columns; None if the columns of no block divide them."""
        return next((block for block in self.blocks if not self.divides or cols % block[1] == 0), None)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(
        kind=ScaledWeight, stored="int8", blocks=((1, 0),),
        meaning="int8 weights and activations, a scale for each output and each token",
    ),
    "fp8": WeightFormat(
        kind=ScaledWeight, stored="fp8", blocks=((1, 0),), min_arch=89,
        meaning="float8 e4m3 weights and activations, a scale for each output and each token",
    ),
    "fp8-block": WeightFormat(
        kind=BlockScaledWeight, stored="fp8", blocks=((128, 128),), min_arch=89,
        meaning="float8 e4m3, scales of 128 x 128 blocks of the weight and of 1 x 128 of the activation",
    ),
    "mxfp8": WeightFormat(
        kind=MXWeight, stored="mxfp8", blocks=((1, 32),), divides=True, min_arch=89,
        meaning="float8 e4m3, a power of two for each 32 (OCP Microscaling), folded to one for 128 x 128 or 1 x 128",
    ),
    "int4": WeightFormat(
        kind=MixedWeight, stored="int4-zero", blocks=((1, 128), (1, 64)), divides=True,
        meaning="4-bit weights, scale and zero point for each 128 inputs of an output (64 where 128 does not divide)",
    ),
    "int8-weight": WeightFormat(
        kind=MixedWeight, stored="int8", blocks=((1, 0),),
        meaning="int8 weights, a scale for each output; activations stay in 16 bits",
    ),
}  # fmt: skip
"""The formats of `tw.quantize` and `--quantize`."""


def quantize_weight(weight: Tensor, format: str) -> QuantizedWeight:
    """Quantise a float weight [N, K] to a format of `WEIGHT_FORMATS`, some rows at a time. Works on "meta", too.

    NaN and infinity are not detected: all values of their block become NaN.

    Raises:
        ValueError: no block of the format divides K.
    """
    form = WEIGHT_FORMATS[format]
    block = form.block_for(weight.shape[1])
    if block is None:
        groups = " or ".join(str(cols) for _, cols in form.blocks)
        raise ValueError(
            f"quantize_weight: {format} has groups of {groups} inputs, so the number of inputs must be a multiple of "
            f"that; got K = {weight.shape[1]}"
        )
    step = max(128, _CHUNK_ELEMENTS // max(1, weight.shape[1]) // 128 * 128)
    chunks = weight.split(step) if weight.shape[0] else [weight]
    pieces = [encode(rows, form.stored, "row" if block == (1, 0) else block) for rows in chunks]
    codes, scales = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
    if form.kind is MXWeight:
        codes, scales, block = _folded(codes, scales)
    elif block == (1, 0):
        scales = [column[:, 0] for column in scales]
    zeros = [piece[2] for piece in pieces if piece[2] is not None]
    return form.kind(torch.cat(codes), torch.cat(scales), torch.cat(zeros) if zeros else None, block=block, dtype=weight.dtype)


def _folded(codes: list[Tensor], scales: list[Tensor]) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """(codes, scales, block) of mxfp8 with one scale for 128 x 128 elements, or for 1 x 128 if some piece does not allow this.

    On "meta", where values are unknown, the block is 128 x 128, as for a trained weight.
    """
    pieces = list(zip(codes, scales, strict=True))
    folded = [fold_mx(*piece, 128) if piece[0].is_meta else fold_mx_weight(*piece) for piece in pieces]
    block = (128, 128)
    if any(scale.shape[0] != -(-code.shape[0] // 128) for code, scale in folded):
        folded, block = [fold_mx(*piece) for piece in pieces], (1, 128)
    return [code for code, _ in folded], [scale for _, scale in folded], block


def stack_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights of one type along their rows, for a merged layer.

    If a block would contain rows of two weights (128 x 128 blocks, and a number of rows that is no multiple of 128), each row
    gets its own scales. The static activation scale is the largest of all weights. With zero points, scales and zero points of
    the activation must be equal.

    Raises:
        ValueError: types or blocks differ, or activation scales or zero points that must be equal are not.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    blocks = {weight.block for weight in weights}
    if len(blocks) > 1 or any(weight.shape[0] % first.block[0] for weight in weights[:-1]):
        weights = [weight.by_rows() for weight in weights]
        blocks = {weight.block for weight in weights}
    if len(blocks) > 1 or len({type(weight) for weight in weights}) > 1 or len({w.zeros is None for w in weights}) > 1:
        raise ValueError(
            f"stack_rows: all weights must have the same type and block; got {[(w.format, w.block) for w in weights]}"
        )
    if isinstance(first, StaticWeight):
        first = _with_one_input(first, [w for w in weights if isinstance(w, StaticWeight)])
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None])
    codes, scales = torch.cat([weight.codes for weight in weights]), torch.cat([weight.scales for weight in weights])
    return first._like(codes, scales, zeros, weights[0].block)


def _with_one_input(first: StaticWeight, weights: Sequence[StaticWeight]) -> StaticWeight:
    """`first` with the largest activation scale of the weights, so that no activation saturates that did not before."""
    if any(w.x_zero is not None for w in weights) and len(inputs := {w.input_qparams for w in weights}) > 1:
        raise ValueError(
            "stack_rows: merged layers share one activation, so their static scales and zero points must be equal; "
            f"got {sorted(inputs)}"
        )
    if first.x_zero is not None:
        return first
    largest = torch.stack([w.x_scale for w in weights]).amax()
    return type(first)(first.codes, first.scales, first.zeros, block=first.block, dtype=first.dtype, x_scale=largest)
