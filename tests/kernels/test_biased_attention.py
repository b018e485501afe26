"""Attention with a mask or a bias: the public function against torch's in float64, rows alone, and calls that do not fit."""

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance import errors
from tilewright import ops
from tilewright.hw.device import device_of
from tilewright.kernels.attention.biased import biased_attention_op
from tilewright.op import Inputs

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
WHERE = "cuda" if DEVICE.kind == "cuda" else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """2 sequences, 5 queries, 7 keys, 4 heads on 2, dims 16 and 8."""
    inputs = Inputs(WHERE, seed=3)
    q = inputs.randn(2, 5, 4, 16, dtype=dtype)
    k, v = inputs.randn(2, 7, 2, 16, dtype=dtype), inputs.randn(2, 7, 2, 8, dtype=dtype)
    return q, k, v


def torchs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """torch's function in float64."""
    q, k, v = (t.double().cpu().transpose(1, 2) for t in (q, k, v))
    bias = torch.atleast_2d(bias.cpu() if bias.dtype == torch.bool else bias.cpu().double())  # torch wants both dims
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [None, 1.0, -0.5])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 5, 7), (4, 1, 1), (2, 1, 1, 7), (1, 4, 5, 7), (2, 4, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_as_torch_has_it(shape: tuple[int, ...], kind: torch.dtype, scale: float | None, dtype: torch.dtype) -> None:
    q, k, v = operands(dtype)
    bias = Inputs(WHERE, seed=4).randn(*shape)
    bias = bias > 0 if kind == torch.bool else bias
    got = ops.attention(q, k, v, bias=bias, scale=scale)
    assert isinstance(got, Tensor)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert errors(got.cpu(), torchs(q, k, v, bias, scale))[0] < (1e-5 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_query_that_sees_nothing_gives_zeros_as_torchs(kind: torch.dtype) -> None:
    q, k, v = operands()
    seen = torch.ones(5, 7, dtype=torch.bool, device=WHERE)
    seen[2] = False
    bias = seen if kind == torch.bool else torch.zeros(5, 7, device=WHERE).masked_fill(~seen, -math.inf)
    got = ops.attention(q, k, v, bias=bias)
    assert isinstance(got, Tensor)
    assert not got[:, 2].any()
    assert errors(got.cpu(), torchs(q, k, v, bias, None))[0] < 1e-5


def test_a_finite_fill_is_what_a_softmax_of_filled_scores_gives() -> None:
    q, k, v = operands()
    seen = torch.ones(1, 1, 5, 7, dtype=torch.bool, device=WHERE)
    seen[..., 1, :], seen[..., 3:] = False, False
    scores = (q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).mT).double()
    for fill in (-1e4, -2.0, 3.0, torch.finfo(torch.float32).min, -math.inf):
        want = scores.masked_fill(~seen, fill).softmax(-1) @ v.repeat_interleave(2, 2).transpose(1, 2).double()
        got = biased_attention_op(q, k, v, seen, 1.0, fill, True).transpose(1, 2)
        assert torch.equal(got.isnan(), want.isnan())
        assert bool(want.isnan().any()) == (fill == -math.inf)
        assert errors(got.nan_to_num(), want.nan_to_num())[0] < 1e-5


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(dtype: torch.dtype) -> None:
    inputs = Inputs(WHERE, seed=5)
    q, k, v = (inputs.randn(3, rows, 2, 32, dtype=dtype) for rows in (70, 90, 90))
    bias = inputs.randn(3, 2, 70, 90)
    (triton,) = (impl for impl in biased_attention_op.impls if impl.name == "triton")

    def run(*args: Any) -> Tensor:
        config = triton.space.default(DEVICE, biased_attention_op.problem(*args))
        return triton.launch(config, *args)

    whole = run(q, k, v, bias, 0.2, -math.inf, False)
    for b, row in ((0, 0), (1, 65), (2, 69)):
        alone = run(*(t[b : b + 1] for t in (q[:, row : row + 1], k, v, bias[:, :, row : row + 1])), 0.2, -math.inf, False)
        assert torch.equal(alone[0, 0], whole[b, row])


class Bad(NamedTuple):
    options: dict[str, Any]
    words: str


def _mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=WHERE)


BAD = (
    Bad({"bias": _mask(5, 6)}, r"bias is \[5, 6\], it must broadcast to \[B, H, S, SK\] \[2, 4, 5, 7\]"),
    Bad({"bias": _mask(1, 1, 1, 5, 7)}, r"bias is \[1, 1, 1, 5, 7\], it must broadcast to"),
    Bad({"bias": _mask(5, 7, dtype=torch.int32)}, r"bias is torch.int32 on .*, wanted bool, bfloat16, float16 or float32"),
    Bad({"bias": _mask(5, 7), "causal": True}, "bias cannot be combined with causal; express these by the bias"),
    Bad({"bias": _mask(5, 7), "window": 2, "softcap": 3.0}, "bias cannot be combined with window, softcap"),
    Bad({"bias": _mask(5, 7), "precision": "fp8"}, "bias cannot be combined with precision"),
    Bad({"bias": _mask(5, 7), "return_lse": True}, "bias cannot be combined with return_lse"),
    Bad({"bias": _mask(5, 7), "scale": math.nan}, "scale is nan, wanted a finite number"),
)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.words)
def test_what_does_not_fit(case: Bad) -> None:
    with pytest.raises(ValueError, match=case.words):
        ops.attention(*operands(), **case.options)


def test_packed_operands_and_gradients_are_refused() -> None:
    q, k, v = operands()
    with pytest.raises(ValueError, match="a bias needs operands"):
        ops.attention(q[0], k[0], v[0], bias=_mask(5, 7))
    for asks in (q, k, v):
        asks.requires_grad_()
        with pytest.raises(ValueError, match="bias has no backward pass"):
            ops.attention(q, k, v, bias=_mask(5, 7))
        asks.requires_grad_(False)
    with pytest.raises(ValueError, match="bias has no backward pass"):
        ops.attention(q, k, v, bias=torch.zeros(5, 7, requires_grad=True, device=WHERE))
