"""Conformance finds what is planted: implementations that write, return or compute what they must not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright.hw.roofline import Cost
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config


def _reference(x: Tensor, total: Tensor) -> Tensor:
    total += 1
    return x * 2


OP = Op(
    name="test_scale_and_count",
    reference=_reference,
    fake=lambda x, total: torch.empty_like(x),
    mutates=("total",),
    problem=lambda x, total: x.shape[0],
    cost=lambda x, total: Cost(flops=x.numel(), bytes=2 * x.nbytes),
    examples=(Example("small", lambda inputs: (inputs.randn(8), inputs.randn(3))),),
    impls=(),
)


def right(config: Config, x: Tensor, total: Tensor) -> Tensor:
    total += 1
    return torch.empty_like(x).copy_(x * 2)


def writes_its_input(config: Config, x: Tensor, total: Tensor) -> Tensor:
    y = right(config, x, total)
    x[3] = 0
    return y


def returns_its_input(config: Config, x: Tensor, total: Tensor) -> Tensor:
    right(config, x, total)
    return x.view(2, 4)[0]


def returns_what_it_writes(config: Config, x: Tensor, total: Tensor) -> Tensor:
    right(config, x, total)
    return total


def forgets_an_element(config: Config, x: Tensor, total: Tensor) -> Tensor:
    y = right(config, x, total)
    return torch.empty_like(y).copy_(y)[:-1]


def forgets_to_count(config: Config, x: Tensor, total: Tensor) -> Tensor:
    return right(config, x, total.clone())


def leaves_one_unwritten(config: Config, x: Tensor, total: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:-1] = right(config, x, total)[:-1]
    return y


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (right, None),
        (writes_its_input, "argument 0 is written, and not declared so"),
        (returns_its_input, "output 0 is the memory of argument 0"),
        (returns_what_it_writes, "output 0 is the memory of argument 1"),
        (forgets_an_element, r"output 0: shape \(7,\), the definition has \(8,\)"),
        (forgets_to_count, "output 1: largest error"),
        (leaves_one_unwritten, "output 0: largest error inf"),
    ],
)
def test_planted(launch: Callable[..., Any], words: str | None) -> None:
    args = OP.examples[0].make(Inputs())
    impl = Impl(name="planted", launch=launch)
    if words is None:
        conformance.check(OP, impl, {}, args)
        return
    with pytest.raises(AssertionError, match=words):
        conformance.check(OP, impl, {}, args)
