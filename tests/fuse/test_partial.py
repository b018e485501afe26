"""Models that are no graph: children that are used in several places, called twice, or write to what they are given."""

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.fuse import Partial
from tilewright.fuse.check import TOLERANCES, Inaccurate, compare_outputs
from tilewright.fuse.optimized import Optimized
from tilewright.fuse.settings import Settings


class Branching(nn.Module):
    """Reads a value, so it is taken apart."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.again, self.both = body, body, nn.ModuleList([body, body])
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = -x
        first, second = self.body(x), self.again(x + 1)
        return self.last(first - second + self.both[1](x) + x)


def _optimized(model: nn.Module, x: Tensor, **more: bool) -> Partial:
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False, **more)
    assert isinstance(done, Partial)
    with torch.no_grad():
        right = model(x.clone())
    assert compare_outputs(right, done(x.clone()))[0].rms < 1e-5
    return done


def test_a_module_in_several_places_is_optimised_once_for_all() -> None:
    done = _optimized(Branching(nn.Linear(16, 16)).eval(), torch.randn(3, 16))
    assert isinstance(done.model, Branching)
    places = (done.model.body, done.model.again, *done.model.both)
    assert isinstance(places[0], Optimized)
    assert all(place is places[0] for place in places)
    assert [d.anchor for d in done.report.decisions if d.kind == "capture" and d.taken] == ["body", "last"]


def test_results_of_several_calls_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies the second call would overwrite what the first has returned, before the model reads it."""
    asked: list[bool] = []
    home = sys.modules["tilewright.fuse.optimize"]  # the package's attribute of that name is the function
    real = home._whole

    def whole(
        model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], settings: Settings, device: torch.device
    ) -> Optimized:
        done = real(model, args, kwargs, settings, device)
        asked.append(settings.copy_outputs)
        return done

    monkeypatch.setattr(home, "_whole", whole)
    _optimized(Branching(nn.Linear(16, 16)).eval(), torch.randn(3, 16), copy_outputs=False)
    assert asked == [True, False]


@dataclass
class Answer:
    """What torch.export does not know how to take apart."""

    score: Tensor
    more: dict[str, Tensor]


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Answer:
        y = self.layer(x)
        return Answer(y, {"mean": y.mean()})


def test_results_in_a_dataclass() -> None:
    torch.manual_seed(0)  # a mean near 0 has a large relative error
    model, x = Answering().eval(), torch.randn(3, 16)
    done = tilewright.optimize(model, x, "fp16", report=False, compiled=False)
    with torch.no_grad():
        right = model(x).score
    assert 0 < (done(x).score - right).abs().max() < 1e-2
    assert done.report.error is not None
    assert [row["name"] for row in done.report.error["outputs"]] == ["['score']", "['more']['mean']"]


def test_a_child_that_writes_to_its_inputs_stays() -> None:
    """An optimised one works on copies: the model around it would read what was there before."""
    body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))
    done = _optimized(Branching(body).eval(), torch.randn(3, 16))
    eager = {d.anchor: d.reason for d in done.report.decisions if d.kind == "eager"}
    assert "writes to its inputs" in eager["body"]
    assert [d.anchor for d in done.report.decisions if d.kind == "capture" and d.taken] == ["body.1", "last"]


class Cancelling(nn.Module):
    """Two results that are nearly alike, one less the other: in 16 bits little is left of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = -x
        return self.last(self.body(x) - self.body(x + 0.02))


def test_rounding_that_torch_has_too_is_allowed() -> None:
    """As of a whole graph: twice what torch's own model is off by in the precision. A user's tolerance holds as it is."""
    torch.manual_seed(0)
    model, x = Cancelling().eval(), torch.randn(5, 16)
    done = tilewright.optimize(model, x, "fp16", report=False, compiled=False)
    assert isinstance(done, Partial)
    with torch.no_grad():
        right, own = model(x), model.half()(x.half()).float()
    model.float()
    assert TOLERANCES["fp16"].rms < compare_outputs(right, done(x))[0].rms <= 2 * compare_outputs(right, own)[0].rms
    with pytest.raises(Inaccurate):
        tilewright.optimize(model, x, "fp16", report=False, compiled=False, tolerance=0.02)
