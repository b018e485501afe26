"""torch.compile takes a layer's forward and backward pass as one graph each, and the gradients are the eager ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.conformance import quiet_compile
from tilewright import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.arange(4, device=DEVICE)


def _added(x: Tensor, w: Tensor) -> Tensor:
    y, total = ops.add_rms_norm(x, 2 * x, w)
    return (y * total).sum()


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_rms_norm": _added,
    "batch_norm": lambda x, w: ops.batch_norm(x, None, None, w, training=True).square().sum(),
    "cross_entropy": lambda x, w: ops.cross_entropy(x * w, IDS),
    "layer_norm": lambda x, w: ops.layer_norm(x, w, 2 * w).square().sum(),
    "log_softmax": lambda x, w: ops.log_softmax(x * w, 0).square().sum(),
    "max": lambda x, w: ops.max(x * w, 0)[0].square().sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph(name: str) -> None:
    x, w = (torch.randn(n, device=DEVICE, requires_grad=True) for n in ((4, 16), (16,)))
    want = torch.autograd.grad(CALLS[name](x, w), (x, w))
    with quiet_compile():
        got = torch.autograd.grad(torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")(x, w), (x, w))
    torch.testing.assert_close(got, want)
