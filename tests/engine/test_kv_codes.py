"""An engine whose cache holds codes of 8 bits: what is planned is what is allocated, and the tokens stay nearly the same."""

from typing import Any

import pytest
import torch

from tests.models.layouts import SIZES
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import load_engine
from tilewright.engine.loading import facts_of, load
from tilewright.engine.plan import cache_dtype
from tilewright.engine.request import SamplingParams
from tilewright.models import ModelConfig, kv_bytes_per_token
from tilewright.nn import KVCache

CONFIG = ModelConfig.from_hf(SIZES)


def options(**more: Any) -> EngineConfig:
    return EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=4, **more)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_a_plan_counts_codes_and_scales(format: str) -> None:
    loaded = load(CONFIG, options(kv_cache=format))
    cache = loaded.runner.cache
    assert isinstance(cache, KVCache)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in layer)
    assert held == loaded.plan.cache_bytes
    assert loaded.plan.page_bytes == loaded.plan.page_size * kv_bytes_per_token(CONFIG, cache.k[0].dtype)
    assert loaded.plan.page_bytes < load(CONFIG, options(page_size=loaded.plan.page_size)).plan.page_bytes / 3
    assert facts_of(CONFIG, torch.float32, options(kv_cache=format))["kv_cache"] == format


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_logits_stay_near(format: str) -> None:
    """The embedded model, in chunks and decoding, with a shared page copied: what it says is about as likely as before."""

    def likelihoods(**more: Any) -> list[float]:
        engine = load_engine("bookworm", options(prefill_chunk=16, **more))
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1, n=2)
        engine.submit([5, 60, 33, 12, 90, 4] * 6, params)
        found = []
        while engine.has_work:
            found += [entry.logprob for delta in engine.step() for entry in delta.logprobs or ()]
        return found

    plain, quantized = likelihoods(), likelihoods(kv_cache=format)
    assert len(plain) == len(quantized) == 16
    assert max(abs(a - b) for a, b in zip(plain[:2], quantized[:2], strict=True)) < 0.1


def test_pages_are_copied_with_their_scales() -> None:
    cache = KVCache.zeros(layers=2, pages=4, kv_heads=2, page_size=16, head_dim=32, dtype=torch.float8_e4m3fn, device="cpu")
    assert [t.shape for t in next(iter(cache.layers))] == [(4, 2, 16, 32), (4, 2, 32, 16), (4, 2, 16), (4, 2, 16)]
    for tensors in cache.layers:
        for t in tensors:
            t[1] = torch.ones(t.shape[1:]).to(t.dtype)
    cache.copy_pages(torch.tensor([1, 1]), torch.tensor([0, 3]))
    for tensors in cache.layers:
        for t in tensors:
            assert t.float().flatten(1).mean(1).tolist() == [1.0, 1.0, 0.0, 1.0]


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="kv_cache is 'int4', wanted one of int8, fp8"):
        EngineConfig(kv_cache="int4")
    loaded = load(CONFIG, options())
    assert cache_dtype(loaded.runner.model, options()) is None
