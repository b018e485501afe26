"""What conformance cannot say of 8-bit products: exact sums, whole tuning spaces on a GPU, launches that overlap, bad input."""

import re
from typing import Any

import pytest
import torch

from tests import conformance
from tilewright import ops
from tilewright.asm.compile import record
from tilewright.asm.facts import facts
from tilewright.hw import env
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear_op
from tilewright.kernels.launch.pdl import waits
from tilewright.kernels.quantize.per_row import quantize_rows_op
from tilewright.op import Inputs, invariant, prefer
from tilewright.ops.weights import quantize_weight

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
DEVICE = device_of(0 if GPU else -1)
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
make: Any = scaled_linear_op.make


@pytest.mark.parametrize("name", [impl.name for impl in scaled_linear_op.impls])
def test_integers_are_summed_exactly(name: str) -> None:
    """A sum that rises to 2^25 in odd steps and falls again to one weight: in float32 it would not come back to that."""
    half = 2048
    x = Inputs(seed=1).randint(120, 128, 17, half, dtype=INT8)
    weight = Inputs(seed=2).randint(120, 128, 32, half, dtype=INT8)
    x, weight = torch.cat([x, x], 1), torch.cat([weight, -weight], 1)
    x[:, -1] -= 1
    x, weight = x.to(WHERE), weight.to(WHERE)
    scales = torch.ones(17, device=WHERE), torch.ones(32, device=WHERE)
    impl = next(impl for impl in scaled_linear_op.impls if impl.name == name)
    args = (x, weight, *scales, None, "none", None, torch.bfloat16)
    if reason := impl.refusal(DEVICE, scaled_linear_op.problem(*args)):
        pytest.skip(f"{name} {reason}")
    with prefer(name):
        y = ops.scaled_linear(x, weight, *scales)
    assert torch.equal(y.float(), -weight[:, -1].float().expand(17, 32))


@pytest.mark.skipif(not GPU, reason="walks whole spaces: no GPU here")
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("shape", [(300, 1000, 2064), (40, 520, 4112)], ids=str)
def test_every_config_matches_the_definition(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    args = make(Inputs(WHERE), M=m, N=n, K=k, dtype=dtype, bias=True, activation="gelu", residual=True)
    problem = scaled_linear_op.problem(*args)
    for impl in scaled_linear_op.impls:
        if impl.refusal(DEVICE, problem) is None:
            for config in impl.space.configs(DEVICE, problem):
                conformance.check(scaled_linear_op, impl, config, args)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (512, 6144, 4096, (128, 192, "m")),
        (256, 6144, 4096, (128, 96, "m")),
        (64, 4096, 4096, (64, 32, "n")),
        (512, 28672, 4096, (128, 128, "tiles")),
        (2048, 6144, 4096, (128, 128, "tiles")),
        (4096, 28672, 4096, (256, 128, "m")),
    ],
)
def test_tiles_between_others_where_they_fill_the_card_in_one_wave(m: int, n: int, k: int, tile: tuple[int, int, str]) -> None:
    card = device_named("h100")
    space = next(impl.space for impl in scaled_linear_op.impls if impl.name == "sm90")
    problem = scaled_linear_op.problem(*make(Inputs("meta"), M=m, N=n, K=k, dtype=INT8))
    config = space.default(card, problem)
    assert (config["BLOCK_M"], config["BLOCK_N"], config["CONSUMERS"]) == tile
    assert space.refusal(card, problem, config) is None
    gated = scaled_linear_op.problem(*make(Inputs("meta"), M=m, N=n, K=k, dtype=INT8, activation="silu_mul"))
    assert space.default(card, gated)["BLOCK_N"] in (64, 128, 256)
    sixteen = next(impl.space for impl in linear_op.impls if impl.name == "sm90")
    wide: Any = linear_op.make
    assert sixteen.default(card, linear_op.problem(*wide(Inputs("meta"), M=m, N=n, K=2 * k)))["BLOCK_N"] not in (32, 96)


@pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")
@pytest.mark.parametrize("m", [64, 512, 4096])
@pytest.mark.parametrize(("dtype", "k", "spans"), [(E4M3, 256, False), (E4M3, 272, True), (INT8, 65536, False)], ids=str)
def test_sums_of_float8_alone_are_made_of_spans(dtype: torch.dtype, k: int, spans: bool, m: int) -> None:
    """Total and sums in turns lie in registers, where ptxas neither spills nor waits; the portable kernel has two of all."""
    card = device_named("h100")
    args = make(Inputs("meta"), M=m, N=8192, K=k, dtype=dtype)
    problem = scaled_linear_op.problem(*args)
    sm90, triton = (next(impl for impl in scaled_linear_op.impls if impl.name == name) for name in ("sm90", "triton"))
    config = sm90.space.default(card, problem)
    binary = record(sm90, config, args, 90)[0]
    found = facts(binary)
    assert (found.spill_bytes, found.wgmma_serialised) == (0, False)
    # Two spans of a pair, and the last one, of both consumers: a tile's number is added three times.
    added = binary.ptx.count("add.f32")
    assert (added >= 3 * config["BLOCK_M"] * config["BLOCK_N"] // 128) == spans
    large = {"BLOCK_M": 128, "BLOCK_N": 256, "CONSUMERS": "m", "SPLIT_K": 1, "UNALIGNED": "copy"}
    assert (sm90.space.refusal(card, problem, large) is not None) == (spans or m == 64)
    tile = triton.space.default(card, problem)
    assert tile["BLOCK_M"] * tile["BLOCK_N"] // (32 * tile["num_warps"]) <= (64 if dtype == E4M3 else 128)


@pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")
@pytest.mark.parametrize(("m", "rows"), [(1, 8), (16, 16), (17, 32), (33, 64)])
def test_boxes_of_x_are_no_higher_than_x(m: int, rows: int) -> None:
    """The copy engine takes its time for rows that are not there: 63 of 64 made products last 1.02 to 2.4 times as long."""
    sm90 = next(impl for impl in scaled_linear_op.impls if impl.name == "sm90")
    config = {
        "BLOCK_M": 64,
        "BLOCK_N": 256,
        "CONSUMERS": "n",
        "SPLIT_K": 1,
        "UNALIGNED": "copy",
    }  # boxes of 128 rows of the weight
    args = make(Inputs("meta"), M=m, N=4096, K=4096, dtype=INT8)
    boxes = {int(rows) for rows in re.findall(r"tensordesc<tensor<(\d+)x128xsi8", record(sm90, config, args, 90)[0].ttgir)}
    assert boxes == {rows, 128}


@pytest.mark.parametrize(
    ("chained", "rows", "cols", "wanted"),
    [
        (True, 1, 99999, True),
        (True, 128, 14336, True),
        (True, 129, 4096, True),
        (True, 256, 4097, False),
        (True, 257, 128, False),
        (False, 64, 4096, False),
    ],
)
def test_which_products_wait_for_the_quantiser(chained: bool, rows: int, cols: int, wanted: bool) -> None:
    assert waits(chained, rows, cols) == wanted


@pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")
def test_who_waits_and_who_lets_others_start() -> None:
    """In the kernels' own instructions: every group of warps of a chained product waits, a quantiser never does."""
    sm90 = next(impl for impl in scaled_linear_op.impls if impl.name == "sm90")
    args = make(Inputs("meta"), M=64, N=256, K=512, dtype=INT8)
    config = sm90.space.default(device_named("h100"), scaled_linear_op.problem(*args))
    waiting, alone = (record(sm90, config, (*args, chained), 90)[0].ptx for chained in (True, False))
    assert (waiting.count("griddepcontrol.wait"), alone.count("griddepcontrol")) == (3, 0)
    rows: Any = quantize_rows_op.make
    given = rows(Inputs("meta"), M=4, N=256)
    for card, arch, count in (("h100", 90, 1), ("a100", 80, 0)):
        impl = quantize_rows_op.impls[0]
        found = record(impl, impl.space.default(device_named(card), quantize_rows_op.problem(*given)), given, arch)[0].ptx
        assert (found.count("griddepcontrol.launch_dependents"), found.count("griddepcontrol.wait")) == (count, 0)


@pytest.mark.skipif(not GPU, reason="launches that overlap: no GPU here")
@pytest.mark.parametrize("format", ["int8", "fp8", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("rows", [64, 128, 256, 512])
def test_a_product_never_reads_what_its_quantiser_has_not_written(rows: int, format: str) -> None:
    """One after another in the same memory, eagerly and in a graph, as with a pause after each."""
    weight = quantize_weight(Inputs(WHERE).randn(1024, 4096, dtype=torch.bfloat16), format)
    xs = [Inputs(WHERE, seed=i).randn(rows, 4096, dtype=torch.bfloat16, scale=1.0 + i) for i in range(8)]
    with torch.inference_mode():
        want = []
        for x in xs:
            want.append(ops.linear(x, weight))
            torch.cuda.synchronize()
        eager = [ops.linear(x, weight) for x in xs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [ops.linear(x, weight) for x in xs]
        graph.replay()
        torch.cuda.synchronize()
    for w, e, c in zip(want, eager, captured, strict=True):
        assert torch.equal(w, e)
        assert torch.equal(w, c)


@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """In the invariant scope."""
    if not DEVICE.runs_triton:
        pytest.skip("no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
    x, weight, x_scales, w_scales, *rest = make(Inputs(WHERE), M=130, N=144, K=272, dtype=dtype, activation="gelu", bias=True)
    with invariant():
        want = scaled_linear_op(x, weight, x_scales, w_scales, *rest)
        for m in (1, 17, 65):
            got = scaled_linear_op(x[:m], weight, x_scales[:m], w_scales, *rest)
            assert torch.equal(conformance.bits(got), conformance.bits(want[:m]))


X, W, XS, WS = torch.ones(2, 16, dtype=INT8), torch.ones(4, 16, dtype=INT8), torch.ones(2), torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.scaled_linear(X, W[:, :8], XS, WS), r"with one K; got x \[2, 16\] and weight \[4, 8\]"),
        (lambda: ops.scaled_linear(X.float(), W, XS, WS), "must be int8, float8_e4m3fn or float8_e5m2, both the same"),
        (lambda: ops.scaled_linear(X, W.to(E4M3), XS, WS), "got torch.int8 and torch.float8_e4m3fn"),
        (lambda: ops.scaled_linear(X, W, XS[:1], WS), r"x_scales must be \[2\], contiguous float32"),
        (lambda: ops.scaled_linear(X, W, XS, WS.double()), r"w_scales must be \[4\], contiguous float32"),
        (lambda: ops.scaled_linear(X, W.T.contiguous().T, XS, WS), "weight must be dense along K"),
        (lambda: ops.scaled_linear(X, W, XS, WS, activation="swish"), "activation must be one of none, relu"),
        (
            lambda: ops.scaled_linear(X, W[:3], XS, WS[:3], activation="silu_mul"),
            "an even number of rows, for a gate half and an up half; got 3",
        ),
        (
            lambda: ops.scaled_linear(X, W, XS, WS, bias=torch.ones(4).half()),
            r"bias must be \[4\], bfloat16 or float32 on cpu",
        ),
        (lambda: ops.scaled_linear(X, W, XS, WS, residual=torch.ones(2, 3)), r"residual must be \[2, 4\]"),
        (lambda: ops.scaled_linear(X, W, XS, WS, dtype=torch.float64), "dtype must be bfloat16 or float16"),
        (lambda: ops.scaled_linear(X[:, :1].expand(2, 131073), W[:, :1].expand(4, 131073), XS, WS), "K must be at most 131072"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
