"""Modules that make float32 themselves, cast to 16 bits: each layer has operands of one type, and the answers are right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tilewright.fuse.trace import trace


class _Net(nn.Module):
    def __init__(self, function: Callable[["_Net", Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.conv, self.bn, self.up = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ConvTranspose2d(3, 8, 2)
        self.a, self.b, self.ln, self.gn = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _attended(m: _Net, x: Tensor) -> Tensor:
    q = m.a(x)[:, None]
    bias = torch.arange(x.shape[1], device=x.device).to(torch.float32).neg()
    return F.scaled_dot_product_attention(q, m.b(x)[:, None], q, bias[None, :] - bias[:, None])


PROGRAMS: dict[str, tuple[Callable[[_Net, Tensor], Tensor], Callable[[], Tensor]]] = {
    "bytes": (lambda m, x: m.bn(m.conv((x.to(torch.float32) - 127.5) / 64)).relu().mean((2, 3)), lambda: _bytes(2, 3, 9, 9)),
    "bytes, transposed": (lambda m, x: m.up(x.float() / 128), lambda: _bytes(2, 3, 5, 5)),
    "positions": (
        lambda m, x: m.b(F.gelu(m.a((torch.arange(8, device=x.device).float() * 0.1).sin() + x))),
        lambda: torch.randn(3, 8),
    ),
    "twice": (lambda m, x: m.b(m.a(x.float()).float() * 0.5), lambda: torch.randn(3, 8)),
    "a norm": (lambda m, x: m.b(m.ln(x.float() * 0.5)), lambda: torch.randn(3, 8)),
    "a norm of groups": (lambda m, x: m.gn(x.float() / 64), lambda: _bytes(2, 8, 4, 4)),
    "a mask of scores": (_attended, lambda: torch.randn(2, 5, 8)),
    "a product": (lambda m, x: m.a(x).float() @ m.b(x).mT, lambda: torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    function, given = PROGRAMS[name]
    model, x = _Net(function).eval(), given()
    with torch.no_grad():
        right = model(x)
    fast = tilewright.optimize(model, x, "fp16", compiled=False, report=False)
    other = x.flip(0)
    with torch.no_grad():
        for got, want in ((fast(x), right), (fast(other), model(other))):
            assert float((got - want).norm() / want.norm()) < 4e-3


def test_one_type_is_left_alone() -> None:
    """Weights may be wider than what a norm reads, and a float32 model has no casts."""
    model = _Net(lambda m, x: m.ln(m.a(x))).eval()
    for dtype in (torch.float32, torch.bfloat16):
        traced = trace(model.to(dtype), (torch.randn(2, 8, dtype=dtype),))
        assert [n.target for n in traced.graph.nodes if n.op == "call_function"].count(torch.ops.aten.to.dtype) == 0
    wide = _Net(lambda m, x: m.ln(x)).eval()
    assert "aten.to.dtype" not in str(trace(wide, (torch.randn(2, 8, dtype=torch.bfloat16),)).graph)
