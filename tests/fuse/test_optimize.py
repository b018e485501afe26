"""`optimize` of small modules: the right numbers, in the module's own structure, and exactly the fusions that are expected."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tilewright.fuse import Partial, Untraceable, calls
from tilewright.fuse.check import Inaccurate, compare_outputs

LIMITS = {"fp32": 1e-5, "fp16": 3e-3}


class Residual(nn.Module):
    """conv-bn-relu-conv-bn, sum, relu in place: a block of a residual network, on its way a pool and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.n1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.two, self.n2 = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
        self.relu, self.pool, self.mean = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n2(self.two(self.relu(self.n1(self.one(x)))))
        y += x
        return self.head(torch.flatten(self.mean(self.pool(self.relu(y))), 1))


class Gated(nn.Module):
    """silu(a) * b of two linears, and of the halves of one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.both, self.out = nn.Linear(16, 48, bias=False), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        up, gate = self.both(x).chunk(2, -1)
        return self.out(up * F.gelu(gate))


class Separate(nn.Module):
    """Attention with three linears, residual, norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.norm(x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


class Written(Separate):
    """The same, softmax(q k^T / sqrt d) v as it is written out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = ((q @ k.transpose(-1, -2)) / 8**0.5).softmax(-1)
        return self.norm(x + self.o((weights @ v).transpose(1, 2).flatten(2)))


class Many(nn.Module):
    """Token ids in, a dict of tuples out; one weight used twice; a scale on a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(11, 16), nn.Parameter(torch.rand(16) + 0.5)
        self.shared = nn.Linear(16, 16)

    def forward(self, ids: Tensor, shift: int = 2) -> dict[str, Any]:
        x = self.table(ids + shift)
        y = x + self.scale * self.shared(x)
        return {"y": y, "more": (self.shared(y).relu(), ids * 2, 7)}


class Patches(nn.Module):
    """Patches of an image, a token before them, which alone is read in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head, self.token = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, 8), nn.Parameter(torch.randn(1, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1)[:, 0])


class Case(NamedTuple):
    """A module, its inputs, and what is taken of each kind."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    taken: dict[str, int]
    calls: dict[str, int]
    """How many calls of each operator the graph has; what is not ours is counted as "rest"."""


def _ids() -> tuple[Tensor, ...]:
    return (torch.tensor([[1, 4, 0], [8, 2, 5]]),)


CASES = {
    "residual block": Case(
        Residual, lambda: (torch.randn(2, 8, 6, 6),), {"batch_norm": 2, "activation": 2, "residual": 1},
        {"conv": 2, "max_pool": 1, "mean": 1, "linear": 1},
    ),
    "linear gelu": Case(
        lambda: nn.Sequential(nn.Linear(12, 20), nn.Dropout(0.5), nn.GELU(), nn.Linear(20, 4), nn.BatchNorm1d(4), nn.ReLU()),
        lambda: (torch.randn(6, 12),), {"activation": 2, "batch_norm": 1}, {"linear": 2},
    ),
    "gated": Case(Gated, lambda: (torch.randn(2, 3, 16),), {"activation": 1, "gate": 2, "residual": 1}, {"linear": 4}),
    "attention": Case(
        Separate, lambda: (torch.randn(2, 5, 16),), {"merge": 1, "residual": 1}, {"linear": 2, "attention": 1, "layer_norm": 1}
    ),
    "attention written out": Case(
        Written, lambda: (torch.randn(2, 5, 16),), {"merge": 1, "residual": 1}, {"linear": 2, "attention": 1, "layer_norm": 1}
    ),
    "torch's encoder layer": Case(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu"), lambda: (torch.randn(2, 5, 16),),
        {"activation": 1, "residual": 2, "bias": 1}, {"linear": 4, "attention": 1, "layer_norm": 2},
    ),
    "ids, shared, dict": Case(Many, _ids, {"scale": 1, "activation": 1, "residual": 1}, {"linear": 2, "rest": 3}),
    "patches": Case(Patches, lambda: (torch.randn(2, 3, 8, 12),), {"patches": 1}, {"linear": 2, "rest": 1}),
    "one dimension": Case(
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding="same"), nn.SiLU(), nn.Conv1d(6, 6, 5, stride=2, groups=3)),
        lambda: (torch.randn(2, 4, 9),), {"activation": 1}, {"conv": 2},
    ),
}  # fmt: skip


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean, -1, 1)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(m.running_var, 0.5, 2)  # pyright: ignore[reportArgumentType]
    return model.eval()


