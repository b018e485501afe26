"""What `optimize` holds its graphs against: the model as the user calls it, its time, torch's own model in the precision."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.fuse import Partial, calls, judge
from tilewright.fuse.check import Inaccurate, compare_outputs

HOME = sys.modules["tilewright.fuse.optimize"]  # the package's attribute of that name is the function


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def optimized(model: nn.Module, x: Any, precision: str | None = "fp32", **options: Any) -> Any:
    return tilewright.optimize(model, x, precision, **{"report": False, "compiled": False, **options})


# ---- precision


class Small(nn.Module):
    """Outputs of 1e-9 behind activations of 1: nothing of them is left in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            self.b.weight.mul_(1e-9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x).relu()
        return y, self.b(y)


def test_an_output_that_the_precision_has_lost() -> None:
    """The larger output beside it hides nothing, and torch's own loss is no excuse."""
    torch.manual_seed(0)
    model, x = Small().eval(), normal(3, 8)
    with pytest.raises(
        Inaccurate, match=r"output\[1\] of .* error 1.00e\+00.*own model in fp16 gets this output wrong as well"
    ) as caught:
        optimized(model, x, "fp16")
    assert "Use precision='fp32', or set tolerance=... to accept the error" in str(caught.value)
    assert "fault" not in str(caught.value)
    with torch.no_grad():
        assert all(d.rms < 1e-5 for d in compare_outputs(model(x), optimized(model, x)(x)))


def test_the_default_precision_is_the_devices() -> None:
    assert optimized(mlp(), normal(2, 8), None).report.facts["precision"] == "fp32"


# ---- the model as the user calls it


def test_torchs_fast_path_gives_something_else() -> None:
    """Zeros in padded places: the report says how far, and where. Other shapes have the same numbers, whoever runs them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = normal(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=mask)
    assert (fast[1, 3:] == 0).all()
    done = optimized(model, (x,), example_kwargs={"src_key_padding_mask": mask}, max_shapes=1)
    said = done.report.text().splitlines()[0]
    assert "differs: torch's fast path of nn.TransformerEncoder gives other values for output (relative RMS error" in said
    assert "% of its values, the first at [1, 3, 0]" in said
    for rows in (slice(0, 2), slice(1, 2)):
        got = done(x[rows], src_key_padding_mask=mask[rows])
        kept = ~mask[rows]
        assert (got - fast[rows])[kept].abs().max() < 1e-5
        assert got[-1, 3:].abs().max() > 0.1
    assert done.report.calls == {"optimised": 1, "as given": 1}
    whole = optimized(model, (x,))
    assert "differs" not in whole.report.facts


class Remembers(nn.Module):
    """Depends on something that no graph keeps: the second trace of it gives what a call does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + (1.0 if torch.compiler.is_compiling() else 0.0)


def test_a_graph_that_differs_from_the_call_is_none() -> None:
    model, x = Remembers().eval(), normal(3, 8)
    done = optimized(model, x)
    assert isinstance(done, Partial)
    assert "Remembers as a graph gives other outputs than its own call" in done.report.text()
    with torch.no_grad():
        assert compare_outputs(model(x), done(x))[0].rms < 1e-5


# ---- time


@pytest.mark.parametrize(("times", "ours"), [([100.0, 200.0], True), ([200.0, 100.0], False)])
def test_the_faster_one_answers(monkeypatch: pytest.MonkeyPatch, times: list[float], ours: bool) -> None:
    monkeypatch.setattr(HOME, "timed_us", lambda calls, device: times)
    model, x = mlp(), normal(2, 8)
    done = optimized(model, x, measure=True)
    first = done.report.text().splitlines()[0]
    assert first.startswith(
        "speed: 0.100 ms a call" if ours else "speed: 0.200 ms a call, the original model 0.100 ms: not faster"
    )
    done(x)
    assert done.report.calls == {"optimised": int(ours), "as given": int(not ours)}
    if not ours:
        with pytest.raises(ValueError, match="it has no graph, because the original model is faster; measure=False keeps it"):
            assert done.fused
    assert "speed" not in optimized(model, x).report.facts, "compiled=False on a CPU asks for the operators"


def test_what_is_timed_is_a_call() -> None:
    def spin(ms: float) -> Callable[[], Any]:
        return lambda: torch.tensor(0).item() or __import__("time").sleep(ms / 1e3)

    one, three = judge.timed_us((spin(1), spin(3)), torch.device("cpu"))
    assert 1000 <= one < three
    assert three >= 3000


# ---- faults of the fuser


def planted(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor], width: int) -> None:
    """Products of the fuser with so many columns are wrong."""
    real = calls.linear

    def linear(*args: Any) -> Tensor:
        out = real(*args)
        return wrong(out) if args[1].shape[0] == width else out

    for module in (sys.modules[name] for name in ("tilewright.fuse.emit", "tilewright.fuse.gates") if name in sys.modules):
        if getattr(module, "calls", None) is calls:
            monkeypatch.setattr(module.calls, "linear", linear)


def first_wrong(out: Tensor) -> Tensor:
    """One value of many."""
    out = out.clone()
    out.view(-1)[0] += 1.0
    return out


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("wrong", [first_wrong, lambda out: out * 1.5, lambda out: out * float("nan")])
def test_a_fault_of_the_fuser_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, precision: str, wrong: Callable[[Tensor], Tensor]
) -> None:
    """The others stay, and the report names it."""
    planted(monkeypatch, wrong, 16)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 16), nn.Linear(16, 4)).eval(), normal(3, 8)
    done = optimized(model, x, precision)
    with torch.no_grad():
        assert compare_outputs(model(x), done(x))[0].rms < (1e-5 if precision == "fp32" else 3e-3)
    faults = [d for d in done.report.decisions if d.kind == "fault"]
    assert [d.anchor for d in faults] == ["2"]
    assert faults[0].reason.startswith("a bug in tilewright's fusion: 2")
    assert "torch computes it instead; please report it" in faults[0].reason
    assert [launch["op"] for launch in done.report.launches if launch["layer"] in ("0", "3")] == ["linear", "linear"]


def test_a_fault_that_cannot_be_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where leaving it to torch does not help the error says that it is no matter of the precision."""
    model, x = mlp(), normal(3, 8)
    planted(monkeypatch, first_wrong, 16)
    real = HOME.Lowering
    monkeypatch.setattr(HOME, "Lowering", lambda traced, exact, report, refused: real(traced, exact, report))
    with pytest.raises(
        Inaccurate, match=r"guilty layer is 0: .*in float32 too, which is a bug in tilewright's fusion; please report it"
    ) as caught:
        optimized(model, x, "fp16")
    assert "wider precision" not in str(caught.value)


@pytest.mark.parametrize(
    ("factor", "words"), [(1e6, "and torch's own layer has an error of this size in fp16 too"), (1.0, None)]
)
def test_a_layer_beside_torchs_own(factor: float, words: str | None) -> None:
    model, x = mlp(), torch.ones(3, 8)
    with torch.no_grad():
        model[0].weight.mul_(factor)  # pyright: ignore[reportIndexIssue]
    if words is None:
        optimized(model, x, "fp16")
        return
    with pytest.raises(Inaccurate, match=rf"guilty layer is 0: .*{words}"):
        optimized(model, x, "fp16")
