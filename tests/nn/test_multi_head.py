"""Attention layers without a cache against torch's own layer, and against SDPA with masks written down."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import nn
from tilewright.nn.multi_head import CrossAttention, Lengths, SelfAttention

PLACE: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}


def fill(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.requires_grad_(False).parameters():
        parameter.normal_(0.1, 0.4, generator=generator)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def torchs(features: int, heads: int, bias: bool, weights: dict[str, Tensor | None], memory: int | None = None) -> Any:
    """torch's layer with these weights."""
    layer = torch.nn.MultiheadAttention(features, heads, bias=bias, kdim=memory, vdim=memory, batch_first=True, **PLACE)
    state = {name: value for name, value in weights.items() if value is not None}
    layer.load_state_dict(state, strict=True)
    return layer.eval().requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_torchs(bias: bool, causal: bool) -> None:
    layer = SelfAttention(24, heads=3, causal=causal, qkv_bias=bias, out_bias=bias, **PLACE)
    fill(layer)
    weights = {
        "in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias,
        "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
    }  # fmt: skip
    other, x = torchs(24, 3, bias, weights), randn(2, 7, 24)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want, _ = other(x, x, x, attn_mask=mask, need_weights=False)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_cross_attention_is_torchs(bias: bool) -> None:
    layer = CrossAttention(24, heads=3, memory_features=10, bias=bias, out_bias=bias, **PLACE)
    fill(layer)
    assert isinstance(layer.kv.weight, Tensor)
    k, v = layer.kv.weight[:24], layer.kv.weight[24:]
    biases = None if layer.q.bias is None or layer.kv.bias is None else torch.cat([layer.q.bias, layer.kv.bias])
    weights = {
        "q_proj_weight": layer.q.weight, "k_proj_weight": k, "v_proj_weight": v, "in_proj_bias": biases,
        "out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias,
    }  # fmt: skip
    other, x, memory = torchs(24, 3, bias, weights, 10), randn(2, 5, 24), randn(2, 9, 10, seed=2)
    want, _ = other(x, memory, memory, need_weights=False)
    torch.testing.assert_close(layer(x, layer.keys_and_values(memory)), want, rtol=1e-4, atol=1e-5)


def by_hand(layer: SelfAttention, x: Tensor, mask: Tensor) -> Tensor:
    """A layer with narrow values and grouped heads, rotated, by SDPA with the mask [S, S] written down."""
    q, k, v = (p.unflatten(-1, (n, -1)) for p, n in zip(layer.qkv(x).split(layer.qkv.parts, -1), layer.heads, strict=True))
    if layer.rope is not None:
        cos, sin = layer.rope.cos_sin[: x.shape[1], :, None].unbind(1)
        turned = []
        for t in (q, k):
            a, b = t.chunk(2, -1)
            turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
        q, k = turned
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=layer.options["scale"], enable_gqa=True)
    return layer.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotated", [False, True])
def test_grouped_heads_narrow_values_windows_and_rotation(rotated: bool) -> None:
    rope = nn.Rope(8, max_positions=32, device="cpu") if rotated else None
    layer = SelfAttention(
        20, heads=4, kv_heads=2, head_dim=8, value_dim=6, causal=True, window=3, rope=rope, scale=0.2, out_bias=True,
        **PLACE
    )  # fmt: skip
    fill(layer)
    x, distance = randn(2, 9, 20), torch.arange(9)[:, None] - torch.arange(9)
    torch.testing.assert_close(layer(x), by_hand(layer, x, (distance >= 0) & (distance < 3)), rtol=1e-4, atol=1e-5)
    prefixed = by_hand(layer, x, ((distance >= 0) | (torch.arange(9) < 4)) & (distance < 3))
    torch.testing.assert_close(layer(x, prefix=4), prefixed, rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_each_alone() -> None:
    layer = SelfAttention(
        16, heads=4, kv_heads=1, causal=True, sinks=True, softcap=3.0, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0]),
        rope=nn.Rope(4, max_positions=16, device="cpu"), **PLACE,
    )  # fmt: skip
    fill(layer)
    parts = [randn(n, 16, seed=n) for n in (3, 1, 6)]
    cu = torch.tensor([0, 3, 4, 10], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(p)) for p in parts])
    got = layer(torch.cat(parts), Lengths(cu=cu, longest=6), positions)
    torch.testing.assert_close(got, torch.cat([layer(p[None])[0] for p in parts]), rtol=1e-4, atol=1e-5)
    cross = CrossAttention(16, heads=2, **PLACE)
    fill(cross)
    memories = [randn(n, 16, seed=n + 20) for n in (2, 5, 1)]
    of_memory = Lengths(cu=torch.tensor([0, 2, 7, 8], dtype=torch.int32), longest=5)
    got = cross(torch.cat(parts), cross.keys_and_values(torch.cat(memories)), Lengths(cu=cu, longest=6), of_memory)
    want = [cross(p[None], cross.keys_and_values(m[None]))[0] for p, m in zip(parts, memories, strict=True)]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)


BAD = {
    "groups": (lambda: SelfAttention(16, heads=3, kv_heads=2, **PLACE), "heads must be a multiple of kv_heads, got 3 and 2"),
    "head dim": (
        lambda: CrossAttention(16, heads=3, **PLACE),
        "is not a multiple of heads (3); pass head_dim",
    ),
    "no heads": (lambda: SelfAttention(16, heads=0, **PLACE), "heads must be a multiple of kv_heads, got 0 and 0"),
    "no kv heads": (lambda: CrossAttention(16, heads=2, kv_heads=0, **PLACE), "multiple of kv_heads, got 2 and 0"),
    "window": (lambda: SelfAttention(16, heads=2, window=0, **PLACE), "window is 0, wanted at least 1"),
    "slopes": (
        lambda: SelfAttention(16, heads=2, alibi_slopes=torch.zeros(3), **PLACE),
        "alibi_slopes must have shape [2], one slope per head; got [3]",
    ),
    "packed": (lambda: SelfAttention(16, heads=2, **PLACE)(randn(4, 16)), "got queries [4] without lengths"),
    "positions": (
        lambda: SelfAttention(16, heads=2, rope=nn.Rope(8, max_positions=4, device="cpu"), **PLACE)(randn(4, 16)),
        "needs positions, int64 [T]",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
