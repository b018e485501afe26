"""Launches over gradients that lie anywhere: at odd addresses, with gaps, at new places each step."""

import pytest
import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.kernels.optimizer.adamw import adamw_op
from tilewright.kernels.optimizer.grad_norm import clip_scale_op, grad_squares_op
from tilewright.kernels.optimizer.multi_tensor import CHUNK, control_values, flat_size, starts_of, tables

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((3, 50), (1,), (4097,), (8, 16))
needs_triton = pytest.mark.skipif(
    not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run"
)


def contiguous(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(PLACE)


def at_an_odd_address(shape: tuple[int, ...], seed: int) -> Tensor:
    memory = torch.empty(1 + torch.Size(shape).numel(), dtype=torch.bfloat16, device=PLACE)
    return memory[1:].view(shape).copy_(contiguous(shape, seed))


def with_gaps(shape: tuple[int, ...], seed: int) -> Tensor:
    memory = torch.empty(*shape, 2, dtype=torch.bfloat16, device=PLACE)
    return memory[..., 0].copy_(contiguous(shape, seed))


def transposed(shape: tuple[int, ...], seed: int) -> Tensor:
    return contiguous(shape, seed).mT.contiguous().mT if len(shape) == 2 else contiguous(shape, seed)


def run(make, steps: int = 2) -> list[Tensor]:
    """The state after some steps, each with gradients at new places."""
    size = flat_size([torch.Size(shape).numel() for shape in SHAPES])
    master = torch.randn(size, generator=torch.Generator().manual_seed(9)).to(PLACE)
    state = [master, torch.zeros_like(master), torch.zeros_like(master), torch.zeros_like(master, dtype=torch.bfloat16)]
    control = torch.tensor(control_values(0.9, 0.99, 1.0), dtype=torch.float64, device=PLACE)
    rates = torch.tensor([[1.0, 0.1]] * len(SHAPES), device=PLACE)
    squares = torch.empty(size // CHUNK, device=PLACE)
    kept = []
    for step in range(steps):
        grads = [make(shape, 10 * step + i) for i, shape in enumerate(SHAPES)]
        kept.append(grads)
        grad_squares_op(squares, grads)
        clip_scale_op(squares, control)
        adamw_op(*state, grads, rates, control, 1e-2, 1e-8)
    return [*state, control]


@needs_triton
@pytest.mark.parametrize("make", [at_an_odd_address, with_gaps, transposed])
def test_where_gradients_lie_does_not_matter(make) -> None:
    for got, want in zip(run(make), run(contiguous), strict=True):
        assert torch.equal(got, want)


def test_the_tables_say_where_things_are() -> None:
    grads = [contiguous(shape, i) for i, shape in enumerate(SHAPES)] + [contiguous((0,), 0)]
    table = tables(grads, PLACE)
    assert starts_of([g.numel() for g in grads]) == [0, CHUNK, 2 * CHUNK, 4 * CHUNK, 5 * CHUNK, 5 * CHUNK]
    assert table.owners.tolist() == [0, 1, 2, 2, 3]
    assert table.spans.tolist() == [[0, 150], [CHUNK, 1], [2 * CHUNK, 4097], [4 * CHUNK, 128], [5 * CHUNK, 0]]
    assert table.addresses.tolist() == [g.data_ptr() for g in grads]
    assert tables(grads, PLACE).addresses is table.addresses


def test_gradients_of_two_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtypes torch\.bfloat16, torch\.float32; one launch takes one dtype"):
        tables([contiguous((2,), 0), contiguous((2,), 0).float()], PLACE)
