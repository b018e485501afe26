"""Pages that the prefix cache gives up go to host memory and come back, as they were: answers do not change."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.test_plan import TINY
from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.host_pages import HostPages
from tilewright.engine.llm import load_engine
from tilewright.engine.request import SamplingParams
from tilewright.engine.tier import HostTier
from tilewright.models import kv_bytes_per_token
from tilewright.nn import KVCache, LatentCache

PAGE = 4


def engine(pages: int, host: int, **more: Any) -> Engine:
    page = PAGE * kv_bytes_per_token(TINY, torch.int8 if more.get("kv_cache") else torch.float32)
    made = EngineConfig(
        device="cpu", page_size=PAGE, kv_cache_bytes=pages * page, host_cache_bytes=host * page, max_model_len=48, max_seqs=4,
        **more,
    )  # fmt: skip
    return load_engine(TINY, made)


def answers(made: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, a few requests at a time."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for at in range(0, len(asked), 3):
        for i, (prompt, params) in enumerate(asked[at : at + 3], start=at):
            found[made.submit(prompt, params, str(i))] = ([], [])
        while made.has_work:
            for delta in made.step():
                assert delta.error is None
                found[delta.request_id][0].extend(delta.token_ids)
                found[delta.request_id][1].extend(entry.logprob for entry in delta.logprobs)
    return list(found.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_answers_are_those_of_a_cache_that_is_large_enough(seed: int, kv_cache: str | None) -> None:
    rng = random.Random(seed)
    vocab = TINY.vocab_size
    stems = [[rng.randrange(vocab) for _ in range(rng.randrange(9, 25))] for _ in range(4)]
    asked = []
    for i in range(30):
        prompt = [*rng.choice(stems), *(rng.randrange(vocab) for _ in range(rng.randrange(6)))]
        asked.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 16), seed=i, logprobs=0, ignore_eos=True)))
    large, small = engine(400, 0, kv_cache=kv_cache), engine(13, 200, kv_cache=kv_cache)
    for (tokens, logprobs), (want, wanted) in zip(answers(small, asked), answers(large, asked), strict=True):
        assert tokens == want
        assert logprobs == pytest.approx(wanted, abs=1e-5)  # a CPU's products round by the number of rows
    stats = small.stats()
    assert stats.pages_in > 5, "nothing came back: this test would prove nothing"
    assert stats.pages_out >= stats.host_pages_used > 0
    assert stats.prefix_hit_tokens > engine_hits(asked, kv_cache), "the host found nothing that the device had not"


def engine_hits(asked: list[tuple[list[int], SamplingParams]], kv_cache: str | None) -> int:
    """Tokens that a cache of the same size finds without the host."""
    alone = engine(13, 0, kv_cache=kv_cache)
    answers(alone, asked)
    return alone.stats().prefix_hit_tokens


def filled(kind: str) -> KVCache | LatentCache:
    sizes: dict[str, Any] = {"layers": 3, "pages": 9, "page_size": PAGE, "device": "cpu"}
    if kind == "latent":
        cache = LatentCache.zeros(width=10, dtype=torch.bfloat16, **sizes)
    else:
        dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
        cache = KVCache.zeros(kv_heads=2, head_dim=8, dtype=dtype, **sizes)
    for layer in cache.layers:
        for part in layer:
            part.copy_(torch.randint(-9, 9, part.shape).to(part.dtype))
    return cache


def page_of(cache: KVCache | LatentCache, page: int) -> list[list[float]]:
    return [part.float()[page].flatten().tolist() for layer in cache.layers for part in layer]


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8", "latent"])
def test_a_page_comes_back_as_it_went(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through buffers that hold two pages, into blocks of three."""
    cache = filled(kind)
    size = sum(part[0].numel() * part.element_size() for layer in cache.layers for part in layer)
    monkeypatch.setattr("tilewright.engine.tier.CHUNK_BYTES", 2 * size)
    monkeypatch.setattr("tilewright.engine.tier.BLOCK_BYTES", 3 * size)
    tier, before = HostTier(cache, 7), [page_of(cache, page) for page in range(9)]
    tier.move(((0, 3), (5, 4), (2, 5), (8, 0), (1, 6)), ())
    tier.move(((4, 1),), ((0, 0), (3, 1), (4, 2), (5, 5)))
    tier.move((), ((1, 8), (6, 6)))
    wanted = list(before)
    wanted[0], wanted[1], wanted[2], wanted[5], wanted[8], wanted[6] = (before[page] for page in (8, 0, 5, 2, 4, 1))
    assert [page_of(cache, page) for page in range(9)] == wanted


def test_the_least_recently_used_page_goes_first() -> None:
    gone: list[bytes] = []
    host = HostPages(2, gone.append)
    host.keep(7, b"a")
    host.keep(8, b"b")
    host.keep(9, b"c")  # both are being written in this step
    assert b"c" not in host
    assert not host.ready(b"a")
    assert host.moves() == (((7, 0), (8, 1)), ())
    assert host.ready(b"a")
    host.pin([b"a"])
    host.keep(9, b"c")
    assert gone == [b"b"]
    host.fetch(b"a", 4)
    out, back = host.moves()
    assert (out, back) == (((9, 1),), ((0, 4),))
    host.give_back(out, back)  # that step was not launched
    assert not host.ready(b"c")
    assert host.moves() == (out, back)
    host.forget([1])
    assert gone == [b"b", b"c"]


def test_what_is_told_of_digests_counts_both_tiers() -> None:
    """A router hears that content is gone when neither has it."""
    heard: list[tuple[bytes, bool]] = []
    pool = BlockPool(1, PAGE, host_pages=1)
    pool.listener = lambda digest, known: heard.append((digest, known))
    for name in (b"one", b"two", b"three"):
        page = pool.allocate()
        pool.register(page, name)
        pool.host.moves()
        pool.release([page])
    assert heard == [(b"one", True), (b"two", True), (b"one", False), (b"three", True)]


def test_the_host_keeps_pages_of_the_prefix_cache_alone() -> None:
    with pytest.raises(ValueError, match="host_cache_bytes is set without the prefix cache"):
        EngineConfig(host_cache_bytes=1 << 20, prefix_cache=False)
    assert replace(EngineConfig(host_cache_bytes=0), prefix_cache=False).host_cache_bytes == 0
