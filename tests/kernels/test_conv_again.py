"""Convolutions and norms that were called before go straight to their launch: same results, whatever memory comes next."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.plan import plan_of
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.launch.replay import call_key
from tilewright.kernels.norm.channel.batch_norm_apply import normalize_channels_op
from tilewright.op import Inputs, prefer

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU here: what is launched again has been launched on one")


def image(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return Inputs("cuda", seed).randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def no_summary(*args: Any) -> None:
    raise AssertionError("the call was summarised again")


@needs_gpu
@pytest.mark.parametrize("name", ["sm90", "few", "triton", "vendor"])
@pytest.mark.parametrize("dims", [(2, 64, 14, 128, 3, 1), (1, 128, 7, 64, 3, 2), (2, 64, 9, 64, 1, 2)], ids=str)
def test_convolution(name: str, dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    n, c, h, o, k, stride = dims
    p = (h + 2 * (k // 2) - k) // stride + 1
    with prefer(name), torch.no_grad():
        for i in range(4):
            x, weight, residual = image(i, n, c, h, h), image(i + 9, o, c, k, k) / (c * k * k) ** 0.5, image(i + 5, n, o, p, p)
            bias = Inputs("cuda", i).randn(o, dtype=torch.float16)
            weight = weight.contiguous(memory_format=torch.channels_last)
            y = ops.conv2d(x, weight, bias, stride, k // 2, activation="relu", residual=residual)
            want = F.conv2d(x.double(), weight.double(), bias.double(), stride, k // 2)
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert conformance.errors(y, (want + residual.double()).relu())[0] < 1e-2
            monkeypatch.setattr(conv_op, "problem", no_summary)


@needs_gpu
@pytest.mark.parametrize("last", [True, False])
def test_norm(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for i in range(3):
            x, residual = (image(seed, 2, 24, 7, 5) for seed in (i, i + 7))
            x, residual = (t if last else t.contiguous() for t in (x, residual))
            m, v, w, b = (Inputs("cuda", i + s).randn(24).square() + 0.5 for s in range(4))
            y = ops.batch_norm(x, m, v, w, b, activation="relu", residual=residual)
            want = (F.batch_norm(x.double(), m.double(), v.double(), w.double(), b.double()) + residual.double()).relu()
            assert y.stride() == x.stride()
            assert conformance.errors(y, want)[0] < 1e-2
            monkeypatch.setattr(normalize_channels_op, "problem", no_summary)


@needs_gpu
def test_other_kinds_of_calls_are_other_calls() -> None:
    x = image(0, 1, 16, 8, 8)
    options: tuple[Any, ...] = (1, "same")
    key = call_key(options, x, None)
    assert key == call_key(options, image(1, 1, 16, 8, 8), None)
    others = (x.contiguous(), x.bfloat16(), x[:, :8], x.double())
    assert len({key, call_key((2,), x, None), call_key(options, x, x), *(call_key(options, t, None) for t in others)}) == 7
    assert call_key(([1, 1],), x) is None
    assert call_key(options, x[..., 1:, 1:].as_strided((1, 16, 4, 4), (256, 1, 64, 16), 3)) is None


def test_what_goes_the_long_way() -> None:
    assert call_key((1,), torch.zeros(2)) is None
    with torch.device("meta"):
        assert call_key((1,), torch.zeros(2)) is None


def test_product_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 x 1 as `linear` has chosen it, of torch's own shapes; on a CPU its reference stands for the choice."""
    chosen = SimpleNamespace(launch=lambda config, *args: linear_op.reference(*args))
    monkeypatch.setattr(linear_op, "chosen", lambda *args: (chosen, {}), raising=False)
    inputs = Inputs()
    x, weight, bias = inputs.randn(2, 3, 5, 8), inputs.randn(6, 1, 1, 8), inputs.randn(6)
    by_linear = next(impl for impl in conv_op.impls if impl.name == "linear")
    assert by_linear.plan is not None
    call = by_linear.plan({}, x, weight, bias, None, "relu")
    for _ in range(2):
        image, filters = inputs.randn(2, 3, 5, 8).permute(0, 3, 1, 2), inputs.randn(6, 1, 1, 8).permute(0, 3, 1, 2)
        y = call(image, filters, bias, None)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y, F.conv2d(image, filters, bias).relu())


def test_a_plan_fills_memory_of_its_own() -> None:
    inputs, seen = Inputs(), []

    class Launched:
        def run(self, *operands: Tensor | None) -> None:
            seen.append(operands)

    x, weight, size = inputs.randn(2, 5, 4, 8), inputs.randn(6, 3, 3, 8), [5, 4]
    args = (x, weight, None, None, "none", [1, 1], [1, 1], [1, 1], 1, size, None, None, torch.float16)
    assert plan_of(lambda config, *args: None)({}, *args) is None
    plan = plan_of(lambda config, *args: Launched())({}, *args)
    assert plan is not None
    first, second = plan(x, weight, None, None), plan(x, weight, None, x)
    assert first.shape == (2, 6, 5, 4)
    assert first.dtype == torch.float16
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert first.data_ptr() != second.data_ptr()
    assert seen[0] == (x, weight, first, None, None, None, None)
    assert seen[1][4] is x
