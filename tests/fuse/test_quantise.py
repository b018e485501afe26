"""int8 in `optimize`: who writes codes, what stays in 16 bits and why, and that the outputs are right."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tilewright
from tilewright.fuse import choose, int8, int8_calls
from tilewright.fuse.check import Difference
from tilewright.fuse.inductor import copied
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.quantise import planned, step_of
from tilewright.fuse.report import Report
from tilewright.fuse.settings import Settings
from tilewright.fuse.tuning import calls_of
from tilewright.hw.device import device_named


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, out: int):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.conv3 = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, out, 1)
        self.down = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))
        return F.relu(self.conv3(y) + self.down(x))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), Bottleneck(32, 32, 64), Bottleneck(64, 32, 64), nn.AdaptiveAvgPool2d(1))


def encoder(pre: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 2, 128, activation="gelu", batch_first=True, norm_first=pre)
    return nn.Sequential(layer, nn.LayerNorm(64))


class Silu(nn.Module):
    """A residual in front of an activation that is not homogeneous: no codes of another scale can be added there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(32, 32, 3, 1, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.third(F.silu(self.second(x) + x))


class _Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :64])


def _calls(done: Optimized) -> Counter[str]:
    assert isinstance(done.fused, fx.GraphModule)
    ours = {getattr(int8_calls, name): name for name in int8_calls.__all__}
    return Counter(ours[n.target] for n in done.fused.graph.nodes if n.target in ours)


CASES = [
    # The stem and the last convolution speak 16 bits to what is around them, everything between is codes.
    pytest.param(
        convolutions, (2, 3, 8, 8),
        {"quantise": 1, "conv_int8_to_int8": 3, "linear_int8_to_int8": 3, "dequantise": 1, "conv_int8_to_float": 1},
        id="bottlenecks",
    ),
    pytest.param(
        lambda: encoder(True), (2, 20, 64),
        {"layer_norm_quantise": 2, "quantise": 1, "linear_int8_to_float": 3, "linear_int8_to_int8": 1}, id="pre-norm",
    ),
    pytest.param(
        lambda: encoder(False), (2, 20, 64),
        {"layer_norm_quantise": 1, "quantise": 2, "linear_int8_to_float": 3, "linear_int8_to_int8": 1}, id="post-norm",
    ),
    pytest.param(
        Silu, (1, 32, 5, 5),
        {"quantise": 2, "conv_int8_to_int8": 1, "dequantise": 1, "conv_int8_to_float": 2}, id="silu behind a sum",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "calls"), CASES)
def test_who_writes_codes(make: Callable[[], nn.Module], shape: tuple[int, ...], calls: dict[str, int]) -> None:
    model, x = make().eval(), torch.randn(shape)
    done = tilewright.optimize(model, x, "int8", report=False, compiled=False)
    assert _calls(done) == calls
    with torch.no_grad():
        right = model(x)
    error = (done(x) - right).square().mean().sqrt() / right.square().mean().sqrt()
    assert 1e-4 < error < 0.03  # codes were taken, and are right
    assert all(" quantised by " in d.reason for d in done.report.decisions if d.kind == "quantise" and d.taken)


REFUSED = [
    (lambda: nn.Conv2d(32, 32, 3, groups=2), (1, 32, 5, 5), "groups"),
    (lambda: nn.Conv2d(20, 32, 3), (1, 20, 5, 5), "20 input and 32 output channels"),
    (lambda: nn.Linear(64, 64), (4, 64), "4 rows"),
    (lambda: nn.Linear(72, 64), (40, 72), "not a multiple of 16"),
]


@pytest.mark.parametrize(("make", "shape", "reason"), REFUSED)
def test_what_stays_in_16_bits(make: Callable[[], nn.Module], shape: tuple[int, ...], reason: str) -> None:
    done = tilewright.optimize(make().eval(), torch.randn(shape), "int8", report=False, compiled=False)
    assert not _calls(done)
    [decision] = [d for d in done.report.decisions if d.kind == "quantise"]
    assert reason in decision.reason
    assert not decision.taken


