"""What conformance cannot say of matrix products: whole tuning spaces, public shapes, bad input, variants, invariance."""

import re
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from tests import conformance
from tests.kernels.matmul_cases import Case, arguments, every_config
from tilewright import ops
from tilewright.asm.compile import record
from tilewright.asm.facts import facts
from tilewright.hw.device import CARD_OF_ARCH, Device, device_of
from tilewright.kernels.gemm.cublas import VENDOR
from tilewright.kernels.gemm.linear import EXAMPLES, linear_op
from tilewright.kernels.gemm.problem import LARGEST_BUCKET, Problem, buckets
from tilewright.kernels.gemm.tile import INVARIANT, TRITON
from tilewright.op import Impl, Inputs, invariant, prefer
from tilewright.ops.linear import LINEAR_OPS

GPU = torch.cuda.is_available()
DEVICE = device_of(0 if GPU else -1)
WHERE = "cuda" if GPU else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(DEVICE.kind == "interpret", reason="Triton's interpreter compiles nothing")

IMPLS = {impl.name: impl for impl in linear_op.impls}


@needs_triton
@pytest.mark.parametrize("case", list(every_config(DEVICE)), ids=str)
def test_config_matches_definition(case: Case) -> None:
    conformance.check(linear_op, case.impl, case.config, case.args)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.label)
def test_composed_epilogue_matches_definition(example: Any) -> None:
    """What `vendor` composes around the library's product, here with the CPU's library."""
    conformance.check(linear_op, VENDOR, {}, example.make(Inputs(WHERE)))


# ---- public functions

