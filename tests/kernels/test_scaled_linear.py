"""What conformance cannot say of 8-bit products: exact sums, whole tuning spaces on a GPU, bad input."""

from typing import Any

import pytest
import torch

from tests import conformance
from tilewright import ops
from tilewright.hw.device import device_of
from tilewright.kernels.scaled_linear import scaled_linear_op
from tilewright.op import Inputs, invariant, prefer

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
        (lambda: ops.scaled_linear(X, W[:3], XS, WS[:3], activation="silu_mul"), "an even number of rows; got 3"),
        (lambda: ops.scaled_linear(X, W, XS, WS, bias=torch.ones(4)), r"bias must be \[4\] of torch.bfloat16"),
        (lambda: ops.scaled_linear(X, W, XS, WS, residual=torch.ones(2, 3)), r"residual must be \[2, 4\]"),
        (lambda: ops.scaled_linear(X, W, XS, WS, dtype=torch.float64), "dtype must be bfloat16 or float16"),
        (lambda: ops.scaled_linear(X[:, :1].expand(2, 131073), W[:, :1].expand(4, 131073), XS, WS), "K must be at most 131072"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
