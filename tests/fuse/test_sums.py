"""A sum that moves from a product into the norm behind it: the same numbers, by other calls."""

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.fuse import calls, choose
from tilewright.fuse.check import layer_errors
from tilewright.fuse.choose import recorded
from tilewright.fuse.sums import in_place, rewrite, streams
from tilewright.fuse.trace import trace
from tilewright.op import invariant


class _Block(nn.Module):
    """Pre-norm or post-norm, the sums read once more at the end."""

    def __init__(self, post: bool):
        super().__init__()
        self.post = post
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x + self.first(x))
        z = self.norm2(y + self.second(y))
        return z if self.post else self.norm2(x + self.second(self.norm1(x + self.first(x)))) + x


@pytest.mark.parametrize("post", [False, True])
def test_rewritten(post: bool) -> None:
    torch.manual_seed(0)
    model, x = _Block(post).eval(), torch.randn(2, 5, 16)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    fused = done.fused
    sums = list(recorded(fused, [x]).sums.values())
    places = [place for problem in sums for place in problem.places]
    assert len(places) == 2
    for place in places:
        rewrite(fused.graph, *place, ("vendor", {}))
    fused.graph.lint()
    fused.recompile()
    targets = [n.target for n in fused.graph.nodes]
    assert targets.count(calls.add_layer_norm) == 2
    assert calls.layer_norm not in targets
    torch.testing.assert_close(fused(x)[0], model(x))
    assert all(layer.own < 1e-5 for layer in layer_errors(trace(model, (x,), {}).module, fused, [x]))


class _Stream(nn.Module):
    """A stem and pre-norm blocks, the stream normed at the end; `leak`: the stream is read by something else too."""

    def __init__(self, leak: bool):
        super().__init__()
        self.leak, self.stem = leak, nn.Linear(16, 16)
        self.products, self.norms = (
            nn.ModuleList(make(16) for _ in range(4)) for make in (lambda n: nn.Linear(n, n), nn.LayerNorm)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        for product, norm in zip(self.products[:3], self.norms[:3], strict=True):
            x = x + product(torch.tanh(norm(x)))
        return self.norms[3](x) + (first if self.leak else 0.0)


@pytest.mark.parametrize("leak", [False, True])
def test_stream_in_place(leak: bool) -> None:
    torch.manual_seed(0)
    model, x = _Stream(leak).eval(), torch.randn(2, 5, 16)
    fused = tilewright.optimize(model, x, "fp32", report=False, compiled=False).fused
    places = [place for problem in recorded(fused, [x]).sums.values() for place in problem.places]
    found = streams(fused.graph, places)
    # What is read at the end may not be added to: there the stream begins with the first sum.
    assert [len(run) for run in found] == [2 if leak else 3]
    in_place(fused, found[0])
    fused.graph.lint()
    fused.recompile()
    for _ in range(2):
        torch.testing.assert_close(fused(x)[0], model(x))
    assert all(layer.own < 1e-5 for layer in layer_errors(trace(model, (x,), {}).module, fused, [x]))


def test_not_in_place_where_the_product_reads_the_stream() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.product, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.norm(x + self.product(x))

    x = torch.randn(3, 16)
    fused = tilewright.optimize(Twice().eval(), x, "fp32", report=False, compiled=False).fused
    places = [place for problem in recorded(fused, [x]).sums.values() for place in problem.places]
    assert len(places) == 1
    assert not streams(fused.graph, places)


@pytest.mark.parametrize(("apart", "taken"), [(False, "2 in place, 1 product"), (True, "product")])
def test_who_forms_sums_is_said(monkeypatch: pytest.MonkeyPatch, apart: bool, taken: str) -> None:
    """In place is the fastest, but what is read at the end stays as it is, and so does all where rows must stand alone."""
    measured = choose._Summed([], [2.0, 1.0], ["product", "in place"])
    monkeypatch.setattr(choose, "_summed", lambda problem, watch: measured)
    model, x = _Stream(leak=True).eval(), torch.randn(2, 5, 16)
    fused = tilewright.optimize(model, x, "fp32", report=False, compiled=False).fused
    with invariant() if apart else torch.no_grad():
        [row] = choose._sums(fused, list(recorded(fused, [x]).sums.values()), None)  # pyright: ignore[reportArgumentType]
    assert (row["taken"], row["in place"], row["times"]) == (taken, 0 if apart else 2, 3)


class _Image(nn.Module):
    """Patches, a class token before them, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 7, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions


def test_tokens_are_assembled_by_the_product() -> None:
    torch.manual_seed(0)
    model, x = _Image().eval(), torch.randn(3, 3, 8, 12)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    fused = done.fused
    assert done.report.count("tokens") == 1
    assert not any("aten" in call["op"] for call in done.report.launches)
    targets = [n.target for n in fused.graph.nodes]
    assert torch.ops.aten.cat.default not in targets
    assert torch.ops.aten.add.Tensor not in targets
    for image in (x, torch.randn_like(x)):  # the second finds the rows of the first
        torch.testing.assert_close(fused(image)[0], model(image))
    assert layer_errors(trace(model, (x,), {}).module, fused, [x])[-1].own < 1e-5


def test_not_where_rows_are_left_out() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm((x + self.product(x))[:, 0])

    x = torch.randn(2, 5, 16)
    done = tilewright.optimize(Last().eval(), x, "fp32", report=False, compiled=False)
    assert not recorded(done.fused, [x]).sums
