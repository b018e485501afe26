"""layer_norm with its rows' statistics kept, and the gradient that takes them: the same norm, the same gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests import conformance
from tests.conformance import errors
from tilewright import ops
from tilewright.asm.certificate import load
from tilewright.hw.device import CARDS, device_named, device_of
from tilewright.kernels.norm import backward_saved_stats as norm_backward_kept
from tilewright.kernels.norm.backward import layer_norm_backward_op
from tilewright.kernels.norm.backward_saved_stats import KEPT_SPACE
from tilewright.kernels.norm.inputs import row_statistics
from tilewright.kernels.norm.layer_norm import layer_norm_op, layer_norm_stats, layer_norm_stats_op
from tilewright.op import Example, Inputs, prefer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEX = 0 if torch.cuda.is_available() else -1
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: Gluon cannot be interpreted")
H100 = device_named("h100")
KEPT = next(impl for impl in layer_norm_backward_op.impls if impl.name == "kept")


@pytest.mark.parametrize("example", layer_norm_stats_op.examples, ids=lambda example: example.label)
def test_keeping_statistics_leaves_the_norm(example: Example) -> None:
    """The same bits; where a compiler contracts products and sums in one of two programs, neighbouring values at most, or what
    another last bit of a row's mean in float32 makes of values near zero."""
    args = example.make(Inputs(DEVICE))
    y, stats = layer_norm_stats_op(*args)
    want = layer_norm_op(*args)
    assert (y.shape, y.dtype) == (want.shape, want.dtype)
    if DEVICE == "cpu":
        assert torch.equal(conformance.bits(y), conformance.bits(want))
    x = args[0].double()
    gap = x - x.mean(-1, keepdim=True)
    mean = 8 * 2**-24 * x.mean(-1, keepdim=True).abs() * torch.rsqrt(gap.square().mean(-1, keepdim=True) + args[3])
    near = (y.double() - want.double()).abs() <= mean * args[1].double().abs()
    assert bool((near | ((_places(y) - _places(want)).abs() <= 1)).all())
    want = torch.stack((x.mean(-1).flatten(), torch.rsqrt(gap.square().mean(-1) + args[3]).flatten()))
    assert stats.shape == want.shape == (2, x[..., 0].numel())
    torch.testing.assert_close(stats.double(), want, rtol=1e-5, atol=1e-6)


