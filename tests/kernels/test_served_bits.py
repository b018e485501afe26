"""In the invariant scope a pass over packed sequences, with gradients, has the bits of a server that decodes token by token:
with float weights, and with codes beside them that both multiply by."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.hw.device import device_of
from tilewright.models import Model, random_model
from tilewright.models.config import ModelConfig
from tilewright.nn import Batch, KVCache, Packed, PackedKeysValues, ServedKeysValues
from tilewright.op import invariant
from tilewright.rl.quantised import add_quantised_weights

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTHS = (9, 150, 1) if ON_GPU else (1, 5)
PAGE_SIZE = 16 if ON_GPU else 4
HEAD_DIM = 16
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=256, windows=(None, None),
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not device_of(0 if ON_GPU else -1).runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1, products of a CPU differ"
)


def one_by_one(model: Model, tokens: Tensor) -> Tensor:
    """Hidden states of one sequence, a token a step."""
    length = len(tokens)
    pages = -(-length // PAGE_SIZE)
    cache = KVCache.zeros(
        layers=CONFIG.num_hidden_layers, pages=pages, kv_heads=CONFIG.num_key_value_heads, page_size=PAGE_SIZE,
        head_dim=model.config.head_dim, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    table = torch.arange(pages, dtype=torch.int32, device=DEVICE)[None]
    found = []
    for place in range(length):
        at = torch.tensor([place], device=DEVICE)
        batch = Batch(
            positions=at, slots=at, block_table=table, kv_lens=(at + 1).int(), max_q_len=1, logits_rows=at,
            cu_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        found.append(model(tokens[place : place + 1], batch, cache))
    return torch.cat(found)


_SLOW = () if ON_GPU else pytest.mark.long


_WIDE = pytest.mark.skipif(not ON_GPU, reason="no GPU here: the kernels for heads of 64 and 128 are Hopper's")


@pytest.fixture(
    params=[
        "", *(pytest.param(dim, marks=_WIDE) for dim in (64, 128)), "int8", "fp8",
        *(pytest.param(name, marks=_SLOW) for name in ("fp8-block", "int8-weight", "int4")),
    ]
)  # fmt: skip
def model(request: pytest.FixtureRequest) -> Model:
    """With float weights, of wider heads too, or with codes beside them."""
    config = replace(CONFIG, head_dim=request.param) if isinstance(request.param, int) else CONFIG
    made = random_model(config, device=torch.device(DEVICE), dtype=torch.bfloat16, seed=0).requires_grad_(True)
    return add_quantised_weights(made, request.param) if isinstance(request.param, str) and request.param else made


def test_a_packed_pass_has_the_bits_of_single_steps(model: Model) -> None:
    tokens = torch.arange(sum(LENGTHS), device=DEVICE) * 7 % CONFIG.vocab_size
    lengths = torch.tensor(LENGTHS)
    packed = Packed(
        positions=torch.cat([torch.arange(n) for n in LENGTHS]).to(DEVICE),
        cu_q=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(DEVICE),
        max_q_len=max(LENGTHS),
    )
    with invariant():
        learnt = model(tokens, packed, ServedKeysValues.of(packed, page_size=PAGE_SIZE))
        with torch.no_grad():
            scored = model(tokens, packed, ServedKeysValues.of(packed, page_size=PAGE_SIZE))
            served = torch.cat([one_by_one(model, part) for part in tokens.split(list(LENGTHS))])
            unfused = model(tokens, packed, PackedKeysValues())
            assert torch.equal(model.logits(scored), model.logits(served))
    assert learnt.requires_grad
    assert torch.equal(scored, served)
    assert torch.equal(learnt, served)
    assert not torch.equal(unfused, served), "the training operators round elsewhere: without them this test shows nothing"


def test_attention_has_the_same_bits_where_a_tile_of_keys_is_full() -> None:
    """A token behind 64 keys takes them without a mask when it comes alone, and with one among others."""
    count, length, heads, dim = (64, 130, 4, HEAD_DIM) if ON_GPU else (2, 65, 2, HEAD_DIM)
    torch.manual_seed(0)
    q, k, v = (torch.randn(count * length, heads, dim, dtype=torch.bfloat16).to(DEVICE) for _ in range(3))
    pages = -(-length // 16)
    cache = torch.zeros(2, count * pages, 16, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    for held, rows in zip(cache, (k, v)):
        held.view(count, pages * 16, heads, dim)[:, :length] = rows.view(count, length, heads, dim)
    k_cache, v_cache = (held.transpose(1, 2).contiguous() for held in cache)
    table = torch.arange(count * pages, dtype=torch.int32, device=DEVICE).view(count, pages)

    def attend(rows: Tensor, queries: int, keys: int) -> Tensor:
        kv_lens = torch.full((count,), keys, dtype=torch.int32, device=DEVICE)
        cu_q = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * queries
        return ops.paged_attention(rows, k_cache, v_cache, table, kv_lens, cu_q, queries, dim**-0.5)

    with invariant():
        whole = attend(q, length, length).view(count, length, heads, dim)
        for place in range(63, length, 64):
            alone = attend(q.view(count, length, heads, dim)[:, place].contiguous(), 1, place + 1)
            assert torch.equal(alone, whole[:, place])