def _right(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """In float64, on copies: a module may write to its inputs."""
    floats = tuple(x.double() if x.is_floating_point() else x.clone() for x in inputs)
    with torch.no_grad():
        found = model.double()(*floats)
    model.float()
    return found


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    model, inputs = _model(case.make), case.inputs()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    precision = "fp16" if name == "residual block" else "fp32"
    done = tilewright.optimize(model, inputs, precision, report=False, compiled=False)
    other = tuple(x.flip(0) for x in inputs)
    got, want = done(*other), _right(model, other)
    for apart in compare_outputs(want, got):
        assert apart.rms <= LIMITS[precision], f"{apart}\n{done.report}"
    kinds = {d.kind for d in done.report.decisions if d.taken}
    assert {kind: done.report.count(kind) for kind in kinds} == case.taken, str(done.report)
    ours = {"conv", "linear", "attention", "layer_norm", "max_pool", "mean"}
    calls = [launch["op"] if launch["op"] in ours else "rest" for launch in done.report.launches]
    assert {op: calls.count(op) for op in calls} == case.calls, str(done.report)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()), "the user's model was changed"


def test_inputs_are_not_written() -> None:
    model, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(3, 4)
    kept = x.clone()
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    done(x)
    assert torch.equal(x, kept)
    assert "not written" in done.report.facts


@pytest.mark.parametrize("start", [0, 1])
def test_inputs_that_lie_otherwise_are_copied(start: int) -> None:
    """Launches were chosen for the example's strides, at 16 bytes: a view that has others does not reach them."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8).eval()
    done = tilewright.optimize(model, torch.randn(4, 16), precision="fp32", graph=False, compiled=False, report=False)
    seen: list[Tensor] = []
    done.fused.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    view = torch.randn(4, 17)[:, start : start + 16]
    torch.testing.assert_close(done(view), model(view))
    whole = torch.randn(4, 16)
    done(whole)
    assert [x.stride() for x in seen] == [(16, 1), (16, 1)]
    assert not any(x.data_ptr() % 16 for x in seen)
    assert seen[1] is whole


class Sum(nn.Module):
    """A convolution of one image beside another image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.conv(x) + y)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (Sum(), [(2, 8, 6, 6), (2, 16, 6, 6)]),
        (nn.MaxPool2d(3, 2, 1), [(2, 8, 6, 6)]),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), [(2, 8, 6, 6)]),
    ],
    ids=["sum", "pool", "mean"],
)
def test_images_come_in_with_their_channels_last(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Whichever of its operands an image is: nothing is laid out anew in every call."""
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        wanted = model.eval()(*inputs)
    fused = tilewright.optimize(model, tuple(inputs), precision="fp32", report=False, measure=False)
    torch.testing.assert_close(fused(*inputs), wanted)
    called = [node for node in fused.fused.graph.nodes if node.op == "call_function"]
    assert [node.args[2] for node in called if node.target is calls.enter] == [True] * len(inputs)
    assert not any(node.target is calls.as_dense for node in called)


class Named(nn.Module):
    """Arguments by name, a number among them; what depends on parameters alone is returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, other: Tensor, times: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x) * times - other, self.scale, torch.arange(3.0)


def test_arguments_by_name() -> None:
    """In any order, as the model's own."""
    model, x, other = Named().eval(), torch.randn(3, 4), torch.randn(3, 4)
    named = {"x": x, "other": other, "times": 2}
    done = tilewright.optimize(model, (), "fp32", example_kwargs=named, report=False, compiled=False)
    with torch.no_grad():
        torch.testing.assert_close(done(times=2, other=other, x=x), model(x, other, 2))
    assert done.report.calls == {"optimised": 1, "as given": 0}
    again = tilewright.optimize(model, named, "fp32", report=False, compiled=False)
    torch.testing.assert_close(again(times=2, other=other, x=x), done(**named))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'other'"):
        done(times=2, x=x)


@pytest.mark.parametrize("compiled", [False, True])
def test_constants_are_copied_out(compiled: bool) -> None:
    """What a caller writes to them is not there in the next call."""
    model, x = Named().eval(), torch.randn(3, 4)
    done = tilewright.optimize(model, (x, x, 2), "fp32", report=False, compiled=compiled)
    for _ in range(2):
        _, scale, places = done(x, x, 2)
        assert scale.add_(1.0).tolist() == [2.0, 2.0, 2.0]
        assert places.add_(1.0).tolist() == [1.0, 2.0, 3.0]
    assert model.scale.tolist() == [1.0, 1.0, 1.0]


