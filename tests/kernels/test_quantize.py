"""Quantising kernels: the bits of `tilewright.formats`, edges, every config, and what they refuse.

Kernels run on a GPU or under Triton's interpreter (`TRITON_INTERPRET=1`); without either, the references stand for them.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance import Poisoned, bits, flat, outputs
from tilewright.formats import FORMATS, SMALLEST_AMAX, Quantized, dequantize, quantize
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.elementwise.glu import silu_mul
from tilewright.kernels.gemm.quantized.row_scaled import scaled_linear
from tilewright.kernels.norm.rms_norm import add_rms_norm, rms_norm
from tilewright.kernels.quantize import fused
from tilewright.kernels.quantize import per_block as blocks
from tilewright.kernels.quantize.both_ways import quantize_both_ways_op
from tilewright.kernels.quantize.per_block import quantize_blocks_op, quantize_mx_op
from tilewright.kernels.quantize.per_row import quantize_rows, quantize_rows_op
from tilewright.kernels.quantize.per_tensor import quantize_static_op, quantize_tensor_op
from tilewright.op import Example, Impl, Inputs, Op, Refused, on_card, prefer
from tilewright.tune.tolerance import codes_apart

INDEX = 0 if torch.cuda.is_available() else -1
DEVICE, WHERE = device_of(INDEX), "cuda" if INDEX == 0 else "cpu"
INF, NAN = float("inf"), float("nan")
EXACT = (
    quantize_rows_op, quantize_blocks_op, quantize_mx_op, quantize_tensor_op, quantize_static_op, quantize_both_ways_op
)  # fmt: skip
FUSED = (fused.rms_norm_quantize_op, fused.add_rms_norm_quantize_op, fused.silu_mul_quantize_op)
needs_kernels = pytest.mark.skipif(
    not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run"
)

CALLS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str, Any]] = {
    "rows int8": (quantize_rows, "int8", "row"),
    "rows fp8": (lambda x: quantize_rows(x, "fp8"), "fp8", "row"),
    "rows e5m2": (lambda x: quantize_rows(x, "fp8-e5m2"), "fp8-e5m2", "row"),
    "blocks": (blocks.quantize_blocks, "fp8", (1, 128)),
    "blocks e5m2": (lambda x: blocks.quantize_blocks(x, "fp8-e5m2"), "fp8-e5m2", (1, 128)),
    "mx": (blocks.quantize_mx, "mxfp8", (1, 32)),
    "mx e5m2": (lambda x: blocks.quantize_mx(x, "mxfp8-e5m2"), "mxfp8-e5m2", (1, 32)),
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(WHERE)


def check_layout(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.stride(), g.dtype) == (w.shape, w.stride(), w.dtype)


def check_neighbours(got: list[Tensor], want: list[Tensor]) -> None:
    """Codes, scales and a sum that may stem from sums of squares with another last bit."""
    torch.testing.assert_close(got[1], want[1], rtol=2.0**-7, atol=0)
    apart = (bits(got[0]).int() - bits(want[0]).int()).abs()
    assert int(apart.max()) <= 1
    assert float(apart.float().mean()) < 0.02
    for g, w in zip(got[2:], want[2:], strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize(
    ("dtype", "got", "want", "apart"),
    [
        (torch.int8, [1, -128, 5], [2, -127, 5], (1, 2 / 3)),
        (torch.int8, [127, 0], [-127, 0], (254, 0.5)),
        (torch.float8_e4m3fn, [1.0, -1.0, 2.0, 0.0], [1.125, -1.125, 2.0, 0.0], (1, 0.5)),
        (torch.float8_e4m3fn, [0.001953125, 0.0], [-0.001953125, -0.0], (2, 0.5)),
        (torch.float8_e4m3fn, [448.0], [NAN], (1, 1.0)),
    ],
)
def test_how_far_codes_are_apart(dtype: torch.dtype, got: list[float], want: list[float], apart: tuple[int, float]) -> None:
    steps, share = codes_apart(torch.tensor(got).to(dtype), torch.tensor(want).to(dtype))
    assert (steps, share) == (apart[0], pytest.approx(apart[1]))


def cases(ops: tuple[Op, ...]) -> list[Any]:
    return [
        pytest.param(op, example, impl, id=f"{op.name}-{example.label}-{impl.name}")
        for op in ops
        for example in op.examples
        for impl in op.impls
    ]


@needs_kernels
@pytest.mark.parametrize(("op", "example", "impl"), cases(EXACT))
def test_bits_of_the_definition(op: Op, example: Example, impl: Impl) -> None:
    """Codes, scales and strides, in memory that was NaN; also with the arguments as the float64 oracle has them."""
    args = example.make(Inputs(WHERE))
    config = impl.space.default(DEVICE, op.problem(*args))
    want = outputs(op, None, {}, args)
    with Poisoned():
        got = outputs(op, impl, config, args)
    check_layout(got, want)
    for g, w, o in zip(got, want, flat(op.reference(args[0].double(), *args[1:])), strict=True):
        assert torch.equal(bits(g), bits(w))
        assert torch.equal(bits(w), bits(o))


@needs_kernels
@pytest.mark.parametrize(("op", "example", "impl"), cases(FUSED))
def test_fused_is_the_two_calls(op: Op, example: Example, impl: Impl) -> None:
    """Against the definition on a GPU or here: codes are the same, but for the odd one where a sum differs in its last bit."""
    args = example.make(Inputs(WHERE))
    if reason := impl.refusal(DEVICE, op.problem(*args)):
        pytest.skip(f"{impl.name} {reason}")
    want = outputs(op, None, {}, args)
    with Poisoned():
        got = outputs(op, impl, impl.space.default(DEVICE, op.problem(*args)), args)
    check_layout(got, want)
    check_neighbours(got, want)


@needs_kernels
@pytest.mark.parametrize(
    ("op", "cols"),
    [
        (op, n)
        for op in EXACT + FUSED
        for n in (96, 640 if op is quantize_both_ways_op else 6144)
        if "mx" not in op.name or n == 96
    ],
)
def test_every_config(op: Op, cols: int) -> None:
    """The bits do not depend on the config, but for sums of squares; wide rows in held and in re-read blocks."""
    assert op.make is not None
    args = op.make(Inputs(WHERE), M=3, N=cols)
    problem, impl = op.problem(*args), op.impls[0]
    configs = list(impl.space.configs(DEVICE, problem))
    assert len(configs) >= 4
    results = {}
    for config in configs:
        # The interpreter has no warps.
        key = tuple(value for name, value in config.items() if name != "num_warps" or DEVICE.kind == "cuda")
        results.setdefault(key, config)
    want = outputs(op, impl, impl.space.default(DEVICE, problem), args)
    for config in results.values():
        with Poisoned():
            got = outputs(op, impl, config, args)
        if op in FUSED:
            check_neighbours(got, want)
        else:
            assert all(torch.equal(bits(g), bits(w)) for g, w in zip(got, want, strict=True)), config


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_edges(name: str, dtype: torch.dtype) -> None:
    """Rows that are zero, tiny, huge, not finite, or full of ties: the bits of the definition."""
    call, format, block = CALLS[name]
    largest = FORMATS[format].largest
    x = torch.zeros(12, 160)
    x[1] = torch.finfo(dtype).tiny / 4
    x[2] = torch.finfo(dtype).max * torch.linspace(-1, 1, 160)
    x[3, 5], x[4, 7], x[5, 33] = NAN, INF, -INF
    x[6] = torch.arange(160) - 80.5
    x[6, ::32] = largest
    x[7] = torch.linspace(448, 511, 160)
    x[8] = -0.0
    x[9, 0] = SMALLEST_AMAX / 3
    x[10] = torch.randn(160, generator=torch.Generator().manual_seed(5)) * 1e-30
    x[11, 159] = 1.0
    x = x.to(dtype).to(WHERE)
    codes, scales = call(x)
    with prefer("reference"):
        want_codes, want_scales = call(x.cpu())
    assert torch.equal(bits(codes.cpu()), bits(want_codes))
    torch.testing.assert_close(scales.float().cpu(), want_scales.float(), rtol=0, atol=0, equal_nan=True)
    size = (1, 160) if block == "row" else block
    back = dequantize(Quantized(format=format, values=codes, scales=scales.view(12, -1), block=size))
    assert not back[0].any()
    assert not back[8].any()
    for row, col in ((3, 5), (4, 7), (5, 33)):
        start = col // size[1] * size[1]
        assert back[row, start : start + size[1]].isnan().all()
        assert int(back[row].isnan().sum()) == min(size[1], 160 - start)
    finite = torch.tensor([0, 1, 2, 6, 7, 8, 9, 10, 11])
    want = dequantize(quantize(x.cpu()[finite], format, block))
    assert torch.equal(back.cpu()[finite], want)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(96,), (2, 3, 96), (0, 96), (2, 0, 96), (3, 0)], ids=str)
def test_any_leading_dims(name: str, shape: tuple[int, ...]) -> None:
    call, format, block = CALLS[name]
    x = randn(*shape)
    codes, scales = call(x)
    assert codes.shape == shape
    assert scales.shape == (shape[:-1] if block == "row" else (*shape[:-1], -(-shape[-1] // block[1])))
    if x.numel():
        q = quantize(x.reshape(-1, shape[-1]), format, block)
        assert torch.equal(bits(codes).flatten(), bits(q.values).flatten())
        assert torch.equal(bits(scales).flatten(), bits(q.scales).flatten())


@pytest.mark.parametrize("cols", [1, 15, 16, 17, 100, 16500])
def test_rows_start_at_16_bytes_and_end_in_zeros(cols: int) -> None:
    with Poisoned():
        codes, _ = quantize_rows(randn(3, cols))
    width = -(-cols // 16) * 16
    assert codes.stride() == (width, 1)
    assert codes.data_ptr() % 16 == 0
    assert not codes.as_strided((3, width), (width, 1))[:, cols:].any()


@pytest.mark.parametrize("name", CALLS)
def test_layouts_of_x(name: str) -> None:
    call, *_ = CALLS[name]
    x = randn(6, 96)
    want = [bits(t) for t in call(x)]
    for view in (torch.cat((x, x), 1)[:, :96], x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        for got, w in zip(call(view), want, strict=True):
            assert torch.equal(bits(got), w)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("cols", [100, 17000])
def test_a_row_alone_is_the_row_in_a_batch(format: str, cols: int) -> None:
    x, up, weight = randn(3, cols, dtype=torch.bfloat16), randn(3, cols, dtype=torch.bfloat16, seed=4), randn(cols).bfloat16()
    calls: list[Callable[[slice], tuple[Tensor, ...]]] = [
        lambda rows: quantize_rows(x[rows], format),
        lambda rows: fused.rms_norm_quantize(x[rows], weight, format=format),
        lambda rows: fused.add_rms_norm_quantize(x[rows], up[rows], weight, format=format),
        lambda rows: fused.silu_mul_quantize(x[rows], up[rows], format),
    ]
    for call in calls:
        for alone, batch in zip(call(slice(1, 2)), call(slice(None)), strict=True):
            assert torch.equal(bits(alone[0]), bits(batch[1]))


def test_fused_public_functions() -> None:
    x, y, weight = randn(2, 3, 64), randn(2, 3, 64, seed=4), randn(64)
    pairs = [
        (fused.rms_norm_quantize(x, weight), quantize_rows(rms_norm(x, weight))),
        (fused.silu_mul_quantize(x, y), quantize_rows(silu_mul(x, y))),
        (fused.add_rms_norm_quantize(x, y, weight)[:2], quantize_rows(add_rms_norm(x, y, weight)[0])),
    ]
    for (codes, scale), (want_codes, want_scale) in pairs:
        assert int((codes.int() - want_codes.int()).abs().max()) <= 1
        torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
    assert torch.equal(fused.add_rms_norm_quantize(x, y, weight)[2], x + y)


@pytest.mark.parametrize(("m", "cols", "format"), [(8192, 14336, "int8"), (4096, 28672, "fp8")])
def test_wide_gated_rows_take_what_was_measured_to_be_fast(m: int, cols: int, format: str) -> None:
    """The fastest of every config on an H100 at both (benchmarks/results/h100/studies/quantize.json), by 2 and 8 % of 8192."""
    gate = torch.empty(m, cols, dtype=torch.bfloat16, device="meta")
    op = fused.silu_mul_quantize_op
    config = op.impls[0].space.default(device_named("h100"), op.problem(gate, gate, format))
    assert config == {"BLOCK_T": 1, "BLOCK_D": 16384, "num_warps": 32}


@pytest.mark.parametrize("bad", [NAN, INF])
def test_fused_rows_that_are_not_finite(bad: float) -> None:
    x, y, weight = randn(3, 64), randn(3, 64, seed=4), torch.ones(64, device=WHERE)
    x[1, 5] = bad
    for codes, scale, *_ in (
        fused.rms_norm_quantize(x, weight),
        fused.add_rms_norm_quantize(x, y, weight),
        fused.silu_mul_quantize(x, y),
    ):
        assert scale.isnan().tolist() == [False, True, False]
        assert not codes[1].any()


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_product_takes_the_codes_as_they_are(format: str) -> None:
    """Odd K: padded rows go into `scaled_linear`, and the product is that of what the codes mean."""
    x, weight = randn(5, 101), randn(32, 101, seed=4)
    (xq, x_scale), (wq, w_scale) = quantize_rows(x, format), quantize_rows(weight, format)
    got = scaled_linear(xq, wq, x_scale, w_scale).double()
    want = (xq.double() * x_scale[:, None].double()) @ (wq.double() * w_scale[:, None].double()).T
    assert float((got - want).norm() / want.norm()) < 0.004
    assert float((got - x.double() @ weight.double().T).norm() / want.norm()) < (0.02 if format == "int8" else 0.05)


@pytest.mark.parametrize("op", EXACT + FUSED, ids=lambda op: op.name)
def test_registered_with_torch(op: Op) -> None:
    """Schema and fake agree with what runs; a call traces as one graph; no fewer bytes are claimed than are written."""
    for example in op.examples[:2]:
        args = example.make(Inputs(WHERE))
        torch.library.opcheck(op.dispatched, args, test_utils=("test_schema", "test_faketensor"))
        assert op.cost(*args).bytes >= sum(t.nbytes for t in flat(op.reference(*args)))
    torch.compiler.reset()
    args = op.examples[0].make(Inputs(WHERE))
    got = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*args)
    check_layout(flat(got), flat(op.run(*args)))


def test_cards_without_fp8() -> None:
    """sm_80 takes int8, and says what it lacks for the rest."""
    card = device_named("a100")
    for op in EXACT + FUSED:
        assert op.make is not None
        for format in ("fp8", "fp8-e5m2"):
            args = (*op.make(Inputs("meta"), M=2, N=64)[:-1], ("mx" if op is quantize_mx_op else "") + format)
            with (
                on_card(card),
                pytest.raises(Refused, match="needs sm_89 or newer, which converts to fp8; this is sm_80, use int8 here"),
            ):
                op.choose(card, op.problem(*args))
    assert op.choose(card, quantize_rows_op.problem(torch.empty(2, 64), "int8")).impl.name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: quantize_rows(x, "int4"), "format is 'int4', wanted int8 or fp8 or fp8-e5m2"),
        (lambda x: blocks.quantize_blocks(x, "int8"), "format is 'int8', wanted fp8 or fp8-e5m2"),
        (lambda x: blocks.quantize_mx(x, "fp8"), "wanted mxfp8 or mxfp8-e5m2"),
        (lambda x: blocks.quantize_mx(x), "K is 40 in x (2, 40), wanted a multiple of 32"),
        (lambda x: quantize_rows(x.double()), "x must be bf16, fp16 or fp32"),
        (lambda x: quantize_rows(x[0, 0]), "got () torch.float32"),
        (lambda x: fused.rms_norm_quantize(x, x[0, :7]), "weight must be [40]"),
        (lambda x: fused.rms_norm_quantize(x, x[0], format="q"), "format is 'q'"),
        (lambda x: fused.add_rms_norm_quantize(x, x[:1], x[0]), "residual must be like x, (2, 40)"),
        (
            lambda x: fused.silu_mul_quantize(x, x.half()),
            "up must be like gate, (2, 40) torch.float32; got (2, 40) torch.float16",
        ),
    ],
)
def test_refused_arguments(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(randn(2, 40))
