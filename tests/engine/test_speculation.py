"""Speculation changes no token: requests with guesses, right and wrong, against the definition without any."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.engine.fake_runner import byte_tokenizer, expected, scheduler
from tests.engine.guesses import Oracle
from tests.engine.masked_runner import MaskedRunner, expected_choice
from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.lookup import GRAM, WINDOW, Lookup
from tilewright.engine.request import Request, SamplingParams
from tilewright.engine.rules import FromGrammar

VOCAB = 257
EOS = (256,)


def engine(proposer: object, *, asynchronous: bool = True, **sizes) -> Engine:
    made = scheduler(**{"pages": 64, "max_seqs": 4, "budget": 64, **sizes})
    made.max_samples = 64
    blocks = made.blocks
    runner = MaskedRunner(blocks.num_pages, blocks.page_size, vocab_size=VOCAB, asynchronous=asynchronous)
    return Engine(runner, byte_tokenizer(), EOS, made, proposer=proposer, draft_tokens=8)  # type: ignore[arg-type]


def answers(engine: Engine, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    names = [engine.submit(prompt, params) for prompt, params in asked]
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.num_pages, "pages are lost"
    return [found[name] for name in names]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("free", [False, True])
def test_no_token_changes_whatever_is_guessed(right: float, asynchronous: bool, free: bool) -> None:
    made = engine(Oracle(right, free=free), asynchronous=asynchronous)
    asked = [
        ([1 + i, 2, 3], SamplingParams(max_tokens=60, seed=i, speculate=i != 3, logprobs=(None, 1)[i == 1])) for i in range(6)
    ]
    got = answers(made, asked)
    for (prompt, params), tokens in zip(asked, got, strict=True):
        assert params.seed is not None
        assert tokens == expected(prompt, params, params.seed, vocab_size=VOCAB, eos_ids=EOS)
    stats = made.stats()
    if right == 0:
        assert (stats.drafted_tokens > 0) == (not free), "wrong guesses are found out in silence"
        assert stats.accepted_tokens < 5
    if right == 1:
        assert stats.accepted_tokens > 100


@pytest.mark.parametrize("free", [False, True])
def test_a_crowd_comes_while_drafts_are_in_flight(free: bool) -> None:
    """Nobody speculates among so many; a request whose drafts are in flight waits for them, and its next row is right."""
    made = engine(Oracle(1.0, free=free), max_seqs=24, pages=400, budget=200)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    asked = [([1 + i, 2, 3], replace(params, seed=i)) for i in range(20)]
    found: dict[str, list[int]] = {made.submit(*asked[0]): []}
    while made.has_work:
        if (
            len(found) == 1 and made.stats().accepted_tokens and not made._in_flight
        ):  # the next step has its drafts, and all prompts
            found.update({made.submit(*one): [] for one in asked[1:]})
        for delta in made.step():
            found[delta.request_id] += delta.token_ids
    assert made.stats().accepted_tokens > 0
    for (prompt, one), tokens in zip(asked, found.values(), strict=True):
        assert tokens == expected(prompt, one, one.seed or 0, vocab_size=VOCAB, eos_ids=EOS)


def test_right_guesses_make_fewer_steps() -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=3)
    steps = {}
    for right in (0.0, 1.0):
        made = engine(Oracle(right, free=True))
        answers(made, [([5, 6, 7], params)])
        steps[right] = made.runner.launched  # type: ignore[attr-defined]
    assert steps[0.0] == 200
    assert steps[1.0] < 60


@pytest.mark.parametrize(("asynchronous", "most"), [(False, 16), (True, 40)])
def test_what_a_grammar_forces_takes_few_steps(asynchronous: bool, most: int) -> None:
    texts = [b"a text of which every byte but the first is forced, and there are many", b"b or another text"]
    params = SamplingParams(max_tokens=100, seed=3, grammar=Grammar.choice([text.decode() for text in texts]))
    asked = [([5, 6, seed], replace(params, seed=seed)) for seed in range(4)]
    steps = {}
    for proposer in (None, FromGrammar()):
        made = engine(proposer, asynchronous=asynchronous)
        got = answers(made, asked)
        assert got == [expected_choice(prompt, texts, one, one.seed or 0, EOS[0]) for prompt, one in asked]
        steps[proposer] = made.runner.launched  # type: ignore[attr-defined]
    assert steps.pop(None) > 65
    assert min(steps.values()) <= most
    assert made.stats().forced_tokens > 100


def test_continuations() -> None:
    text = Lookup()
    assert text.continuation(4) == []
    text.extend([1, 2, 3])
    assert text.continuation(4) == []
    text.extend([4, 1, 2, 3])
    assert text.continuation(3) == [4, 1, 2]
    text.extend([5, 9, 2, 3, 4, 1, 2, 3])  # the longest agreement wins over the latest
    assert text.continuation(2) == [5, 9]
    text.extend([7, 7, 7, 7])
    assert text.continuation(5) == [7] * 5


def test_a_proposer_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Oracle):
        def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
            if self.rng.random() < 0.2:
                raise RuntimeError("out of memory")
            return super().propose(asked)

    made = engine(Broken(1.0))
    asked = [([1 + i, 2, 3], SamplingParams(max_tokens=60, seed=i)) for i in range(6)]
    for (prompt, params), tokens in zip(asked, answers(made, asked), strict=True):
        assert tokens == expected(prompt, params, params.seed or 0, vocab_size=VOCAB, eos_ids=EOS)
    assert "no tokens are guessed ahead any more: RuntimeError: out of memory" in caplog.text


@pytest.mark.long
def test_the_index_is_bounded() -> None:
    text, rng = Lookup(), random.Random(0)
    for _ in range(5):
        text.extend([rng.randrange(1000) for _ in range(WINDOW)])
        text.extend(list(range(2000, 2010)))
        assert len(text._tokens) <= 2 * WINDOW >= len(text._latest)
    text.extend(list(range(2000, 2000 + GRAM)))
    assert text.continuation(2) == [2003, 2004]
