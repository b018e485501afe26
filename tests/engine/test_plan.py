"""The memory plan: it adds up, it fits, and what it counts is what loading allocates."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.engine import plan as plan_module
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import load
from tilewright.engine.plan import MemoryPlan, NoMemory, page_size_of, plan_memory
from tilewright.models import SHAPES, ModelConfig, empty_model
from tilewright.models.latent import Latent

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    windows=(None, None),
    max_position_embeddings=128,
)


def planned(config: ModelConfig = TINY, device: torch.device = CPU, **options: object) -> MemoryPlan:
    model = empty_model(config, device="meta", dtype=torch.bfloat16)
    return plan_memory(model, EngineConfig(**options), device=device, dtype=torch.bfloat16)  # type: ignore[arg-type]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 80 GiB of which 78 are free."""
    monkeypatch.setattr(plan_module, "memory_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(plan_module, "free_bytes", lambda device: 78 * GIB)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fraction", [0.5, 0.9, 1.0])
def test_a_plan_adds_up_and_fills_the_card(shape: str, fraction: float, card: None) -> None:
    plan = planned(SHAPES[shape], CUDA, memory_fraction=fraction, max_seqs=4096)
    assert plan.limit_bytes == min(int(80 * GIB * fraction), 78 * GIB)
    assert plan.limit_bytes - plan.page_bytes < plan.total_bytes <= plan.limit_bytes
    assert f"{plan.total_bytes:,} bytes of {plan.limit_bytes:,} allowed" in str(plan)


LATENT = replace(TINY, latent=Latent(nope_dim=8, rope_dim=8, value_dim=8, kv_rank=16, q_rank=None))


@pytest.mark.parametrize(
    ("config", "options", "tokens"),
    [(TINY, {}, 16), (TINY, {"kv_cache": "int8"}, 64), (LATENT, {}, 64), (LATENT, {"page_size": 8}, 8)],
)
def test_pages_follow_the_model_unless_chosen(config: ModelConfig, options: dict[str, Any], tokens: int) -> None:
    assert page_size_of(config, EngineConfig(**options)) == tokens
    if config is TINY:
        assert planned(config, **options).page_size == tokens


@pytest.mark.parametrize("positions", [128, 131072, 1 << 20])
def test_the_rope_table_is_counted(positions: int, card: None) -> None:
    long = replace(TINY, max_position_embeddings=positions)
    plan = planned(long, CUDA, max_model_len=128, max_seqs=1)
    assert plan.tables_bytes == positions * TINY.head_dim * 4
    assert f"{plan.tables_bytes:,} bytes" in str(plan)


def test_what_is_counted_is_what_is_loaded() -> None:
    loaded = load(TINY, EngineConfig(device="cpu", dtype="bfloat16", kv_cache_bytes=1 << 20))
    model, plan = loaded.runner.model, loaded.plan
    assert plan.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert plan.tables_bytes == sum(table.nbytes for table in model.buffers())
    cache = loaded.runner.cache
    assert plan.cache_bytes == sum(pages.nbytes for pages in (*cache.k, *cache.v)) <= 1 << 20


@pytest.mark.parametrize(
    ("options", "pages", "tokens"),
    [
        ({}, 256 * 8, 128),  # no more than all requests at full length can use
        ({"max_seqs": 2}, 16, 128),
        ({"max_seqs": 2, "max_model_len": 40}, 6, 40),
        ({"kv_cache_bytes": 4 * 2048}, 4, 64),  # the cache decides the length
        ({"kv_cache_bytes": 4 * 2048, "max_model_len": 50}, 4, 50),
    ],
    ids=str,
)
def test_pages_and_lengths(options: dict[str, object], pages: int, tokens: int) -> None:
    plan = planned(**options)
    assert plan.page_bytes == 16 * 2 * 2 * 2 * 8 * 2, "tokens, layers, keys and values, heads, head dim, bytes"
    assert (plan.num_pages, plan.max_model_len) == (pages, tokens)


@pytest.mark.parametrize(
    ("options", "device", "words"),
    [
        ({"kv_cache_bytes": 4 * 2048, "max_model_len": 80}, CPU, "one request of 80 tokens needs 5 pages and 4 fit"),
        ({"kv_cache_bytes": 2047}, CPU, "one request of 16 tokens needs 1 pages and 0 fit"),
        ({"memory_fraction": 0.001}, CUDA, "needs 1 pages and 0 fit"),
        ({"kv_cache_bytes": 90 * GIB, "max_seqs": 1}, CUDA, None),  # more than the 8 pages that are of use is not taken
    ],
    ids=str,
)
def test_too_little_memory(options: dict[str, object], device: torch.device, words: str | None, card: None) -> None:
    if words is None:
        assert planned(device=device, **options).num_pages == 8
        return
    with pytest.raises(NoMemory, match=words) as error:
        planned(device=device, **options)
    assert "memory plan for" in str(error.value)
    assert "--max-model-len" in str(error.value)


def test_positions_end_somewhere() -> None:
    with pytest.raises(ValueError, match="max_model_len is 200, but the model's positions end at 128"):
        planned(max_model_len=200)
