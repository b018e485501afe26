"""Masks that cost little: originals of a grammar, newest tokens from arrays, and what the device has to do meanwhile."""

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import byte_tokenizer, scheduler
from tests.engine.masked_runner import MaskedRunner, expected_choice
from tilewright.engine import grammar_cache
from tilewright.engine.core import Engine
from tilewright.engine.decoding import Newest
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_cache import Compiled
from tilewright.engine.grammar_masks import Grammars
from tilewright.engine.llm import LLM
from tilewright.engine.request import Request, SamplingParams
from tilewright.engine.step import FillMasks, Step, StepResult

END = 256
PATTERN = Grammar.regex("(ab|[a-c]{2,5}x|[0-9]+)*")
TEXTS = ["yes", "no", "no way", "yesterday", "n" * 40]
LONG = ["n" * 40, "no way round this", "yesterday evening"]


def grammars_of(threads: int) -> Grammars:
    pytest.importorskip("llguidance", reason="llguidance is not installed: there are no grammars")
    return Grammars(byte_tokenizer().to_json(), (END,), threads=threads)


def compiled_of(grammars: Grammars, grammar: Grammar = PATTERN) -> Compiled:
    return grammars._cache.compiled(grammar)


# ---- originals --------------------------------------------------------------------------------------------------------------


def test_requests_are_divided_between_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one matcher wait for each other, so many requests get several."""
    monkeypatch.setattr(grammar_cache, "AT_ONCE_S", math.inf)
    grammars = grammars_of(3)
    started = [grammars.start(PATTERN) for _ in range(4)]
    compiled = compiled_of(grammars)
    assert len(compiled.originals) == 1
    started += [grammars.start(PATTERN) for _ in range(44)]
    assert [len(one.users) for one in compiled.originals] == [8] * 6  # 2 for each thread
    assert {one.number for one in compiled.originals} == {constraint._number for constraint in started}
    del started[5:]
    grammars.start(Grammar.regex("x"))
    assert sum(len(one.users) for one in compiled.originals) == 5
    again = [grammars.start(PATTERN) for _ in range(19)]
    assert len(compiled.originals) == 6
    assert max(len(one.users) for one in compiled.originals) == 4
    assert len(again) == 19


def test_one_thread_needs_one_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "AT_ONCE_S", math.inf)
    grammars = grammars_of(1)
    started = [grammars.start(PATTERN) for _ in range(30)]
    assert [len(one.users) for one in compiled_of(grammars).originals] == [len(started)]


def test_originals_of_a_slow_grammar_are_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "AT_ONCE_S", -1.0)
    grammars = grammars_of(4)
    started = [grammars.start(PATTERN) for _ in range(5)]
    for thread in threading.enumerate():
        if thread.name == "tilewright-originals":
            thread.join()
    compiled = compiled_of(grammars)
    assert len(compiled.originals) == 2
    assert not compiled.busy
    assert all(constraint.advance([ord("a")]) is not None for constraint in started)
    assert grammars.start(PATTERN)._number == compiled.originals[1].number


def test_originals_without_users_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "AT_ONCE_S", math.inf)
    monkeypatch.setattr(grammar_cache, "MOST_ORIGINALS", 2)
    grammars, other = grammars_of(4), Grammar.regex("[0-9]*")
    first = [grammars.start(PATTERN) for _ in range(20)]
    assert len(compiled_of(grammars).originals) == 3
    second = [grammars.start(other) for _ in range(20)]
    assert len(compiled_of(grammars, other).originals) == 1, "all the room is in use"
    del first, second
    third = [grammars.start(other) for _ in range(20)]
    assert len(compiled_of(grammars).originals) == 1
    assert len(compiled_of(grammars, other).originals) == 3
    assert len(third) == 20


class Watched:
    """An executor that notes the rows it is given."""

    def __init__(self, real: Any):
        self._real = real
        self.asked: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(rows: list[Any], *rest: Any) -> Any:
            self.asked.append([row[0] for row in rows])
            return getattr(self._real, name)(rows, *rest)

        return call


def lines(bits: np.ndarray) -> list[bytes]:
    return [line.tobytes() for line in bits]


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_masks_are_those_of_each_request_alone(threads: int, arrays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random answers of many requests, some without a grammar and some before it; rows of one original are neighbours."""
    monkeypatch.setattr(grammar_cache, "AT_ONCE_S", math.inf)
    rng, grammars, alone = random.Random(1), grammars_of(threads), grammars_of(1)
    grammars._executor = watched = Watched(grammars._executor)
    after = Grammar("regex", PATTERN.source, after=((7,),))
    asked = [rng.choice([PATTERN, PATTERN, after, Grammar.choice(LONG), None]) for _ in range(40)]
    requests = [Request(str(i), [1], SamplingParams()) for i in range(40)]
    states = [None if grammar is None else grammars.start(grammar) for grammar in asked]
    number_of = {id(state._matcher): state._number for state in states if state is not None}
    bits = np.zeros((40, grammars.words), np.int32)
    for _ in range(8):
        bits[:] = rng.getrandbits(31)  # what an earlier step has left
        newest = Newest([len(r.output_ids) for r in requests], [r.output_ids[-1] if r.output_ids else -1 for r in requests])
        assert grammars.fill(requests, states, bits, newest=newest if arrays else None) == []
        for request, grammar, line in zip(requests, asked, lines(bits), strict=True):
            one = np.zeros((1, grammars.words), np.int32)
            alone.fill([request], [None if grammar is None else alone.start(grammar)], one)
            assert one.tobytes() == line
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :END]
        for request, allowed in zip(requests, flags):
            found = np.flatnonzero(allowed).tolist()
            request.output_ids.append(7 if 7 in found and rng.random() < 0.3 else rng.choice(found))
    for rows in watched.asked:
        numbers = [number_of[id(matcher)] for matcher in rows]
        assert numbers == sorted(numbers)


