"""Calls that no operator of ours computes: which become a part of Inductor's, and when it is kept."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tilewright
from tilewright.fuse import leftovers
from tilewright.fuse.leftovers import compile_leftovers
from tilewright.fuse.report import Report


class Own(nn.Module):
    """Embeddings with their sum, and an activation of one's own between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(50, 32), nn.Embedding(8, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.up(self.norm(self.words(ids) + self.places(torch.arange(8))))
        return self.down(y * torch.sigmoid(1.7 * y) + torch.tanh(y))


class Squeeze(nn.Module):
    """Squeeze and excitation: a view stands between the sigmoid and the product with the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        share = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        return x * share[:, :, None, None] + 0.5


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.layer(torch.tanh(torch.sin(y)))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _parts(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], x: Tensor, times: list[float]
) -> tuple[Any, Any, Report]:
    """(the model, its graph with parts, decisions), as if the calls and the part had taken so long."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: real(module, backend="eager", **options))
    monkeypatch.setattr(leftovers, "_timed", lambda ways, args: times)
    model = make().eval()
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    report = Report(launches=done.report.launches)
    assert isinstance(done.fused, fx.GraphModule)
    return model, compile_leftovers(done.fused, [x], report), report


@pytest.mark.parametrize(
    ("make", "x", "calls"),
    [
        pytest.param(Own, torch.randint(50, (2, 8)), [2, 5], id="embeddings and an activation"),
        pytest.param(Squeeze, torch.randn(2, 16, 5, 5), [2], id="squeeze and excitation"),
        pytest.param(Tanh, torch.randn(3, 16), [2], id="a sine and a tanh"),
    ],
)
def test_parts(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], x: Tensor, calls: list[int]) -> None:
    model, fused, report = _parts(monkeypatch, make, x, [10.0, 5.0])
    assert [int(d.reason.split()[0]) for d in report.decisions] == calls
    ops = [row["op"] for row in report.launches]
    assert ops.count("inductor") == len(calls)
    left = [str(n.target) for n in fused.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert sorted(op for op in ops if op.startswith("aten")) == sorted(left)
    assert all(d.taken and "5.0 us compiled by Inductor, 10.0 us one by one" in d.reason for d in report.decisions)
    with torch.no_grad():
        torch.testing.assert_close(fused(x)[0], model(x))


def test_a_part_that_is_not_faster_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 16)
    model, fused, report = _parts(monkeypatch, Tanh, x, [10.0, 9.9])
    assert not report.decisions[0].taken
    assert "inductor" not in [row["op"] for row in report.launches]
    with torch.no_grad():
        torch.testing.assert_close(fused(x)[0], model(x))


def test_a_single_call_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    report = _parts(monkeypatch, make, torch.randn(3, 16), [10.0, 5.0])[2]
    assert report.decisions == []


def test_a_part_whose_code_is_wrong_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module, **_: Any) -> Callable[..., Any]:
        return lambda *args: module(*args) + 1

    monkeypatch.setattr(torch, "compile", wrong)
    monkeypatch.setattr(leftovers, "_timed", lambda ways, args: [10.0, 5.0])
    model, x = Tanh().eval(), torch.randn(3, 16)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    report = Report(launches=done.report.launches)
    fused = compile_leftovers(done.fused, [x], report)
    assert "Inductor's code gives wrong outputs (relative RMS error" in report.decisions[0].reason
    with torch.no_grad():
        torch.testing.assert_close(fused(x)[0], model(x))
