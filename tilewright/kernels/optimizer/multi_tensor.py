"""Shared by the optimizers' kernels: the layout of tensors in flat memory, and the numbers that a step reads on the device.

An optimizer's state is flat: one buffer for the master weights, and one for each moment. A buffer contains the tensors one
after the other. Each starts at a multiple of CHUNK elements and is padded with zeros up to the next one, so a chunk belongs to
one tensor, and loads from flat memory need no mask. Gradients stay where autograd put them. A launch gets a table of their
addresses, so that it can process all tensors at once. Offsets are 64 bits wide.

`control` is a float64 tensor of the numbers that change from step to step on the device (`Slot`); the host does not know
them. The kernels that update weights read it; `clip_scale` writes it.

Not supported: gradients of different dtypes in one launch; capturing a CUDA graph with gradients at addresses that no earlier
call had, because their table is copied from the host.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.op import Inputs
from tilewright.tune.space import Space

__all__ = [
    "BLOCKS",
    "CHUNK",
    "SLOTS",
    "Problem",
    "Slot",
    "Tables",
    "applied",
    "control_values",
    "flat_arguments",
    "flat_size",
    "gathered",
    "load_gradient",
    "moved_bytes",
    "problem_of",
    "put",
    "spread",
    "starts_of",
    "tables",
]

CHUNK = 4096
"""In elements: every tensor starts at a multiple of it. Norm weights of 1,024 elements waste most, 36 KB of state each."""


class Slot:
    """Indices into `control`."""

    STEP = 0
    """The number of updates applied so far, including the current one."""
    BETA1 = 1
    BETA2 = 2
    BETA1_POWER = 3
    """beta1 to the power of STEP."""
    BETA2_POWER = 4
    MAX_NORM = 5
    """The largest norm that gradients may have; inf: no limit."""
    NORM = 6
    """The norm of all gradients together, before they are scaled."""
    SCALE = 7
    """The factor by which gradients are multiplied."""
    APPLIED = 8
    """1, or 0 if the norm is not finite: then nothing is written."""
    FACTOR1 = 9
    """1 / (1 - beta1^STEP), the bias correction of the first moment; computed once per step, not once per thread."""
    FACTOR2 = 10
    """The same for the second moment."""


SLOTS = 11


def control_values(beta1: float, beta2: float, max_norm: float = float("inf")) -> list[float]:
    """The values of `control` before the first step."""
    return [0.0, beta1, beta2, 1.0, 1.0, max_norm, 0.0, 1.0, 1.0, 1.0, 1.0]


# ---- layout


def starts_of(sizes: Sequence[int]) -> list[int]:
    """The starts in flat memory of tensors with these numbers of elements, and as a last entry the end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // CHUNK) * CHUNK)
    return starts


def flat_size(sizes: Sequence[int]) -> int:
    """The number of elements of flat memory for tensors with these numbers of elements."""
    return starts_of(sizes)[-1]


def gathered(grads: Sequence[Tensor], flat: Tensor) -> Tensor:
    """The gradients in flat memory, with the shape and dtype of `flat` and zeros between them."""
    out = torch.zeros_like(flat)
    for start, grad in zip(starts_of([g.numel() for g in grads]), grads):
        out[start : start + grad.numel()] = grad.reshape(-1)
    return out


