"""Batch norms that are launches of their own, and concatenations that grow: numbers and launches, as in test_taken.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuse.test_taken import IMAGE, Case, image, is_taken_and_right


def dense_block(m: Any, x: Tensor) -> Tensor:
    a = m.c1(x)
    b = m.c2(F.relu(m.n1(torch.cat((x, a), 1))))
    c = m.c3(F.relu(m.n2(torch.cat((x, a, b), 1))))
    return m.n3(torch.cat((x, a, b, c), 1)).mean((2, 3))


def larger_first(m: Any, x: Tensor) -> Tensor:
    a, b = m.c1(x), m.c1(m.n0(x))
    return m.n2(torch.cat((x, a, b), 1)).mean() * m.n1(torch.cat((x, a), 1))


def read_twice(m: Any, x: Tensor) -> Tensor:
    a = m.c1(x)
    first = torch.cat((x, a), 1)
    return m.n2(torch.cat((x, a, m.c2(m.n1(first))), 1)) + first.mean()


DENSE: dict[str, Tensor | nn.Module] = {
    **{f"c{i + 1}": nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3)},
    **{f"n{i}": nn.BatchNorm2d(8 + 4 * i) for i in range(4)},
}
CASES = (
    Case(
        "transposed in groups, norm",
        lambda m, x: m.norm(m.up(x)),
        IMAGE,
        ("conv_transpose", "batch_norm"),
        {"up": nn.ConvTranspose2d(8, 6, 2, 2, groups=2), "norm": nn.BatchNorm2d(6)},
    ),
    Case("batch norm before a convolution", lambda m, x: m.c1(F.relu(m.n0(x))), IMAGE, ("batch_norm", "conv"), DENSE),
    Case(
        "batch norm of a value that is read twice",
        lambda m, x: (lambda y: m.norm(y) * y)(m.conv(x)),
        IMAGE,
        ("conv", "batch_norm"),
        {"norm": nn.BatchNorm2d(12), "conv": nn.Conv2d(8, 12, 3)},
    ),
    Case("batch norm of signals", lambda m, x: m.norm(x), image(2, 8, 11), ("batch_norm",), {"norm": nn.BatchNorm1d(8)}),
    Case("batch norm of rows", lambda m, x: F.gelu(m.norm(x)), image(5, 8), ("batch_norm",), {"norm": nn.BatchNorm1d(8)}),
    Case(
        "batch norm without parameters",
        lambda m, x: m.norm(x),
        IMAGE,
        ("batch_norm",),
        {"norm": nn.BatchNorm2d(8, affine=False)},
    ),
    Case("growing concatenations", dense_block, IMAGE, ("conv", "append, batch_norm") * 3 + ("mean",), DENSE),
    Case(
        "the larger concatenation first",
        larger_first,
        IMAGE,
        ("conv", "batch_norm", "conv", "batch_norm", "batch_norm"),
        DENSE,
    ),
    Case(
        "a growing concatenation that is read twice",
        read_twice,
        IMAGE,
        ("conv", "batch_norm", "conv", "batch_norm"),
        DENSE,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_taken_and_right(case: Case, precision: str) -> None:
    is_taken_and_right(case, precision)
