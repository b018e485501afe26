"""Keys of the bands of MinHash signatures, for locality-sensitive hashing: equal bands have equal keys, on every device.

    rows = P // bands
    key = 0;  for r in 0 .. rows-1:  key = mix((key + signature[d, band * rows + r]) * odd)        modulo 2**64

mix is the finaliser of MurmurHash3 (Appleby), odd = 2**64 / golden ratio (Knuth 6.4). signature: [D, P] int32, not negative;
rows may be strided. Result: [D, bands] int64, the bits of unsigned numbers. Documents with equal keys in a column are
candidates; sorting the column finds them. Limited by bytes. Not supported: backward.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["band_keys", "band_keys_op"]

# D documents, P places of a signature

_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xFF51AFD7ED558CCD - 2**64
_SECOND = 0xC4CEB9FE1A85EC53 - 2**64

# ---- reference


def _mixed(value: Tensor) -> Tensor:
    # >> of int64 copies the sign. The mask turns it into a shift of unsigned numbers.
    value = value ^ ((value >> 33) & 0x7FFFFFFF)
    value = value * _FIRST
    value = value ^ ((value >> 33) & 0x7FFFFFFF)
    value = value * _SECOND
    return value ^ ((value >> 33) & 0x7FFFFFFF)


def _reference(signature: Tensor, bands: int) -> Tensor:
    rows = signature.shape[1] // bands
    parts = signature[:, : rows * bands].reshape(len(signature), bands, rows).long()
    keys = torch.zeros(len(signature), bands, dtype=torch.int64, device=signature.device)
    for row in range(rows):
        keys = _mixed((keys + parts[:, :, row]) * _ODD)
    return keys


def _cost(signature: Tensor, bands: int) -> Cost:
    return Cost(flops=9 * signature.numel(), bytes=signature.nbytes + 8 * len(signature) * bands)


# ---- space and examples


class Problem(NamedTuple):
    """The properties that a recipe fixes; not the number of documents."""

    places: int
    bands: int


SPACE = Space(
    default=lambda device, problem: {"BLOCK": 256, "num_warps": 4}, axes={"BLOCK": (128, 256, 512), "num_warps": (4, 8)}
)


def _arguments(inputs: Inputs, *, D: int, P: int = 112, bands: int = 14) -> tuple[Tensor, int]:
    """Signatures of D documents with P places, and the number of bands."""
    return inputs.randint(0, 2**31 - 1, D, P, dtype=torch.int32), bands


@Example.of
def _example(inputs: Inputs, documents: int, places: int, bands: int, row_stride: int = 0) -> tuple[Tensor, int]:
    return inputs.randint(0, 2**31 - 1, documents, row_stride or places, dtype=torch.int32)[:, :places], bands


EXAMPLES = (
    _example("usual", 40, 112, 14),
    _example("left over", 300, 30, 7),
    _example("strided", 9, 12, 3, row_stride=19),
    _example("one", 1, 1, 1),
)

# ---- kernel


@triton.jit
def _mix(value):
    value = value ^ (value >> 33)
    value = value * 0xFF51AFD7ED558CCD
    value = value ^ (value >> 33)
    value = value * 0xC4CEB9FE1A85EC53
    return value ^ (value >> 33)


@triton.jit(do_not_specialize=["total", "row_stride"], do_not_specialize_on_alignment=["signature_ptr", "out_ptr"])
def _band_keys_kernel(signature_ptr, out_ptr, total, row_stride, BANDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = item < total
    at = signature_ptr + item // BANDS * row_stride + item % BANDS * ROWS
    key = tl.zeros([BLOCK], tl.uint64)
    for row in range(ROWS):
        place = tl.load(at + row, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        key = _mix((key + place) * 0x9E3779B97F4A7C15)
    tl.store(out_ptr + item, key.to(tl.int64, bitcast=True), mask=live)


def _launch(config: Config, signature: Tensor, bands: int) -> Tensor:
    out = torch.empty(len(signature), bands, dtype=torch.int64, device=signature.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), config["BLOCK"]),)
        rows = signature.shape[1] // bands
        _band_keys_kernel[grid](signature, out, out.numel(), signature.stride(0), BANDS=bands, ROWS=rows, **config)
    return out


band_keys_op = Op(
    name="band_keys",
    reference=_reference,
    problem=lambda signature, bands: Problem(signature.shape[1], bands),
    cost=_cost,
    examples=EXAMPLES,
    make=_arguments,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, batch_invariant=True),),
)


def band_keys(signature: Tensor, bands: int) -> Tensor:
    """A number for each band of each signature. Bands with equal places have equal numbers; see the top of this file.

    Args:
        signature: [D, P] int32, not negative, as `minhash` returns them; rows may be strided.
        bands: the number of bands, of P // bands places each; the places left over are ignored.

    Returns:
        [D, bands] int64.

    Raises:
        ValueError: the signature does not fit, or bands is not from 1 to P.
    """
    if signature.dim() != 2 or signature.dtype != torch.int32 or (signature.shape[1] > 1 and signature.stride(1) != 1):
        raise ValueError(
            f"band_keys: signature must be int32 [D, P] with dense rows, got {tuple(signature.shape)} {signature.dtype}"
        )
    if not 1 <= bands <= signature.shape[1]:
        raise ValueError(f"band_keys: bands must be 1 to {signature.shape[1]}, the places in a signature; got {bands}")
    return band_keys_op(signature, bands)