def test_products_with_large_errors_stay_until_the_outputs_are_right() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(40, 64)
    done = tilewright.optimize(model, x, "int8", report=False, compiled=False, tolerance=2e-3)
    assert not _calls(done)
    assert "the outputs have an RMS error of" in str(done.report)


def test_single_values_that_are_far_off_keep_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check of the whole model would refuse is not returned."""
    monkeypatch.setattr(int8, "compare_outputs", lambda want, got: (Difference("", 0.01, 1.5),))
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(40, 64)
    done = tilewright.optimize(model, x, "int8", report=False, compiled=False)
    assert not _calls(done)
    assert "a largest error of 1.5e+00" in str(done.report)


def _measured_as(monkeypatch: pytest.MonkeyPatch, whole: list[float]) -> Report:
    """The report of a graph whose products take half as long in int8, as a whole `whole` (int8, 16 bits)."""
    model, x = convolutions().eval(), torch.randn(2, 3, 8, 8)
    done = tilewright.optimize(model, x, "fp16", report=False, compiled=False)
    assert isinstance(done.fused, fx.GraphModule)
    monkeypatch.setattr(int8, "choose", lambda graph, inputs, ranked: [{"graph": "int8"}])
    monkeypatch.setattr(choose, "device_of", lambda index: device_named("h100"))
    monkeypatch.setattr(choose, "_alone_us", lambda launch, device: 20.0 if launch.args[0].dtype == torch.float16 else 10.0)
    monkeypatch.setattr(int8, "_whole_us", lambda graphs, inputs: whole)
    report = Report(choices=[{"graph": "16 bits"}])
    with torch.no_grad():
        want = [model(x)]
    int8.in_int8(copied(done.fused), done.fused, [x], want, report, Settings("int8", None, False, True, 0))
    return report


def test_rows_of_the_database_are_timed_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured where rows decide: that is no reason to leave int8."""
    report = _measured_as(monkeypatch, [1.0, 2.0])
    assert report.count("quantise") == 7
    assert report.choices == [{"graph": "int8"}]


def test_choices_are_those_of_the_graph_that_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _measured_as(monkeypatch, [2.0, 1.0])
    assert not report.count("quantise")
    assert "the whole graph takes 2.0 us in int8, 1.0 us in float16" in str(report.decisions)
    assert report.choices == [{"graph": "16 bits"}]


