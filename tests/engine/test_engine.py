"""The engine over a fake model: the same tokens and text whatever else is going on, and a way on after every failure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import FakeRunner, byte_tokenizer, expected, fault_at, scheduler
from tests.engine.pair import start_again
from tests.engine.test_stops import cut
from tilewright.engine.core import Engine
from tilewright.engine.request import Delta, QueueFull, RequestTooLong, SamplingParams
from tilewright.engine.step import DeviceLost, RowFault

TOKENIZER = byte_tokenizer()
VOCAB = 257
EOS = (0, 7, 33, 120, 256)


def engine(*, asynchronous=False, faults=lambda number: None, **options) -> Engine:
    sched = scheduler(**options)
    blocks = sched.blocks
    runner = FakeRunner(blocks.num_pages, blocks.page_size, vocab_size=VOCAB, asynchronous=asynchronous, faults=faults)
    return Engine(runner, TOKENIZER, EOS, sched)


def drain(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def joined(deltas: list[Delta], request_id: str, index: int = 0) -> tuple[list[int], str, str | None, object]:
    """(tokens, text, finish reason, stop reason), and the order of the deltas checked."""
    mine = [delta for delta in deltas if (delta.request_id, delta.index) == (request_id, index)]
    assert [delta.finish_reason is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    tokens = [token for delta in mine for token in delta.token_ids]
    return tokens, "".join(delta.text for delta in mine), mine[-1].finish_reason, mine[-1].stop_reason


def definition(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str, str | None, object]:
    """What `joined` must be, made from the plain token list."""
    tokens = expected(prompt, params, seed, vocab_size=VOCAB, eos_ids=EOS)
    end = tokens[-1]
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    by_token = end in stops and len(tokens) > params.min_tokens
    used = tokens[:-1] if by_token else tokens
    for count in range(1, len(used) + 1):
        text, stop = cut(TOKENIZER.decode(used[:count]), list(params.stop))
        if stop is not None:
            return tokens[:count], text, "stop", stop
    reason = end if by_token and end in params.stop_token_ids else None
    return tokens, TOKENIZER.decode(used), "stop" if by_token else "length", reason


SHORT = list(range(40, 59))
LONG = list(range(20, 170))
WORKLOAD: list[tuple[list[int], SamplingParams]] = [
    (SHORT, SamplingParams(max_tokens=30, seed=1, ignore_eos=True)),
    (SHORT[:16], SamplingParams(max_tokens=9, seed=2)),
    (LONG, SamplingParams(max_tokens=20, seed=3, n=3)),
    (LONG[:96] + SHORT, SamplingParams(max_tokens=12, seed=4, presence_penalty=0.5)),
    (SHORT[:16], SamplingParams(max_tokens=25, seed=2, min_tokens=5)),
    ([65], SamplingParams(max_tokens=40, seed=9, ignore_eos=True, stop=("A", "\ufffdb", "  "))),
    (LONG, SamplingParams(max_tokens=1, seed=5)),
    (LONG[:100], SamplingParams(max_tokens=30, seed=6, stop_token_ids=tuple(range(60, 80)), ignore_eos=True)),
]

ROOMY = {"pages": 400, "size": 16, "max_seqs": 16, "budget": 512}
TIGHT = {"pages": 48, "size": 4, "max_seqs": 8, "budget": 64}
MODES = {
    "one step for all": ROOMY,
    "chunk 16": ROOMY | {"chunk": 16},
    "chunk 64": ROOMY | {"chunk": 64},
    "budget 17": ROOMY | {"budget": 17},
    "no cache": ROOMY | {"cache": False},
    "two at a time": ROOMY | {"max_seqs": 2},
    "tight": TIGHT,
    "tight, chunk 16": TIGHT | {"chunk": 16},
    "tight, no cache": TIGHT | {"cache": False},
    "pages of one token": {"pages": 200, "size": 1, "max_seqs": 8, "budget": 64},
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_whatever_else_is_going_on(mode, asynchronous):
    """Alone, batched, in chunks, prefix found or not or wholly cached (the second round), preempted and resumed."""
    eng = engine(asynchronous=asynchronous, **MODES[mode])
    deltas: list[Delta] = []
    for turn in range(2):
        names = [eng.submit(prompt, params, f"{turn}/{i}") for i, (prompt, params) in enumerate(WORKLOAD)]
        deltas = drain(eng)
        for name, (prompt, params) in zip(names, WORKLOAD, strict=True):
            for index in range(params.n):
                assert params.seed is not None
                assert joined(deltas, name, index) == definition(prompt, params, params.seed + index)
    stats = eng.stats()
    assert stats.pages_used == stats.running == stats.waiting == 0
    assert stats.finished == 2 * sum(params.n for _, params in WORKLOAD)
    assert stats.generated_tokens == sum(len(delta.token_ids) for delta in deltas) * 2
    assert mode == "pages of one token" or (stats.preemptions > 0) == mode.startswith("tight")
    assert (stats.prefix_hit_tokens > 0) == ("no cache" not in mode)


@pytest.mark.parametrize("mode", MODES)
def test_alone(mode):
    for prompt, params in WORKLOAD:
        eng = engine(**MODES[mode])
        name = eng.submit(prompt, params)
        deltas = drain(eng)
        for index in range(params.n):
            assert joined(deltas, name, index) == definition(prompt, params, (params.seed or 0) + index)


@settings(max_examples=60, deadline=None)
@given(
    stops=st.lists(st.sampled_from(["a", "é", "\ufffd\ufffd", "  ", "b\n", "Q"]), max_size=2).map(tuple),
    asynchronous=st.booleans(),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_random_arrivals_and_aborts(stops, asynchronous, seed, data):
    eng = engine(asynchronous=asynchronous, pages=12, size=4, max_seqs=3, budget=12)
    known: dict[str, tuple[list[int], SamplingParams]] = {}
    aborted: set[str] = set()
    deltas: list[Delta] = []
    for number in range(data.draw(st.integers(1, 8))):
        prompt = [60 + i % 4 for i in range(data.draw(st.integers(1, 20)))]
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 20)), seed=seed + number % 2, stop=stops)
        known[eng.submit(prompt, params)] = (prompt, params)
        for _ in range(data.draw(st.integers(0, 4))):
            deltas += eng.step()
        if data.draw(st.integers(0, 4)) == 0:
            name = data.draw(st.sampled_from(sorted(known)))
            eng.abort(name)
            aborted.add(name)
    deltas += drain(eng)
    for name, (prompt, params) in known.items():
        found = joined(deltas, name)
        wanted = definition(prompt, params, params.seed or 0)
        if found[2] == "abort":
            assert name in aborted
            assert wanted[0][: len(found[0])] == found[0]
            assert wanted[1].startswith(found[1])
        else:
            assert found == wanted
    assert eng.stats().pages_used == 0


@pytest.mark.parametrize("again_after", [0, 3, 8])
def test_logprobs_come_with_their_tokens(again_after):
    """Also when all starts again (for want of pages, say) while the prompt is computed, or after."""
    eng = engine(chunk=4)
    first = eng.submit(SHORT[:9], SamplingParams(max_tokens=9, seed=1, logprobs=1, ignore_eos=True))
    second = eng.submit(SHORT[:17], SamplingParams(max_tokens=9, seed=2, prompt_logprobs=0, ignore_eos=True))
    deltas = [delta for _ in range(again_after) for delta in eng.step()]
    start_again(eng.scheduler)
    deltas += drain(eng)
    for delta in deltas:
        asked = delta.request_id == first
        assert [entry.token_id for entry in delta.logprobs] == (list(delta.token_ids) if asked else [])
    prompts = [delta.prompt_logprobs for delta in deltas if delta.request_id == second]
    assert [entry.token_id for entry in prompts[0] or ()] == SHORT[1:17]
    assert prompts[1:] == [None] * 8


def test_an_asynchronous_runner_has_a_step_in_flight_behind_the_next():
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    tokens = expected(SHORT, params, 1, vocab_size=VOCAB)
    for asynchronous, when in ((False, [1, 2, 3]), (True, [2, 3, 4])):
        eng = engine(asynchronous=asynchronous)
        eng.submit(SHORT, params)
        found = {turn: [delta.token_ids[0] for delta in eng.step()] for turn in range(1, 5)}
        assert {turn: new for turn, new in found.items() if new} == {turn: [t] for turn, t in zip(when, tokens, strict=True)}
        assert not eng.has_work


BAD = [
    ({"prompt_ids": [1, 257]}, ValueError, "the prompt has the token id 257, wanted 0 to 256"),
    ({"prompt_ids": [-1]}, ValueError, "token id -1"),
    ({"prompt_ids": []}, ValueError, "no tokens"),
    ({"prompt_ids": [1], "params": SamplingParams(max_tokens=1000)}, RequestTooLong, "together 1001; the model takes 1000"),
    ({"prompt_ids": [1], "params": SamplingParams(logit_bias={300: 1.0})}, ValueError, "logit_bias has the token id 300"),
    ({"prompt_ids": [1], "params": SamplingParams(stop_token_ids=(300,))}, ValueError, "stop_token_ids has the token id 300"),
    ({"prompt_ids": [1], "request_id": "taken"}, ValueError, "'taken' is in use"),
    ({"prompt_ids": [1], "params": SamplingParams(n=5)}, QueueFull, "1 requests wait, 5 more asked for"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD)
def test_a_bad_request_is_refused_and_changes_nothing(arguments, error, words):
    eng = engine(waiting=4)
    eng.submit([1, 2], request_id="taken")
    before = eng.stats()
    with pytest.raises(error, match=words):
        eng.submit(**arguments)
    assert eng.stats() == before
    assert joined(drain(eng), "taken")[2] in ("length", "stop")


def test_without_a_tokenizer_there_are_ids_and_no_text():
    with_text = engine()
    eng = Engine(with_text.runner, None, EOS, with_text.scheduler, vocab_size=100)
    with pytest.raises(ValueError, match="stop_token_ids"):
        eng.submit([1], SamplingParams(stop=("a",)))
    with pytest.raises(ValueError, match="token id 100, wanted 0 to 99"):
        eng.submit([100])
    params = SamplingParams(max_tokens=8, seed=2)
    name = eng.submit(SHORT[:16], params)
    tokens, text, reason, _ = joined(drain(eng), name)
    wanted = definition(SHORT[:16], params, 2)
    assert (tokens, text, reason) == (wanted[0], "", wanted[2])
    with pytest.raises(ValueError, match="give a tokenizer, or the vocab_size"):
        Engine(eng.runner, None, EOS, eng.scheduler)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("number", [1, 2, 4, -1, -2, -4], ids=lambda n: f"{'launch' if n > 0 else 'collect'} {abs(n)}")
def test_a_failed_step_fails_its_requests_only(number, asynchronous):
    eng = engine(asynchronous=asynchronous, faults=fault_at(number), max_seqs=2)
    names = [eng.submit(SHORT, SamplingParams(max_tokens=6, seed=i, ignore_eos=True)) for i in range(5)]
    deltas = drain(eng)
    failed = [delta for delta in deltas if delta.finish_reason == "error"]
    assert {delta.request_id for delta in failed} == set(names[:2])
    assert {delta.error for delta in failed} == {"the step failed: Fault: out of memory"}
    for i, name in enumerate(names):
        wanted = expected(SHORT, SamplingParams(max_tokens=6), i, vocab_size=VOCAB)
        found = joined(deltas, name)[0]
        assert found == wanted if i > 1 else found == wanted[: len(found)]
    # Before it failed, the step before had brought a token.
    assert len(joined(deltas, names[0])[0]) == abs(number) - 1
    stats = eng.stats()
    assert (stats.failed, stats.finished, stats.pages_used) == (2, 3, 0)
    again = eng.submit(SHORT, SamplingParams(max_tokens=6, seed=1))
    assert joined(drain(eng), again) == definition(SHORT, SamplingParams(max_tokens=6), 1)


def test_a_failed_step_fails_those_that_read_what_it_should_have_written():
    eng = engine(asynchronous=True, faults=fault_at(-1))
    eng.submit(SHORT, SamplingParams(seed=1))
    assert eng.step() == []
    eng.submit(SHORT[:8], SamplingParams(seed=2))
    assert [delta.finish_reason for delta in drain(eng)] == ["error", "error"]
    assert eng.stats().pages_used == eng.stats().pages_cached == 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_abort_hands_out_a_last_delta(asynchronous):
    eng = engine(asynchronous=asynchronous)
    name = eng.submit(SHORT, SamplingParams(max_tokens=50, seed=1, n=2, ignore_eos=True))
    for _ in range(4):
        eng.step()
    eng.abort(name)
    eng.abort(name)
    eng.abort("nobody")
    last = drain(eng)
    assert [(delta.index, delta.finish_reason, delta.token_ids) for delta in last] == [(0, "abort", ()), (1, "abort", ())]
    assert eng.stats().pages_used == 0
    assert all(state in ("free", "cached") for state, _ in eng.scheduler.page_map())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_row_that_cannot_be_packed_ends_alone(asynchronous):
    """All others have the tokens that they would have had, and what the prefix cache knows stays."""
    eng = engine(asynchronous=asynchronous, **ROOMY)
    first = eng.submit(LONG, SamplingParams(max_tokens=8, seed=1))
    drain(eng)
    cached = eng.stats().pages_cached
    names = [eng.submit(SHORT, SamplingParams(max_tokens=6, seed=i, ignore_eos=True)) for i in range(4)]
    launch, bad = eng.runner.launch, names[2]

    def refuses(step):
        for row in step.rows:
            if row.request.id == bad and row.start >= len(SHORT) + 1:
                raise RowFault(row.request, OverflowError("too wide"))
        return launch(step)

    eng.runner.launch = refuses
    deltas = drain(eng)
    for i, name in enumerate(names):
        wanted = expected(SHORT, SamplingParams(max_tokens=6), i, vocab_size=VOCAB)
        tokens, _, reason, _ = joined(deltas, name)
        assert (tokens, reason) == ((wanted[: len(tokens)], "error") if name == bad else (wanted, "length"))
        assert len(tokens) >= 1
    (error,) = {delta.error for delta in deltas if delta.finish_reason == "error"}
    assert error == "it could not be run: OverflowError: too wide"
    assert eng.failed_steps == 0, "the step did not fail"
    assert eng.stats().pages_cached >= cached
    assert eng.stats().preemptions == 0
    assert first not in {delta.request_id for delta in deltas}


def test_a_fault_of_the_host_leaves_the_prefix_cache_to_those_beside_the_step():
    eng = engine(**ROOMY)
    eng.submit(LONG, SamplingParams(max_tokens=8, seed=1))
    drain(eng)
    cached = eng.stats().pages_cached
    eng.submit(SHORT, SamplingParams(max_tokens=6, seed=1))
    launch = eng.runner.launch

    def wrong(step):
        eng.runner.launch = launch
        raise OverflowError("a bug")

    eng.runner.launch = wrong
    assert [delta.error for delta in drain(eng)] == ["the step failed: OverflowError: a bug"]
    assert eng.stats().pages_cached == cached
    again = eng.submit(LONG, SamplingParams(max_tokens=8, seed=1))
    assert next(delta for delta in drain(eng) if delta.request_id == again).cached_tokens > 100


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_a_lost_device_ends_all_requests_and_the_engine(method, asynchronous):
    eng = engine(asynchronous=asynchronous, max_seqs=2)
    names = [eng.submit(SHORT, SamplingParams(max_tokens=6, seed=i)) for i in range(4)]
    eng.step()

    def lost(_):
        raise DeviceLost("cuda:0 answers no more: an illegal address")

    setattr(eng.runner, method, lost)
    last = {delta.request_id: delta for delta in drain(eng) if delta.finish_reason is not None}
    assert {name: last[name].finish_reason for name in names} == dict.fromkeys(names, "error")
    assert {last[name].error for name in names} == {"cuda:0 answers no more: an illegal address"}
    assert eng.stats().pages_used == 0
    assert not eng.has_work
    with pytest.raises(DeviceLost, match="answers no more"):
        eng.submit(SHORT)