FORMULAS = {
    "none": lambda y: y,
    "relu": lambda y: y.clamp_min(0),
    "gelu": lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2,
    "gelu_tanh": lambda y: y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))) / 2,
    "silu": lambda y: y / (1 + torch.exp(-y)),
    "silu_mul": lambda y: FORMULAS["silu"](y[..., : y.shape[-1] // 2]) * y[..., y.shape[-1] // 2 :],
    "gelu_mul": lambda y: FORMULAS["gelu"](y[..., : y.shape[-1] // 2]) * y[..., y.shape[-1] // 2 :],
}


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_linear_is_the_formula(activation: str, lead: tuple[int, ...]) -> None:
    inputs = Inputs(WHERE)
    x, weight, bias = inputs.randn(*lead, 20), inputs.randn(6, 20, scale=0.2), inputs.randn(6)
    plain = FORMULAS[activation]((x.double() @ weight.double().T) + bias.double())
    residual = inputs.randn(*plain.shape)
    got = ops.linear(x, weight, bias, activation, residual)
    assert got.is_contiguous()
    torch.testing.assert_close(got, (plain + residual).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.linear(x, weight, bias, activation), plain.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 5), (5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((2, 4, 5), (2, 5, 6)),
        ((3, 2, 4, 5), (2, 5, 6)),
        ((4, 5), (2, 5, 6)),
        ((0, 5), (5, 6)),
        ((2, 4, 0), (2, 0, 6)),
        ((1, 1), (1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", ["NN", "NT", "TN", "TT"])
def test_matmul_is_torch_matmul(a: tuple[int, ...], b: tuple[int, ...], transposed: str) -> None:
    inputs = Inputs(WHERE)
    left, right = (
        inputs.randn(*shape[:-2], shape[-1], shape[-2]).mT if t == "T" else inputs.randn(*shape)
        for shape, t in zip((a, b), transposed, strict=True)
    )
    want = torch.matmul(left, right)
    torch.testing.assert_close(ops.matmul(left, right), want)
    residual = inputs.randn(*want.shape[:-1], 2 * want.shape[-1])[..., ::2]
    torch.testing.assert_close(ops.matmul(left, right, None, "relu", residual), want.relu() + residual)


def test_result_is_never_an_input() -> None:
    x, weight, residual = torch.zeros(3, 0), torch.zeros(4, 0), torch.ones(3, 4)
    got = ops.linear(x, weight, None, "none", residual)
    assert torch.equal(got, residual)
    assert got.data_ptr() != residual.data_ptr()


X, W = torch.zeros(2, 3, 8), torch.zeros(6, 8)
BAD = {
    "K": (lambda: ops.linear(X, torch.zeros(6, 7)), ValueError, "x [2, 3, 8] and weight [6, 7]"),
    "weight of three dims": (lambda: ops.linear(X, torch.zeros(1, 6, 8)), ValueError, "weight [1, 6, 8]"),
    "scalar": (lambda: ops.linear(torch.tensor(1.0), W), ValueError, "x []"),
    "matmul K": (lambda: ops.matmul(X, W), ValueError, "a [2, 3, 8] and b [6, 8]"),
    "vector": (lambda: ops.matmul(X[0, 0], W.T), ValueError, "a [8] and b [8, 6]"),
    "batch": (lambda: ops.matmul(X, torch.zeros(5, 8, 6)), ValueError, "must broadcast; got a [2, 3, 8] and b [5, 8, 6]"),
    "bias": (lambda: ops.linear(X, W, torch.zeros(5)), ValueError, "bias must be [6]; got [5]"),
    "gated bias": (lambda: ops.linear(X, W, torch.zeros(3), "silu_mul"), ValueError, "bias must be [6]; got [3]"),
    "residual": (
        lambda: ops.linear(X, W, None, "gelu_mul", torch.zeros(2, 3, 6)),
        ValueError,
        "residual must be [2, 3, 3]; got [2, 3, 6]",
    ),
    "activation": (
        lambda: ops.linear(X, W, None, "swish"),
        ValueError,
        "one of none, relu, gelu, gelu_tanh, silu, silu_mul, gelu_mul; got 'swish'",
    ),
    "odd halves": (lambda: ops.linear(X, W[:5], None, "silu_mul"), ValueError, "an even N of weight, for a gate half"),
    "dtype": (lambda: ops.linear(X, W.half()), ValueError, "weight must have the dtype and device of x, torch.float32 on"),
    "matmul dtype": (
        lambda: ops.matmul(X, W.T.half()),
        ValueError,
        "b must have the dtype and device of a, torch.float32 on cpu;",
    ),
    "bias dtype": (lambda: ops.linear(X, W, torch.zeros(6).bfloat16()), ValueError, "got torch.bfloat16 on cpu"),
    "device": (lambda: ops.linear(X, W.to("meta")), ValueError, "got torch.float32 on meta"),
    "weight type": (lambda: ops.linear(X, cast(Any, [1.0])), TypeError, "weight must be a tensor, got list [1.0]"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_weight_type_decides_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Tensor):
        pass

    class Doubled(Tensor):
        pass

    x, weight = torch.ones(1, 2), torch.ones(3, 2)
    monkeypatch.setitem(LINEAR_OPS, Doubled, lambda x, w, *rest: 2 * F.linear(x, w.as_subclass(Tensor)))
    assert ops.linear(x, Parameter(weight, requires_grad=False)).tolist() == [[2.0] * 3]
    assert ops.linear(x, weight.as_subclass(Plain)).tolist() == [[2.0] * 3]
    assert ops.linear(x, weight.as_subclass(Doubled)).tolist() == [[4.0] * 3]


# ---- choices


def model_problems() -> list[Problem]:
    shapes = [
        (4096, 1024),
        (1024, 2048),
        (6144, 1024),
        (1024, 3072),
        (151936, 1024),
        (6144, 4096),
        (24576, 4096),
        (4096, 12288),
    ]
    shapes += [(1, 8), (100, 300), (7, 28672)]
    return [
        Problem(dtype, m, n, k, "none", False, True, False, "k", "k", True, True)
        for dtype in (torch.bfloat16, torch.float32)
        for m in buckets(1 << 16)
        for n, k in shapes
    ]


@pytest.mark.parametrize("name", ["gemv", "skinny", "sm90", "triton_tma", "triton"])
@pytest.mark.parametrize("smem_bytes", [101376, 166912, 232448])
def test_default_config_is_one_of_the_space(name: str, smem_bytes: int) -> None:
    """sm_120 and sm_89, A100, H100: the config taken without a measurement is never one that a tuner would drop."""
    arch = {101376: 120, 166912: 80, 232448: 90}[smem_bytes]
    card = Device(kind="cuda", name="card", arch=arch, sms=132, smem_bytes=smem_bytes)
    impl = IMPLS[name]
    taken = [p for p in model_problems() if impl.refusal(card, p) is None]
    assert taken or (name == "triton_tma" and arch == 80) or (name == "sm90" and arch != 90)
    for problem in taken:
        config = impl.space.default(card, problem)
        assert impl.space.refusal(card, problem, config) is None, (problem, config)
        if problem.m_bucket in (1, 64):
            assert set(config) == set(impl.space.axes)


def test_buckets_are_all_that_calls_fall_into() -> None:
    weight = torch.empty(8, 4, device="meta")
    found = {linear_op.problem(torch.empty(m, 4, device="meta"), weight, None, "none", None).m_bucket for m in range(1, 301)}
    assert sorted(found) == list(buckets(300)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert buckets(1 << 20)[-1] == LARGEST_BUCKET


@needs_compiler
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gemv", (3, 4)),
        ("skinny", (1, 2, 5, 8)),
        ("triton_tma", (65, 100, 128)),
        ("triton", (65, 100, 128, 129)),
        ("sm90", (65, 100, 128)),
    ],
)
def test_rows_compile_nothing_new(name: str, rows: tuple[int, ...]) -> None:
    """One binary serves every number of rows of a bucket, those that are multiples of 16 and those that are 1 among them."""
    impl: Impl = IMPLS[name]
    args = arguments(Inputs(), rows[-1], 64, 256, torch.bfloat16)
    config = impl.space.default(CARD_OF_ARCH[90], linear_op.problem(*args))
    keys = set()
    for m in rows:
        x, weight, bias, activation, residual = arguments(Inputs(), m, 64, 256, torch.bfloat16)
        keys |= {binary.key for binary in record(impl, config, (x, weight, bias, activation, residual), 90)}
    assert len(keys) == 1


# (M, N, K) -> tiles and SPLIT_K within 1.2 % of the fastest measured (benchmarks/results/h100/studies/linear-aligned.json).
FAST: dict[tuple[int, int, int], set[tuple[int, int, str, int]]] = {
    (128, 8192, 8192): {(64, 128, "n", 1), (128, 64, "m", 1)},
    (128, 5120, 8192): {(64, 128, "n", 1), (64, 128, "n", 0)},
    (256, 8192, 28672): {(128, 128, "m", 1), (128, 128, "m", 0)},
    (256, 5120, 25600): {(128, 256, "m", 0), (256, 128, "m", 0)},
    (512, 4096, 14336): {(128, 128, "m", 1), (128, 128, "m", 0)},
    (1024, 6144, 4096): {(128, 128, "tiles", 1)},
    (4096, 4096, 4096): {(128, 256, "m", 1), (128, 256, "m", 0)},
    (8192, 8192, 8192): {(128, 256, "m", 1), (128, 256, "m", 0)},
}


@pytest.mark.parametrize(("shape", "fast"), FAST.items(), ids=list(map(str, FAST)))
def test_sm90_takes_what_was_measured_to_be_fast(shape: tuple[int, int, int], fast: set[tuple[int, int, str, int]]) -> None:
    m, n, k = shape
    args = arguments(Inputs("meta"), m, n, k, torch.bfloat16, bias=False, residual=False)
    config = IMPLS["sm90"].space.default(CARD_OF_ARCH[90], linear_op.problem(*args))
    assert (config["BLOCK_M"], config["BLOCK_N"], config["CONSUMERS"], config["SPLIT_K"]) in fast


@needs_compiler
@pytest.mark.parametrize(("k", "step"), [(2056, 2056), (1000, 1000), (256, 264), (512, 512)])
@pytest.mark.parametrize("arch", [80, 90])
def test_skinny_loads_16_bytes_ahead_at_every_multiple_of_8(k: int, step: int, arch: int) -> None:
    """Triton knows of multiples of 16 alone: K = 2056 was loaded two bytes at a time, 18.6 us for 16 x 2056 x 2056."""
    x, weight = (torch.empty(rows, step, dtype=torch.bfloat16, device="meta")[:, :k] for rows in (16, 2056))
    args = (x, weight, None, "none", None)
    config = IMPLS["skinny"].space.default(CARD_OF_ARCH[arch], linear_op.problem(*args))
    (found,) = (facts(binary) for binary in record(IMPLS["skinny"], config, args, arch))
    assert set(found.loads) == {16}
    assert not found.spill_bytes


# ---- bits


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_invariant_row_alone_is_the_row_in_its_batch(dtype: torch.dtype) -> None:
    rows, n, k = (1000, 1000, 2048) if GPU else (70, 40, 96)
    x, weight, bias, activation, residual = arguments(Inputs(WHERE), rows, n, k, dtype, "gelu")
    assert bias is not None
    with invariant():
        assert linear_op.choice_for(x, weight, bias, activation, residual).impl is INVARIANT
        together = ops.linear(x, weight, bias, activation, residual)
        for some in (slice(0, 1), slice(1, 2), slice(rows // 2, rows // 2 + 7), slice(rows - 1, rows), slice(5, rows)):
            alone = ops.linear(x[some], weight, bias, activation, residual[some])
            assert torch.equal(conformance.bits(alone), conformance.bits(together[some])), some


def test_neither_rows_nor_their_place_choose_an_invariant_product() -> None:
    """Not its kernel, and no program shares a tile with another: that would be a sum in another order."""
    card, weight = CARD_OF_ARCH[90], torch.empty(1000, 2048, dtype=torch.bfloat16)
    held = torch.empty(5000, 2056, dtype=torch.bfloat16)
    with invariant():
        for x in (held[:1, :2048], held[:300, :2048], held[:, :2048], held[:9, 3:2051], held.view(2056, 5000)[:2048, :77].mT):
            choice = linear_op.choose(card, linear_op.problem(x, weight, None, "none", None))
            assert (choice.impl.name, choice.config["SPLIT_K"]) == ("sm90_invariant", 1)
        for other in (weight.view(2000, 1024)[:, :1001], weight.view(2048, 1000).mT, weight[:999]):
            x = torch.empty(40, other.shape[1], dtype=torch.bfloat16)
            assert linear_op.choose(card, linear_op.problem(x, other, None, "none", None)).impl is INVARIANT


@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() != (9, 0), reason="sm90 runs on Hopper alone")
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (1000, 520)])
def test_sm90_has_the_same_bits_in_every_tile(n: int, k: int) -> None:
    """Why `sm90_invariant` may take its tile by the number of rows, and the same row may lie where it wants."""
    x, weight, bias, _, residual = arguments(Inputs(WHERE), 300, n, k, torch.bfloat16)
    with invariant():
        whole = linear_op(x, weight, bias, "none", residual)
    for m in (33, 300):  # more would be as many binaries again
        args = (x[:m], weight, bias, "none", residual[:m])
        problem, space = linear_op.problem(*args), IMPLS["sm90"].space
        for config in space.configs(DEVICE, problem):
            if config["SPLIT_K"] == 1:
                found = IMPLS["sm90"].launch(config, *args)
                assert torch.equal(conformance.bits(found), conformance.bits(whole[:m])), (m, config)
    with invariant():
        moved = torch.empty(300 * k + 1, dtype=x.dtype, device=x.device)[1:].view(300, k).copy_(x)
        for other in (x[:1], moved, x.mT.contiguous().mT):
            found = linear_op(other, weight, bias, "none", residual[: len(other)])
            assert torch.equal(conformance.bits(found), conformance.bits(whole[: len(other)]))


@needs_triton
def test_split_leaves_its_tickets_as_it_found_them() -> None:
    """Many launches of different sizes in a row, as the replays of a CUDA graph are."""
    config = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
    for n, split in ((32, 4), (64, 2), (32, 2)):
        args = arguments(Inputs(WHERE), 5, n, 128, torch.float16, "silu")
        conformance.check(linear_op, TRITON, {**config, "SPLIT_K": split}, args)


@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() != (9, 0), reason="sm90 runs on Hopper alone")
@pytest.mark.parametrize("split", [0, 2, 4])
def test_sm90_adds_parts_in_one_order(split: int) -> None:
    """Programs come in any order; their sum has the same bits every time, and as many replays as one likes."""
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "CONSUMERS": "m", "SPLIT_K": split, "UNALIGNED": "copy"}
    for m, n in ((300, 1000), (2000, 1200), (300, 1000)):
        args = arguments(Inputs(WHERE), m, n, 4104, torch.bfloat16, "silu")
        conformance.check(linear_op, IMPLS["sm90"], config, args)
        first = IMPLS["sm90"].launch(config, *args)
        assert all(torch.equal(first, IMPLS["sm90"].launch(config, *args)) for _ in range(20))
    with prefer("sm90"):
        choice = linear_op.choose(CARD_OF_ARCH[90], linear_op.problem(*args))
    assert choice.source in ("exact", "default")


def test_tiles_are_not_shared_by_more_programs_than_there_are_sms() -> None:
    args = arguments(Inputs("meta"), 256, 5120, 25600, torch.bfloat16, bias=False, residual=False)
    problem, space = linear_op.problem(*args), IMPLS["sm90"].space
    shared = {(c["BLOCK_M"], c["BLOCK_N"], c["SPLIT_K"]) for c in space.configs(CARD_OF_ARCH[90], problem) if c["SPLIT_K"] != 1}
    assert {(128, 256, 2), (128, 256, 0), (128, 128, 0)} <= shared
    assert not {(128, 256, 4), (128, 128, 2), (64, 64, 4)} & shared


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("m", "n"), [(64, 10752), (16, 11008), (64, 4225), (512, 4097), (256, 5120)])
def test_a_shared_default_is_one_of_the_space(m: int, n: int, aligned: bool) -> None:
    """Less than a wave of tiles and a long K: not twice as high as x, and columns behind the last whole tile are none."""
    problem = Problem(torch.bfloat16, m, n, 28672, "none", False, False, False, "k", "k", aligned, aligned)
    space = IMPLS["sm90"].space
    config = space.default(CARD_OF_ARCH[90], problem)
    assert space.refusal(CARD_OF_ARCH[90], problem, config) is None, config
