"""`mixed_linear`'s `sm90`, which writes an int4 weight out under the products: the bits of one that was written before."""

from typing import Any

import pytest
import torch

from tests import conformance
from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels.gemm.sm90 import SM90, pieces
from tilewright.kernels.gemm.sm90_configs import shares
from tilewright.kernels.gemm.weight_only import dequant_then_gemm as mixed_dequantized
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.kernels.gemm.weight_only.sm90 import MIXED_SM90
from tilewright.kernels.hopper.producer_rows import counters_of
from tilewright.kernels.launch.counters import tickets
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
    assert MIXED_SM90.refusal(DEVICE, mixed_linear_op.problem(*args)) is None

    class ByTheSameTile:
        @staticmethod
        def run(*operands: Any) -> torch.Tensor:
            return SM90.launch({**TILE, "SPLIT_K": tile["SPLIT_K"]}, *operands)

    monkeypatch.setattr(mixed_dequantized, "linear_op", ByTheSameTile)
    want = conformance.bits(mixed_dequantized.DEQUANTIZED.launch({}, *args))
    for _ in range(5):
        with conformance.Poisoned():  # a weight that was right before would hide rows that nobody wrote
            got = MIXED_SM90.launch(tile, *args)
        assert torch.equal(conformance.bits(got), want)
    assert not tickets(got.device, 1).any(), "counters are zero between launches"


@on_hopper
@pytest.mark.parametrize("steps", [65, 66])
@pytest.mark.parametrize("group", [16, 32])
def test_tiles_that_are_left_are_shared(group: int, steps: int) -> None:
    """A round of 132 tiles, then 44 in shares of 22 steps: which those are the order says, so bits are not those of SM90."""
    assert shares(16 * 11, steps, 132, 0)[:3] == (132, 1, 22)
    args = make(Inputs("cuda", group, here=True), M=2048, N=2600, K=64 * steps, group=64, zeros=True, bias=True)
    conformance.check(mixed_linear_op, MIXED_SM90, config(0, group), args)


@on_hopper
def test_replayed_and_on_several_streams() -> None:
    args = make(Inputs("cuda", 0, here=True), M=2048, N=10240, K=1024, group=128, zeros=True)
    tile = config(0, 32)
    want = MIXED_SM90.launch(tile, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            got = MIXED_SM90.launch(tile, *args)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    kept, streams = [], [torch.cuda.Stream() for _ in range(3)]
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                kept.append(MIXED_SM90.launch(tile, *args))
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in kept)


def test_counters_start_where_pointers_are_aligned() -> None:
    """Else tiles that are shared, odd in number or even, would decide how the kernel is compiled, in a server that runs."""
    y, tile = torch.empty(1), {"BLOCK_M": 128, "BLOCK_N": 256, "SPLIT_K": 0}
    for tiles in range(1, 400):
        work = pieces(tile, CARD_OF_ARCH[90], y, tiles, 64, False, more=counters_of(4096))
        assert work.others % 4 == 0
        assert work.counters is not None
        assert work.counters.numel() >= work.others + counters_of(4096)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"M": 1024}, "is for more than 1024 rows: with fewer, writing the dequantised weight takes longer than the product"),
        ({"format": "int8", "group": 0}, "supports int4 codes with a 16-bit x only, not int8 with torch.bfloat16"),
        ({"group": 32}, "supports scales per group of 64 or 128 columns of a row only"),
        ({"block_rows": 128}, "supports scales per group of 64 or 128 columns of a row only"),
        (
            {"activation": "silu_mul"},
            "does not support a gate: it dequantises rows in order, but gate and up rows are needed together",
        ),
    ],
    ids=str,
)
def test_what_it_takes(changes: dict[str, Any], reason: str | None) -> None:
    dims = {"M": 2048, "N": 512, "K": 512, "format": "int4", "group": 128, **changes}
    problem = mixed_linear_op.problem(*make(Inputs("meta"), **dims))
    assert MIXED_SM90.refusal(CARD_OF_ARCH[90], problem) == reason
