"""Layers against their formulas in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.running import make_batch
from tilewright import nn
from tilewright.nn import KVCache

PLACE = {"device": "cpu", "dtype": torch.float32}


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.requires_grad_(False).parameters():
        parameter.normal_(0.1, 0.4, generator=generator)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    layer = nn.Linear(12, (5, 7), bias=bias, **PLACE)
    fill(layer)
    x = randn(2, 3, 12)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer.parts == (5, 7)
    assert nn.Linear(12, 5).parts == (5,)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "function"), [("silu_mul", F.silu), ("gelu_mul", F.gelu)])
def test_gated_mlp(activation: str, function, bias: bool) -> None:
    layer = nn.GatedMLP(12, 20, activation=activation, bias=bias, **PLACE)
    fill(layer)
    x = randn(5, 12)
    gate, up = F.linear(x, layer.gate_up.weight, layer.gate_up.bias).chunk(2, -1)
    want = F.linear(function(gate) * up, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), want)


def test_rms_norm() -> None:
    x, residual = randn(4, 16), randn(4, 16).flip(0)
    rms = nn.RMSNorm(16, eps=1e-3, **PLACE)
    fill(rms)
    torch.testing.assert_close(rms(x), F.rms_norm(x, (16,), rms.weight, 1e-3))
    y, total = rms.add(x, residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (16,), rms.weight, 1e-3))
    assert torch.equal(total, x + residual)
    y, total = rms.add(x, None)
    assert torch.equal(y, rms(x))
    assert total is x


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias: bool) -> None:
    layer = nn.LayerNorm(16, eps=1e-3, bias=bias, **PLACE)
    fill(layer)
    x = randn(4, 16)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (16,), layer.weight, layer.bias, 1e-3))


def test_embedding() -> None:
    layer = nn.Embedding(9, 4, **PLACE)
    fill(layer)
    assert torch.equal(layer(torch.tensor([[3, 0], [8, 3]])), layer.weight[torch.tensor([[3, 0], [8, 3]])])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Linear", (6, 5)),
        ("Linear", (6, 5, False)),
        ("Embedding", (9, 4)),
        ("Embedding", (9, 4, 2)),
        ("LayerNorm", (6,)),
        ("LayerNorm", ((2, 3),)),
        ("RMSNorm", (6,)),
    ],
)
def test_layers_begin_as_torchs(name: str, arguments: tuple[Any, ...]) -> None:
    """The same seed, the same names and numbers, gradients for all; and the same outputs, with the same eps."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*arguments)
    torch.manual_seed(0)
    ours = getattr(nn, name)(*arguments)
    assert {n: p.requires_grad for n, p in ours.named_parameters()} == {
        n: p.requires_grad for n, p in theirs.named_parameters()
    }
    for n, p in theirs.named_parameters():
        assert torch.equal(p, ours.state_dict()[n]), n
    x = (
        torch.tensor([[3, 0], [8, 2]])
        if name == "Embedding"
        else 1e-4 * torch.randn(5, 2, 3)
        if arguments == ((2, 3),)
        else randn(4, 6)
    )
    torch.testing.assert_close(ours(x), theirs(x))


def rotate(x: Tensor, rope: nn.Rope) -> Tensor:
    """x [T, heads, D] at positions 0 to T - 1, pair by pair."""
    cos, sin = rope.cos_sin[: x.shape[0], :, None].unbind(1)
    half = cos.shape[-1]
    pairs = [(2 * i, 2 * i + 1) if rope.interleaved else (i, i + half) for i in range(half)]
    y = x.clone()
    for i, (a, b) in enumerate(pairs):
        y[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        y[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
    return y


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("head_norm_eps", [None, 1e-3])
@pytest.mark.parametrize(("interleaved", "rotated"), [(False, 8), (True, 8), (False, 4)])
def test_attention(interleaved: bool, rotated: int, head_norm_eps: float | None, window: int | None) -> None:
    tokens, heads, kv_heads, dim = 7, 4, 2, 8
    rope = nn.Rope(rotated, max_positions=16, interleaved=interleaved)
    layer = nn.Attention(
        12, heads=heads, kv_heads=kv_heads, head_dim=dim, rope=rope, qkv_bias=True, out_bias=True,
        head_norm_eps=head_norm_eps, window=window, **PLACE,
    )  # fmt: skip
    fill(layer)
    x = randn(tokens, 12)
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).view(tokens, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if head_norm_eps is not None:
        q = F.rms_norm(q, (dim,), layer.q_norm, head_norm_eps)
        k = F.rms_norm(k, (dim,), layer.k_norm, head_norm_eps)
    q, k = rotate(q, rope), rotate(k, rope)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    mask = (j <= i) if window is None else (j <= i) & (j > i - window)
    o = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)
    want = F.linear(o.flatten(1), layer.out.weight, layer.out.bias)

    cache = KVCache.zeros(layers=1, pages=3, kv_heads=kv_heads, page_size=4, head_dim=dim, dtype=x.dtype, device="cpu")
    got = layer(x, make_batch([([2, 1], 0, tokens)], 4), cache.layer(0))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.k[0][[2, 1]].transpose(1, 2).flatten(0, 1)[:tokens], k)
    assert not cache.v[0][0].any()


