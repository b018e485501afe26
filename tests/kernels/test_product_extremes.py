"""Every implementation of every product at its extremes: long sums, the largest codes, what is not finite."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright.hw.device import device_of
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.quantized.block_scaled import block_scaled_linear_op
from tilewright.kernels.gemm.quantized.mx import mx_linear_op
from tilewright.kernels.gemm.quantized.requantized import cast_linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.op import Impl, Inputs, Op

GPU = torch.cuda.is_available()
DEVICE = device_of(0 if GPU else -1)
WHERE = "cuda" if GPU else "cpu"
BF16, INT8, E4M3, E5M2, E8M0 = torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
Args = tuple[Any, ...]

pytestmark = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")

# The interpreter's sums are torch's: there a length shows what a kernel does at its steps, and on a GPU how they add up.
K = 65536 if GPU else 8192
LONG: dict[str, tuple[Op, dict[str, Any]]] = {
    "one row": (linear_op, {"M": 1, "N": 16, "K": K}),
    "few rows": (linear_op, {"M": 9, "N": 16, "K": K, "residual": True}),
    "rows": (linear_op, {"M": 24, "N": 16, "K": K, "bias": True}),
    "rows of float32": (linear_op, {"M": 5, "N": 8, "K": K, "dtype": torch.float32}),
    "int8": (scaled_linear_op, {"M": 24, "N": 16, "K": K, "dtype": INT8}),
    "fp8": (scaled_linear_op, {"M": 24, "N": 16, "K": K, "dtype": E4M3}),
    "fp8, a span and two steps": (scaled_linear_op, {"M": 24, "N": 16, "K": 1024 + 144, "dtype": E4M3}),
    "e5m2 of three spans": (scaled_linear_op, {"M": 9, "N": 16, "K": 2048 + 16, "dtype": E5M2}),
    "fp8 to float32": (cast_linear_op, {"M": 24, "N": 16, "K": K // 4, "dtype": E4M3, "out": torch.float32}),
    "fp8 blocks": (block_scaled_linear_op, {"M": 24, "N": 16, "K": K}),
    "mxfp8": (mx_linear_op, {"M": 24, "N": 16, "K": K}),
    "int8 weight": (mixed_linear_op, {"M": 9, "N": 16, "K": K, "format": "int8"}),
    "int4 weight": (mixed_linear_op, {"M": 24, "N": 16, "K": K, "format": "int4", "group": 128, "zeros": True}),
}
if GPU:  # a minute in the interpreter
    LONG["rows that start anywhere"] = (linear_op, {"M": 18, "N": 8, "K": 65540})
    LONG["fp8, tiles"] = (scaled_linear_op, {"M": 136, "N": 264, "K": 28672, "dtype": E4M3})


def takers(op: Op, args: Args) -> Iterator[Impl]:
    problem = op.problem(*args)
    found = [impl for impl in op.impls if impl.refusal(DEVICE, problem) is None]
    assert found, f"nothing takes {problem}"
    yield from found


def check_all(op: Op, args: Args) -> None:
    """Every implementation, whatever one before it says; each failure with its name."""
    wrong = []
    for impl in takers(op, args):
        try:
            conformance.check(op, impl, impl.space.default(DEVICE, op.problem(*args)), args)
        except AssertionError as error:
            wrong.append(f"{impl.name}: {error}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(("op", "dimensions"), LONG.values(), ids=list(LONG))
def test_long_sums_match_the_definition(op: Op, dimensions: dict[str, Any]) -> None:
    check_all(op, op.make(Inputs(WHERE, seed=3), **dimensions))


# Halves of a tile by rows or by columns, whole and in shares that are shorter and longer than a span; three boxes of the
# weight; as small as can be.
SPANS = [
    *((128, 128, "m", split) for split in (1, 0, 2, 4)),
    *((64, 128, "n", split) for split in (1, 2, 4)),
    (128, 192, "m", 1),
    (64, 32, "n", 1),
]


@pytest.mark.skipif(not GPU or DEVICE.arch != 90, reason="a kernel for Hopper, which the interpreter cannot run")
@pytest.mark.parametrize("k", [1024, 1024 + 16, 4096, 8192 + 128, 28672])
@pytest.mark.parametrize("choices", SPANS, ids=str)
def test_spans_of_float8_match_in_every_kind_of_tile(choices: tuple[int, int, str, int], k: int) -> None:
    """Programs have more than one tile, or a share of one; of millions of numbers one in a million is the furthest off."""
    sm90 = next(impl for impl in scaled_linear_op.impls if impl.name == "sm90")
    config = dict(zip(("BLOCK_M", "BLOCK_N", "CONSUMERS", "SPLIT_K", "UNALIGNED"), (*choices, "copy"), strict=True))
    m, n = (264, 520) if choices[3] > 1 else (2056, 2056)
    args = scaled_linear_op.make(Inputs(WHERE, seed=5, here=True), M=m, N=n, K=k, dtype=E4M3)
    conformance.check(scaled_linear_op, sm90, config, args)


@pytest.mark.parametrize("signs", [(-128, -128), (-128, 127), *([(127, 127)] if GPU else ())], ids=str)
def test_the_largest_sums_of_int8_are_exact(signs: tuple[int, int]) -> None:
    """K is at most 131072. 128 * 128 * 131072 is 2^31, which is too much by one: codes of -128 alone get a shorter sum."""
    k = 131072 - 16 * (signs == (-128, -128))
    x, weight = (torch.full((rows, k), sign, dtype=INT8, device=WHERE) for rows, sign in zip((17, 8), signs, strict=True))
    scales = torch.full((17,), 2.0**-10, device=WHERE), torch.full((8,), 2.0**-10, device=WHERE)
    args = (x, weight, *scales, None, "none", None, BF16, False)
    want = torch.tensor(signs[0] * signs[1] * k * 2.0**-20, dtype=torch.float64).to(BF16)
    for impl in takers(scaled_linear_op, args):
        y = impl.launch(impl.space.default(DEVICE, scaled_linear_op.problem(*args)), *args)
        assert torch.equal(y.cpu(), want.expand(17, 8)), impl.name


def spoiled(tensor: Tensor, **places: float) -> Tensor:
    """The tensor with numbers put at flat places from "at_0" to "at_N"."""
    wide = tensor.to(torch.float32)
    for place, number in places.items():
        wide.view(-1)[int(place.removeprefix("at_"))] = number
    return wide.to(tensor.dtype)


NAN, INF = torch.nan, torch.inf


def _plain(**dimensions: Any) -> tuple[Op, Args]:
    x, weight, *rest = linear_op.make(Inputs(WHERE, seed=4), **dimensions)
    rows, k = x.shape
    # Of the last row of x the last number, of the weight's first row the first: where masks and tails are.
    x = spoiled(x, **{f"at_{rows * k - 1}": NAN})
    return linear_op, (x, spoiled(weight, at_0=INF, **{f"at_{3 * k - 1}": -INF}), *rest)


def _scaled(dtype: torch.dtype) -> tuple[Op, Args]:
    x, weight, xs, ws, *rest = scaled_linear_op.make(Inputs(WHERE, seed=4), M=20, N=24, K=272, dtype=dtype)
    if dtype == E4M3 and GPU:
        x = spoiled(x, at_271=NAN)
    return scaled_linear_op, (x, weight, spoiled(xs, at_19=NAN), spoiled(ws, at_2=INF), *rest)


def _mixed(rows: int, **format: Any) -> tuple[Op, Args]:
    x, codes, scales, *rest = mixed_linear_op.make(Inputs(WHERE, seed=4), M=rows, N=48, K=256, **format)
    return mixed_linear_op, (spoiled(x, **{f"at_{rows * 256 - 1}": NAN}), codes, spoiled(scales, at_1=NAN), *rest)


def _mx() -> tuple[Op, Args]:
    x, weight, xs, ws, *rest = mx_linear_op.make(Inputs(WHERE, seed=4), M=20, N=24, K=288)
    held = xs.view(torch.uint8).clone()
    held[19, -1] = 0xFF  # E8M0's NaN
    return mx_linear_op, (spoiled(x, at_5=NAN), weight, held.view(E8M0), ws, *rest)


SPOILED: dict[str, Any] = {
    "one row": lambda: _plain(M=1, N=24, K=264),
    "few rows": lambda: _plain(M=7, N=24, K=264),
    "rows": lambda: _plain(M=40, N=24, K=264),
    "rows that start anywhere": lambda: _plain(M=18, N=9, K=265),
    "int8": lambda: _scaled(INT8),
    "fp8": lambda: _scaled(E4M3),
    "int8 weight, few rows": lambda: _mixed(5, format="int8"),
    "int4 weight": lambda: _mixed(20, format="int4", group=64),
}
if GPU:  # Triton's interpreter takes float8's NaN, which a folded NaN scale becomes, for a number
    SPOILED["mxfp8"] = _mx


@pytest.mark.parametrize("make", SPOILED.values(), ids=list(SPOILED))
def test_what_is_not_finite_stays_in_its_rows_and_columns(make: Any) -> None:
    op, args = make()
    want = conformance.oracle(op, args)[0]
    assert 0 < int(want.isfinite().sum()) < want.numel() or want.shape[0] == 1
    check_all(op, args)