# ---- newest tokens ----------------------------------------------------------------------------------------------------------


class Checked(Grammars):
    """Compares the newest tokens that it is given with the requests."""

    used = 0

    def fill(
        self, requests: Sequence[Request], *args: Any, newest: Newest | None = None, **named: Any
    ) -> list[tuple[Request, str]]:  # fmt: skip
        """As the real one."""
        assert newest is not None
        for request, count, token in zip(requests, *newest, strict=True):
            if count > 0 and request.finish_reason is None:
                assert (len(request.output_ids), request.output_ids[-1]) == (count, token)
                Checked.used += 1
        return super().fill(requests, *args, newest=newest, **named)


CHECKED = Checked(byte_tokenizer().to_json(), (END,)) if pytest.importorskip("llguidance") else None


def engine_of(*, runner: MaskedRunner | None = None, pages: int = 64, **kwargs: Any) -> Engine:
    runner = runner or MaskedRunner(pages, 4, vocab_size=END + 1, asynchronous=True)
    engine = Engine(runner, byte_tokenizer(), (END,), scheduler(pages, **kwargs))
    engine._grammars = CHECKED
    return engine


def run(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for _ in range(3000):
        if not engine.has_work:
            return found
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    raise AssertionError("the engine does not come to an end")


@given(data=st.data(), pages=st.sampled_from([24, 64]), budget=st.sampled_from([4, 8, 32]))
@settings(max_examples=60, deadline=None)
def test_the_newest_tokens_are_those_of_the_requests(data: st.DataObject, pages: int, budget: int) -> None:
    """With preemption, chunks, aborts, and requests that come while a step waits for its masks."""
    engine = engine_of(pages=pages, budget=budget)
    wanted: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 7))):
        prompt = data.draw(st.sampled_from([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7] * 5]))
        texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4, unique=True))
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 30)), seed=number, grammar=Grammar.choice(texts))
        engine.submit(prompt, params, f"r{number}")
        wanted[f"r{number}"] = expected_choice(prompt, [text.encode() for text in texts], params, number, END)
        for _ in range(data.draw(st.integers(0, 4))):
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        if data.draw(st.integers(0, 5)) == 0:
            gone = data.draw(st.sampled_from(sorted(wanted)))
            engine.abort(gone)
            wanted[gone] = wanted[gone][:0]
    for name, ids in run(engine).items():
        found.setdefault(name, []).extend(ids)
    assert {name: found[name] for name, ids in wanted.items() if ids} == {name: ids for name, ids in wanted.items() if ids}
    assert engine.scheduler.blocks.available == pages
    assert not engine._constraints


def test_the_newest_tokens_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before, engine = Checked.used, engine_of()
    watched = Watched(engine.grammars._executor)
    monkeypatch.setattr(engine.grammars, "_executor", watched)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=20, grammar=Grammar.choice(["n" * 40])))
    run(engine)
    assert Checked.used == before + 19
    assert len(watched.asked) == 20 + 19, "masks, and tokens that the executor has consumed"


# ---- the device has work ----------------------------------------------------------------------------------------------------


