"""Tuning a model's calls: what is heard of a run, how arguments cross to another process, and that its rows decide."""

import json

import pytest
import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.fuse.spec import Unspoken, arguments_of, spelled
from tilewright.fuse.tuner import task_of
from tilewright.fuse.tuning import calls_of, choices, tune
from tilewright.hw.device import device_named
from tilewright.op import Inputs


def model(x: Tensor) -> Tensor:
    w = torch.ones(32, 16)
    x = ops.linear(ops.linear(x, w, None, "relu"), w.t().contiguous())
    return ops.rms_norm(ops.linear(x, w, None, "relu"), torch.ones(32))


def test_a_run_is_heard_once_a_problem() -> None:
    with torch.inference_mode():
        found = [(called.op.name, called.count) for called in calls_of(lambda: model(torch.ones(4, 16)))]
    assert found == [("linear", 2), ("linear", 1), ("rms_norm", 1)]


def test_choices_name_what_runs() -> None:
    rows = choices(lambda: model(torch.ones(4, 16)))
    assert [(row["op"], row["impl"], row["count"]) for row in rows] == [
        ("linear", "reference", 2), ("linear", "reference", 1), ("rms_norm", "reference", 1),
    ]  # fmt: skip
    json.dumps(rows)


def test_nothing_is_tuned_on_a_cpu() -> None:
    assert tune(lambda: model(torch.ones(4, 16))) == []


def test_arguments_cross_as_shapes() -> None:
    x = torch.ones(4, 6, dtype=torch.float16).t()
    args = (x, torch.ones(3, dtype=torch.int8).expand(2, 3), None, 1.5, "relu", [1, 2], torch.bfloat16, True)
    made = arguments_of(spelled(args), Inputs("cpu", 1))
    assert spelled(made) == spelled(args)
    assert made[0].shape == x.shape
    assert made[0].stride() == x.stride()
    assert made[0].dtype == torch.float16
    assert made[0].std() > 0.1
    assert made[1].stride() == (0, 1)
    assert made[2:] == args[2:]


@pytest.mark.parametrize(
    ("value", "words"), [(torch.ones(3, dtype=torch.int64), "int64"), (nn.Linear(1, 1), "the type Linear")]
)
def test_what_cannot_be_drawn_is_said(value: object, words: str) -> None:
    with pytest.raises(Unspoken, match=words):
        spelled([value])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}', "JSON list"),
        ('[{"dtype": "load"}]', "'load' is not a dtype"),
        ('[{"shape": [99999, 999999], "strides": [999999, 1], "dtype": "float32"}]', "at most"),
    ],
)
def test_foreign_arguments_are_checked(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arguments_of(text, Inputs("meta"))


def test_a_task_is_the_problem_that_was_called() -> None:
    [called] = calls_of(lambda: ops.linear(torch.ones(4, 64, dtype=torch.float16), torch.ones(32, 64, dtype=torch.float16)))
    wanted = {"op": "linear", "problem": called.text, "arguments": spelled(called.args)}
    task = task_of(wanted, device_named("h100"))
    assert "vendor" in task.impls
    with pytest.raises(ValueError, match="another problem"):
        task_of({**wanted, "problem": "{}"}, device_named("h100"))
