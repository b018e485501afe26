"""Latent attention and mixtures of experts against their formulas, token by token, in plain torch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.running import make_batch
from tests.nn.test_layers import fill, randn, rotate
from tilewright import nn
from tilewright.op import invariant

PLACE = {"device": "cpu", "dtype": torch.float32}
HEADS, NOPE, TURNED, VALUE, RANK = 3, 6, 4, 5, 10


def make_mla(q_rank: int | None, interleaved: bool, bias: bool) -> nn.MLA:
    rope = nn.Rope(TURNED, max_positions=32, interleaved=interleaved)
    layer = nn.MLA(
        12, heads=HEADS, nope_dim=NOPE, rope_dim=TURNED, value_dim=VALUE, kv_rank=RANK, q_rank=q_rank, rope=rope, scale=0.4,
        bias=bias, **PLACE,
    )  # fmt: skip
    fill(layer)
    return layer


def weight_of(layer: nn.Linear) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    return layer.weight


def expanded(layer: nn.MLA, x: Tensor) -> tuple[Tensor, Tensor]:
    """(the layer's output for one sequence, the rows that it should cache), by the formulas of the paper."""
    tokens = x.shape[0]
    q, latent, key = F.linear(x, weight_of(layer.reader), layer.reader.bias).split((layer.down_sizes[0], RANK, TURNED), 1)
    if layer.q_up is not None and layer.q_norm is not None:
        q = F.linear(F.rms_norm(q, q.shape[1:], layer.q_norm.weight, layer.q_norm.eps), weight_of(layer.q_up))
    q = q.view(tokens, HEADS, NOPE + TURNED)
    q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:], layer.rope)), -1)
    latent = F.rms_norm(latent, (RANK,), layer.kv_norm.weight, layer.kv_norm.eps)
    key = rotate(key[:, None], layer.rope)
    k, v = F.linear(latent, layer.kv_up).view(tokens, HEADS, NOPE + VALUE).split((NOPE, VALUE), -1)
    k = torch.cat((k, key.expand(-1, HEADS, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    scores.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return F.linear(o.flatten(1), weight_of(layer.out), layer.out.bias), torch.cat((latent, key[:, 0]), 1)


@pytest.mark.parametrize("expand_from", [1, 100], ids=["expanded", "absorbed"])
@pytest.mark.parametrize(("q_rank", "interleaved", "bias"), [(8, True, True), (None, True, False), (8, False, False)])
def test_latent_attention(q_rank: int | None, interleaved: bool, bias: bool, expand_from: int) -> None:
    layer = make_mla(q_rank, interleaved, bias)
    layer.expand_from = expand_from
    x, y = randn(7, 12), randn(5, 12).flip(0)
    cache = nn.LatentCache.zeros(layers=1, pages=6, page_size=4, width=RANK + TURNED, **PLACE).rows[0]
    got = layer(torch.cat((x, y)), make_batch([([2, 1], 0, 7), ([5, 3], 0, 5)], 4), cache)
    (want_x, rows_x), (want_y, rows_y) = expanded(layer, x), expanded(layer, y)
    torch.testing.assert_close(got, torch.cat((want_x, want_y)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[[2, 1]].flatten(0, 1)[:7], rows_x)
    torch.testing.assert_close(cache[[5, 3]].flatten(0, 1)[:5], rows_y)
    assert not cache[[0, 4]].any()


def test_when_keys_are_expanded() -> None:
    """Long prompts are; not decoding, nor where the tables hold much more than the step brings, nor the invariant scope."""
    layer = make_mla(8, True, False)
    layer.expand_from = 8
    cache = torch.empty(8, 4, RANK + TURNED)
    cases = {
        "prompt": ([([0, 1, 2], 0, 12)], True),
        "short": ([([0, 1], 0, 7)], False),
        "two": ([([0, 1], 0, 8), ([2, 3], 0, 8)], True),
        "with a decoding row": ([([0, 1], 0, 8), ([2, 3], 6, 1)], False),
        "end of a long prompt": ([(list(range(7)), 20, 8)], False),
    }
    for label, (rows, want) in cases.items():
        batch = make_batch(rows, 4)
        assert layer._expands(batch, cache) is want, label
        with invariant():
            assert not layer._expands(batch, cache)


def test_refuses_half_a_bias() -> None:
    with pytest.raises(ValueError, match="bias=True needs q_rank"):
        make_mla(None, True, True)


ROUTINGS = {
    "greedy": nn.Routing(method="greedy", experts=6, chosen=2),
    "groups": nn.Routing(method="group_limited_greedy", experts=6, chosen=2, groups=3, chosen_groups=2, scale=2.0),
    "bias": nn.Routing(method="noaux_tc", experts=6, chosen=3, groups=3, chosen_groups=2, normalise=True, scale=2.5),
}


def routed(layer: nn.MoE, routing: nn.Routing, x: Tensor) -> Tensor:
    """One token through its experts, chosen as the papers say, with lists."""
    logits = (layer.router.weight.float() @ x.float()).tolist()
    per = routing.experts // routing.groups
    if routing.method == "noaux_tc":
        assert layer.router.bias is not None
        scores = torch.tensor(logits).sigmoid().tolist()
        ranked = [score + bias for score, bias in zip(scores, layer.router.bias.tolist(), strict=True)]
        worth = [sum(sorted(ranked[g * per : (g + 1) * per])[-2:]) for g in range(routing.groups)]
    else:
        scores = ranked = torch.tensor(logits).softmax(0).tolist()
        worth = [max(ranked[g * per : (g + 1) * per]) for g in range(routing.groups)]
    groups = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.chosen_groups]
    open_to = [i for i in range(routing.experts) if i // per in groups]
    chosen = sorted(open_to, key=lambda i: -ranked[i])[: routing.chosen]
    weights = [scores[i] for i in chosen]
    if routing.normalise:
        weights = [weight / sum(weights) for weight in weights]
    total = torch.zeros_like(x, dtype=torch.float32)
    gate_up, down = (experts.stacked().mT for experts in (layer.experts_gate_up, layer.experts_down))
    for i, weight in zip(chosen, weights, strict=True):
        gate, up = (x @ gate_up[i]).chunk(2)
        total += routing.scale * weight * ((F.silu(gate) * up) @ down[i]).float()
    return total


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))
def test_mixture_of_experts(routing: nn.Routing) -> None:
    layer = nn.MoE(12, 5, shared=7, routing=routing, **PLACE)
    fill(layer)
    x = randn(9, 12)
    want = layer.shared(x) + torch.stack([routed(layer, routing, row) for row in x])
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)


def test_experts_that_nobody_chose() -> None:
    """Of 40 tokens, one expert has none."""
    routing = ROUTINGS["bias"]
    layer = nn.MoE(16, 8, shared=8, routing=routing, **PLACE)
    fill(layer)
    assert layer.router.bias is not None
    layer.router.bias[4] = -9.0
    x = randn(40, 16)
    assert not (layer.router(x)[1] == 4).any()
    want = layer.shared(x) + torch.stack([routed(layer, routing, row) for row in x])
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)
