"""What conformance cannot say of products with scales along K: strides, long sums, extremes, bad input, every config."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright.asm.compile import record
from tilewright.asm.facts import facts
from tilewright.formats import quantize
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.gemm.quantized.block_scaled import block_scaled_linear, block_scaled_linear_op
from tilewright.kernels.quantize.mx_to_block import fold_mx_weight, quantize_fold
from tilewright.kernels.quantize.per_block import quantize_blocks
from tilewright.op import Inputs, invariant, prefer

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
DEVICE = device_of(0 if GPU else -1)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = [impl.name for impl in block_scaled_linear_op.impls]
make: Any = block_scaled_linear_op.make
needs_compiler = pytest.mark.skipif(DEVICE.kind == "interpret", reason="Triton's interpreter compiles nothing")


def impl_for(name: str, *args: Any) -> Any:
    impl = next(impl for impl in block_scaled_linear_op.impls if impl.name == name)
    if reason := impl.refusal(DEVICE, block_scaled_linear_op.problem(*args)):
        pytest.skip(f"{name} {reason}")
    return impl


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_rows", [128, 1])
def test_scales_of_any_strides(name: str, block_rows: int) -> None:
    """Dense along K, along M, or views of something larger: the same bits."""
    args = list(make(Inputs(WHERE), M=33, N=200, K=300, block_rows=block_rows))
    impl_for(name, *args)
    with prefer(name):
        want = block_scaled_linear(*args)
        for turn in (Tensor.contiguous, lambda t: t.t().contiguous().t(), lambda t: torch.cat((t, t), 1)[:, : t.shape[1]]):
            got = block_scaled_linear(*args[:2], turn(args[2]), turn(args[3]))
            assert torch.equal(conformance.bits(got), conformance.bits(want))


@pytest.mark.parametrize("name", NAMES)
def test_small_blocks_beside_large_ones(name: str) -> None:
    """Large blocks that cancel leave a small one: exact in float32 block by block, and lost where they are added otherwise."""
    x = torch.ones(16, 384, device=WHERE).to(E4M3)
    weight = torch.tensor([1.0, 0.125, -1.0], device=WHERE).repeat_interleave(128).repeat(64, 1).to(E4M3)
    x_scales = torch.tensor([2.0**12, 1.0, 2.0**12], device=WHERE).repeat(16, 1)
    w_scales = torch.ones(1, 3, device=WHERE)
    impl_for(name, x, weight, x_scales, w_scales, None, "none", None, torch.bfloat16)
    with prefer(name):
        y = block_scaled_linear(x, weight, x_scales, w_scales)
    assert torch.equal(y.float(), torch.full((16, 64), 16.0, device=WHERE))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_where_it_is(name: str) -> None:
    args = list(make(Inputs(WHERE), M=20, N=160, K=256))
    args[2] = args[2].contiguous()
    args[2][3, 1] = float("nan")
    args[3][1, 0] = float("nan")
    args[2][5] = 0.0
    impl_for(name, *args)
    with prefer(name):
        y = block_scaled_linear(*args).float()
    want = torch.zeros(20, 160, dtype=torch.bool, device=WHERE)
    want[3], want[:, 128:] = True, True
    assert torch.equal(y.isnan(), want)
    assert not y[5, :128].any()


@pytest.mark.parametrize("cols", [320, 100])
def test_quantisers_and_product_together(cols: int) -> None:
    """The product of what codes mean, and near that of what was quantised: fp8 in blocks and mxfp8 folded."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, cols, generator=generator).to(WHERE) for rows in (9, 130))
    (xq, xs), (wq, ws) = quantize_blocks(x), quantize_blocks(weight)
    got = block_scaled_linear(xq, wq, xs, ws).double()
    want = x.double() @ weight.double().T
    assert float((got - want).norm() / want.norm()) < 0.05
    if cols % 32 == 0:
        q = quantize(weight, "mxfp8")
        (xq, xs), (wq, ws) = quantize_fold(x), fold_mx_weight(q.values, q.scales)
        got = block_scaled_linear(xq, wq, xs, ws).double()
        assert float((got - want).norm() / want.norm()) < 0.05


