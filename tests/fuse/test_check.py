"""Whether an optimised model is compared rightly, and the layer named that is to blame: planted errors, known answers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.fuse.check import FLOAT_NODE, Inaccurate, compare_outputs, layer_errors, verify

GRID = torch.linspace(-2, 2, 101)


class Net(nn.Module):
    """Three layers, and outputs in a dict with an integer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Any]:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x)) + shift
        y = self.head(x)
        return {"logits": y, "pair": (x, y.argmax(-1)), "n": 3}


PAIRED = ("linear", "relu", "linear_1", "relu_1", "add", "linear_2")


@pytest.fixture(scope="module")
def graph() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    exported = torch.export.export(Net().eval(), inputs())
    return exported.module()  # pyright: ignore[reportReturnType]


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=generator), torch.randn(32, generator=generator)


def fused(graph: torch.fx.GraphModule, at: str | None = None, damage: Callable[[Tensor], Tensor] | None = None) -> Any:
    """A copy whose nodes say what they compute, and the one named `at` gives something else."""
    from copy import deepcopy

    copy = deepcopy(graph)
    for node in list(copy.graph.nodes):
        if node.name in PAIRED:
            node.meta[FLOAT_NODE] = node.name
        if node.name == at:
            with copy.graph.inserting_after(node):
                broken = copy.graph.call_function(damage, (node,))
            node.replace_all_uses_with(broken, delete_user_cb=lambda user, new=broken: user is not new)
            broken.meta[FLOAT_NODE] = node.meta.pop(FLOAT_NODE)
    copy.recompile()
    return copy


def noise(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t + scale * t.square().mean().sqrt() * torch.randn(t.shape, generator=torch.Generator().manual_seed(5))


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    def one(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[7] = value
        return t

    return one


def test_the_same_numbers_pass(graph: torch.fx.GraphModule) -> None:
    check = verify(graph, fused(graph), inputs(), precision="fp32")
    assert [d.name for d in check.outputs] == ["['logits']", "['pair'][0]", "['pair'][1]", "['n']"]
    assert all(d.rms == d.largest == 0.0 for d in check.outputs)
    assert "RMS error" in str(check)
    assert check.to_json()["precision"] == "fp32"


@pytest.mark.parametrize(
    ("at", "damage", "layer", "words"),
    [
        ("linear_1", noise(0.3), "second", "own error"),
        ("linear", noise(0.3), "first", "own error"),
        ("linear_2", noise(0.3), "head", "own error"),
        ("relu_1", spoiled(math.inf), "relu_1", "infinite"),
        ("linear", spoiled(math.nan), "first", "NaN"),
        ("linear_1", lambda t: t[:, :16].repeat(1, 2), "second", "own error"),
    ],
)
def test_the_guilty_layer_is_named(
    graph: torch.fx.GraphModule, at: str, damage: Callable[[Tensor], Tensor], layer: str, words: str
) -> None:
    with pytest.raises(Inaccurate, match=rf"guilty layer is {layer} \(test_check\.py:\d+\).*{words}") as caught:
        verify(graph, fused(graph, at, damage), inputs(), precision="fp16")
    assert isinstance(caught.value, ValueError)
    guilty = caught.value.check.guilty
    assert guilty is not None
    assert guilty.layer == layer
    others = [found for found in caught.value.check.layers if found.layer != layer]
    assert all(found.own == 0.0 for found in others), "an error is seen where it arises, not where it arrives"


def test_errors_that_add_up_have_no_guilty_layer(graph: torch.fx.GraphModule) -> None:
    """Each layer is in tolerance, all together are not."""
    copy = graph
    for at in ("linear", "linear_1", "linear_2"):
        copy = fused(copy, at, lambda t: t * 1.01)
    with pytest.raises(Inaccurate, match="No single layer is guilty: the errors of") as caught:
        verify(graph, copy, inputs(), precision="fp32", tolerance=0.0105)
    own = [found.own for found in caught.value.check.layers if found.own]
    assert own == pytest.approx([0.01, 0.01, 0.01], rel=1e-3)


def test_twice_the_error_of_torchs_own_model_is_allowed(graph: torch.fx.GraphModule) -> None:
    """Where a precision is not enough for a model, in whatever hands."""
    off = fused(graph, "linear_2", lambda t: t * 1.03)
    right = graph(*inputs())

    def native(scale: float) -> Any:
        return lambda *_: {**right, "logits": right["logits"] * scale}

    check = verify(graph, off, inputs(), precision="fp16", native=native(1.02))
    assert check.tolerance.rms == pytest.approx(0.04, rel=1e-3)
    assert "torch's own model" in str(check)
    for own in (1.01, math.nan):
        with pytest.raises(Inaccurate, match="guilty layer is head"):
            verify(graph, off, inputs(), precision="fp16", native=native(own))


def test_torchs_own_error_is_an_excuse_up_to_a_ceiling(graph: torch.fx.GraphModule) -> None:
    """An output that torch's own model has lost as well is lost, and the message says whose fault that is."""
    off, right = fused(graph, "linear_2", lambda t: t * 1.15), graph(*inputs())
    own = {**right, "logits": right["logits"] * 1.14}
    with pytest.raises(
        Inaccurate, match=r"wanted at most RMS 1\.00e-01.*torch's own model in fp16 gets this output wrong as well.*'fp32'"
    ):
        verify(graph, off, inputs(), precision="fp16", native=lambda *_: own)
    assert not verify(graph, off, inputs(), precision="fp16", tolerance=0.2).failed


def test_a_random_model_is_said_to_be_one(graph: torch.fx.GraphModule) -> None:
    noisy = fused(graph, "linear_1", lambda t: t + torch.randn_like(t))
    with pytest.raises(ValueError, match="it draws random numbers"):
        verify(noisy, noisy, inputs(), precision="fp16")


def test_rounding_to_float16_is_measured(graph: torch.fx.GraphModule) -> None:
    """Own errors of layers that round once are half a unit of float16, and the check passes."""
    half = fused(graph, "linear_1", lambda t: t.half().float())
    check = verify(graph, half, inputs(), precision="fp16")
    own = {found.layer: found.own for found in layer_errors(graph, half, inputs())}
    assert 5e-5 < own["second"] < 5e-4
    assert own["first"] == own["head"] == 0.0
    assert 0.0 < check.worst.rms < 1e-3


@pytest.mark.parametrize(
    ("want", "got", "rms", "words"),
    [
        (GRID, GRID, 0.0, ""),
        (GRID, GRID * 1.01, 0.01, ""),
        (GRID, GRID.half(), None, ""),
        (GRID, GRID[:-1], math.inf, "shape"),
        (torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5]), 0.25, "25.00% of the values differ"),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), math.inf, "got torch.float32, wanted torch.int64"),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), 0.0, ""),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.inf]), 0.0, ""),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), math.inf, "missing or different"),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf, "missing"),
        (torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0]), math.inf, "1 of 2 values are NaN"),
        (torch.zeros(0), torch.zeros(0), 0.0, ""),
        (GRID * 1j, GRID * 1.01j, 0.01, ""),
        (3, 3, 0.0, ""),
        (3, 4, math.inf, "got 4, wanted 3"),
        (2.0, 2.002, 1e-3, ""),
        (2.0, 2, math.inf, "got 2, wanted 2.0"),
        (True, False, math.inf, "got False"),
        (None, None, 0.0, ""),
        (GRID, None, math.inf, "got None"),
    ],
)
def test_one_leaf(want: Any, got: Any, rms: float | None, words: str) -> None:
    (found,) = compare_outputs(want, got)
    if rms is None:
        assert 0.0 < found.rms < 5e-4
    else:
        assert found.rms == pytest.approx(rms, rel=1e-3)
    assert words in found.words
    assert bool(found.words) == bool(words)