def _places(x: Tensor) -> Tensor:
    """The place of each value among those of its dtype, as int64: neighbours are 1 apart, and both zeros are 0."""
    place = conformance.bits(x).long()
    return torch.where(place < 0, -(1 << (8 * x.element_size() - 1)) - place, place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_places_of_values(dtype: torch.dtype) -> None:
    """Neighbours across a power of two and across zero are 1 apart, what lies between is counted."""
    info = torch.finfo(dtype)
    values = torch.tensor([-1.0, -info.tiny * info.eps, -0.0, 0.0, info.tiny * info.eps, 1.0, 1 + info.eps], dtype=dtype)
    places = _places(values)
    assert (places.diff()[1:4].tolist(), places.diff()[5:].tolist()) == ([1, 0, 1], [1])
    assert places[0] == -places[5]
    below = torch.tensor(1 - info.eps / 2, dtype=dtype)
    assert places[5] - _places(below) == 1
    assert places[6] - _places(below) == 2


@pytest.mark.parametrize("cols", [1000, 9000])
def test_gradient_far_from_zero(cols: int) -> None:
    """A mean 3000 times the deviation: kept statistics lose no more than the row's own mean in float32 does."""
    inputs = Inputs(DEVICE)
    x, dy, w = inputs.randn(3, cols) + 3000, inputs.randn(3, cols), inputs.randn(cols) + 1
    stats = layer_norm_stats(x, w, None, 1e-5)[1]
    wide = [t.double().requires_grad_() for t in (x, w)]
    want = torch.autograd.grad(F.layer_norm(wide[0], (cols,), wide[1]), wide, dy.double())
    dx, dweight, _ = layer_norm_backward_op(dy, x, w, 1e-5, stats)
    # Half an ulp of 3000 is 1.2e-4; the mean, and with it each h, may be off by as much and a little.
    assert errors(dx.cpu(), want[0].cpu())[0] < 3e-4
    assert bool(((dweight - want[1]).abs() < 3e-4 * dy.abs().sum(0)).all())


@pytest.mark.parametrize("cols", [1, 8192, 8200, 17001])
def test_rows_of_any_width_keep_them(cols: int) -> None:
    x, w = (Inputs(DEVICE).randn(*shape).requires_grad_() for shape in ((2, cols), (cols,)))
    y = ops.layer_norm(x, w)
    saved: Any = y.grad_fn
    stats = saved.saved_tensors[2]
    torch.testing.assert_close(stats, row_statistics(x.detach(), 1e-5), rtol=1e-5, atol=1e-6)
    dy = Inputs(DEVICE, seed=1).randn(2, cols)
    twin = [t.detach().double().requires_grad_() for t in (x, w)]
    want = torch.autograd.grad(F.layer_norm(twin[0], (cols,), twin[1]), twin, dy.double())
    for got, expected in zip(torch.autograd.grad(y, (x, w), dy), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)


def test_inference_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("statistics were made")

    monkeypatch.setattr(layer_norm_stats_op, "run", refused)
    x, w = Inputs(DEVICE).randn(2, 8), Inputs(DEVICE).randn(8).requires_grad_()
    assert not ops.layer_norm(x, w.detach()).requires_grad
    with torch.no_grad():
        assert not ops.layer_norm(x, w).requires_grad
    with pytest.raises(AssertionError, match="were made"):
        ops.layer_norm(x, w)


def test_who_takes_statistics() -> None:
    """Given statistics go to `kept`; rows that make their own go the way they went."""

    def first(cols: int, stats: bool) -> str:
        make: Any = layer_norm_backward_op.make
        return layer_norm_backward_op.choose(
            H100, layer_norm_backward_op.problem(*make(Inputs("meta"), M=4, N=cols, stats=stats))
        ).impl.name

    assert [first(16384, True), first(16384, False)] == ["kept", "split"]
    assert [first(16385, True), first(16385, False)] == ["triton", "triton"]
    assert [first(8192, True), first(8192, False)] == ["triton", "triton"]


def _wide_problem(dtype: torch.dtype) -> Any:
    make: Any = layer_norm_backward_op.make
    return layer_norm_backward_op.problem(*make(Inputs("meta"), M=4, N=16384, stats=True, dtype=dtype))


@pytest.mark.parametrize("slug", sorted(CARDS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kept_takes_what_fits(slug: str, dtype: torch.dtype) -> None:
    """Cards of 99 KB a program have room for half of the rows, of float32 for none: those go to `triton`, with statistics."""
    card, problem = CARDS[slug], _wide_problem(dtype)
    fits = card.smem_bytes > 99 * 1024 or dtype.itemsize == 2
    assert (KEPT.refusal(card, problem) is None) == fits
    with prefer("kept"):
        assert layer_norm_backward_op.choose(card, problem).impl.name == ("kept" if fits else "triton")
    if fits:
        config = KEPT_SPACE.default(card, problem)
        assert config in list(KEPT_SPACE.configs(card, problem))
        assert config["BLOCK_T"] == (8 // dtype.itemsize if card.smem_bytes > 99 * 1024 else 2)


def test_shared_memory_is_what_was_certified() -> None:
    """A config's own count is the compiler's, or it would refuse too little."""
    problem = _wide_problem(torch.bfloat16)
    for row in load("layer_norm_backward")["configs"]["kept/sm_90"]:
        assert norm_backward_kept._shared_bytes(row["config"], problem) == row["kernels"][0]["shared_bytes"]


def _example(rows: int, cols: int, dtype: torch.dtype, row_stride: int, mean: float) -> tuple[Tensor, ...]:
    inputs = Inputs(DEVICE)
    x, dy = (inputs.randn(rows, row_stride or cols, dtype=dtype)[:, :cols] for _ in range(2))
    x = x + mean if mean else x
    return dy, x, inputs.randn(cols, dtype=dtype), row_statistics(x, 1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "row_stride", "mean"),
    [
        (1, 8200, 0, 0.0),
        (3, 16504, 0, 30.0),  # a last part that is narrower, rows that are no whole block
        (1000, 16384, 16392, 0.0),  # x and dy start anywhere
        (259, 131072, 0, 0.0),
        (37, 262144, 0, 0.0),
    ],
)
def test_every_config_of_kept(dtype: torch.dtype, rows: int, cols: int, row_stride: int, mean: float) -> None:
    """Against float64, twice with the same bits."""
    dy, x, w, stats = _example(rows, cols, dtype, row_stride, mean)
    args = (dy, x, w, 1e-5, stats)
    device, problem = device_of(INDEX), layer_norm_backward_op.problem(*args)
    configs = list(KEPT_SPACE.configs(device, problem))
    assert KEPT_SPACE.default(device, problem) in configs
    for config in configs:
        conformance.check(layer_norm_backward_op, KEPT, config, args)


@needs_gpu
def test_kept_and_made_statistics_agree() -> None:
    dy, x, w, stats = _example(64, 32768, torch.bfloat16, 0, 0.0)
    ways = {"split": None, "kept": stats, "triton": stats}
    found = {}
    for name, given in ways.items():
        with prefer(name):
            assert layer_norm_backward_op.choice_for(dy, x, w, 1e-5, given).impl.name == name
            found[name] = layer_norm_backward_op(dy, x, w, 1e-5, given)
    for name in ("kept", "triton"):
        for got, want in zip(found[name], found["split"], strict=True):
            assert errors(got, want)[1] < 4e-3


def test_no_config_of_kept_spills() -> None:
    """As certified for the card that it was made for."""
    rows = load("layer_norm_backward")["configs"]["kept/sm_90"]
    assert len(rows) == 4
    for row in rows:
        assert not any(kernel.get("spill_bytes") for kernel in row["kernels"]), row["config"]