class Logged(MaskedRunner):
    """Notes what is asked of the device, in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log: list[tuple[str, int]] = []
        self.refuses = False

    def launch(self, step: Step) -> int:
        """As the real one."""
        ticket = super().launch(step)
        self.log.append(("launch", ticket))
        return ticket

    def sample(self, ticket: int, words: int, fill: FillMasks) -> None:
        """As the real one; fails once if it `refuses`."""
        if self.refuses:
            self.refuses = False
            raise RuntimeError("no memory for masks")

        def noted(bits: np.ndarray) -> None:
            self.log.append(("fill", ticket))
            fill(bits)

        super().sample(ticket, words, noted)
        self.log.append(("sample", ticket))

    def collect(self, ticket: int) -> StepResult:
        """As the real one."""
        result = super().collect(ticket)
        self.log.append(("collect", ticket))
        return result


def test_masks_are_filled_behind_the_pass_and_the_next_pass_follows_at_once() -> None:
    """While masks are filled, the pass of the same step is on the device; before results are read, the next pass is."""
    runner = Logged(64, 4, vocab_size=END + 1, asynchronous=True)
    engine = engine_of(runner=runner)
    engine.submit([1, 2], SamplingParams(max_tokens=12, grammar=Grammar.choice(["n" * 40])), "strict")
    engine.submit([3], SamplingParams(max_tokens=12, ignore_eos=True), "free")
    engine.advance()
    assert runner.log == [("launch", 1), ("fill", 1), ("sample", 1)], "nothing has to be waited for"
    engine.advance()
    assert runner.log[3:] == [("launch", 2)]
    for ticket in range(2, 11):
        del runner.log[:]
        rows = engine.advance()
        assert runner.log == [("collect", ticket - 1), ("fill", ticket), ("sample", ticket), ("launch", ticket + 1)]
        assert len(rows.tokens) == 2
    run(engine)


def test_plain_steps_stay_one_ahead() -> None:
    runner = Logged(64, 4, vocab_size=END + 1, asynchronous=True)
    engine = engine_of(runner=runner)
    engine.submit([3], SamplingParams(max_tokens=12, ignore_eos=True), "free")
    engine.submit([1, 2], SamplingParams(max_tokens=3, grammar=Grammar.choice(["n" * 40])), "strict")
    while len(engine._constraints):
        engine.advance()
    engine.advance()
    del runner.log[:]
    engine.advance()
    (first, new), (second, old) = runner.log
    assert (first, second, new) == ("launch", "collect", old + 1)
    run(engine)


@pytest.mark.parametrize("what", ["abort", "reset", "broken"])
def test_a_step_that_waits_for_its_masks_may_lose_its_requests(what: str) -> None:
    runner = Logged(64, 4, vocab_size=END + 1, asynchronous=True)
    engine = engine_of(runner=runner)
    params = SamplingParams(max_tokens=12, seed=1, grammar=Grammar.choice(["n" * 40]))
    engine.submit([1, 2], params, "first")
    for _ in range(4):
        engine.step()
    assert engine._unsampled is not None
    if what == "abort":
        engine.abort("first")
    elif what == "reset":
        engine.reset()
        runner.queue.clear()  # the device runs what it was given, and nobody reads it
        runner.masked.clear()
    else:
        runner.refuses = runner.hurt = True
        (delta,) = [delta for delta in engine.step() if delta.finish_reason]
        assert "no memory for masks" in str(delta.error)
    engine.submit([1, 2], params, "second")
    assert run(engine)["second"] == expected_choice([1, 2], [b"n" * 40], params, 1, END)
    assert engine.scheduler.blocks.available == 64


class Ahead:
    """A runner whose steps the engine keeps in flight as if they ran on a device."""

    asynchronous = True

    def __init__(self, runner: Any):
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2, "logprobs": 2}], ids=["plain", "full"])
def test_a_model_draws_the_same_when_steps_are_in_flight(options: dict[str, Any]) -> None:
    """The embedded model: logits that were computed with the pass are sampled a call later."""
    llm = LLM("bookworm")
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
    strict = [SamplingParams(max_tokens=30, seed=seed, grammar=Grammar.json_schema(schema), **options) for seed in range(3)]
    asked = [*strict, SamplingParams(max_tokens=30, seed=7)]

    def answers() -> list[Any]:
        found = llm.generate(["Once upon", "The cat", "A", "Once"], asked)
        return [output.token_ids for one in found for output in one.outputs]

    wanted = answers()
    steps = llm.engine.mask_times.steps
    ahead: Any = Ahead(llm.engine.runner)
    llm.engine.runner = ahead
    assert answers() == wanted
    assert llm.engine.mask_times.steps > steps


def test_what_masks_cost_is_counted() -> None:
    engine = engine_of()
    engine.submit([1, 2], SamplingParams(max_tokens=5, n=2, grammar=Grammar.choice(["n" * 40])))
    before = engine.mask_times.copy()
    run(engine)
    times = engine.mask_times.since(before)
    assert times.masks == 10
    assert 5 <= times.steps <= 10
    assert min(times.commit_s, times.fill_s, times.send_s, times.wait_s, times.accept_s) > 0
