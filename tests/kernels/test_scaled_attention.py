"""Attention over 8-bit codes: what it costs in accuracy, what smoothing saves, how codes lie in memory, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import conformance
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.attention.fp8.attention import scaled_attention_op
from tilewright.kernels.attention.fp8.layout import key_order
from tilewright.kernels.attention.fp8.quantize_kv import quantize_keys_values_op
from tilewright.op import Inputs
from tilewright.ops import attention

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
TORCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H100 = device_named("h100")
make: Any = scaled_attention_op.make


def _operands(queries: int, keys: int, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; every eighth channel of all keys is far from zero by `offset`."""
    inputs = Inputs(TORCH_DEVICE, seed=3)
    q = inputs.randn(1, queries, 2, 64, dtype=torch.bfloat16)
    k, v = (inputs.randn(1, keys, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    far = inputs.tensor([offset * (i % 8 == 0) for i in range(64)], torch.bfloat16)
    return q, k + far, v


# (precision, queries, keys, causal, offset of some channels, least cosine, largest error of the RMS)
ACCURACY = [
    ("fp8", 150, 150, True, 0.0, 0.9975, 0.9),
    ("fp8", 64, 300, False, 0.0, 0.9975, 0.35),
    ("fp8", 64, 300, False, 16.0, 0.9975, 0.35),
    ("int8", 150, 150, True, 0.0, 0.9998, 0.2),
    ("int8", 64, 300, False, 16.0, 0.9998, 0.1),
]


@pytest.mark.parametrize(("precision", "queries", "keys", "causal", "offset", "cosine", "largest"), ACCURACY)
def test_accuracy(precision: str, queries: int, keys: int, causal: bool, offset: float, cosine: float, largest: float) -> None:
    if DEVICE.kind == "cuda" and precision == "fp8" and DEVICE.arch < 89:
        pytest.skip(f"fp8 needs sm_89, this is sm_{DEVICE.arch}")
    q, k, v = _operands(queries, keys, offset)
    got = attention(q, k, v, causal=causal, precision=precision)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries if causal else keys)
    exact = (t.float().transpose(1, 2) for t in (q, k, v))
    want = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert isinstance(got, Tensor)
    assert got.dtype == q.dtype
    assert torch.cosine_similarity(got.float().flatten(), want.flatten(), 0) > cosine
    assert conformance.errors(got, want)[0] < largest


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_what_all_keys_share_is_lost_before_the_codes(precision: str) -> None:
    inputs = Inputs(seed=5)
    k, v = inputs.randn(1, 300, 2, 64), inputs.randn(1, 300, 2, 64)
    plain, _, scale, _ = quantize_keys_values_op.reference(k, v, precision)
    far, _, far_scale, _ = quantize_keys_values_op.reference(k + 16.0 * inputs.randn(64), v, precision)
    torch.testing.assert_close(far_scale, scale, rtol=1e-4, atol=0.0)
    steps, share = conformance.codes_apart(far, plain)
    assert steps <= 1
    assert share < 0.01


def test_codes_decode_to_what_they_stand_for() -> None:
    inputs = Inputs(seed=6)
    k, v = inputs.randn(2, 200, 3, 32), inputs.randn(2, 200, 3, 32)
    _, codes, _, scale = quantize_keys_values_op.reference(k, v, "fp8")
    assert (torch.frexp(scale)[0] == 0.5).all(), "scales of values are powers of two"
    values = codes.float() * scale.repeat_interleave(128, 2)[:, :, None]
    back = torch.empty_like(values)
    back[..., key_order(256, k.device)] = values
    assert not back[..., 200:].any()
    error = (back[..., :200].permute(0, 3, 1, 2) - v).abs()
    assert (error <= v.abs() * 2.0**-4 + scale.max() * 2.0**-10).all()


def test_order_of_keys_is_that_of_hoppers_registers() -> None:
    """Thread t of a row's four has the scores 2 t, 2 t + 1 of each 8 columns, and wants operands 4 t to 4 t + 3 of 16."""
    order = key_order(32, torch.device("cpu"))
    for at, key in enumerate(order.tolist()):
        assert at // 16 == key // 16
        assert at % 16 // 4 == key % 8 // 2
    assert order.sort().values.equal(torch.arange(32))


@pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_every_config_matches_the_definition(format: str) -> None:
    args = make(Inputs(TORCH_DEVICE), B=1, Q=70, KV=140, H=2, G=1, D=64, causal=True, format=format)
    problem = scaled_attention_op.problem(*args)
    ran = 0
    for impl in scaled_attention_op.impls:
        if impl.refusal(DEVICE, problem) is None:
            for config in impl.space.configs(DEVICE, problem):
                conformance.check(scaled_attention_op, impl, config, args)
                ran += 1
    assert ran, "no implementation takes this"


def test_refusals() -> None:
    sm90, triton = scaled_attention_op.impls
    for words, reason in (
        ({"format": "int8"}, "float8 codes"),
        ({"D": 96}, "head dims 64 and 128 only, not 96"),
        ({"dtype": torch.float32}, "bf16 and fp16 only"),
    ):
        problem = scaled_attention_op.problem(*make(Inputs("meta"), B=1, KV=64, **words))
        assert reason in str(sm90.refusal(H100, problem))
        assert triton.refusal(H100, problem) is None
    narrow = make(Inputs("meta"), B=1, KV=64, D=64)
    unaligned = torch.empty(1, 64, 32, 65, dtype=torch.bfloat16, device="meta")[..., :64]
    assert "heads of a query next to each other" in str(sm90.refusal(H100, scaled_attention_op.problem(unaligned, *narrow[1:])))
    assert "sm_89" in str(triton.refusal(device_named("a100"), scaled_attention_op.problem(*narrow)))


Q, K = torch.ones(1, 3, 4, 16, dtype=torch.bfloat16), torch.ones(1, 5, 2, 16, dtype=torch.bfloat16)
CU = torch.tensor([0, 3], dtype=torch.int32)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp4"}, "precision is 'fp4', wanted fp8 or int8, or None"),
    ({"window": 3, "softcap": 2.0}, "window, softcap cannot be combined with precision fp8"),
    ({"return_lse": True}, "return_lse cannot be combined with precision fp8"),
    ({"q": Q[0], "k": K[0, :3], "v": K[0, :3]}, r"sequences of one length, q \[B, S, H, D\]; got \[3, 4, 16\]"),
    ({"q": Q[0], "k": K[0, :3], "v": K[0, :3], "cu_q": CU}, "cu_q cannot be combined with precision fp8"),
    ({"v": K[..., :8]}, r"needs v of the same shape as k, got \[1, 5, 2, 8\] and \[1, 5, 2, 16\]"),
    ({"q": Q.float(), "k": K.float(), "v": K.float()}, "needs bfloat16 or float16, got torch.float32"),
    ({"q": Q[..., :8], "k": K[..., :8], "v": K[..., :8]}, "multiple of 16, got 8"),
    ({"scale": 0.0}, "scale is 0.0"),
    ({"q": Q.clone().requires_grad_()}, "precision fp8 has no backward pass; call it under torch.no_grad()"),
    ({"q": Q[:, :, :3]}, "3 query heads are not a multiple of 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": K, "v": K, "precision": "fp8", **changes})


def test_a_query_without_keys_gives_zeros() -> None:
    q, k, v = (torch.randn(1, rows, 2, 16).bfloat16() for rows in (5, 3, 3))
    out = attention(q, k, v, causal=True, precision="fp8")
    assert isinstance(out, Tensor)
    assert not out[:, :2].any()
    assert out[:, 2:].any()