@pytest.mark.skipif(not GPU, reason="long sums: no GPU here")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [4096, 65536])
def test_error_does_not_grow_with_k(name: str, k: int) -> None:
    """Beside the one rounding to bf16 (RMS 0.17 %) hardly anything, at any K."""
    args = make(Inputs(WHERE, here=True), M=256, N=256, K=k)
    impl_for(name, *args)
    with prefer(name):
        y = block_scaled_linear(*args)
    want = conformance.oracle(block_scaled_linear_op, args)[0]
    assert float((y.double() - want).norm() / want.norm()) < 0.0018


@pytest.mark.skipif(not GPU, reason="walks whole spaces: no GPU here")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu_mul"])
@pytest.mark.parametrize("shape", [(300, 1024, 2064), (40, 520, 4112)], ids=str)
def test_every_config_matches_the_definition(shape: tuple[int, int, int], activation: str, dtype: torch.dtype) -> None:
    m, n, k = shape
    args = make(Inputs(WHERE), M=m, N=n, K=k, dtype=dtype, bias=True, activation=activation, residual=True)
    problem = block_scaled_linear_op.problem(*args)
    for impl in block_scaled_linear_op.impls:
        if impl.refusal(DEVICE, problem) is None:
            for config in impl.space.configs(DEVICE, problem):
                conformance.check(block_scaled_linear_op, impl, config, args)


@pytest.mark.skipif(not GPU, reason="walks a whole space: no GPU here")
@pytest.mark.parametrize("columns", [True, False], ids=["scales dense along M", "along K"])
@pytest.mark.parametrize("m", [17, 129, 200, 256])
def test_every_step_has_its_own_scales(m: int, columns: bool) -> None:
    """A name that was another's alias before the loop once left the last part of each step with the scales of the first."""
    args = list(make(Inputs(WHERE), M=m, N=6144, K=4096))
    args[2] = args[2] if columns else args[2].contiguous()
    impl = impl_for("sm90", *args)
    for config in impl.space.configs(DEVICE, block_scaled_linear_op.problem(*args)):
        conformance.check(block_scaled_linear_op, impl, config, tuple(args))


@pytest.mark.skipif(not GPU, reason="launches configs of sm_90: no GPU here")
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
@pytest.mark.parametrize("k", [100, 128, 256, 384, 512, 640, 2064])
def test_products_that_take_turns_change_no_bit(k: int, activation: str) -> None:
    """From one step on, an odd or an even number of them: the additions are those of larger tiles, in the same order."""
    args = make(Inputs(WHERE, here=True), M=200, N=512, K=k, activation=activation, bias=True)
    impl = impl_for("sm90", *args)
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": 1}
    conformance.check(block_scaled_linear_op, impl, config, args)
    want = impl.launch({**config, "BLOCK_N": 256}, *args)
    assert torch.equal(conformance.bits(impl.launch(config, *args)), conformance.bits(want))


@needs_compiler
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
@pytest.mark.parametrize("split", [1, 0])
def test_products_that_take_turns_stay_in_registers(split: int, activation: str) -> None:
    """No spills, and no wait after each instruction of the tensor cores."""
    args = make(Inputs("meta"), M=512, N=4096, K=4096, activation=activation)
    (binary,) = record(block_scaled_linear_op.impls[0], {"BLOCK_M": 128, "BLOCK_N": 128, "SPLIT_K": split}, args, 90)
    found = facts(binary)
    assert (found.spill_bytes, found.wgmma_serialised) == (0, False)


