"""Many tensors in flat memory: the bits of one copy for each, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.kernels.optimizer.multi_tensor import starts_of
from tilewright.kernels.optimizer.pack import flat_size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((3, 50), (1,), (0, 4), (4097,), (64, 64), (8192,))


def drawn(dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in SHAPES]


def flat_for(tensors: list[Tensor]) -> Tensor:
    size = flat_size([x.numel() for x in tensors])
    return torch.full((size,), float("nan"), dtype=tensors[0].dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_packing_and_unpacking_keep_all_bits_and_write_nothing_between(dtype: torch.dtype) -> None:
    tensors, others = drawn(dtype, 0), drawn(dtype, 1)
    tensors[0][1, 7] = float("nan")
    flat = flat_for(tensors)
    ops.pack_tensors(flat, tensors)
    starts = starts_of([x.numel() for x in tensors])
    for start, end, x in zip(starts, starts[1:], tensors):
        assert torch.equal(flat[start : start + x.numel()].view(torch.uint8), x.view(-1).view(torch.uint8))
        assert bool(flat[start + x.numel() : end].isnan().all())
    ops.unpack_tensors(flat, others)
    for x, other in zip(tensors, others):
        assert torch.equal(x.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def test_tensors_with_gaps_or_odd_starts_are_copied_one_by_one() -> None:
    tensors = [torch.randn(9, 6, device=DEVICE)[:, :4], torch.randn(8, device=DEVICE)[1:]]
    flat, others = flat_for(tensors), [torch.zeros(9, 8, device=DEVICE)[:, ::2], torch.zeros(9, device=DEVICE)[2:]]
    ops.pack_tensors(flat, tensors)
    ops.unpack_tensors(flat, others)
    assert all(torch.equal(x, other) for x, other in zip(tensors, others))


def test_what_does_not_fit_is_refused() -> None:
    tensors = drawn(torch.float32, 0)
    with pytest.raises(ValueError, match=r"pack_tensors: flat must be contiguous \[28672\]"):
        ops.pack_tensors(flat_for(tensors)[1:], tensors)
    with pytest.raises(ValueError, match=r"unpack_tensors: all tensors must have the dtype and device of flat; tensor 2 is"):
        ops.unpack_tensors(flat_for(tensors), [*tensors[:2], tensors[2].half(), *tensors[3:]])
