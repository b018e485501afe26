"""Copies of many tensors into flat memory, and back, in one launch for all of them.

    pack:    flat[start_i + j] = tensor_i[j]
    unpack:  tensor_i[j] = flat[start_i + j]

    tensors: a list of tensors of one dtype with 1, 2, 4 or 8 bytes; flat: [flat_size] of this dtype, in the layout of
    multi_tensor.py: each tensor starts at a multiple of 4,096 elements. Elements between tensors are neither read nor written.

Limited by memory bandwidth: every byte is read once and written once. With one copy for each tensor of a model, the device
would be idle between launches, and not full at the end of each.

`Packing` copies in both directions. Only `pack` is an operator, whose config `unpack` shares.

Not supported: tensors of several dtypes in one call.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.hw.roofline import Cost
from tilewright.kernels.launch.replay import launch
from tilewright.kernels.optimizer.multi_tensor import CHUNK, Tables, flat_size, starts_of, tables
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["Packing", "flat_size", "pack_tensors_op"]


class Problem(NamedTuple):
    """Everything that a config may depend on."""

    itemsize: int


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# ---- reference


def _pack_reference(flat: Tensor, tensors: list[Tensor]) -> None:
    for place, tensor in zip(_parts(flat, tensors), tensors, strict=True):
        place.copy_(tensor)


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The place of each tensor in flat memory, in its shape."""
    starts = starts_of([tensor.numel() for tensor in tensors])
    return [flat[start : start + tensor.numel()].view(tensor.shape) for (start, _), tensor in zip(pairwise(starts), tensors)]


def _cost(flat: Tensor, tensors: list[Tensor]) -> Cost:
    return Cost(flops=0, bytes=2 * sum(tensor.nbytes for tensor in tensors))


# ---- space and examples

SPACE = Space(
    default=lambda device, problem: {"BLOCK": 2048, "num_warps": 4},
    axes={"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8)},
)


@Example.of
def _example(inputs: Inputs, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    low, high = (-(1 << 7), 1 << 7) if dtype == torch.int8 else (-(1 << 15), 1 << 15)
    flat = inputs.randint(low, high, flat_size([torch.Size(shape).numel() for shape in shapes]), dtype=dtype)
    return flat, [inputs.randint(low, high, *shape, dtype=dtype) for shape in shapes]


_EXAMPLES = (
    _example("several", ((3, 50), (1,), (4097,), (64, 64)), torch.int16),
    _example("bytes", ((33,), (2, 100), (5, 1000)), torch.int8),
    _example("wide", ((5, 1000), (7,)), torch.int32),
    _example("widest", ((5, 1000), (7,)), torch.int64),
    _example("empty among them", ((0,), (100,), (0, 3)), torch.int16),
)


def _make(inputs: Inputs, *, M: int, N: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[Tensor]]:
    """M tensors [N, N]."""
    return inputs.randn(flat_size([N * N] * M), dtype=dtype), [inputs.randn(N, N, dtype=dtype) for _ in range(M)]


# ---- kernel


@triton.jit
def _pack_kernel(
    flat_ptr, owners_ptr, spans_ptr, addresses_ptr, UNPACK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    owner = tl.load(owners_ptr + start // CHUNK)
    first = tl.multiple_of(tl.load(spans_ptr + 2 * owner), CHUNK)
    size = tl.load(spans_ptr + 2 * owner + 1)
    address = tl.load(addresses_ptr + owner)
    local = tl.multiple_of(start - first, BLOCK)
    at = tl.arange(0, BLOCK)
    own = tl.multiple_of(address.to(tl.pointer_type(flat_ptr.dtype.element_ty)), 16) + local + at
    there = flat_ptr + start + at
    if UNPACK:
        source, target = there, own
    else:
        source, target = own, there
    # Blocks start at multiples of BLOCK, so only the last block of a tensor needs the mask.
    if local + BLOCK <= size:
        tl.store(target, tl.load(source))
    else:
        tl.store(target, tl.load(source, mask=local + at < size, other=0), mask=local + at < size)


def _launch(config: Config, flat: Tensor, table: Tables, *, unpack: bool) -> None:
    if flat.numel():
        grid = (flat.numel() // config["BLOCK"],)
        launch(_pack_kernel, grid, (flat, *table[:3]), (), {"UNPACK": unpack, "CHUNK": CHUNK, **config})


def _pack(config: Config, flat: Tensor, tensors: list[Tensor]) -> None:
    _launch(config, flat, tables(tensors, flat.device), unpack=False)


pack_tensors_op = Op(
    name="pack_tensors",
    reference=_pack_reference,
    problem=lambda flat, tensors: Problem(flat.dtype.itemsize),
    cost=_cost,
    examples=_EXAMPLES,
    make=_make,
    mutates=("flat",),
    impls=(Impl(name="triton", launch=_pack, space=SPACE, batch_invariant=True),),
)


# ---- many calls


class Packing:
    """Copies between flat memory and tensors that stay where they are. Everything but the launch is done once.

    Args:
        flat: [flat_size([numel of each tensor])], contiguous.
        tensors: of flat's dtype. They are copied one by one, which is slower, if they are on another device than flat, have
            gaps, or do not start at multiples of 16 bytes.

    Copies are not waited for, neither on a GPU nor between one and locked memory of the host.

    Raises:
        ValueError: the dtypes or the size of flat do not fit.
    """

    def __init__(self, flat: Tensor, tensors: Sequence[Tensor]):
        self._places, self._tensors = _places(flat, tensors), list(tensors)
        whole = all(x.is_contiguous() and x.data_ptr() % 16 == 0 and x.device == flat.device for x in (flat, *tensors))
        self._flat = _bits(flat)
        bits = [_bits(tensor) for tensor in tensors] if whole else []
        self._choice = pack_tensors_op.choice_for(self._flat, bits)
        self._table = tables(bits, flat.device) if bits and self._choice.impl.name != "reference" else None

    def pack(self) -> None:
        """Copy the tensors into flat memory."""
        if self._table is not None:
            self._launch(unpack=False)
        else:
            _copy_each(self._places, self._tensors)

    def unpack(self) -> None:
        """Copy flat memory into the tensors."""
        if self._table is not None:
            self._launch(unpack=True)
        else:
            _copy_each(self._tensors, self._places)

    def _launch(self, *, unpack: bool) -> None:
        assert self._table is not None
        with torch.cuda.device(self._flat.device) if self._flat.is_cuda else nullcontext():
            _launch(self._choice.config, self._flat, self._table, unpack=unpack)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, in one dimension."""
    return x.detach().view(-1).view(_BITS[x.dtype.itemsize])


def _places(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The place of each tensor in flat memory, in its shape. Raises ValueError if they do not fit."""
    for i, tensor in enumerate(tensors):
        if tensor.dtype != flat.dtype:
            raise ValueError(f"all tensors must have flat's dtype, {flat.dtype}; tensor {i} is {tensor.dtype}")
    size = flat_size([tensor.numel() for tensor in tensors])
    if flat.shape != (size,) or not flat.is_contiguous() or flat.dtype.itemsize not in _BITS:
        got = f"{list(flat.shape)} {flat.dtype}"
        raise ValueError(f"flat must be contiguous [{size}] of 1, 2, 4 or 8 bytes for these tensors, got {got}")
    return _parts(flat, tensors)
