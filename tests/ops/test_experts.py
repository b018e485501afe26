"""A mixture of experts by its public operators: values and gradients against plain torch in float64, and what they refuse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import nn, ops
from tilewright.kernels.gemm.grouped.problem import GROUPED_ACTIVATIONS, grouped_activated

T, E, X, K = 11, 6, 5, 2


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPERTS = torch.tensor([[1, 3], [3, 0], [1, 0], [3, 1], [1, 3]] + [[3, 1]] * 6, dtype=torch.int32)  # nobody takes 2 and 4


def plain(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor, weights: Tensor, activation: str) -> Tensor:
    total = []
    for t, chosen in enumerate(EXPERTS.tolist()):
        inner = [grouped_activated(x[t] @ gate_up[e].T + bias[e], activation) for e in chosen]
        total.append(sum(w * (h @ down[e].T) for w, h, e in zip(weights[t], inner, chosen, strict=True)))
    return torch.stack(total)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("activation", GROUPED_ACTIVATIONS)
def test_values_and_gradients(activation: str, gather: bool) -> None:
    width = 4 if GROUPED_ACTIVATIONS[activation][1] else 8
    given = (randn(T, E, seed=1), randn(X, 8, E, seed=2), randn(X, 8, seed=3), randn(X, E, width, seed=4))
    given = (*given, torch.rand(T, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64).float())
    results = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in given]
        x, gate_up, bias, down, weights = leaves
        if ours:
            order = ops.sort_by_expert(EXPERTS, X)
            rows = x if gather else ops.permute_tokens(x, order)
            inner = ops.grouped_linear(rows, gate_up, order, bias, activation, gather=gather)
            y = ops.combine_tokens(ops.grouped_linear(inner, down, order), order, weights)
        else:
            y = plain(x, gate_up, bias, down, weights, activation)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, randn(*y.shape, seed=6))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"normalise": True, "scale": 2.5}, {"softmax": False, "normalise": True}], ids=str)
def test_gradients_of_routing(options: dict[str, Any]) -> None:
    """Through the weights alone; torch's own top-k says which experts."""
    logits = randn(T, X, seed=1).float()
    results = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if ours:
            weights, _ = ops.route_experts(leaf, K, **options)
        else:
            scores = leaf.softmax(-1) if options.get("softmax", True) else leaf.sigmoid()
            weights = scores.topk(K, -1).values
            if options.get("normalise"):
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * options.get("scale", 1.0)
        results.append((weights.detach(), torch.autograd.grad(weights, leaf, randn(T, K, seed=2).float())[0]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_masked_layout() -> None:
    x, weight, counts = randn(3, 4, E, seed=1), randn(3, 8, E, seed=2), torch.tensor([4, 0, 2], dtype=torch.int32)
    want = torch.einsum("xme,xne->xmn", x, weight)
    want[1], want[2, 2:] = 0.0, 0.0
    torch.testing.assert_close(ops.masked_grouped_linear(x, weight, counts), want)


def test_a_mixture_learns() -> None:
    """Some steps of plain descent on a layer's own parameters, router included, bring it nearer to another one's."""
    torch.manual_seed(1)
    routing = nn.Routing(method="greedy", experts=4, chosen=2, normalise=True)
    teacher, layer = (nn.MoE(8, 8, shared=4, routing=routing, device="cpu", dtype=torch.float32) for _ in range(2))
    x = randn(64, 8, seed=1).float()
    with torch.no_grad():
        want = teacher(x)
    losses = []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    for _ in range(60):
        loss = F.mse_loss(layer(x), want)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


ORDER = ops.sort_by_expert(EXPERTS, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.route_experts(torch.zeros(2, 4, dtype=torch.float64), 2), "must be [T, X] float32"),
        (lambda: ops.route_experts(torch.zeros(2, 4), 5), "5 experts cannot be chosen"),
        (lambda: ops.route_experts(torch.zeros(2, 4), 1, groups=3), "4 experts cannot be divided into 3 groups"),
        (lambda: ops.route_experts(torch.zeros(2, 4), 1, bias=torch.zeros(4)), "needs softmax=False"),
        (lambda: ops.sort_by_expert(torch.zeros(2, 2), 4), "experts must be [T, K] int32"),
        (lambda: ops.permute_tokens(torch.zeros(3, E), ORDER), "x must be [11, N]"),
        (lambda: ops.combine_tokens(torch.zeros(T, E), ORDER, torch.zeros(T, K)), "rows must be [22, N]"),
        (lambda: ops.combine_tokens(torch.zeros(22, E), ORDER, torch.zeros(T, 3)), "weights must be [11, 2] float32"),
        (lambda: ops.grouped_linear(torch.zeros(T, E), torch.zeros(X, 8, E), ORDER), "a row for each token's expert, [22, in]"),
        (lambda: ops.grouped_linear(torch.zeros(22, E), torch.zeros(X, 8, 7), ORDER), "weight [X, N, K]"),
        (lambda: ops.grouped_linear(torch.zeros(22, E), torch.zeros(3, 8, E), ORDER), "offsets [X + 1], int32 [4]"),
        (lambda: ops.grouped_linear(torch.zeros(22, E), torch.zeros(X, 7, E), ORDER, activation="silu_mul"), "an even N"),
        (lambda: ops.grouped_linear(torch.zeros(22, E), torch.zeros(X, 8, E), ORDER, activation="tanh"), "must be one of"),
        (lambda: ops.grouped_linear(torch.zeros(22, E), torch.zeros(X, 8, E).half(), ORDER), "must have the dtype of x"),
        (lambda: ops.masked_grouped_linear(torch.zeros(3, E), torch.zeros(X, 8, E), ORDER.offsets), "x must be [X, M, in]"),
    ],
)
def test_refuses(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[").replace("+", r"\+")):
        call()


def test_traces_whole() -> None:
    """A layer of experts is one graph for torch.compile."""
    routing = nn.Routing(method="greedy", experts=4, chosen=2)
    layer = nn.MoE(8, 8, shared=4, routing=routing, device="cpu", dtype=torch.float32)
    x = randn(5, 8, seed=1).float()
    with torch.no_grad():
        want = layer(x)
        torch.compiler.reset()
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want)
