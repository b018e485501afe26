"""Which products of one row start early: those whose weights are constants, behind a launch that lets them."""

import torch
from torch import Tensor, nn

import tilewright
from tilewright.fuse import calls
from tilewright.fuse.early import mark

SKINNY, EARLY = ("skinny", {"PDL": False}), ("gemv", {"PDL": True})


class Heads(nn.Module):
    """Four products: behind a norm, behind a product, behind an operator of torch, and with a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.randn(8, 8))
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(self.norm(x)))
        return nn.functional.linear(self.third(y.sort(-1).values), self.scale * y.sum())


def test_products_behind_what_lets_them_start() -> None:
    torch.manual_seed(0)
    model, x = Heads().eval(), torch.randn(1, 16)
    done = tilewright.optimize(model, x, "fp32", report=False, compiled=False)
    products = [node for node in done.fused.graph.nodes if node.target is calls.linear]
    assert len(products) == 4
    assert mark(done.fused.graph, dict.fromkeys(products, SKINNY), lambda node: EARLY) == 2
    assert [node.args[6:] for node in products] == [(EARLY,), (EARLY,), (), ()]
    done.fused.graph.lint()


def test_a_product_behind_one_of_another_kind_waits() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).eval(), torch.randn(1, 16)
    graph = tilewright.optimize(model, x, "fp32", report=False, compiled=False).fused.graph
    _, second = (node for node in graph.nodes if node.target is calls.linear)
    asked = []
    assert mark(graph, {second: SKINNY}, asked.append) == 0
    assert not asked


def test_one_that_is_no_faster_stays() -> None:
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 8)).eval(), torch.randn(1, 16)
    graph = tilewright.optimize(model, x, "fp32", report=False, compiled=False).fused.graph
    first, second = (node for node in graph.nodes if node.target is calls.linear)
    assert mark(graph, {first: ("vendor", {}), second: SKINNY}, lambda node: None) == 0
    asked = []
    mark(graph, {first: ("vendor", {}), second: SKINNY}, asked.append)
    assert asked == [first], "behind the library nothing starts early"
