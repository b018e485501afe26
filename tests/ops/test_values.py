"""In the invariant scope results with gradients have the bits of results without, where a fused kernel rounds less often."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.op import invariant
from tilewright.ops.values import invariant_scope, valued

torch.manual_seed(0)
X, RESIDUAL = torch.randn(5, 32, dtype=torch.bfloat16), torch.randn(5, 24, dtype=torch.bfloat16)
WEIGHT, WIDE = torch.randn(24, 32, dtype=torch.bfloat16), torch.randn(48, 32, dtype=torch.bfloat16)
EXPERTS = torch.randn(3, 48, 32, dtype=torch.bfloat16)
GAIN, BIAS = torch.randn(32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)


def _grouped(x: Tensor) -> Tensor:
    order = ops.sort_by_expert(torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]]).int(), 3)
    return ops.grouped_linear(x, EXPERTS, order, activation="silu_mul", gather=True)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "gated": lambda x: ops.linear(x, WIDE, activation="silu_mul"),
    "activation": lambda x: ops.linear(x, WEIGHT, activation="gelu"),
    "residual": lambda x: ops.linear(x, WEIGHT, residual=RESIDUAL),
    "grouped": _grouped,
    "layer norm": lambda x: ops.layer_norm(x, GAIN, BIAS),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_and_the_gradients_of_training(name: str) -> None:
    call = CASES[name]
    leaf = X.clone().requires_grad_()
    expected = torch.autograd.grad(call(leaf).float().square().sum(), leaf)[0].float()
    with invariant():
        with torch.no_grad():
            served = call(X)
        learnt = call(leaf)
        (gradient,) = torch.autograd.grad(learnt.float().square().sum(), leaf)
    assert torch.equal(learnt, served)
    assert float((gradient.float() - expected).norm()) <= 8e-3 * float(expected.norm())


def test_a_value_takes_the_gradient_of_its_twin() -> None:
    y = torch.tensor([1.0, 2.0], requires_grad=True)
    value = valued(3 * y, torch.tensor([3.5, 6.5]))
    assert value.tolist() == [3.5, 6.5]
    assert torch.autograd.grad(value.sum(), y)[0].tolist() == [3.0, 3.0]


def test_dynamo_reads_the_scope_once_a_trace() -> None:
    """The function carries the mark that torch's decorator would set, without the import that the decorator costs."""

    def marked() -> bool:
        return True

    torch.compiler.assume_constant_result(marked)
    assert vars(marked)
    assert vars(invariant_scope).items() >= vars(marked).items()