@pytest.mark.parametrize("activation", ["none", "silu_mul"])
@pytest.mark.parametrize("block_rows", [128, 1])
def test_a_row_alone_is_the_row_in_a_batch(block_rows: int, activation: str) -> None:
    """In the invariant scope, whatever the number of rows."""
    if not DEVICE.runs_triton:
        pytest.skip("no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
    rows = (1, 17, 80) if not GPU else (1, 17, 80, 300, 2000)
    args = list(make(Inputs(WHERE), M=rows[-1], N=256, K=300, block_rows=block_rows, activation=activation))
    with invariant():
        want = block_scaled_linear(*args)
        for m in rows:
            args[0], args[2] = args[0][:m], args[2][:m]
            assert torch.equal(conformance.bits(block_scaled_linear(*args)), conformance.bits(want[:m]))
            args = list(make(Inputs(WHERE), M=rows[-1], N=256, K=300, block_rows=block_rows, activation=activation))


@needs_compiler
@pytest.mark.parametrize(("split", "m", "programs"), [(1, 4096, 132), (1, 128, 16), (0, 3200, 132)])
def test_every_sm_has_a_program_where_there_are_tiles(split: int, m: int, programs: int) -> None:
    """Of an H100's 132, for 512 tiles too, which 128 would take in as many rounds (studies/block-programs.json: no faster)."""
    args = make(Inputs(), M=m, N=4096, K=512)
    config = {"BLOCK_M": 128, "BLOCK_N": 256, "SPLIT_K": split}
    (binary,) = record(block_scaled_linear_op.impls[0], config, args, 90)
    assert binary.blocks == programs


@pytest.mark.parametrize("m", [1, 64, 200, 2000])
@pytest.mark.parametrize("n", [256, 4096, 28672])
@pytest.mark.parametrize("k", [128, 4096, 14336])
@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_defaults_are_in_the_space(m: int, n: int, k: int, activation: str) -> None:
    card = device_named("h100")
    problem = block_scaled_linear_op.problem(*make(Inputs("meta"), M=m, N=n, K=k, activation=activation))
    for impl in block_scaled_linear_op.impls[:2]:
        config = impl.space.default(card, problem)
        assert impl.space.refusal(card, problem, config) is None
        assert all(config[name] in values for name, values in impl.space.axes.items())


def test_who_takes_what() -> None:
    """Hopper's kernel takes square blocks, the portable one all, and a card without float8 says so."""
    sm90, portable, *_ = block_scaled_linear_op.impls
    for card, block_rows, wanted in (("h100", 128, (None, None)), ("h100", 1, ("one scale per 128 rows", None)),
                                     ("a100", 128, ("needs sm_90", "float8 products need sm_89"))):  # fmt: skip
        problem = block_scaled_linear_op.problem(*make(Inputs("meta"), M=64, N=256, K=256, block_rows=block_rows))
        for impl, reason in zip((sm90, portable), wanted, strict=True):
            said = impl.refusal(device_named(card), problem)
            assert (said is None) == (reason is None)
            assert reason is None or reason in said


X, W = torch.ones(2, 256).to(E4M3), torch.ones(160, 256).to(E4M3)
XS, WS = torch.ones(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_scaled_linear(X, W[:, :8], XS, WS), r"with one K; got x \[2, 256\] and weight \[160, 8\]"),
        (lambda: block_scaled_linear(X.float(), W, XS, WS), "must be float8_e4m3fn or float8_e5m2, both the same"),
        (lambda: block_scaled_linear(X, W.float().to(E5M2), XS, WS), "got torch.float8_e4m3fn and torch.float8_e5m2"),
        (lambda: block_scaled_linear(X, W, XS[:, :1], WS), r"x_scales must be \[2, 2\], float32 .* got \[2, 1\]"),
        (lambda: block_scaled_linear(X, W, XS, WS[:1]), r"w_scales must be \[2, 2\] or \[160, 2\], float32"),
        (lambda: block_scaled_linear(X, W, XS.double(), WS), "x_scales .* torch.float64"),
        (
            lambda: block_scaled_linear(X, W.view(torch.uint8).T.contiguous().T.view(E4M3), XS, WS),
            "weight must be dense along K",
        ),
        (lambda: block_scaled_linear(X, W, XS, WS, activation="swish"), "activation must be one of none, relu"),
        (
            lambda: block_scaled_linear(X, W[:159], XS, WS, activation="silu_mul"),
            "an even number of rows, for a gate half and an up half; got 159",
        ),
        (lambda: block_scaled_linear(X, W, XS, WS, bias=torch.ones(160).half()), r"bias must be \[160\], bfloat16 or float32"),
        (lambda: block_scaled_linear(X, W, XS, WS, residual=torch.ones(2, 3)), r"residual must be \[2, 160\]"),
        (
            lambda: block_scaled_linear(X, W, XS, WS, dtype=torch.float64),
            "dtype must be bfloat16 or float16, on a CPU also float32",
        ),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