def test_attention_with_sinks_and_a_scale() -> None:
    tokens, dim = 7, 8
    rope = nn.Rope(dim, max_positions=16)
    layer = nn.Attention(12, heads=4, kv_heads=2, head_dim=dim, rope=rope, window=4, sinks=True, scale=0.7, **PLACE)
    fill(layer)
    x = randn(tokens, 12)
    q, k, v = (F.linear(x, layer.qkv.weight).view(tokens, -1, dim)).split((4, 2, 2), 1)
    q, k, v = (t.transpose(0, 1).double() for t in (rotate(q, rope), *(rotate(k, rope), v)))
    scores = 0.7 * q @ k.repeat_interleave(2, 0).mT
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    scores = scores.masked_fill((distance < 0) | (distance >= 4), float("-inf"))
    with_sinks = torch.cat([scores, layer.sinks.double()[:, None, None].expand(4, tokens, 1)], -1)
    o = with_sinks.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 0)
    want = F.linear(o.transpose(0, 1).flatten(1).float(), layer.out.weight)
    cache = KVCache.zeros(layers=1, pages=3, kv_heads=2, page_size=4, head_dim=dim, dtype=x.dtype, device="cpu")
    got = layer(x, make_batch([([2, 1], 0, tokens)], 4), cache.layer(0))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": 0}, "heads must be a multiple of kv_heads, got 4 and 0"),
        ({"window": 0}, "window is 0, wanted at least 1"),
        ({"scale": -1.0}, "scale is -1.0, wanted a finite number above 0"),
    ],
)
def test_attention_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nn.Attention(8, **{"heads": 4, "kv_heads": 2, "head_dim": 2, "rope": nn.Rope(2, max_positions=4), **options})


def test_layers_are_made_where_asked() -> None:
    """Under `unfilled` they want no gradient, which elsewhere they do."""
    rope = nn.Rope(8, max_positions=16, device="meta")
    place = {"device": "meta", "dtype": torch.bfloat16}

    def layers() -> tuple[torch.nn.Module, ...]:
        return (
            nn.Attention(
                12, heads=4, kv_heads=2, head_dim=8, rope=rope, qkv_bias=True, head_norm_eps=1e-6, sinks=True, **place
            ),
            nn.SelfAttention(16, heads=4, sinks=True, **place),
            nn.Embedding(9, 4, **place),
            nn.GatedMLP(12, 20, bias=True, **place),
            nn.LayerNorm(4, **place),
            nn.RMSNorm(4, **place),
            nn.Linear(4, 5, **place),
        )

    with nn.unfilled():
        empty = layers()
    for wanted, made in ((False, empty), (True, layers())):
        for layer in made:
            for name, parameter in layer.named_parameters():
                found = (parameter.device.type, parameter.dtype, parameter.requires_grad)
                assert found == ("meta", torch.bfloat16, wanted), name
    real = nn.Rope(8, max_positions=16).cos_sin
    assert (rope.cos_sin.shape, rope.cos_sin.dtype) == (real.shape, real.dtype)
    assert not rope.state_dict()


def test_cache_copies_pages_in_every_layer() -> None:
    sizes = {"layers": 2, "pages": 5, "kv_heads": 2, "page_size": 4, "head_dim": 8}
    cache = KVCache.zeros(**sizes, dtype=torch.float32, device="cpu")
    assert len(cache.k) == len(cache.v) == 2
    for i, tensor in enumerate((*cache.k, *cache.v)):
        assert tensor.shape == (5, 2, 4, 8)
        assert tensor.is_contiguous()
        tensor.copy_(torch.arange(5.0)[:, None, None, None] + 10 * i)
    cache.copy_pages(torch.tensor([1, 1, 4]), torch.tensor([0, 3, 2]))
    for i, tensor in enumerate((*cache.k, *cache.v)):
        assert (tensor[:, 0, 0, 0] - 10 * i).tolist() == [1, 1, 4, 1, 4]
        assert torch.equal(tensor, tensor[:, :1, :1, :1].expand_as(tensor))
