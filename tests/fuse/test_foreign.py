"""Models with parts that torch.export, fake tensors or Inductor cannot handle: the rest is optimised, and is right."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tilewright.fuse import Optimized, Partial, optimize
from tilewright.fuse.check import NOISE_WORDS, TOLERANCES, Check, compare_outputs
from tilewright.fuse.judge import Right
from tilewright.fuse.rivals import Rivals
from tilewright.fuse.structure import flatten


class Two(nn.Module):
    """Two parts, and a function of them for `forward`."""

    def __init__(self, first: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.run = first, run
        self.last = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


def _optimized(model: nn.Module, *args: Tensor, **more: Any) -> Optimized:
    """Optimised, and compared with the model on other values."""
    model.eval().requires_grad_(False)
    done = optimize(model, args, "fp32", report=False, **{"compiled": False, **more})
    other = [t + 0.5 if t.is_floating_point() else t for t in args]
    assert all(d.rms < 1e-5 for d in compare_outputs(model(*other), done(*other)))
    return done


def _reasons(done: Optimized) -> dict[str, str]:
    return {d.anchor: d.reason for d in done.report.decisions if d.kind == "eager"}


def test_a_torchscript_part_stays_as_it_is() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    done = _optimized(Two(scripted, lambda m, x: m.last(m.first(x))), torch.randn(3, 8))
    assert isinstance(done, Partial)
    assert _reasons(done) == {"first": "it is a TorchScript module, which has no Python code to trace"}
    assert "it contains a TorchScript module (first)" in done.report.decisions[0].reason


def energy_and_force(m: Two, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        energy = m.first(x).square().sum(1)
        (force,) = torch.autograd.grad(energy.sum(), x)
    return m.last(energy.detach()[:, None] - force)


def test_a_part_that_the_model_differentiates_stays_as_it_is() -> None:
    done = _optimized(Two(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), energy_and_force), torch.randn(3, 8))
    assert isinstance(done, Partial)
    assert _reasons(done) == {"first": "the model computes gradients through it"}


def packed(m: Two, x: Tensor, lengths: Tensor) -> Tensor:
    rows, _ = m.first(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return m.last(pad_packed_sequence(rows, batch_first=True)[0])


def test_packed_sequences() -> None:
    """Their class checks what it is made of, so nothing but tensors can stand in it."""
    model = Two(nn.GRU(8, 8, batch_first=True), packed)
    done = _optimized(model, torch.randn(3, 5, 8), torch.tensor([5, 2, 4]))
    assert isinstance(done, Partial)
    assert set(_reasons(done)) == {"first"}


def test_a_call_that_reads_values_while_it_runs() -> None:
    """istft looks at its window, which tensors without memory do not have."""
    window = torch.hann_window(16)

    def run(m: Two, x: Tensor) -> Tensor:
        return torch.istft(torch.stft(m.last(x).flatten(1), 16, 4, window=window, return_complex=True), 16, 4, window=window)

    done = _optimized(Two(nn.Identity(), run), torch.randn(2, 8, 8))
    assert not isinstance(done, Partial)


def test_tensors_without_elements() -> None:
    """Their strides say nothing: a rotation of all channels, written for some of them."""

    def run(m: Two, x: Tensor) -> Tensor:
        y = m.last(x).transpose(1, 2)
        return m.first(torch.cat([y[:, :8] * 2, y[:, 8:].transpose(1, 2).reshape(2, 0, 6)], 1).transpose(1, 2))

    assert not isinstance(_optimized(Two(nn.Linear(8, 8), run), torch.randn(2, 6, 8)), Partial)


def _wrong(model: nn.Module) -> Callable[..., Any]:
    return lambda *args: [t + 1 for t in model(*args)]


def _fails(model: nn.Module) -> Callable[..., Any]:
    def called(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nand a page more")

    return called


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ([_wrong, _wrong], "no, operators run one by one, because Inductor's code gives wrong outputs (relative RMS error "),
        ([_wrong, _fails], "no, operators run one by one, because Inductor's code gives wrong outputs (relative RMS error "),
        ([_wrong, lambda model: model], "by Inductor, without packed weights, because with them its code gives wrong outputs"),
        ([_fails], "no, operators run one by one, because Inductor fails: no such kernel"),
    ],
)
def test_what_inductor_gets_wrong(monkeypatch: pytest.MonkeyPatch, code: list[Callable[..., Any]], words: str) -> None:
    """The graph is right, so it answers without Inductor."""
    each = iter(code)
    monkeypatch.setattr(torch, "compile", lambda model, fullgraph, options: next(each)(model))
    model = Two(nn.Identity(), lambda m, x: m.last(x))
    done = _optimized(model, torch.randn(3, 8), compiled=True, measure=False)
    assert done.report.facts["compiled"].startswith(words)
    assert next(each, None) is None, "all was tried"
    assert done.report.error is not None
    assert done.report.error["outputs"][0]["rms"] < 1e-5


def test_a_rival_with_other_outputs_does_not_answer() -> None:
    want = {"a": torch.ones(4), "b": torch.zeros(4)}
    right = Right(want, *flatten(want))
    noise = [replace(d, words=NOISE_WORDS) for d in compare_outputs(want, want) if "b" in d.name]
    check: Any = Check("fp32", TOLERANCES["fp32"], tuple(noise))
    rivals = Rivals(*[None] * 3, right, check, None, True)  # type: ignore[arg-type]
    rivals.verify({"a": torch.ones(4), "b": torch.ones(4)})
    with pytest.raises(RuntimeError, match=r"its output\['a'\] is too far from the float model's: 2.50e-01"):
        rivals.verify({"a": torch.full((4,), 1.25), "b": torch.zeros(4)})


class Smoothed(nn.Module):
    """Its state after a call on the same values is what it was, so two such calls give the same outputs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.mean, self.kept, self.calls = where, None, dict[str, Tensor](), 0
        self.register_buffer("held", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == "attribute":
            self.mean = x if self.mean is None else 0.9 * self.mean + 0.1 * x
            return self.mean
        if self.where == "dict":
            self.kept["mean"] = 0.9 * self.kept.get("mean", x) + 0.1 * x
            return self.kept["mean"]
        if self.where == "buffer":
            self.held = x + self.held
            return self.held
        return x * self.calls


@pytest.mark.parametrize(
    ("where", "written"),
    [("attribute", "mean, calls"), ("dict", "kept, calls"), ("buffer", "calls, held"), ("number", "calls")],
)
def test_state_in_attributes(where: str, written: str) -> None:
    """A graph would give the outputs of the first call for ever."""
    model = Two(Smoothed(where), lambda m, x: m.last(m.first(x))).eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    done = optimize(model, torch.randn(3, 8), "fp32", report=False, compiled=False)
    assert isinstance(done, Partial)
    reason = f"Smoothed keeps state between calls (in {written}), which a graph cannot do"
    assert _reasons(done) == {"first": reason}
    assert model.first.calls == 0, "the user's own model was not called"
    for x in torch.randn(4, 3, 8):
        assert compare_outputs(plain(x), done(x))[0].rms < 1e-5


class Table(nn.Module):
    """Filled at the first call, like tables of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor | None = None
        self.last_input: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is None or len(self.rows) < len(x):
            self.rows = torch.tensor([float(i) for i in range(len(x))])[:, None]
        self.last_input = x
        return x + self.rows[: len(x)]


def test_a_table_that_the_first_call_fills_is_no_state() -> None:
    done = _optimized(Two(Table(), lambda m, x: m.last(m.first(x))), torch.randn(3, 8))
    assert not isinstance(done, Partial)
    for size in (5, 2):
        x = torch.randn(size, 8)
        assert compare_outputs(done.as_given(x), done(x))[0].rms < 1e-5
    assert all(shape.optimised for shape in done.report.shapes)


class Sampled(nn.Module):
    """An encoder whose result is drawn, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.encoder(x).chunk(2, 1)
        return torch.cat([mean, mean + deviation * torch.randn_like(mean)], 1)


def test_random_numbers_are_drawn_between_optimised_parts() -> None:
    """With the same seed the outputs are the model's, because the same numbers are drawn in the same order."""
    model = Two(Sampled(), lambda m, x: m.last(m.first(x))).eval().requires_grad_(False)
    x = torch.randn(3, 8)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    done = optimize(model, x, "fp32", report=False, compiled=False)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's random numbers are as they were"
    assert isinstance(done, Partial)
    assert [d.anchor for d in done.report.decisions if d.kind == "capture" and d.taken] == ["first.encoder", "last"]
    assert "it draws random numbers" in done.report.decisions[0].reason
    assert "test_foreign.py:" in done.report.decisions[0].reason
    torch.manual_seed(7)
    got, other = done(x), done(x)
    torch.manual_seed(7)
    assert compare_outputs(model(x), got)[0].rms < 1e-5
    assert not torch.equal(got, other)


def test_a_part_of_any_operator_is_optimised() -> None:
    """Also if it has no product: a norm with its activation, a transposed convolution, attention with a mask."""

    def run(m: Two, x: Tensor) -> Tensor:
        return m.first(x if x.sum().item() < 1e9 else -x)

    parts = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), nn.ConvTranspose1d(4, 2, 2), nn.RMSNorm(8), nn.InstanceNorm1d(4)
    for part in parts:
        done = _optimized(Two(part, run), torch.randn(2, 4, 8))
        assert "first" in [d.anchor for d in done.report.decisions if d.kind == "capture" and d.taken], part
