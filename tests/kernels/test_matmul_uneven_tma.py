"""What conformance cannot say of `uneven_tma`: what lies beside rows, every start within 16 bytes, refusals, machine code."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tests.kernels.matmul_cases import arguments
from tilewright.asm.compile import record
from tilewright.asm.facts import facts
from tilewright.hw.device import CARD_OF_ARCH, device_named, device_of
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import Problem, buckets
from tilewright.kernels.gemm.unaligned_tma import UNEVEN_TMA
from tilewright.op import Inputs
from tilewright.tune.space import Config
from tilewright.tune.tolerance import errors

GPU = torch.cuda.is_available()
DEVICE = device_of(0 if GPU else -1)
WHERE = "cuda" if GPU else "cpu"
needs_device = pytest.mark.skipif(
    not DEVICE.runs_triton or (GPU and DEVICE.arch < 90), reason="no GPU with a copy engine here: run with TRITON_INTERPRET=1"
)
needs_compiler = pytest.mark.skipif(DEVICE.kind == "interpret", reason="Triton's interpreter compiles nothing")


def among(t: Tensor, offset: int, gap: int, beside: float) -> Tensor:
    """t in rows `gap` apart, `offset` behind a multiple of 16 bytes, and `beside` all around."""
    rows, cols = t.shape
    held = torch.full((64 + rows * (cols + gap),), beside, dtype=t.dtype, device=t.device)
    return held.as_strided((rows, cols), (cols + gap, 1), 8 + offset).copy_(t)


def check(config: Config, args: tuple[Any, ...]) -> None:
    """`conformance.check` of operands as they lie, which it would copy out of what is beside them."""
    x, weight, *rest = args
    largest, rms = errors(UNEVEN_TMA.launch(config, *args), conformance.oracle(linear_op, (x, weight.contiguous(), *rest))[0])
    limit_max, limit_rms = conformance.limits(linear_op, UNEVEN_TMA, x.dtype)
    assert largest <= limit_max
    assert rms <= limit_rms


# (M, N, K, elements the weight starts behind a multiple of 16 bytes, elements between its rows, of the parts along K)
BESIDE = (
    (17, 9, 17, 0, 0, 1),
    (20, 41, 71, 3, 0, 1),
    (33, 12, 71, 7, 1, 1),  # rows 72 apart: one class
    (18, 19, 135, 0, 3, 2),  # 138 apart: four
    (40, 21, 130, 5, 2, 3),  # 132 apart: two
    (18, 600, 72, 1, 1, 2),  # two tiles of a class
    (17, 3, 8191, 2, 0, 4),
)


@needs_device
@pytest.mark.parametrize("beside", [float("nan"), float("inf")])
@pytest.mark.parametrize(("m", "n", "k", "offset", "gap", "parts"), BESIDE)
def test_what_lies_beside_a_row_is_never_multiplied(
    m: int, n: int, k: int, offset: int, gap: int, parts: int, beside: float
) -> None:
    x, weight, bias, activation, residual = arguments(Inputs(WHERE), m, n, k, torch.bfloat16, "silu")
    x, weight = among(x, offset, gap, beside), among(weight, offset, gap, beside)
    args = (x, weight, bias, activation, residual)
    assert UNEVEN_TMA.refusal(DEVICE, linear_op.problem(*args)) is None
    config = UNEVEN_TMA.space.default(DEVICE, linear_op.problem(*args))
    check({**config, "BLOCK_N": 64, "BLOCK_K": 64, "PARTS": parts}, args)


@needs_device
def test_a_number_that_is_not_finite_stays_in_its_row_and_column() -> None:
    """The neighbours of a row of the weight are the ends of other rows: K follows K without a gap."""
    x, weight, bias, activation, residual = arguments(Inputs(WHERE), 19, 26, 83, torch.float16)
    weight[5], weight[11, 0], weight[12, -1] = torch.nan, torch.inf, -torch.inf
    x[3, -1], x[4, 0], x[7, 40] = torch.inf, -torch.inf, torch.nan
    args = (x, weight, bias, activation, residual)
    config = UNEVEN_TMA.space.default(DEVICE, linear_op.problem(*args))
    conformance.check(linear_op, UNEVEN_TMA, config, args)
    got = UNEVEN_TMA.launch(config, *args)
    bad_rows, bad_cols = [3, 4, 7], [5, 11, 12]
    fine = [i for i in range(19) if i not in bad_rows], [i for i in range(26) if i not in bad_cols]
    assert got[fine[0]][:, fine[1]].isfinite().all()


@needs_device
@pytest.mark.parametrize("offset", range(1, 8))
def test_one_class_starts_anywhere(offset: int) -> None:
    x, weight, bias, activation, residual = arguments(Inputs(WHERE), 17, 24, 80, torch.float16, "gelu", residual=False)
    args = (x, among(weight, offset, 0, float("nan")), bias, activation, residual)
    check(UNEVEN_TMA.space.default(DEVICE, linear_op.problem(*args)), args)


@needs_device
def test_a_row_repeated_and_x_alone_unaligned() -> None:
    x, weight, bias, activation, residual = arguments(Inputs(WHERE), 18, 16, 72, torch.bfloat16, "relu")
    config = UNEVEN_TMA.space.default(DEVICE, linear_op.problem(among(x, 1, 0, 0.0), weight, bias, activation, residual))
    for x_given, w_given in ((among(x, 1, 0, torch.nan), weight), (among(x, 3, 0, torch.nan), weight[:1].expand(16, 72))):
        check(config, (x_given, w_given, bias, activation, residual))


# ---- choices


def problem(m: int, n: int = 4095, k: int = 4095, **other: object) -> Problem:
    given = Problem(torch.bfloat16, m, n, k, "none", False, False, False, "k", "k", False, False)
    return given._replace(**other)


REFUSED = (
    (90, problem(256, k=4096, aligned=True), "is only for rows that do not start at multiples of 16 bytes"),
    (90, problem(2048), "supports at most 1024 rows of x"),
    (90, problem(64, batched=True), "supports a single weight only, without a gate"),
    (90, problem(64, n=4096, activation="silu_mul"), "supports a single weight only, without a gate"),
    (90, problem(64, x_major="m"), "needs x and the weight contiguous along K"),
    (90, problem(64, w_major="n"), "needs x and the weight contiguous along K"),
    (90, problem(64, dtype=torch.float32), "does not support torch.float32"),
    (90, problem(64, k=0), "N or K is 0: the copy engine (TMA) cannot load empty matrices"),
    (80, problem(64), "needs sm_90, this is sm_80"),
)


@pytest.mark.parametrize(("arch", "given", "reason"), REFUSED)
def test_refusals_have_reasons(arch: int, given: Problem, reason: str) -> None:
    assert UNEVEN_TMA.refusal(CARD_OF_ARCH[arch], given) == reason


@pytest.mark.parametrize("arch", [90, 100])
def test_default_is_one_of_the_space_and_chosen_only_where_it_was_measured(arch: int) -> None:
    card, large = CARD_OF_ARCH[arch], ((2049, 2049), (4099, 2053), (4095, 4095), (4096, 4096), (50257, 4095))
    for m in buckets(1024):
        for n, k in ((1, 1), (9, 17), (1013, 1019), (2049, 2049), (4099, 2053), (4095, 4095), (4096, 4096), (50257, 4095)):
            given = problem(m, n, k)
            config = UNEVEN_TMA.space.default(card, given)
            assert UNEVEN_TMA.space.refusal(card, given, config) is None, (given, config)
            assert set(config) == set(UNEVEN_TMA.space.axes)
            faster = arch == 90 and m in (32, 64, 128, 256) and (n, k) in large
            assert (linear_op.choose(card, given).impl is UNEVEN_TMA) == faster, given


# (M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, num_warps, num_stages): of 44 to 92 configs the fastest on an H100 80GB HBM3
FASTEST = (
    (32, 4095, 4095, 32, 64, 128, 2, 4, 5),
    (64, 4095, 4095, 64, 64, 128, 2, 4, 5),
    (128, 4095, 4095, 128, 64, 64, 2, 4, 5),
    (256, 4095, 4095, 256, 64, 64, 2, 4, 5),
    (256, 2049, 2049, 128, 64, 64, 2, 4, 5),
    (127, 4099, 2053, 128, 64, 64, 3, 4, 4),
)


@pytest.mark.parametrize("row", FASTEST, ids=["x".join(map(str, row[:3])) for row in FASTEST])
def test_default_is_the_fastest_measured(row: tuple[int, ...]) -> None:
    m, n, k, *fastest = row
    args = arguments(Inputs("meta"), m, n, k, torch.bfloat16, bias=False, residual=False)
    config = UNEVEN_TMA.space.default(device_named("h100"), linear_op.problem(*args))
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "PARTS", "num_warps", "num_stages")
    assert config == dict(zip(names, fastest, strict=True))


# ---- machine code


@needs_compiler
@pytest.mark.parametrize(("m", "n", "k"), [row[:3] for row in FASTEST])
def test_tensor_cores_do_not_wait_and_loads_are_wide(m: int, n: int, k: int) -> None:
    args = arguments(Inputs("meta"), m, n, k, torch.bfloat16, bias=False, residual=False)
    config = UNEVEN_TMA.space.default(CARD_OF_ARCH[90], linear_op.problem(*args))
    turn, product, gather = (facts(binary) for binary in record(UNEVEN_TMA, config, args, 90))
    assert not any(found.spill_bytes for found in (turn, product, gather))
    assert product.wgmma
    assert product.tma_loads
    # 16 columns of x beside whole steps: of 32 rows there are 4 numbers a thread.
    assert product.loads.get(8, 0) == (config["BLOCK_M"] == 32)
    assert set(product.loads) - {8} == {2, 16}
    assert product.loads[2] == config["BLOCK_N"] * 16 // (32 * config["num_warps"]), "both ends of the weight's rows, no more"
    assert set(product.stores) == {16}
    assert not product.wgmma_serialised


@needs_compiler
def test_rows_compile_nothing_new() -> None:
    """One binary of each launch serves every number of rows of a bucket."""
    keys = set()
    for m in (65, 97, 112, 128):
        args = arguments(Inputs("meta"), m, 515, 771, torch.bfloat16)
        config = UNEVEN_TMA.space.default(CARD_OF_ARCH[90], linear_op.problem(*args))
        keys |= {binary.key for binary in record(UNEVEN_TMA, config, args, 90)}
    assert len(keys) == 3