def test_products_of_codes_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tune=True: the search is given a run that calls them, before anything is chosen."""
    model, x = convolutions().eval(), torch.randn(2, 3, 8, 8)
    done = tilewright.optimize(model, x, "fp16", report=False, compiled=False)
    assert isinstance(done.fused, fx.GraphModule)
    heard: list[set[str]] = []

    def tune(run: Callable[[], Any], *, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        heard.append({called.op.name for called in calls_of(run)})
        return [{"op": "conv_codes", "how": "search"}]

    monkeypatch.setattr(int8, "tune", tune)
    report = Report(tuned=[{"op": "conv", "how": "search"}])
    with torch.no_grad():
        want = [model(x)]
    settings = Settings("int8", None, False, True, None, tune=True)
    int8.in_int8(copied(done.fused), done.fused, [x], want, report, settings)
    assert heard
    assert "conv_codes" in heard[0]
    assert [row["op"] for row in report.tuned][:2] == ["conv", "conv_codes"]


def test_steps() -> None:
    """One large number among many small ones saturates; what is not finite has no scale; either memory format."""
    x = torch.randn(1, 16, 64, 64)
    assert step_of(x) == step_of(x.to(memory_format=torch.channels_last)) < x.abs().max() / 127 * 1.01
    x[0, 0, 0, 0] = 50.0
    assert step_of(x) < 40.0 / 127
    x[0, 0, 0, 0] = torch.inf
    assert step_of(x).isnan()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(64, 64), (40, 64)),
        (lambda: nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)), (4, 32, 8, 8)),
        (_Columns, (32, 72)),  # rows of codes that start anywhere are copied
    ],
)
def test_what_is_not_finite_stays_in_its_entry_of_the_batch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make().eval(), torch.randn(shape)
    done = tilewright.optimize(model, x, "int8", report=False, compiled=False)
    assert _calls(done)["quantise"] == 1
    right = done(x)
    x[1].view(-1)[0] = torch.nan
    assert torch.equal(done(x)[2:], right[2:])
    assert torch.equal(done(x)[0], right[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_that_are_small_numbers(compiled: bool) -> None:
    """Of 16 bits, whose smallest number is 6e-8, they would be off by a tenth."""
    codes = torch.arange(-127, 128, dtype=torch.int8).view(1, 5, 17, 3).contiguous(memory_format=torch.channels_last)
    step = torch.tensor(2.6e-7)
    call: Any = int8_calls.dequantise
    call = torch.compile(call, fullgraph=True, backend="eager") if compiled else call
    y = call(codes, step, torch.float16)
    assert (y.dtype, y.stride()) == (torch.float16, codes.stride())
    assert torch.equal(y, (codes.double() * step.double()).half())


def _found(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Any:
    """What `optimize` has found out about a model, caught on its way."""
    caught: list[Any] = []
    real = int8.candidates_of
    monkeypatch.setattr(int8, "candidates_of", lambda *args: caught.append(real(*args)) or caught[-1])
    tilewright.optimize(model.eval(), x, "int8", report=False, compiled=False)
    return caught[0]


def test_what_pays_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By times: a product that is faster, one that is not, and one that is, but not by the conversions that it causes."""
    found = _found(monkeypatch, convolutions(), torch.randn(2, 3, 8, 8))
    nodes = list(found.candidates)
    sixteen = dict.fromkeys(nodes, 20.0)
    faster = int8._paying(found, sixteen, dict.fromkeys(nodes, 10.0))
    assert faster == set(nodes)
    assert not int8._paying(found, sixteen, dict.fromkeys(nodes, 20.5))
    assert not int8._paying(found, sixteen, dict.fromkeys(nodes, 19.9))  # two conversions take more
    one = {n: 10.0 if n is nodes[1] else 30.0 for n in nodes}
    assert int8._paying(found, sixteen, one) == {nodes[1]}
    plan = planned(found, frozenset((nodes[1],)))
    assert (len(plan.quantised), len(plan.outputs)) == (1, 0)


class Normed(nn.Module):
    """A layer norm of [B, T, 32] and what reads it: `rows` all of its rows, `reader` in another way."""

    def __init__(self, reader: Callable[[nn.Module, Tensor], Tensor], rows: bool, layer: nn.Module):
        super().__init__()
        self.norm, self.reader, self.layer = nn.LayerNorm(32), reader, layer
        self.rows = nn.Linear(32, 32) if rows else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(x)
        first = self.reader(self.layer, y)
        return (first,) if self.rows is None else (first, self.rows(y))


def _image(layer: nn.Module, y: Tensor) -> Tensor:
    return layer(y.unflatten(1, (2, -1)).permute(0, 3, 1, 2))


class _Added(nn.Module):
    """The norm is what a convolution that writes codes adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(32, 32, 3, 1, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x))) + x))


READERS = [
    pytest.param(lambda layer, y: layer(y[:, 0]), lambda: nn.Linear(32, 48), id="a class token"),
    pytest.param(lambda layer, y: layer(y.flatten(1)), lambda: nn.Linear(128, 48), id="flattened"),
    pytest.param(_image, lambda: nn.Conv2d(32, 48, 2, 2), id="a convolution"),
    pytest.param(_image, _Added, id="a residual"),
]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("reader", "layer"), READERS)
def test_layer_norms_that_are_not_read_by_rows(
    reader: Callable[[nn.Module, Tensor], Tensor], layer: Callable[[], nn.Module], rows: bool
) -> None:
    """A scale for each row is none for what reads a row here and there, or several as one."""
    model, x = Normed(reader, rows, layer()).eval(), torch.randn(20, 4, 32) * torch.logspace(-1, 1, 80).view(20, 4, 1)
    done = tilewright.optimize(model, x, "int8", report=False, compiled=False)
    assert _calls(done)["layer_norm_quantise"] == rows
    assert "the outputs have an RMS error of" not in str(done.report)
    with torch.no_grad():
        right = model(x)
    for got, wanted in zip(done(x), right, strict=True):
        assert (got - wanted).square().mean().sqrt() < 0.03 * wanted.square().mean().sqrt()
