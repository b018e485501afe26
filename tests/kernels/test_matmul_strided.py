"""Matrix products of operands that are dense in neither direction, or expanded."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright import ops
from tilewright.op import Inputs

WHERE = "cuda" if torch.cuda.is_available() else "cpu"


class Operands(TorchDispatchMode):
    """The operands with which products are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) == "tilewright.linear":
            self.seen.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


STRIDED = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: torch.stack([t, -t], -1).flatten(-2)[..., ::2],
    "every other row and number": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "one row": lambda t: t[..., :1, :].expand_as(t),
    "one column": lambda t: t[..., :1].expand_as(t),
}


@pytest.mark.parametrize("of_weight", STRIDED)
@pytest.mark.parametrize("of_x", STRIDED)
@pytest.mark.parametrize("call", ["linear", "matmul", "batched", "gradient"])
def test_operands_that_lie_anyhow(call: str, of_x: str, of_weight: str) -> None:
    """Kernels are given one stride of an operand, so what is dense in neither direction, or stands in one place, is copied."""
    lead = (2,) if call == "batched" else ()
    inputs = Inputs(WHERE)
    x = STRIDED[of_x](inputs.randn(*lead, 6, 16, dtype=torch.bfloat16))
    weight = STRIDED[of_weight](inputs.randn(*lead, 8, 16, dtype=torch.bfloat16))
    with Operands() as operands:
        if call == "linear":
            y = ops.linear(x, weight, activation="silu")
        elif call == "gradient":
            y = ops.linear(x.detach().requires_grad_(), weight.detach().requires_grad_(), activation="silu")
            y.backward(torch.ones_like(y))
            assert len(operands.seen) == 3, "the product, and both gradients"
        else:
            y = ops.matmul(x, weight.mT, activation="silu")
    assert operands.seen
    for operand in (one for pair in operands.seen for one in pair):
        down, along = operand.stride()[-2:]
        assert 1 in (down, along)
        assert 0 not in (down, along)
    want = torch.nn.functional.silu(x.double() @ weight.double().mT)
    torch.testing.assert_close(y.double(), want, atol=0.05, rtol=0.02)
