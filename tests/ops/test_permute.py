"""permute and transpose against torch's on random shapes, strides and orders; their gradients, and what they refuse."""

import random
import re

import pytest
import torch

from tilewright import ops
from tilewright.kernels.layout.problem import form_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bool, torch.uint8, torch.float16, torch.int16, torch.float32, torch.int32, torch.complex64, torch.float64)


@pytest.mark.parametrize("seed", range(24))
def test_equals_torch(seed: int) -> None:
    """Up to five dimensions, some of size 1, cut, stepped, expanded or already in another order."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3, 8, 17)) for _ in range(rng.randint(1, 5))]
    dtype = rng.choice(DTYPES)
    x = (100 * torch.randn(sizes, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)
    at = rng.randrange(x.dim())
    how = rng.choice(("whole", "cut", "stepped", "expanded", "turned", "conjugate"))
    x = x.narrow(at, 0, max(1, sizes[at] - 1)) if how == "cut" else x
    x = x[(slice(None),) * at + (slice(None, None, 2),)] if how == "stepped" else x
    x = x.unsqueeze(at).expand(*sizes[:at], 3, *sizes[at:]) if how == "expanded" else x
    x = x.transpose(0, at) if how == "turned" else x
    x = x.conj() if how == "conjugate" else x
    dims = rng.sample(range(x.dim()), x.dim())
    got = ops.permute(x, [d - x.dim() if rng.random() < 0.5 else d for d in dims])
    assert got.is_contiguous()
    assert got.data_ptr() != x.data_ptr()
    assert torch.equal(got, x.permute(dims))


def test_what_stays_together_is_one_dimension() -> None:
    """Windows of an image: six dimensions, four after merging; and a plain transposition in a crowd of ones."""
    form = form_of((2, 3, 4, 5, 6, 7), (2520, 840, 210, 42, 7, 1), (0, 1, 3, 2, 4, 5))
    assert form is not None
    assert (form.sizes, form.a, form.b) == ((6, 5, 4, 42), 3, 2)
    form = form_of((1, 8, 1, 9), (72, 9, 9, 1), (3, 0, 1, 2))
    assert form is not None
    assert (form.sizes, form.strides, form.a, form.b) == ((9, 8), (1, 9), 0, 1)
    assert form_of((4, 5), (10, 2), (1, 0)) is None


def test_transpose() -> None:
    x = torch.arange(24, device=DEVICE).view(2, 3, 4)
    for pair in ((0, 2), (-1, 1), (1, 1)):
        assert torch.equal(ops.transpose(x, *pair), x.transpose(*pair))


def test_gradients() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.permute(x, (2, 0, 1)), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.transpose(x, 0, 1) ** 2, (x,))


def test_refused_arguments() -> None:
    x = torch.zeros(2, 3)
    for dims in ((0,), (0, 0), (0, 2), (0, 1, 2)):
        with pytest.raises(ValueError, match=re.escape(f"once, got {list(dims)}")):
            ops.permute(x, dims)
    with pytest.raises(ValueError, match="must be -2 to 1"):
        ops.transpose(x, 0, 2)
