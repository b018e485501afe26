"""Layers that see a window give their pages back: the answers of transformers, from a cache that could not hold all tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fake_runner import scheduler
from tests.models.oracles import make_oracle
from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.llm import load_engine
from tilewright.engine.plan import plan_memory
from tilewright.engine.request import Delta, SamplingParams
from tilewright.engine.windows import Windows
from tilewright.models import empty_model, kv_bytes_per_token, load_config

pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

WINDOW, PAGE, LENGTH = 8, 4, 160
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {},
}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(the oracle, its folder)"""
    sizes = {"head_dim": 16, "sliding_window": WINDOW, "max_position_embeddings": 256, **FAMILIES[request.param]}
    oracle, folder = make_oracle(request.param, sizes), tmp_path_factory.mktemp("windows")
    oracle.save_pretrained(folder)
    return oracle, folder


def cache_bytes(folder: Path, pages: int) -> int:
    """Room for so many pages of all layers."""
    return pages * PAGE * kv_bytes_per_token(load_config(folder), torch.float32)


def prompts(count: int, *, alike: int = 0) -> list[list[int]]:
    """Of 30 to 130 tokens, far over the window; the first `alike` tokens are the same."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda n: torch.randint(2, 60, (n,), generator=generator).tolist()  # noqa: E731
    stem = draw(alike)
    return [stem + draw(30 + 17 * i % 100) for i in range(count)]


def engine(folder: Path, pages: int, **more: Any) -> Engine:
    """A small cache: so many pages if all layers had the same."""
    options = {"max_seqs": 6, "max_tokens_per_step": 24, "max_model_len": LENGTH, "page_size": PAGE, **more}
    return load_engine(folder, EngineConfig(device="cpu", kv_cache_bytes=cache_bytes(folder, pages), **options))


def answers(made: Engine, asked: list[list[int]], tokens: int = 20) -> list[list[int]]:
    """Greedy answers, of all at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    names = [made.submit(prompt, params) for prompt in asked]
    found: dict[str, list[int]] = {name: [] for name in names}
    while made.has_work:
        deltas: list[Delta] = made.step()
        for delta in deltas:
            assert delta.error is None, delta.error
            found[delta.request_id] += delta.token_ids
    return [found[name] for name in names]


def check(oracle: Any, asked: list[list[int]], found: list[list[int]]) -> None:
    """Each token is the likeliest by transformers, which reads prompt and answer at once, without a cache."""
    for prompt, answer in zip(asked, found, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        likeliest = oracle(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer == likeliest.tolist()


def test_answers_are_those_of_transformers(family: tuple[Any, Path]) -> None:
    """Twelve requests, of which the cache would hold few if windowed layers kept all their pages."""
    oracle, folder = family
    asked = prompts(12)
    made = engine(folder, 60)
    check(oracle, asked, answers(made, asked))
    stats = made.stats()
    assert stats.window_pages_total
    assert stats.window_pages_returned > 12 * 10
    assert (stats.window_pages_used, stats.pages_used) == (0, 0)


@pytest.mark.parametrize("more", [{"speculate": "ngram"}, {"prefill_chunk": 5}, {"prefix_cache": False}], ids=str)
def test_other_ways_of_serving_change_nothing(family: tuple[Any, Path], more: dict[str, Any]) -> None:
    _, folder = family
    asked = [*prompts(4), [7, 9, 11] * 30]
    plain = engine(folder, 2000, max_seqs=1, max_tokens_per_step=256, host_cache_bytes=1)
    assert plain.stats().window_pages_total == 0
    assert answers(engine(folder, 60, **more), asked) == answers(plain, asked)


def test_prefixes_are_shared_as_far_as_the_window_is_there(family: tuple[Any, Path]) -> None:
    oracle, folder = family
    made = engine(folder, 90)
    first, *others = prompts(5, alike=40)
    check(oracle, [first], answers(made, [first]))
    check(oracle, others, answers(made, others))
    assert made.stats().prefix_hit_tokens > 0
    # The same prompt again: everything is there, and the last page is copied in both kinds of layers.
    whole = prompts(1)[0][:32]
    found = answers(made, [whole])
    assert answers(made, [whole]) == found
    check(oracle, [whole], found)


def test_requests_fit_that_did_not(family: tuple[Any, Path]) -> None:
    """In the same memory more of them run at once."""
    _, folder = family
    asked = [prompt[:30] * 4 for prompt in prompts(4)]
    together = []
    for more in ({}, {"host_cache_bytes": 1}):
        made = engine(folder, 80, prefix_cache=True, **more)
        for prompt in asked:
            made.submit([prompt[0] + len(together), *prompt[1:]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        most = 0
        while made.has_work:
            made.step()
            most = max(most, len(made.scheduler.running))
        together.append(most)
    assert together[0] > together[1], together


def test_a_plan_says_what_windowed_layers_have(family: tuple[Any, Path]) -> None:
    _, folder = family
    config = load_config(folder)
    model = empty_model(config, device="meta", dtype=torch.float32)

    def plan(pages: int, **more: Any) -> Any:
        options = EngineConfig(kv_cache_bytes=cache_bytes(folder, pages), max_seqs=6, page_size=PAGE, **more)
        return plan_memory(model, options, device=torch.device("cpu"), dtype=torch.float32)

    apart, alike = plan(60, max_model_len=LENGTH), plan(60, max_model_len=12)
    assert apart.cache_bytes <= cache_bytes(folder, 60)
    assert apart.num_pages > 60 >= apart.window_pages >= Windows.pages_seen(WINDOW, PAGE) + 2
    assert "pages of layers that see 8 tokens" in str(apart)
    assert (alike.num_pages, alike.window_pages) == (18, 0)
    with_host = plan(60, max_model_len=LENGTH, host_cache_bytes=1 << 20)
    assert (with_host.num_pages, with_host.window_pages) == (60, 0)
    assert "layers that see 8 tokens keep the pages of all tokens, as host_cache_bytes wants it" in str(with_host)


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match="4 pages for windows of 8 tokens, wanted 5 or more"):
        Windows(BlockPool(4, 4), 8)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_what_is_held_is_what_is_seen(window: int) -> None:
    made = scheduler(64, PAGE, window=(window, 40))
    assert made.windows is not None
    for position in range(40):
        seen = {other // PAGE for other in range(max(0, position - window + 1), position + 1)}
        assert made.windows.first(position) == min(seen)
        assert len(seen) <= Windows.pages_seen(window, PAGE)