class Counted(nn.Module):
    """A score, and which of 1000 places each row is in."""

    def forward(self, x: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1.0, (x + moved).argmax(1)


def test_integers_are_all_the_same() -> None:
    """One of 1000 is 1e-3, which an error of a float may be; of integers torch's own share counts, and the user's number."""
    x = torch.eye(1000)[:, :500].repeat(1, 2) + torch.eye(1000)
    right, moved = torch.zeros(1000, 1000), torch.zeros(1000, 1000)
    moved[3, 7] = 9.0
    model = torch.fx.symbolic_trace(Counted())
    wrong = torch.fx.symbolic_trace(Counted())
    run: Any = lambda x, _: wrong(x, moved)  # noqa: E731
    with pytest.raises(Inaccurate, match=r"0.10% of the values differ; wanted at most 0.00% of the values in fp16"):
        verify(model, wrong, (x, right), precision="fp16", run=run)
    assert verify(model, wrong, (x, right), precision="fp16", run=run, tolerance=1e-3).outputs[1].discrete
    check = verify(model, wrong, (x, right), precision="fp16", run=run, native=run)
    assert check.tolerance.apart == pytest.approx(2e-3)
    with pytest.raises(Inaccurate):  # another output's error is no excuse
        verify(model, wrong, (x, right), precision="fp16", run=run, native=lambda x, _: (x * 1.02, model(x, right)[1]))


def test_another_structure_is_an_infinite_error() -> None:
    (found,) = compare_outputs((GRID, GRID), [GRID, GRID])
    assert found.rms == math.inf
    assert "structure" in found.words


def test_one_wrong_value_of_a_million_is_found(graph: torch.fx.GraphModule) -> None:
    """The RMS error hides it, the largest does not."""
    want = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(2))
    (found,) = compare_outputs(want, want.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(5.0)))
    assert found.rms < 1e-2 < 0.5 < found.largest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp12"}, "precision is 'fp12'; wanted one of fp32, fp16, bf16, int8"),
        ({"precision": "fp16", "tolerance": -1.0}, "tolerance is -1.0"),
        ({"precision": "fp16", "tolerance": math.nan}, "tolerance is nan"),
    ],
)
def test_refused(graph: torch.fx.GraphModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(graph, fused(graph), inputs(), **options)


def test_a_pair_that_does_not_exist(graph: torch.fx.GraphModule) -> None:
    copy = fused(graph)
    next(n for n in copy.graph.nodes if n.name == "relu").meta[FLOAT_NODE] = "gone"
    with pytest.raises(ValueError, match="relu is recorded as computing 'gone'"):
        layer_errors(graph, copy, inputs())