def spread(values: Tensor, grads: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Repeat one value per tensor for each element of flat memory, in the dtype of `flat`."""
    starts = starts_of([g.numel() for g in grads])
    repeats = torch.tensor([end - start for start, end in pairwise(starts)], device=values.device)
    return torch.repeat_interleave(values.to(flat.dtype), repeats, output_size=starts[-1])


def applied(control: Tensor) -> Tensor:
    """Whether this step is applied: a boolean on the device."""
    return control[Slot.APPLIED] != 0


def put(states: Sequence[Tensor], new: Sequence[Tensor], weights: Tensor | None, control: Tensor) -> None:
    """For references: write the new states, and the first of them rounded as weights, unless APPLIED in `control` is 0."""
    for old, now in zip(states, new, strict=True):
        old.copy_(torch.where(applied(control), now.to(old.dtype), old))
    if weights is not None:
        weights.copy_(torch.where(applied(control), states[0].to(weights.dtype), weights))


def moved_bytes(states: Sequence[Tensor], weights: Tensor | None, grads: Sequence[Tensor]) -> int:
    """The bytes that an update must move: states are read and written, weights written, gradients read."""
    return 2 * sum(t.nbytes for t in states) + (0 if weights is None else weights.nbytes) + sum(g.nbytes for g in grads)


# ---- tables


class Tables(NamedTuple):
    """The tables by which a launch over many tensors finds its data."""

    owners: Tensor
    """The index of the tensor that each chunk belongs to: int32 [chunks]."""
    spans: Tensor
    """Start in flat memory and number of elements of each tensor: int64 [tensors, 2]."""
    addresses: Tensor
    """The address of each gradient: int64 [tensors]."""
    kept: tuple[Tensor, ...]
    """Gradients that had to be copied, because they had gaps or did not start at a multiple of 16 bytes."""


_LAYOUTS: OrderedDict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, Tensor]] = OrderedDict()
_ADDRESSES: OrderedDict[tuple[torch.device, tuple[int, ...]], Tensor] = OrderedDict()
_MOST_LAYOUTS, _MOST_ADDRESSES = 16, 64


def _on(device: torch.device, values: list[int], dtype: torch.dtype) -> Tensor:
    """The values on a device; the host does not wait for the copy."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _layout(device: torch.device, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    starts = starts_of(sizes)
    spans = _on(device, [n for pair in zip(starts, sizes) for n in pair], torch.int64).view(-1, 2)
    chunks = torch.tensor([(end - start) // CHUNK for start, end in pairwise(starts)])
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), chunks)
    return owners.to(device), spans


def tables(grads: Sequence[Tensor], device: torch.device) -> Tables:
    """The tables for these gradients. Tables of earlier calls with the same sizes and addresses are reused.

    Raises:
        ValueError: the gradients do not all have the same dtype.
    """
    if any(g.dtype != grads[0].dtype for g in grads):
        found = sorted({str(g.dtype) for g in grads})
        raise ValueError(f"gradients have dtypes {', '.join(found)}; one launch takes one dtype: convert them first")
    ready = [
        g if g.is_contiguous() and g.data_ptr() % 16 == 0 else g.clone(memory_format=torch.contiguous_format) for g in grads
    ]
    sizes = tuple(g.numel() for g in ready)
    places = tuple(g.data_ptr() for g in ready)
    if device.type == "meta":
        return Tables(*_layout(device, sizes), _on(device, list(places), torch.int64), tuple(ready))
    layout = _remembered(_LAYOUTS, (device, sizes), _MOST_LAYOUTS)
    if layout is None:
        layout = _LAYOUTS[device, sizes] = _layout(device, sizes)
    addresses = _remembered(_ADDRESSES, (device, places), _MOST_ADDRESSES)
    if addresses is None:
        addresses = _ADDRESSES[device, places] = _on(device, list(places), torch.int64)
    return Tables(*layout, addresses, tuple(ready))


def _remembered(table: OrderedDict[Any, Any], key: Any, most: int) -> Any:
    """The entry for `key` or None, marked as the most recently used. The least recently used entries are dropped."""
    if key in table:
        table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)
    return table.get(key)


# ---- space and arguments


class Problem(NamedTuple):
    """Everything that a config may depend on."""

    gradients: torch.dtype
    weights: torch.dtype | None


def problem_of(weights: Tensor | None, grads: Sequence[Tensor]) -> Problem:
    """The problem of an update of these weights by these gradients."""
    return Problem(grads[0].dtype, None if weights is None else weights.dtype)


BLOCKS = Space(
    default=lambda device, problem: {"BLOCK": 1024, "num_warps": 8}, axes={"BLOCK": (1024, 2048, 4096), "num_warps": (4, 8)}
)
"""For AdamW, eight warps with four elements per thread have 56 bytes per thread in flight: 114 KB per SM."""


def flat_arguments(
    inputs: Inputs, sizes: Sequence[Sequence[int]], dtype: torch.dtype, count: int, norm: float | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """(`count` flat fp32 tensors of random numbers, gradients of these shapes, rates, `control` after seven steps).

    Matrices have weight decay, vectors do not. norm: the norm of a step that is not applied; None: the step is applied.
    """
    numbers = [torch.Size(size).numel() for size in sizes]
    flats = [inputs.randn(flat_size(numbers)) for _ in range(count)]
    grads = [inputs.randn(*size, dtype=dtype) for size in sizes]
    values = control_values(0.9, 0.99, 1.0)
    values[Slot.STEP], values[Slot.BETA1_POWER], values[Slot.BETA2_POWER] = 7.0, 0.9**7, 0.99**7
    values[Slot.FACTOR1], values[Slot.FACTOR2] = 1 / (1 - 0.9**7), 1 / (1 - 0.99**7)
    values[Slot.NORM], values[Slot.SCALE] = norm or 2.0, 0.5
    if norm is not None:
        values[Slot.APPLIED] = 0.0
    rates = inputs.tensor([[1.0, 0.1 * (len(size) > 1)] for size in sizes], torch.float32)
    return flats, grads, rates, inputs.tensor(values, torch.float64)


# ---- device


@triton.jit
def load_gradient(like_ptr, owner, spans_ptr, addresses_ptr, start, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The gradient in float32 of BLOCK flat elements from `start` on, in the tensor `owner`; zeros after the tensor's end."""
    first = tl.multiple_of(tl.load(spans_ptr + 2 * owner), CHUNK)
    size = tl.load(spans_ptr + 2 * owner + 1)
    address = tl.load(addresses_ptr + owner)
    grad_ptr = tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
    local = tl.multiple_of(start - first, BLOCK)
    at = tl.arange(0, BLOCK)
    # Blocks start at multiples of BLOCK, so only the last block of a tensor needs the mask.
    if local + BLOCK <= size:
        grad = tl.load(grad_ptr + local + at)
    else:
        grad = tl.load(grad_ptr + local + at, mask=local + at < size, other=0.0)
    return grad.to(tl.float32)
