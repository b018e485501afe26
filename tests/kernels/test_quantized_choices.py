"""Which tile a product of codes takes on an H100 where nothing was tuned, beside what was measured of every one."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.op import Inputs

STUDIES = Path(__file__).parents[2] / "benchmarks/results/h100/studies"
SM90 = next(impl for impl in scaled_linear_op.impls if impl.name == "sm90")
Row = tuple[str, list[int], dict[str, float]]


def rows(study: str, **which: Any) -> Iterator[dict[str, Any]]:
    for row in json.loads((STUDIES / f"{study}.json").read_text())["rows"]:
        if all(row.get(key) == value for key, value in which.items()):
            yield row


def of(times: dict[str, float], end: str) -> dict[str, float]:
    return {way.removesuffix(end): us for way, us in times.items() if way.endswith(end)}


def layers() -> list[Row]:
    return [("int8", row["shape"], row["layer"]) for row in rows("int8-tiles", part="int8")]


def low() -> list[Row]:
    """Products of 64 to 512 rows alone. Configs timed once are compared through bf16, which was timed with both."""
    found = []
    for row in rows("scaled-linear", dtype="int8"):
        if row["shape"][0] <= 512:
            scale = row["us"]["bf16"] / row["scout"]["bf16"]
            times = {**{way: us * scale for way, us in row["scout"].items()}, **row["us"]}
            ways = {re.sub("x|(?=[mnt])", "/", way): us for way, us in times.items() if "/" in way}
            found.append(("int8", row["shape"], ways))
    return found


def spans() -> list[Row]:
    found = rows("float8-sums", part="times", sums="in turns")
    return [("float8_e4m3fn", row["shape"], of(row["us"], " of 256")) for row in found if row["shape"][0] > 32]


def boxes() -> list[Row]:
    # Its tiles that share a product along K were timed with boxes of few rows alone.
    found = (row for row in rows("few-row-boxes") if row["dtype"] != "bfloat16")
    return [(row["dtype"], row["shape"], of(row["us"], " few")) for row in found]


def taken(dtype: str, shape: list[int]) -> str:
    m, n, k = shape
    make: Any = scaled_linear_op.make
    problem = scaled_linear_op.problem(*make(Inputs("meta"), M=m, N=n, K=k, dtype=getattr(torch, dtype)))
    config = SM90.space.default(CARD_OF_ARCH[90], problem)
    assert SM90.space.refusal(CARD_OF_ARCH[90], problem, config) is None
    return "{BLOCK_M}/{BLOCK_N}/{CONSUMERS}/{SPLIT_K}".format(**config)


# Tiles of 96, 192 and 32 columns, which are younger than that study.
LATER = {(256, 6144, 4096), (512, 6144, 4096), (64, 4096, 4096), (128, 10240, 8192), (256, 10240, 8192), (64, 4096, 14336)}

# (what was measured; of how many products at least; how much longer than the best tile of each the tiles taken last, geometric
# mean; the worst; tiles taken that were not timed, by shape)
MEASURED = (
    (layers(), 46, 1.0025, 1.02, {(1024, 5120, 8192), (4096, 57344, 8192)}),
    (low(), 26, 1.006, 1.075, LATER),
    (spans(), 45, 1.006, 1.07, {(128, 5120, 25600)}),
    (boxes(), 45, 1.003, 1.03, set()),
)


@pytest.mark.parametrize(
    ("found", "products", "mean", "worst", "untimed"), MEASURED, ids=["int8 layers", "int8", "float8", "few rows"]
)
def test_the_tile_taken_costs_little_beside_the_best(
    found: list[Row], products: int, mean: float, worst: float, untimed: set[tuple[int, ...]]
) -> None:
    """Another default wants measuring first."""
    costs, missing = [], set()
    for dtype, shape, times in found:
        way = taken(dtype, shape)
        if way not in times:
            missing.add(tuple(shape))
            continue
        costs.append(times[way] / min(times.values()))
        assert costs[-1] <= worst, (dtype, shape, way, costs[-1])
    assert missing == untimed
    assert len(costs) >= products
    assert math.exp(math.fsum(map(math.log, costs)) / len(costs)) <= mean


def test_boxes_of_few_rows_were_never_slower() -> None:
    """By more than what two runs differ by, 1 %."""
    compared = 0
    for row in rows("few-row-boxes"):
        few, full = of(row["us"], " few"), of(row["us"], " full")
        for way in few.keys() & full.keys():
            compared += 1
            assert few[way] <= 1.01 * full[way], (row["shape"], way)
    assert compared > 150


@pytest.mark.parametrize(("way", "largest", "rms"), [("spans of 256", 0.008, 0.00168), ("torch fast=False", 0.008, 0.00168)])
def test_spans_of_256_are_within_the_limits_of_one_rounding(way: str, largest: float, rms: float) -> None:
    """Of millions of sums; in one sum the furthest is off by 0.08, and torch's with use_fast_accum are the same numbers."""
    compared = 0
    for row in rows("float8-sums", part="errors"):
        if row["sums"] != "in memory (L2)" and way in row["errors"]:
            compared += 1
            assert row["errors"][way][0] <= largest, row
            assert row["errors"][way][1] <= (rms if row["shape"][0] > 136 else 0.00175), row
        if {"one sum", "torch fast=True"} <= row["errors"].keys():
            assert row["errors"]["one sum"] == row["errors"]["torch fast=True"]
    assert compared >= 9
