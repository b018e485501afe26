"""What conformance cannot say of products with a quantised weight: int4's order, what codes mean, whole spaces, bad input."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright.formats import dequantize, pack_int4, quantize, unpack_int4
from tilewright.hw.device import device_of
from tilewright.kernels.gemm.weight_only.int4_layout import prepare, restore
from tilewright.kernels.gemm.weight_only.linear import mixed_linear, mixed_linear_op
from tilewright.kernels.gemm.weight_only.sm90_rs import shares
from tilewright.op import Inputs, prefer

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
DEVICE = device_of(0 if GPU else -1)
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
make: Any = mixed_linear_op.make


@pytest.mark.parametrize("k", [32, 128, 320])
def test_order_of_int4(k: int) -> None:
    """Every code stands where the docstring of mixed_layout says, and comes back."""
    codes = Inputs(seed=1).randint(0, 16, 3, k, dtype=torch.uint8)
    prepared = prepare(pack_int4(codes))
    assert prepared.shape == (3, -(-k // 128) * 64)
    assert prepared.is_contiguous()
    words = prepared.view(torch.int32)
    for column in range(-(-k // 128) * 128):
        c, i, t, j = column % 128 // 32, column % 32 // 8, column % 8 // 2, column % 2
        stored = words[:, column // 128 * 16 + 4 * t + c] >> (4 * i + 16 * j) & 15
        assert torch.equal(stored, codes[:, column].int() if column < k else torch.full_like(stored, 8))
    assert torch.equal(unpack_int4(restore(prepared, k)), codes)


@pytest.mark.parametrize(
    ("format", "block"),
    [("int8", "row"), ("fp8", "row"), ("fp8-e5m2", "row"), ("fp8", (128, 128)), ("fp8", (1, 128)), ("int4", (1, 64)),
     ("int4", (1, 128)), ("int4-zero", (1, 128)), ("int4-zero", (1, 64))],
)  # fmt: skip
def test_means_what_dequantize_says(format: str, block: Any) -> None:
    """x times the dequantised weight, in float32, with what `formats.quantize` gives."""
    x, weight = Inputs(seed=1).randn(5, 384), Inputs(seed=2).randn(150, 384)
    q = quantize(weight, format, block)
    packed = q.values.dtype == torch.uint8
    codes, scales = prepare(q.values) if packed else q.values, q.scales
    rows, cols = (1, 0) if block == "row" else block
    with prefer("reference"):
        y = mixed_linear(x, codes, scales.flatten() if block == "row" else scales, q.zeros, block_rows=rows, block_cols=cols)
    torch.testing.assert_close(y, x @ dequantize(q).mT, rtol=1e-5, atol=1e-4)


CODES = {
    "int8": torch.arange(-128, 128).to(torch.int8),
    "int4": torch.arange(16, dtype=torch.uint8).repeat(16),
    "e4m3": torch.arange(256, dtype=torch.uint8).view(E4M3),
    "e5m2": torch.arange(256, dtype=torch.uint8).view(E5M2),
}


@pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", [impl.name for impl in mixed_linear_op.impls])
@pytest.mark.parametrize("format", list(CODES))
def test_every_code(format: str, name: str, dtype: torch.dtype) -> None:
    """A weight of one code a row, times one column of ones: each number exactly, through every implementation."""
    codes = CODES[format].view(torch.uint8)[:, None].expand(256, 128).contiguous()
    if format == "int4":
        codes = prepare(pack_int4(codes))
    codes = codes.view(CODES[format].dtype).to(WHERE)
    # 600 rows are what `dequantized` takes; the interpreter, where it does not run, has the same tile for 130.
    for m in (1, 9, 40, 600 if GPU else 130):
        x = torch.zeros(m, 128, dtype=dtype)
        x[:, 5] = 1
        args = (x.to(WHERE), codes, torch.ones(256, device=WHERE), None, None, "none", None, 1, 0)
        impl = next(impl for impl in mixed_linear_op.impls if impl.name == name)
        if impl.refusal(DEVICE, mixed_linear_op.problem(*args)):
            continue
        with prefer(name):
            y = mixed_linear_op(*args)
        want = CODES[format].float() - (8 if format == "int4" else 0)
        known = want.isfinite()
        assert torch.equal(y.float().cpu()[:, known], want.to(dtype).float()[known].expand(m, -1))
        if name in ("triton", "invariant"):
            assert torch.equal(y.float().cpu()[0].isfinite(), known)


LARGE: tuple[dict[str, Any], ...] = (
    {"M": 3, "N": 1000, "K": 4112, "format": "int8", "activation": "gelu"},
    {"M": 11, "N": 1002, "K": 4224, "format": "int4", "group": 128, "activation": "silu_mul", "residual": True},
    {"M": 7, "N": 520, "K": 2112, "format": "int4", "group": 64, "zeros": True, "dtype": FP16},
    {"M": 27, "N": 520, "K": 2080, "format": "int4", "group": 32},
    {"M": 15, "N": 1000, "K": 4112, "format": "e4m3", "group": 128, "block_rows": 128},
    {"M": 700, "N": 2064, "K": 4128, "format": "int8", "activation": "silu_mul"},
    {
        "M": 100,
        "N": 1008,
        "K": 2112,
        "format": "int4",
        "group": 64,
        "zeros": True,
        "bias": True,
        "activation": "gelu",
        "residual": True,
    },
    {"M": 300, "N": 777, "K": 4096, "format": "int4", "group": 128},
    {"M": 40, "N": 776, "K": 2064, "format": "e5m2", "dtype": FP16},
)


@pytest.mark.skipif(not GPU, reason="walks whole spaces: no GPU here")
@pytest.mark.parametrize("dimensions", LARGE, ids=str)
def test_every_config_matches_the_definition(dimensions: dict[str, Any]) -> None:
    args = make(Inputs(WHERE), **dimensions)
    if dimensions.get("activation") == "silu_mul":
        # A weight that is rounded has errors of its row's size, not of the result's; powers of two round nothing.
        args = (*args[:2], args[2].log2().round().exp2(), *args[3:])
    problem = mixed_linear_op.problem(*args)
    for impl in mixed_linear_op.impls:
        if impl.refusal(DEVICE, problem) is None:
            for config in impl.space.configs(DEVICE, problem):
                conformance.check(mixed_linear_op, impl, config, args)


SHARED = ((320, 200, 132, 256), (64, 112, 132, 256), (80, 64, 132, 256), (32, 32, 264, 16), (40, 200, 396, 16), (3, 1, 132, 64))


@pytest.mark.parametrize("split_k", [1, 0, 2, 3])
@pytest.mark.parametrize(("tiles", "steps", "programs", "block_m"), SHARED, ids=str)
def test_shares_are_the_whole_product(tiles: int, steps: int, programs: int, block_m: int, split_k: int) -> None:
    """Every step of every tile is in one share, and no tile has more shares than there is room for."""
    count, waves, share, parts = shares(tiles, steps, programs, block_m, split_k)
    assert count <= programs
    if split_k == 1:
        assert (count, waves, parts) == (min(tiles, programs), 0, 1)
        return
    left = tiles - waves * count
    assert left < programs
    assert not waves or count == programs
    assert count * share >= left * steps
    for tile in range(left):
        first, last = tile * steps // share, ((tile + 1) * steps - 1) // share
        assert last - first + 1 <= parts
        assert last < count
    if split_k > 1 and steps > 1:
        even = -(-(split_k - 1) * steps // share)
        assert even * share - (split_k - 1) * steps < even, "a share ends with its tiles, but for what steps do not divide"


def test_shares_in_step() -> None:
    """2048 x 5120 x 25600: two programs a tile, both halves of K the same for all tiles; shares of any length are 85 steps."""
    assert shares(320, 200, 132, 256, 0)[1:3] == (2, 85)
    assert shares(320, 200, 132, 256, 2)[1:] == (2, 100, 2)
    assert shares(80, 200, 132, 256, 3)[1:] == (0, 134, 3)


X, S = torch.ones(2, 128, dtype=BF16), torch.ones(4)
I8, I4 = torch.ones(4, 128, dtype=torch.int8), torch.full((4, 64), 0x88, dtype=torch.uint8)


def call(x: Tensor = X, codes: Tensor = I8, scales: Tensor = S, *args: Any, **more: Any) -> Any:
    return lambda: mixed_linear(x, codes, scales, *args, **more)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (call(codes=I8[:, :64]), r"codes \[N, K\], with one K; got x \[2, 128\] and codes \[4, 64\]"),
        (call(codes=I4[:, :32]), r"codes \[N, 64 \* ceil\(K / 128\)\] from int4_layout.prepare"),
        (call(codes=I8.float()), "x must be bfloat16 or float16 and codes int8"),
        (call(x=X.double()), "x must be bfloat16 or float16 and codes int8"),
        (call(scales=S[:3]), r"scales must be \[4\], contiguous float32"),
        (call(scales=S.double()), r"scales must be \[4\], contiguous float32"),
        (call(scales=torch.ones(4, 2), block_cols=128), r"scales must be \[4, 1\]"),
        (call(zeros=S.byte()), "only int4 codes have zero points"),
        (call(codes=I4, zeros=S), r"zeros must be \[4\], contiguous uint8"),
        (call(block_cols=16), "for 32, 64 or 128 columns of one, or for 128 x 128; got block_rows 1, block_cols 16"),
        (call(block_rows=128), "got block_rows 128, block_cols 0"),
        (
            call(x=X[:, :96], codes=I4, scales=torch.ones(4, 2), block_cols=64),
            "K must be a multiple of 64, the group size of the int4 codes; got 96",
        ),
        (call(codes=I8.T.contiguous().T), "codes must be dense along K"),
        (call(activation="swish"), "activation must be one of none, relu"),
        (
            call(codes=I8[:3], scales=S[:3], activation="silu_mul"),
            "an even number of rows, for a gate half and an up half; got 3",
        ),
        (call(bias=torch.ones(4)), r"bias must be \[4\], bfloat16 "),
        (call(residual=torch.ones(2, 3, dtype=BF16)), r"residual must be \[2, 4\]"),
    ],
)
def test_bad_input(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run()
