"""Attention over float8 codes by hand for Hopper, on a Hopper card: the edges of its tiles, and what each warpgroup masks.

Elsewhere this kernel is compiled and certified, and everything else about it is tested without it.
"""

import pytest
import torch

from tests import conformance
from tilewright.hw.device import device_of
from tilewright.kernels.attention.fp8 import attention as scaled_attention
from tilewright.kernels.attention.fp8.attention import scaled_attention_op
from tilewright.op import Inputs

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
pytestmark = pytest.mark.skipif(DEVICE.kind != "cuda" or DEVICE.arch != 90, reason="no Hopper card here")

# (queries, keys) round a warpgroup's 64 rows, a block of 128 keys and a tile of 192 rows; then many tiles a program, long and
# short ones; then rows that see no key, for whole warpgroups and for parts.
LENGTHS = (
    *((1, 1), (63, 128), (64, 129), (65, 127), (128, 128), (191, 193), (192, 192), (193, 320), (257, 513)),
    *((1000, 1500), (900, 4000), (1500, 1500)),
    *((150, 20), (400, 129), (300, 1)),
)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_at_tile_edges(dim: int, causal: bool) -> None:
    for queries, keys in LENGTHS:
        for heads, batch in (((4, 2), 1), ((3, 1), 20 if queries == 1000 else 2)):
            example = scaled_attention._example("", "fp8", queries, keys, heads, dim, batch, causal)
            q, k, v, k_scale, *rest = example.make(Inputs("cuda", seed=queries))
            # Low scores: the tensor core cuts them off at some 14 bits, and the fewer weights round to another code by that.
            args = (q, k, v, k_scale * 0.25, *rest)
            conformance.check(scaled_attention_op, scaled_attention_op.impls[0], {}, args)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_row_does_not_know_its_neighbours(dim: int) -> None:
    """A warp corrects its sums if one of its rows has a new maximum: the others, and that one, keep their bits."""
    q, *rest = scaled_attention._example("", "fp8", 384, 2000, (2, 1), dim, 2, True).make(Inputs("cuda", seed=2))
    changed = q * 4.0  # higher maxima, which move with other blocks
    every = 17
    mixed = q.clone()
    mixed[:, ::every] = changed[:, ::every]
    before, between, after = (scaled_attention_op.impls[0].launch({}, x, *rest) for x in (q, mixed, changed))
    others = torch.arange(384, device="cuda") % every != 0
    assert torch.equal(between[:, others], before[:, others])
    assert torch.equal(between[:, ::every], after[:, ::every])
    assert not torch.equal(between[:, ::every], before[:, ::every])
