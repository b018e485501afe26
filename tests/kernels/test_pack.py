"""Many tensors in flat memory: the bits of one copy for each, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tilewright.kernels.optimizer.multi_tensor import starts_of
from tilewright.kernels.optimizer.pack import Packing, flat_size

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
    Packing(flat, tensors).pack()
    starts = starts_of([x.numel() for x in tensors])
    for start, end, x in zip(starts, starts[1:], tensors):
        assert torch.equal(flat[start : start + x.numel()].view(torch.uint8), x.view(-1).view(torch.uint8))
        assert bool(flat[start + x.numel() : end].isnan().all())
    Packing(flat, others).unpack()
    for x, other in zip(tensors, others):
        assert torch.equal(x.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def test_tensors_with_gaps_or_odd_starts_are_copied_one_by_one() -> None:
    tensors = [torch.randn(9, 6, device=DEVICE)[:, :4], torch.randn(8, device=DEVICE)[1:]]
    flat, others = flat_for(tensors), [torch.zeros(9, 8, device=DEVICE)[:, ::2], torch.zeros(9, device=DEVICE)[2:]]
    Packing(flat, tensors).pack()
    Packing(flat, others).unpack()
    assert all(torch.equal(x, other) for x, other in zip(tensors, others))


def test_a_packing_follows_its_memory_and_no_other() -> None:
    tensors, flat = drawn(torch.bfloat16, 0), flat_for(drawn(torch.bfloat16, 0))
    packing = Packing(flat, tensors)
    for seed in (1, 2):
        for x, new in zip(tensors, drawn(torch.bfloat16, seed)):
            x.copy_(new)
        packing.pack()
        for x in tensors:
            x.zero_()
        packing.unpack()
        assert all(torch.equal(x, new) for x, new in zip(tensors, drawn(torch.bfloat16, seed)))


def test_what_does_not_fit_is_refused() -> None:
    tensors = drawn(torch.float32, 0)
    with pytest.raises(ValueError, match=r"flat must be contiguous \[28672\]"):
        Packing(flat_for(tensors)[1:], tensors)
    with pytest.raises(ValueError, match=r"all tensors must have flat's dtype, torch.float32; tensor 2 is torch.float16"):
        Packing(flat_for(tensors), [*tensors[:2], tensors[2].half(), *tensors[3:]])
