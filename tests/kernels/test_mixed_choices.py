"""What `mixed_linear` runs on an H100 where nothing was tuned, held against what was timed of every config there."""

import json
from functools import cache
from math import exp, fsum, log
from pathlib import Path
from typing import Any

import pytest

from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.gemm.weight_only.linear import mixed_linear_op
from tilewright.kernels.gemm.weight_only.problem import MixedProblem
from tilewright.kernels.gemm.weight_only.skinny import x_depth
from tilewright.op import Inputs

STUDIES = Path(__file__).parents[2] / "benchmarks/results/h100/studies"
STUDY, MANY_ROWS = STUDIES / "mixed-linear-choices.json", STUDIES / "mixed-linear-written.json"
H100 = CARD_OF_ARCH[90]
IMPLS = {impl.name: impl for impl in mixed_linear_op.impls}
make: Any = mixed_linear_op.make

# (format, rows): how far what runs is behind the best config of each product, as a geometric mean of products
BEHIND = {
    ("int4", 1): 1.006,
    ("int4", 4): 1.011,
    ("int4", 16): 1.004,
    ("int4", 64): 1.002,
    ("int4", 256): 1.003,
    ("int4", 512): 1.005,
    ("int8", 1): 1.007,
    ("int8", 4): 1.003,
    ("int8", 16): 1.009,
    ("int8", 64): 1.019,
    ("int8", 256): 1.006,
    ("int8", 512): 1.002,
    ("int8", 2048): 1.002,
}


@cache
def rows(format: str, m: int, study: Path = STUDY) -> list[tuple[MixedProblem, dict[str, dict[str, float]]]]:
    """Problems of a format and number of rows, with us by implementation and config; an empty name where there is no config."""
    found = []
    for row in json.loads(study.read_text())["rows"]:
        if (row["format"], row["m"]) == (format, m):
            more = {"group": 128, "zeros": True} if format == "int4" else {}
            problem = mixed_linear_op.problem(*make(Inputs("meta"), M=m, N=row["n"], K=row["k"], format=format, **more))
            us = {impl: t if isinstance(t, dict) else {"": t} for impl, t in row["us"].items() if impl != "bf16"}
            found.append((problem, us))
    return found


def named(impl: str, problem: MixedProblem, config: Any) -> str:
    """A config as the study names it, which has what `skinny` fetches of x ahead besides."""
    ahead = [x_depth(problem.format, max(8, problem.m_bucket), config["DEPTH"])] if impl == "skinny" else []
    return "/".join(str(value) for value in [*config.values(), *ahead])


def mean(values: list[float]) -> float:
    return exp(fsum(log(value) for value in values) / len(values))


@pytest.mark.parametrize(("format", "m"), BEHIND, ids=str)
def test_what_runs_is_about_the_fastest(format: str, m: int) -> None:
    """A config that was not timed fails: it wants timing first."""
    behind = []
    for problem, us in rows(format, m):
        impl, config = mixed_linear_op.choose(H100, problem)[:2]
        assert impl.space.refusal(H100, problem, config) is None
        taken = us[impl.name][named(impl.name, problem, config)]
        behind.append(taken / min(t for configs in us.values() for t in configs.values()))
        assert behind[-1] < 1.08, (problem, impl.name, config)
    assert len(behind) == (6 if m == 2048 else 12)
    assert mean(behind) < BEHIND[format, m]


@pytest.mark.parametrize(("m", "most"), [(2048, 1.01), (3072, 1.008), (4096, 1.01), (8192, 1.011)], ids=str)
def test_many_rows_of_int4(m: int, most: float) -> None:
    """The weight is written under the products but where tiles are few; every config of that, and the others' defaults."""
    behind = []
    for problem, us in rows("int4", m, MANY_ROWS):
        impl, config = mixed_linear_op.choose(H100, problem)[:2]
        behind.append(us[impl.name][named(impl.name, problem, config)] / min(t for own in us.values() for t in own.values()))
        assert behind[-1] < 1.06, (problem, impl.name, config)
        assert impl.name == ("registers" if (m, problem.n < 8192) == (2048, True) else "sm90")
    assert len(behind) == 12
    assert mean(behind) < most


@pytest.mark.parametrize(("format", "m"), BEHIND, ids=str)
def test_the_spaces_have_what_wins(format: str, m: int) -> None:
    """What was refused gains nothing anywhere: 1.2 %, and 2.3 % between two names of one program at 2048 rows."""
    for problem, us in rows(format, m):
        kept = [us["dequantized"][""]] if "dequantized" in us else []
        for name in ("skinny", "registers"):
            if name in us:
                kept += [us[name][named(name, problem, c)] for c in IMPLS[name].space.configs(H100, problem)]
        best = min(t for configs in us.values() for t in configs.values())
        assert min(kept) <= (1.025 if m == 2048 else 1.013) * best, problem


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_skinny_alone(format: str) -> None:
    """Sixteen rows, which other cards have no other kernel for."""
    behind = []
    for problem, us in rows(format, 16):
        taken = us["skinny"][named("skinny", problem, IMPLS["skinny"].space.default(H100, problem))]
        behind.append(taken / min(us["skinny"].values()))
    assert mean(behind) < 1.005


def problem_of(m: int, n: int, k: int, **more: Any) -> MixedProblem:
    return mixed_linear_op.problem(*make(Inputs("meta"), M=m, N=n, K=k, **more))


def test_a_cut_by_what_it_costs() -> None:
    """registers: fewer parts of lower tiles where K is short, programs in step where x is large."""

    def cut(m: int, n: int, k: int) -> tuple[int, int]:
        config = IMPLS["registers"].space.default(H100, problem_of(m, n, k, format="int8"))
        return config["BLOCK_M"], config["SPLIT_K"]

    assert cut(256, 4096, 4096) == (128, 3)
    assert cut(256, 5120, 25600) == (256, 0)
    assert cut(512, 5120, 25600) == (256, 3)
    assert cut(2048, 5120, 25600) == (256, 3)


def test_groups_alone_have_scales_to_fetch_ahead() -> None:
    """int4's groups by default; rows have none, and 8-bit codes in groups were not timed."""
    space = IMPLS["registers"].space
    for more, ahead in (
        ({"format": "int4", "group": 64}, 1),
        ({"format": "int4"}, 0),
        ({"format": "int8"}, 0),
        ({"format": "e4m3", "group": 128, "block_rows": 128}, 0),
    ):
        problem = problem_of(64, 4096, 4096, **more)
        assert space.default(H100, problem)["AHEAD"] == ahead
        assert space.refusal(H100, problem, space.default(H100, problem)) is None


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("m", [1, 4, 16, 32])
def test_groups_of_32_leave_fewer_registers(m: int, zeros: bool) -> None:
    """skinny holds four scales and zero points a chunk: 64 rows of a weight would spill."""
    space = IMPLS["skinny"].space
    for n in (2048, 5120, 28672):
        problem = problem_of(m, n, 8192, format="int4", group=32, zeros=zeros)
        default = space.default(H100, problem)
        assert space.refusal(H100, problem, default) is None
        assert m < 16 or default["BLOCK_N"] * default["DEPTH"] <= 32
