"""`optimize` of what users really have: models that are no graph, write in place, take integers, share weights, or are wrong.

Each either computes what the float model does, as far optimised as it can be, or says what is wrong, where, and what to do.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilewright.fuse import Partial, Untraceable, optimize
from tilewright.fuse.check import compare_outputs


class Model(nn.Module):
    """Two linears, a table, a convolution and a norm, and a function of them for `forward`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run, self.a, self.b = run, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.conv, self.norm = nn.Embedding(11, 8), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def in_place_on_views(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 0] = 1.0
    y[:, 2:].mul_(2)
    return m.b(y)


def in_place_through_an_alias(m: Model, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y
    z.relu_()
    return y + m.b(z)


def tied(m: Model, ids: Tensor) -> Tensor:
    return F.linear(m.a(m.table(ids)).relu(), m.table.weight)


def one_layer_thrice(m: Model, x: Tensor) -> Tensor:
    for _ in range(3):
        x = m.a(x).relu()
    return x


def integers(m: Model, ids: Tensor, mask: Tensor) -> Any:
    return m.a(m.table(ids) * mask.unsqueeze(-1)), ids + 1, mask.sum(), mask.any()


def its_input_too(m: Model, x: Tensor) -> Any:
    return x, m.a(x), [x]


def of_a_dict(m: Model, given: dict[str, Tensor]) -> Any:
    return {"out": m.a(given["x"]) + given["y"]}


def numbers(m: Model, x: Tensor, nothing: None, scale: float, flag: bool) -> Tensor:
    return m.a(x) * scale if flag else x


def divided_by_zero(m: Model, x: Tensor) -> Tensor:
    return m.a(x) / 0.0


def complex_numbers(m: Model, x: Tensor) -> Tensor:
    return torch.fft.rfft(m.a(x))


def norm_of_this_batch(m: Model, x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(m.conv(x), None, None, training=True))


def of_a_scalar(m: Model, x: Tensor) -> Tensor:
    return m.a(x).sum()


def through_numpy(m: Model, x: Tensor) -> Tensor:
    return m.a(torch.from_numpy(np.tanh(x.numpy())))


def rows_chosen_by_value(m: Model, x: Tensor) -> Tensor:
    return m.a(x[x[:, 0] > -1e9])


def counts_its_calls(m: Model, x: Tensor) -> Tensor:
    m.count.add_(1)
    return m.a(x) * m.count


class Case(NamedTuple):
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    line: str = ""
    """Of a model that is no graph: what the report says of its line."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


IDS = torch.tensor([[3, 1, 10], [0, 7, 7]])
CASES = (
    Case(in_place_on_views, (normal(3, 8),)),
    Case(in_place_through_an_alias, (normal(3, 8),)),
    Case(tied, (IDS,)),
    Case(tied, (IDS.int(),)),
    Case(one_layer_thrice, (normal(3, 8),)),
    Case(one_layer_thrice, (normal(8, 3).t(),)),
    Case(one_layer_thrice, (normal(1, 8).expand(4, 8),)),
    Case(one_layer_thrice, (normal(0, 8),)),
    Case(integers, (IDS, torch.tensor([[True, False, True]] * 2))),
    Case(its_input_too, (normal(3, 8),)),
    Case(of_a_dict, ({"x": normal(3, 8), "y": normal(8)},)),
    Case(numbers, (normal(3, 8), None, 3.0, True)),
    Case(divided_by_zero, (normal(3, 8),)),
    Case(complex_numbers, (normal(3, 8),)),
    Case(norm_of_this_batch, (normal(2, 3, 6, 6),)),
    Case(of_a_scalar, (normal(3, 8),)),
    Case(through_numpy, (normal(3, 8),), "in through_numpy: return m.a(torch.from_numpy(np.tanh(x.numpy())))"),
    Case(rows_chosen_by_value, (normal(3, 8),), "depends on values, but a graph needs known sizes"),
    Case(counts_its_calls, (normal(3, 8),), "keeps state between calls (in count)"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_the_numbers_are_those_of_the_model(case: Case) -> None:
    """And neither the model nor the inputs are changed, nor the mode."""
    torch.manual_seed(0)
    model = Model(case.run).train()
    before, given = copy.deepcopy(model.state_dict()), copy.deepcopy(case.inputs)
    done = optimize(model, case.inputs, "fp32", report=False, compiled=False)
    assert model.training
    for _ in range(2):
        got = done(*case.inputs)
        if case.run is counts_its_calls:
            break
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(*copy.deepcopy(case.inputs))
    assert all(d.rms <= 1e-5 for d in compare_outputs(want, got)), f"{compare_outputs(want, got)}\n{done.report}"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for kept, now in zip(pytree.tree_leaves(given), pytree.tree_leaves(case.inputs), strict=True):
        assert kept == now if not isinstance(kept, Tensor) else torch.equal(kept, now)
    assert isinstance(done, Partial) == bool(case.line)
    assert case.line in done.report.text()


def draws(m: Model, x: Tensor) -> Tensor:
    return m.a(x * float(np.random.default_rng().random()))


def deep_inside(m: Model, x: Tensor) -> Tensor:
    return x if float(x.sum()) > 1e9 else x * 2


@pytest.mark.parametrize(
    ("run", "inputs", "options", "error", "words"),
    [
        (
            draws,
            (normal(3, 8),),
            {},
            ValueError,
            "in every call, so its outputs cannot be compared: it draws random numbers",
        ),
        (
            deep_inside,
            (normal(3, 8),),
            {},
            Untraceable,
            r"test_bad_input.py:\d+, in deep_inside.*None of its children can be optimised",
        ),
        (
            one_layer_thrice,
            (normal(3, 9),),
            {},
            ValueError,
            "Model itself fails on the example inputs: mat1 and mat2 .*in one_layer",
        ),
        (of_a_scalar, (normal(3, 8).double(),), {}, ValueError, "Model itself fails on the example inputs: mat1"),
        (one_layer_thrice, 3.0, {}, ValueError, "example_inputs is float; wanted one tensor, a tuple"),
        (
            one_layer_thrice,
            (normal(3, 8),),
            {"max_shapes": 0},
            ValueError,
            "max_shapes is 0; wanted dynamic to be True, False, or a dict",
        ),
        (one_layer_thrice, (normal(3, 8),), {"dynamic": 1}, ValueError, "dynamic is 1 and max_shapes is 8; wanted"),
        (one_layer_thrice, (), {}, ValueError, "the example inputs contain no tensor; wanted at least one"),
        (one_layer_thrice, (normal(3, 8),), {"precision": "int3"}, ValueError, "precision must be one of .*int8; got 'int3'"),
        (one_layer_thrice, (normal(3, 8),), {"tolerance": -0.5}, ValueError, "tolerance is -0.5; wanted a finite number"),
        (one_layer_thrice, (normal(3, 8).to("meta"),), {}, ValueError, "model and inputs must be on one device; got cpu, meta"),
    ],
)
def test_refused(
    run: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    torch.manual_seed(0)
    with pytest.raises(error, match=words):
        optimize(Model(run), inputs, **{"precision": "fp32", "report": False, "compiled": False, **options})


@pytest.mark.parametrize(
    ("model", "x", "precision", "words"),
    [
        (
            torch.relu,
            normal(3, 8),
            "fp32",
            "wanted a torch.nn.Module with Python code of its own; got builtin_function_or_method",
        ),
        (torch.jit.script(nn.Linear(8, 8)), normal(3, 8), "fp32", "got RecursiveScriptModule"),
        (nn.Sequential(nn.LazyLinear(8)), normal(3, 8), "fp32", "0.weight has no shape yet"),
        (
            Model(lambda m, x: torch.cdist(x, x)),
            normal(3, 8),
            "fp16",
            "cannot run the model in fp16 on cpu: .*cdist.*; choose another$",
        ),
    ],
)
def test_models_that_are_none(model: Any, x: Tensor, precision: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimize(model, x, precision, report=False, compiled=False)


def test_what_inductor_cannot_pack_is_compiled_without() -> None:
    """torch 2.13 fails on a convolution of single pixels in 16 bits, which is a product; the report says that it did."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 2, 1), normal(1, 4, 8, 8)
    done = optimize(model, x, "bf16", report=False)
    with torch.no_grad():
        assert compare_outputs(model(x), done(x))[0].rms < 1e-2
    compiled = done.report.facts["compiled"]
    assert compiled == "by Inductor, weights frozen" or "without packed weights, because packing them fails: " in compiled


def test_training_mode_comes_back_to_the_model() -> None:
    """An optimised model is for inference whatever its mode is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    done = optimize(model, normal(3, 4), "fp32", report=False, compiled=False)
    assert model.training
    done.train()
    assert torch.equal(done(normal(3, 4)), done(normal(3, 4)))


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_model_that_cannot_be_copied() -> None:
    with pytest.raises(
        ValueError, match=r"Locked cannot be copied: .*lock.*no module may have an attribute that cannot be copied"
    ):
        optimize(Locked(), torch.randn(2, 4), report=False, compiled=False)
