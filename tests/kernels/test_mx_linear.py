"""What conformance cannot say of MX products: codes as quantisers leave them, which card runs what, bad input."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.formats import dequantize, quantize
from tilewright.hw.device import device_named
from tilewright.kernels.gemm.quantized.mx import mx_linear, mx_linear_op
from tilewright.kernels.quantize.per_block import quantize_mx
from tilewright.op import Inputs

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
make: Any = mx_linear_op.make


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8-e5m2"])
def test_quantisers_and_product_together(format: str) -> None:
    """The product of what codes mean, but for the rounding to bf16 and what folding costs."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(rows, 224, generator=generator).to(WHERE) for rows in (9, 50))
    (xq, xs), q = quantize_mx(x, format), quantize(weight, format)
    want = dequantize(quantize(x, format)).double() @ dequantize(q).double().T
    got = mx_linear(xq, q.values, xs, q.scales).double()
    assert float((got - want).norm() / want.norm()) < 0.003


def test_who_takes_what() -> None:
    problem = mx_linear_op.problem(*make(Inputs("meta"), M=64, N=256, K=256))
    said = {
        card: [impl.refusal(device_named(card), problem) for impl in mx_linear_op.impls] for card in ("b200", "h100", "a100")
    }
    assert said["b200"] == [None, None]
    assert said["h100"] == ["needs sm_100, this is sm_90", None]
    assert all("this is sm_80" in str(reason) for reason in said["a100"])


X, W = torch.ones(2, 64).to(E4M3), torch.ones(6, 64).to(E4M3)
XS, WS = torch.ones(2, 2).to(E8M0), torch.ones(6, 2).to(E8M0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mx_linear(X, W[:, :32], XS, WS), "with one K; got x [2, 64] and weight [6, 32]"),
        (lambda: mx_linear(X[:, :40], W[:, :40], XS, WS), "K is 40 in x [2, 40], wanted a multiple of 32"),
        (lambda: mx_linear(X.float(), W, XS, WS), "must be float8_e4m3fn or float8_e5m2, both the same"),
        (lambda: mx_linear(X, W, XS.float(), WS), "x_scales must be [2, 2], float8_e8m0fnu, dense along K"),
        (lambda: mx_linear(X, W, XS, WS[:5]), "w_scales must be [6, 2], float8_e8m0fnu, dense along K, on cpu; got [5, 2]"),
        (lambda: mx_linear(X, W, XS, WS, activation="swish"), "activation must be one of none, relu"),
        (lambda: mx_linear(X, W, XS, WS, bias=torch.ones(6).half()), "bias must be [6], bfloat16 "),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