def test_arguments_are_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match="precision must be one of fp32, fp16, bf16, int8; got 'fp17'"):
        tilewright.optimize(model, x, "fp17")
    with pytest.raises(ValueError, match="example inputs"):
        tilewright.optimize(model, ())
    with pytest.raises(ValueError, match="CUDA graph"):
        tilewright.optimize(model, x, graph=True)


def test_weights_that_a_module_computes_are_copied() -> None:
    layer, x = nn.utils.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    assert not layer.weight.is_leaf
    done = tilewright.optimize(nn.Sequential(layer, nn.ReLU()), x, "fp16", report=False, compiled=False)
    with torch.no_grad():
        torch.testing.assert_close(done(x), layer(x).relu(), rtol=3e-3, atol=3e-3)
    assert layer(x).requires_grad


class Branching(nn.Module):
    """Reads a value, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Tanh(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if y.sum().item() > 1e9:
            y = -y
        return self.head(self.act(y))


def test_untraceable_is_taken_apart() -> None:
    model, x = _model(Branching), torch.randn(3, 8)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    assert isinstance(done, Partial)
    first = done.report.decisions[0]
    assert not first.taken
    assert "test_optimize.py" in first.reason
    assert "y.sum().item()" in first.reason
    assert [d.anchor for d in done.report.decisions if d.kind == "capture" and d.taken] == ["body", "head"]
    assert [d.anchor for d in done.report.decisions if d.kind == "eager"] == ["act"]
    assert [d.anchor for d in done.report.decisions if d.kind == "activation"] == ["body.0"]
    assert [launch["layer"] for launch in done.report.launches] == ["body.0", "head.linear"]
    assert compare_outputs(_right(model, (x,)), done(x))[0].rms < 1e-5


class Hopeless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_nothing_to_optimise() -> None:
    with pytest.raises(Untraceable, match="None of its children can be optimised"):
        tilewright.optimize(Hopeless(), torch.randn(3))


def test_inaccurate_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        next(model[1].parameters()).mul_(1e6)  # overflows float16
    with pytest.raises(Inaccurate, match="guilty layer is 1"):
        tilewright.optimize(model, torch.ones(3, 4), "fp16", report=False, compiled=False)


def test_int8_keeps_what_it_would_spoil() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    with torch.no_grad():
        # One input counts a thousand times as much as the rest and hardly moves: codes of the others are zeros.
        model[2].weight[:, 1:].mul_(1e-4)
        model[0].bias[1:].fill_(500.0)
        model[0].bias[0] = 0.0
    done = tilewright.optimize(model, torch.randn(40, 64), "int8", report=False, compiled=False)
    reasons = {d.anchor: (d.taken, d.reason) for d in done.report.decisions if d.kind == "quantise"}
    assert [reasons[name][0] for name in "023"] == [True, False, False]
    assert "its own error" in reasons["2"][1]
    assert "is too small for int8" in reasons["3"][1]


def test_report() -> None:
    done = tilewright.optimize(_model(Residual), torch.randn(2, 8, 6, 6), "fp32", report=False, compiled=False)
    text, found = done.report.text(), done.report.as_dict()
    assert "folded into weight and bias" in text
    assert "added in the epilogue" in text
    assert found["bytes_saved"] == sum(d["bytes_saved"] for d in found["decisions"]) > 0


def test_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor is given can be traced, and is right; its own code would take the test fifteen seconds to compile."""
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, fullgraph, options: real(model, fullgraph=fullgraph, backend="aot_eager")
    )
    for make, x in ((Separate, torch.randn(2, 5, 16)), (Residual, torch.randn(2, 8, 6, 6))):
        model = _model(make)
        done = tilewright.optimize(model, x, report=False, measure=False)
        assert done.report.facts["precision"] == "fp32"
        assert done.report.facts["compiled"].startswith("by Inductor")
        assert compare_outputs(_right(model, (x,)), done(x))[0].rms < 1e-5


@pytest.mark.parametrize("scale", [0.0, -0.5, float("inf"), float("nan")])
def test_a_chosen_attention_checks_its_scale(scale: float) -> None:
    """As the one without a choice does: kernels count on a scale above 0."""
    q = torch.ones(1, 4, 2, 8)
    for choice in (None, ("triton", {})):
        with pytest.raises(ValueError, match=r"scale is .* wanted a finite number above 0"):
            calls.attention(q, q, q, False, scale, choice)
