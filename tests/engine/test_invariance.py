"""Greedy ids of a model do not depend on what else runs: alone, in a batch, in chunks, from the cache, after preemption.

On a GPU too: in float32 with the implementations that a server takes, and in bfloat16 with the invariant ones.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import byte_tokenizer
from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.loading import load
from tilewright.engine.request import SamplingParams
from tilewright.engine.runner import ModelRunner
from tilewright.engine.schedule import Scheduler
from tilewright.models.config import ModelConfig

VOCAB = 257
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, windows=(None, None),
)  # fmt: skip
PAGES, PAGE_SIZE, MAX_SEQS, BUDGET = 256, 16, 32, 512


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
MACHINES = [
    ("cpu", "float32", False),
    pytest.param(("cuda", "float32", False), marks=GPU),
    pytest.param(("cuda", "float32", True), marks=GPU),
    pytest.param(("cuda", "bfloat16", True), marks=GPU),
]


@pytest.fixture(scope="module", params=MACHINES, ids=str)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    device, dtype, invariant = request.param
    options = EngineConfig(
        device=device, dtype=dtype, max_seqs=MAX_SEQS, page_size=PAGE_SIZE, max_tokens_per_step=BUDGET,
        kv_cache_bytes=8 << 20, invariant=invariant,
    )  # fmt: skip
    return load(CONFIG, options).runner


def engine(
    runner: ModelRunner, *, pages: int = PAGES, chunk: int | None = None, cache: bool = True, seqs: int = MAX_SEQS
) -> Engine:
    scheduler = Scheduler(
        blocks=BlockPool(pages, PAGE_SIZE, prefix_cache=cache), max_seqs=seqs, max_tokens_per_step=BUDGET, max_model_len=256,
        max_waiting=100, prefill_chunk=chunk,
    )  # fmt: skip
    return Engine(runner, byte_tokenizer(), (), scheduler)


def run(made: Engine, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    names = [made.submit(prompt, params) for prompt in prompts]
    ids: dict[str, list[int]] = {name: [] for name in names}
    while made.has_work:
        for delta in made.step():
            ids[delta.request_id] += delta.token_ids
            assert delta.finish_reason in (None, "length"), delta.error
    return [ids[name] for name in names]


def prompts_of(seed: int, count: int, longest: int = 100) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> tuple[list[list[int]], list[list[int]]]:
    """32 prompts of mixed lengths, and what each gives when it is alone in the engine."""
    prompts = prompts_of(0, 32)
    return prompts, [run(engine(runner, cache=False), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("chunk", [None, 16, 64])
def test_batch_of_32(runner: ModelRunner, alone: tuple[list[list[int]], list[list[int]]], chunk: int | None) -> None:
    prompts, want = alone
    assert len({tuple(ids) for ids in want}) > 16, "the model says the same to everything: this test would prove nothing"
    assert run(engine(runner, chunk=chunk, cache=False), prompts) == want


def test_preempted_and_resumed(runner: ModelRunner) -> None:
    prompts = prompts_of(2, 8, 40)
    want = [run(engine(runner, cache=False), [prompt], 30)[0] for prompt in prompts]
    small = engine(runner, pages=10, cache=False)
    assert run(small, prompts, 30) == want
    assert small.stats().preemptions > 0


def test_prefix_cache_hit_and_fully_cached_prompt(runner: ModelRunner, alone: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, want = alone
    made = engine(runner)
    assert run(made, prompts) == want
    missed = made.stats().prefix_hit_tokens
    assert run(made, prompts) == want
    assert made.stats().prefix_hit_tokens > missed
    whole = [prompt for prompt in prompts_of(1, 8) if len(prompt) >= PAGE_SIZE]
    whole = [prompt[: len(prompt) // PAGE_SIZE * PAGE_SIZE] for prompt in whole]
    first = run(made, whole)
    assert run(made, whole) == first == [run(engine(runner, cache=False), [prompt])[0] for prompt in whole]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 6), chunk=st.sampled_from([None, 16, 64]), pages=st.integers(12, 60),
    shared=st.integers(0, 48),
)  # fmt: skip
def test_any_mixture(runner: ModelRunner, seed: int, count: int, chunk: int | None, pages: int, shared: int) -> None:
    prefix = [i % 256 for i in range(shared)]
    prompts = [prefix + prompt for prompt in prompts_of(seed, count, 60)]
    want = [run(engine(runner, cache=False), [prompt], 6)[0] for prompt in prompts]
    assert run(engine(runner, pages=pages, chunk=chunk), prompts, 6) == want


_CHOICE: dict[str, Any] = {"grammar": Grammar.regex("[a-p]{3,8}(xyz|zyx)[0-9]+")}
_EDITS: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {97: 4.0, 98: -4.0}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "edited": _EDITS,
    "masked": _CHOICE,
    "masked and edited": {**_CHOICE, **_EDITS},
    "explained": {"logprobs": 3},
    "masked and explained": {**_CHOICE, "logprobs": 3},
}


def drawn(runner: ModelRunner, kinds: tuple[str, ...]) -> dict[str, tuple[list[int], list[int]]]:
    """Kind -> the ids that it draws, and the likeliest ids beside them, all kinds in one batch."""
    made = engine(runner, cache=False)
    made.eos_ids = (VOCAB - 1,)
    prompts = dict(zip(KINDS, prompts_of(3, len(KINDS), 40), strict=True))
    for kind in kinds:
        made.submit(prompts[kind], SamplingParams(max_tokens=12, seed=5, **KINDS[kind]), kind)
    found: dict[str, tuple[list[int], list[int]]] = {kind: ([], []) for kind in kinds}
    while made.has_work:
        for delta in made.step():
            assert delta.error is None, delta.error
            found[delta.request_id][0].extend(delta.token_ids)
            found[delta.request_id][1].extend(token for entry in delta.logprobs for token, _ in entry.top)
    return found


def test_what_a_row_draws_does_not_depend_on_what_others_want_of_their_logits(runner: ModelRunner) -> None:
    """Each kind alone, and all pairs and all kinds together: with edits, masks, log-probabilities and without."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tilewright[structured]'")
    alone = {kind: drawn(runner, (kind,))[kind] for kind in KINDS}
    assert len({tuple(ids) for ids, _ in alone.values()}) == len(KINDS)
    assert all(ids[:3] and all(97 <= token <= 112 for token in ids[:3]) for kind, (ids, _) in alone.items() if "masked" in kind)
    for kinds in (*itertools.combinations(KINDS, 2), tuple(KINDS), tuple(reversed(KINDS))):
        assert drawn(runner, kinds) == {kind: alone[kind] for kind in kinds}


def test_masked_rows_alone_cost_no_edits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tilewright[structured]'")
    full: list[bool] = []
    head, edited = runner._head, runner._head.full
    monkeypatch.setattr(head, "full", lambda *args: (full.append(True), edited(*args))[1])
    drawn(runner, ("plain", "masked"))
    assert not full
    drawn(runner, ("plain", "masked and edited"))
    assert full
