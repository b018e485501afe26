"""Attention in a ring of chunks, all of them in one process, against attention within each document in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.models import SHAPES, empty_model
from tilewright.nn import Packed, PackedKeysValues, Rope
from tilewright.nn.keys_values import Heads
from tilewright.parallel.part import refusal
from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import ALONE
from tilewright.parallel.ring import Ring

TOKENS, HEADS, KV, DIM = 48, 4, 2, 16


def packed(ends: list[int]) -> Packed:
    """Documents that end there."""
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in cu.diff()])
    return Packed(positions=positions, cu_q=cu, max_q_len=int(cu.diff().max()))


def attended(keys_values: Any, batch: Packed, operands: list[Tensor], dy: Tensor, **bends: Any) -> list[Tensor]:
    """What attention gives, and its gradients by q, k, v, both norms and the sinks."""
    given = [t.clone().requires_grad_(True) for t in operands]
    q, k, v, q_norm, k_norm, sinks = given
    rope = Rope(DIM, max_positions=TOKENS)
    heads = Heads(rope, q_norm, k_norm, 1e-6, DIM**-0.5, None, sinks, bends.get("softcap"))
    out = keys_values.attend(q, k, v, batch, heads)
    return [out.detach(), *torch.autograd.grad(out, given, dy)]


@pytest.mark.parametrize("ends", [[48], [5, 7, 30, 48], [12, 24, 36, 48], [1, 47, 48], [25, 25, 48]], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=str)
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_ring_attends_as_whole_documents_do(chunks: int, softcap: float | None, ends: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, HEADS, DIM), (TOKENS, KV, DIM), (TOKENS, KV, DIM), (DIM,), (DIM,), (HEADS,), (TOKENS, HEADS, DIM))
    *operands, dy = (torch.randn(*size, generator=generator) for size in sizes)
    whole, batch = PackedKeysValues(deterministic=True), packed(ends)
    wanted = attended(whole, batch, operands, dy, softcap=softcap)
    found = attended(Ring(whole, ALONE, chunks), batch, operands, dy, softcap=softcap)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dq_norm", "dk_norm", "dsinks"), found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=2e-5), (name, (a - b).abs().max())
    assert not torch.equal(found[0], wanted[0]) or ends == [12, 24, 36, 48]


def test_a_ring_needs_chunks_and_models_without_windows() -> None:
    with pytest.raises(ValueError, match="ring needs cp above 1"):
        Plan(ring=True)
    assert Plan.read("cp=2,ring").alone() == Plan(chunks=2, ring=True)

    model: Any = empty_model(SHAPES["llama-1b"], device="meta", dtype=torch.bfloat16)
    model.blocks[0].attn.window = 8
    assert "which ring does not support" in (refusal(model, Plan(cp=2, ring=True)) or "")
