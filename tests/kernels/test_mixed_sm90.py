"""`mixed_linear`'s `sm90`, which writes an int4 weight out under the products: the bits of one that was written before."""

from typing import Any

import pytest
import torch

from tests import conformance
from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels import mixed_dequantized
from tilewright.kernels.matmul_sm90_launch import SM90
from tilewright.kernels.mixed_linear import mixed_linear_op
from tilewright.kernels.mixed_sm90_launch import MIXED_SM90
from tilewright.op import Inputs

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
make: Any = mixed_linear_op.make

on_hopper = pytest.mark.skipif(DEVICE.arch != 90 or DEVICE.kind != "cuda", reason="no Hopper card here")


def config(split: int, group: int) -> dict[str, Any]:
    return {"SPLIT_K": split, "GROUP_M": group}


TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "CONSUMERS": "m", "UNALIGNED": "copy"}
# Rows of the weight round items, counters and tiles; K of half a chunk more, of one step of columns, of more.
SHAPES = (
    (1025, 4096, 4096, 128, config(1, 16)),
    (1500, 1000, 2176, 64, config(0, 32)),
    (2048, 1023, 1088, 64, config(1, 32)),
    (1030, 264, 8192, 128, config(0, 16)),
    (1025, 129, 64, 64, config(1, 32)),
    (5000, 2056, 4160, 64, config(0, 32)),
)


@on_hopper
@pytest.mark.parametrize("zeros", [False, True], ids=["no zero points", "zero points"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_of_a_weight_written_before(
    shape: tuple[int, int, int, int, dict[str, Any]], dtype: torch.dtype, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k, group, tile = shape
    more = {"zeros": zeros, "dtype": dtype, "bias": True, "activation": "gelu", "residual": m % 2 == 0}
    args = make(Inputs("cuda", m, here=True), M=m, N=n, K=k, group=group, **more)
    if reason := MIXED_SM90.refusal(DEVICE, mixed_linear_op.problem(*args)) or MIXED_SM90.space.refusal(
        DEVICE, mixed_linear_op.problem(*args), tile
    ):
        pytest.skip(reason)

    class ByTheSameTile:
        @staticmethod
        def run(*operands: Any) -> torch.Tensor:
            return SM90.launch({**TILE, "SPLIT_K": tile["SPLIT_K"]}, *operands)

    monkeypatch.setattr(mixed_dequantized, "linear_op", ByTheSameTile)
    want = conformance.bits(mixed_dequantized.DEQUANTIZED.launch({}, *args))
    for _ in range(5):
        assert torch.equal(conformance.bits(MIXED_SM90.launch(tile, *args)), want)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"M": 1024}, "is for more than 1024 rows: writing the weight would cost more than the product"),
        ({"format": "int8", "group": 0}, "is for int4 and 16 bits, not int8 and torch.bfloat16"),
        ({"group": 32}, "takes groups of 64 or 128 columns"),
        ({"activation": "silu_mul"}, "makes rows in their order: gate and up halves would be wanted together"),
    ],
    ids=str,
)
def test_what_it_takes(changes: dict[str, Any], reason: str | None) -> None:
    dims = {"M": 2048, "N": 512, "K": 512, "format": "int4", "group": 128, **changes}
    problem = mixed_linear_op.problem(*make(Inputs("meta"), **dims))
    assert MIXED_SM90.refusal(CARD_OF_ARCH[90], problem) == reason
