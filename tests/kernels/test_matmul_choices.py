"""Which implementation a matrix product takes on an H100 where nothing was tuned: shapes, and what was measured of them."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import Inputs

STUDIES = Path(__file__).parents[2] / "benchmarks/results/h100/studies"

# (rows, N, K, activation, the implementation that is asked first on an H100, None for the usual order)
FIRST = (
    (1, 4096, 4096, "none", None),
    (1, 4096, 4095, "none", "gemv"),
    (16, 4095, 4095, "none", "uneven"),
    (16, 8192, 8192, "none", "vendor"),
    (16, 5120, 8192, "none", None),
    (16, 2056, 2056, "none", "vendor"),
    (4, 4096, 1000, "none", "vendor"),
    (16, 4104, 4104, "silu", None),
    (16, 4104, 4104, "silu_mul", None),
    (16, 4100, 4104, "none", None),
    (16, 4104, 4112, "none", None),
    (1, 4104, 4104, "none", None),
    (64, 4096, 4096, "none", None),
    (17, 4095, 4095, "none", "uneven_tma"),
    (32, 4095, 4095, "none", "uneven_tma"),
    (64, 4096, 4095, "none", "uneven_tma"),
    (32, 2049, 2049, "none", "uneven_tma"),
    (32, 1013, 1019, "none", "uneven"),
    (64, 1999, 1999, "none", "uneven"),
    (64, 4095, 4096, "none", "sm90"),
    (127, 4099, 2053, "none", "uneven_tma"),
    (129, 4096, 4095, "gelu", "uneven_tma"),
    (256, 4095, 4095, "none", "uneven_tma"),
    (256, 4096, 4095, "silu_mul", "sm90"),
    (256, 2049, 2049, "none", "uneven_tma"),
    (256, 1999, 1999, "none", "sm90"),
    (257, 4095, 4095, "none", "sm90"),
    (1009, 1013, 1019, "none", "sm90"),
    (2048, 50257, 4096, "none", "sm90"),
    (2048, 4096, 4096, "none", None),
    (2048, 4096, 4096, "gelu", "sm90"),
    (64, 4096, 4096, "silu_mul", None),
    (64, 4104, 4096, "silu_mul", "sm90"),
    (256, 4096, 4096, "silu_mul", "sm90"),
)


@pytest.mark.parametrize(("m", "n", "k", "activation", "name"), FIRST)
def test_rows_that_start_anywhere_are_not_for_cublas(m: int, n: int, k: int, activation: str, name: str | None) -> None:
    x, weight = torch.empty(m, k, dtype=torch.bfloat16, device="meta"), torch.empty(n, k, dtype=torch.bfloat16, device="meta")
    problem = linear_op.problem(x, weight, None, activation, None)
    assert linear_op.first(CARD_OF_ARCH[90], problem) == name
    assert linear_op.first(CARD_OF_ARCH[80], problem) is None
    if name is not None:
        impl = next(impl for impl in linear_op.impls if impl.name == name)
        assert impl.refusal(CARD_OF_ARCH[90], problem) is None, "it would be somebody else's in silence"


@pytest.mark.parametrize(("x_start", "w_start"), [(0, 0), (1, 0), (0, 1), (1, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize("w_gap", [0, 4, 8])
def test_a_problem_says_which_operand_starts_anywhere(x_start: int, w_start: int, w_gap: int) -> None:
    """Both at multiples of 16 bytes, and the weight alone; steps between its rows count as its start does."""
    memory = torch.empty(1024, dtype=torch.bfloat16)
    x = memory.as_strided((4, 16), (16, 1), x_start)
    weight = memory.as_strided((8, 16), (16 + w_gap, 1), w_start)
    given = linear_op.problem(x, weight, None, "none", None)
    assert given.w_aligned == (w_start % 8 == 0 and w_gap % 8 == 0)
    assert given.aligned == (given.w_aligned and x_start % 8 == 0)


def test_what_the_copy_engine_does_not_take_goes_as_before() -> None:
    """Of 256 x 4095 x 4095: other numbers, batches, operands dense along another dimension, and x alone at an offset."""

    def first(x: Tensor, weight: Tensor) -> str | None:
        return linear_op.first(CARD_OF_ARCH[90], linear_op.problem(x, weight, None, "none", None))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = empty(256, 4095), empty(4095, 4095)
    assert first(x, weight) == "uneven_tma"
    assert first(x.float(), weight.float()) == "sm90"
    assert first(x[None], weight[None]) == "sm90"
    assert first(empty(4095, 256).mT, weight) == "sm90"
    assert first(x, empty(4095, 4095).mT) == "sm90"
    assert first(empty(256, 4104)[:, :4095], empty(4095, 4104)[:, :4095]) == "sm90", "rows that start at 16 bytes; y's do not"


OFFSET_WEIGHT = ("uneven_tma",) * 5
OFFSET_X = {4096: ("uneven", "uneven", "sm90", "sm90", "sm90"), 14336: ("uneven_tma",) * 5}


@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("which", ["weight", "x", "both"])
def test_what_one_operand_elsewhere_takes_is_what_was_fastest(which: str, k: int) -> None:
    """17 to 256 x 4096 x K with memory that starts one element further (benchmarks/results/h100/studies/uneven-offsets.json).

    Of `uneven_tma`, `sm90` and `uneven` the fastest, or within 2 % of it.
    """
    study = json.loads((STUDIES / "uneven-offsets.json").read_text())
    took = []
    for m in (17, 32, 64, 128, 256):
        memory = torch.empty(4096 * k + 8, dtype=torch.bfloat16, device="meta")
        x, weight = (memory[start:][: rows * k].view(rows, k) for start, rows in ((which != "weight", m), (which != "x", 4096)))
        problem = linear_op.problem(x, weight, None, "none", None)
        name = linear_op.choose(CARD_OF_ARCH[90], problem).impl.name
        row = next(r for r in study["rows"] if (r["m"], r["k"], r["unaligned"]) == (m, k, which))
        times = {name: row["us"][name] for name in ("uneven_tma", "sm90", "uneven") if name in row["us"]}
        assert times[name] <= 1.02 * min(times.values()), (m, times)
        took.append(name)
    assert tuple(took) == (OFFSET_X[k] if which == "x" else OFFSET_WEIGHT)


# (rows, N, K, activation, whether there is a residual, what runs on an H100 where nothing was measured); all with a bias
UNTUNED = (
    (1024, 768, 3072, "none", True, "sm90"),
    (4096, 768, 3072, "none", True, "vendor"),
    (6304, 768, 3072, "none", True, "vendor"),
    (4096, 4096, 4096, "none", True, "sm90"),
    (4096, 4096, 4096, "none", False, "vendor"),
    (1024, 768, 3072, "none", False, "vendor"),
    (6304, 3072, 768, "gelu", False, "sm90"),
    (6304, 3072, 768, "gelu_tanh", False, "vendor"),
    (1024, 3072, 768, "relu", False, "vendor"),
)


@pytest.mark.parametrize(("m", "n", "k", "activation", "residual", "name"), UNTUNED)
def test_an_epilogue_that_cublas_launches_apart_is_not_for_cublas(
    m: int, n: int, k: int, activation: str, residual: bool, name: str
) -> None:
    inputs = Inputs("meta")
    x, weight, bias = (inputs.randn(*shape, dtype=torch.float16) for shape in ((m, k), (n, k), (n,)))
    problem = linear_op.problem(x, weight, bias, activation, inputs.randn(m, n, dtype=torch.float16) if residual else None)
    assert linear_op.choose(CARD_OF_ARCH[90], problem).impl.name == name


# (rows, N, K, what runs of a product with a residual alone): rows that tiles share evenly among 132 SMs, and others
WITH_RESIDUAL = (
    (64, 4096, 4096, "vendor"),
    (128, 4096, 4096, "vendor"),
    (128, 4096, 14336, "sm90"),
    (256, 4096, 4096, "sm90"),
    (512, 4096, 14336, "sm90"),
    (256, 5120, 8192, "vendor"),
    (256, 5120, 25600, "vendor"),
    (512, 5120, 25600, "vendor"),
    (4096, 5120, 25600, "sm90"),
    (2048, 8192, 28672, "sm90"),
    (2048, 1024, 3072, "vendor"),
    (4096, 0, 4096, "vendor"),
)


def with_residual(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> str:
    x, weight, residual = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (n, k), (m, n)))
    return linear_op.choose(CARD_OF_ARCH[90], linear_op.problem(x, weight, None, "none", residual)).impl.name


@pytest.mark.parametrize(("m", "n", "k", "name"), WITH_RESIDUAL)
def test_a_residual_is_added_by_sm90_where_its_tiles_are_even(m: int, n: int, k: int, name: str) -> None:
    assert with_residual(m, n, k) == name
    assert with_residual(m, n, k, torch.float32) != "sm90"


def test_what_was_measured_with_a_residual_is_what_runs() -> None:
    """Not more than 2 % behind the other one, and never behind cuBLAS."""
    rows = json.loads((STUDIES / "residual.json").read_text())["rows"]
    for row in rows:
        times, took = row["us"], with_residual(row["m"], row["n"], row["k"])
        assert times[took] <= min(1.02 * min(times.values()), times["vendor"]), row


def test_the_tile_taken_costs_little_beside_the_best_measured() -> None:
    """Seven products of 256 and 512 rows, by rows x columns of a tile / SPLIT_K. Another default wants measuring first."""
    sm90 = next(impl for impl in linear_op.impls if impl.name == "sm90")
    rows = [row for row in json.loads((STUDIES / "products-left.json").read_text())["rows"] if row["part"] == "tiles"]
    assert len(rows) == 7
    for row in rows:
        m, n, k = row["shape"]
        us = {**row["us"], row["default"]: row["us"]["default"]}  # the default of that day, by its name too
        x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device="meta") for size in (m, n))
        config = sm90.space.default(CARD_OF_ARCH[90], linear_op.problem(x, weight, None, "none", None))
        taken = us["{BLOCK_M}x{BLOCK_N}/{SPLIT_K}".format(**config)]
        assert taken <= 1.05 * min(time for way, time in us.items() if way != "vendor"), (row["shape"], config)


# (M, N, K) -> how much longer than the aligned product beside it, F.linear's, the tile taken may last
BESIDE = {(4096, 1793, 4096): 1.19, (4096, 2049, 4096): 1.27, (4096, 1800, 4096): 1.12, (512, 10240, 5120): 1.07}


@pytest.mark.parametrize("shape", BESIDE, ids=str)
def test_the_tile_taken_was_the_fastest_of_all(shape: tuple[int, int, int]) -> None:
    """Where the last column of tiles is nearly empty, and where tiles are shared. Another default wants measuring first."""
    m, n, k = shape
    sm90 = next(impl for impl in linear_op.impls if impl.name == "sm90")
    (row,) = (row for row in json.loads((STUDIES / "products-left-2.json").read_text())["rows"] if row["shape"] == [*shape])
    x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device="meta") for size in (m, n))
    config = sm90.space.default(CARD_OF_ARCH[90], linear_op.problem(x, weight, None, "none", None))
    taken = row["us"]["{BLOCK_M}/{BLOCK_N}/{CONSUMERS}/{SPLIT_K}".format(**config)]
    assert config["UNALIGNED"] == "copy"
    assert taken == min(row["us"].values())
    assert taken <= BESIDE[shape] * row["neighbour_us"]


# (study, its reference, products, how much longer than the best config of each the tiles taken last: mean and worst; not timed)
STUDIED = (
    (
        "linear-aligned",
        "cublas",
        102,
        1.007,
        1.05,
        {(512, 6144, 4096), (256, 10240, 5120), (256, 10240, 8192), (512, 5120, 8192)},
    ),
    ("linear-epilogue", "vendor", 100, 1.0152, 1.2, set()),
)


@pytest.mark.parametrize(("study", "reference", "products", "mean", "worst", "untimed"), STUDIED, ids=lambda v: str(v)[:16])
def test_the_tiles_taken_cost_little_beside_every_config(
    study: str, reference: str, products: int, mean: float, worst: float, untimed: set[tuple[int, int, int]]
) -> None:
    """Configs timed once are compared through the reference, which was timed with both. 128x192 tiles came later."""
    sm90 = next(impl for impl in linear_op.impls if impl.name == "sm90")
    rows, costs, missing = json.loads((STUDIES / f"{study}.json").read_text())["rows"], [], set()
    for row in rows:
        m, n, k = row["shape"]
        activation, bias, residual = row.get("case", ("none", False, False))
        width = n // 2 if activation == "silu_mul" else n
        sizes = ((m, k), (n, k), (n,), (m, width))
        x, weight, b, added = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
        problem = linear_op.problem(x, weight, b if bias else None, activation, added if residual else None)
        way = "{BLOCK_M}x{BLOCK_N}{CONSUMERS}/{SPLIT_K}".format(**sm90.space.default(CARD_OF_ARCH[90], problem))
        scale = row["us"][reference] / row["scout"][reference]
        times = {**{way: us * scale for way, us in row["scout"].items()}, **row["us"]}
        if way not in times:
            missing.add((m, n, k))
            continue
        costs.append(times[way] / min(us for name, us in times.items() if "/" in name))
        assert costs[-1] <= worst, (row["shape"], activation, way)
    assert (len(rows), missing) == (products, untimed)
    assert math.exp(math.fsum(map(math.log, costs)) / len(costs)) <= mean


@pytest.mark.parametrize(("n", "k"), [(50257, 4096), (1900, 4095)])
def test_of_tiles_as_large_the_wide_one_is_taken(n: int, k: int) -> None:
    """2048 x 50257 x 4096: 1098 us, 1122 in 256x128 (linear-awkward.json). By classes of rows 256x128 is 8 % slower there."""
    sm90 = next(impl for impl in linear_op.impls if impl.name == "sm90")
    x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device="meta") for size in (2048, n))
    config = sm90.space.default(CARD_OF_ARCH[90], linear_op.problem(x, weight, None, "none", None))
    assert (config["BLOCK_M"], config["BLOCK_N"]) == (128, 256)
