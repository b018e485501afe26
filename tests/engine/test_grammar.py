"""Answers that follow a grammar: masks against other engines of patterns, and requests in every situation of a scheduler."""

import json
import random

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import Fault, byte_tokenizer, scheduler
from tests.engine.masked_runner import MaskedRunner, expected_choice
from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_masks import Constraint, GrammarError, Grammars
from tilewright.engine.grammar_trial import GrammarTrial
from tilewright.engine.llm import LLM
from tilewright.engine.request import Delta, Request, SamplingParams
from tilewright.engine.tokenizer import Tokenizer

END = 256
TEXTS = ["yes", "no", "no way", "yesterday", "\u00e4h", 'maybe "so"\n', "n" * 40]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bookworm")


@pytest.fixture(scope="module")
def byte_grammars() -> Grammars:
    return Grammars(byte_tokenizer().to_json(), (END,))


def mask_of(grammars: Grammars, constraint: Constraint, output_ids: list[int]) -> np.ndarray:
    """Flags of all tokens."""
    request = Request("r", [1], SamplingParams())
    request.output_ids = output_ids
    bits = np.zeros((2, grammars.words), np.int32)
    assert grammars.fill([request, request], [None, constraint], bits) == []
    assert (bits[0] == -1).all()
    return np.unpackbits(bits[1].view(np.uint8), bitorder="little").astype(bool)


# ---- masks ------------------------------------------------------------------------------------------------------------------

PATTERNS = (
    r"[a-c]{2,5}x|[0-9]+",
    r"(ab|a)*(bc|c)?",
    r"\"[ -!#-~]{0,12}\"",
    r"-?(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?",
    r"(the|a) (cat|dog|mouse) (sat|ran)( (here|there))*\.",
    r"[ \t]*once upon [a-z]+",
    r"(x|y){3}(xx|yy)|zzz?",
)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("vocabulary", ["bytes", "bookworm"])
def test_a_mask_is_what_a_regex_engine_says_of_every_token(pattern: str, vocabulary: str, llm: LLM) -> None:
    """Against the partial matches of the `regex` package, token by token, along random answers."""
    tokenizer = byte_tokenizer() if vocabulary == "bytes" else llm.tokenizer
    eos = tokenizer.eos_ids
    grammars, compiled = Grammars(tokenizer.to_json(), eos), regex.compile(pattern.encode())
    pieces = token_bytes(tokenizer)
    rng = random.Random(pattern)
    for _ in range(3):
        constraint, ids, text = grammars.start(Grammar.regex(pattern)), [], b""
        for _ in range(12):
            flags = mask_of(grammars, constraint, ids)
            wanted = {token for token, piece in pieces.items() if piece and compiled.fullmatch(text + piece, partial=True)}
            ends = set(eos) if compiled.fullmatch(text) else set()
            given = set(np.flatnonzero(flags[: tokenizer.vocab_size]).tolist())
            matcher = constraint.advance(ids)
            assert matcher is not None
            tokens, forced = matcher.compute_ff_tokens(), matcher.compute_ff_bytes()
            if tokens:
                # Where only one text can follow it comes in the tokens that the model was trained on.
                assert all(forced.startswith(pieces[t]) or pieces[t].startswith(forced) for t in wanted)
                assert given == {tokens[0]} <= wanted
                assert not ends
            else:
                assert given == wanted | ends
            wanted &= given
            if not wanted:
                break
            ids.append(rng.choice(sorted(wanted)))
            text += pieces[ids[-1]]


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every ordinary token of a byte-level vocabulary, by GPT-2's table of characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    char_of = {byte: chr(byte) for byte in printable}
    char_of |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    byte_of = {char: byte for byte, char in char_of.items()}
    names = ((token, tokenizer.id_to_token(token)) for token in tokenizer.visible(range(tokenizer.vocab_size)))
    return {token: bytes(byte_of[char] for char in name) for token, name in names if name and set(name) <= byte_of.keys()}


SCHEMAS: tuple[dict, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1, None]}}, "required": ["b"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "boolean"}]},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -5, "maximum": 1200},
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_a_mask_is_what_each_token_alone_would_say(schema: dict, llm: LLM) -> None:
    """The walk over the vocabulary's tree against taking every token by itself, along random answers."""
    grammars, rng = llm.engine.grammars, random.Random(1)
    constraint, ids = grammars.start(Grammar.json_schema(schema)), []
    for _ in range(15):
        flags = mask_of(grammars, constraint, ids)
        matcher = constraint.advance(ids)
        assert matcher is not None
        alone = [matcher.validate_tokens([token]) == 1 for token in range(llm.tokenizer.vocab_size)]
        for token in llm.tokenizer.eos_ids:
            alone[token] = matcher.is_accepting()
        forced = matcher.compute_ff_tokens()
        assert flags[: len(alone)].tolist() == ([t == forced[0] for t in range(len(alone))] if forced else alone)
        assert not forced or alone[forced[0]]
        candidates = [t for t in np.flatnonzero(flags[: len(alone)]).tolist() if t not in llm.tokenizer.eos_ids]
        if not candidates:
            break
        ids.append(rng.choice(candidates))


# ---- requests ---------------------------------------------------------------------------------------------------------------


def engine_of(*, asynchronous: bool, pages: int = 64, **kwargs) -> Engine:
    faults = kwargs.pop("faults", lambda number: None)
    runner = MaskedRunner(pages, 4, vocab_size=END + 1, asynchronous=asynchronous, faults=faults)
    return Engine(runner, byte_tokenizer(), (END,), scheduler(pages, **kwargs))


def run(engine: Engine) -> dict[tuple[str, int], list[Delta]]:
    found: dict[tuple[str, int], list[Delta]] = {}
    for _ in range(5000):
        if not engine.has_work:
            return found
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
    raise AssertionError("the engine does not come to an end")


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@given(data=st.data(), asynchronous=st.booleans(), pages=st.sampled_from([24, 64]))
@settings(max_examples=60, deadline=None)
def test_every_answer_is_the_one_it_would_be_alone(data: st.DataObject, asynchronous: bool, pages: int) -> None:
    """Grammars beside free requests, several samples, shared prefixes, chunks, preemption: each as its definition."""
    engine = engine_of(asynchronous=asynchronous, pages=pages, budget=data.draw(st.sampled_from([4, 8, 32])))
    wanted: dict[tuple[str, int], list[int]] = {}
    for number in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.sampled_from([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7] * 5]))
        texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4, unique=True))
        seed, n = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3))
        structured = data.draw(st.booleans())
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 12)), seed=seed, n=n, ignore_eos=data.draw(st.booleans()),
            grammar=Grammar.choice(texts) if structured else None,
        )  # fmt: skip
        engine.submit(prompt, params, f"r{number}")
        for index in range(n if structured else 0):
            wanted[f"r{number}", index] = expected_choice(prompt, [t.encode() for t in texts], params, seed + index, END)
    found = run(engine)
    for key, ids in wanted.items():
        assert ids_of(found[key]) == ids
        assert found[key][-1].finish_reason == ("stop" if ids[-1] == END else "length")
    assert not engine._constraints


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_strings_aborts_and_failed_steps(asynchronous: bool) -> None:
    grammar = Grammar.choice(["n" * 40])
    engine = engine_of(asynchronous=asynchronous)
    engine.submit([1], SamplingParams(max_tokens=30, grammar=grammar, stop=("nnnn",)), "stopped")
    engine.submit([2], SamplingParams(max_tokens=30, grammar=grammar), "aborted")
    engine.submit([3], SamplingParams(max_tokens=9, grammar=grammar), "cut")
    for _ in range(3):
        engine.step()
    engine.abort("aborted")
    found = run(engine)
    assert found["stopped", 0][-1].finish_reason == "stop"
    assert found["aborted", 0][-1].finish_reason == "abort"
    assert (ids_of(found["cut", 0])[-1], found["cut", 0][-1].finish_reason) == (ord("n"), "length")
    for number in (3, -3):

        def faults(at: int, number: int = number) -> None:
            if at == number:
                raise Fault("out of memory")

        engine = engine_of(asynchronous=asynchronous, faults=faults)
        engine.submit([1], SamplingParams(max_tokens=9, grammar=grammar), "hit")
        assert "out of memory" in str(run(engine)["hit", 0][-1].error)
        engine.submit([1], SamplingParams(max_tokens=3, grammar=grammar), "after")
        assert run(engine)["after", 0][-1].finish_reason == "length"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_grammar_that_fails_half_way_ends_its_request_alone(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(asynchronous=asynchronous)
    texts = ["n" * 40]
    engine.submit([1], SamplingParams(max_tokens=9, seed=1, grammar=Grammar.choice(texts)), "bad")
    engine.submit([2], SamplingParams(max_tokens=9, seed=1, grammar=Grammar.choice(texts)), "good")
    engine.submit([2], SamplingParams(max_tokens=9, seed=1, ignore_eos=True), "free")
    first = engine.step()
    bad = next(request for request in engine._constraints if request.id == "bad")
    engine._constraints[bad]._matcher.consume_token(ord("x"))
    found = run(engine)
    assert found["bad", 0][-1].finish_reason == "error"
    assert "grammar" in str(found["bad", 0][-1].error)
    for name in ("good", "free"):
        assert len(ids_of([delta for delta in first if delta.request_id == name] + found[name, 0])) == 9


def test_what_stands_before_the_grammar_is_free(byte_grammars: Grammars) -> None:
    constraint = byte_grammars.start(Grammar("regex", "[0-9]", after=((7, 8), (9,))))
    assert mask_of(byte_grammars, constraint, [1, 7]).all()
    assert mask_of(byte_grammars, constraint, [1, 7, 1, 8]).all()
    flags = mask_of(byte_grammars, constraint, [1, 7, 1, 8, 7, 8])
    assert np.flatnonzero(flags[:257]).tolist() == list(range(48, 58))
    assert np.flatnonzero(mask_of(byte_grammars, constraint, [1, 7, 1, 8, 7, 8, 50])[:257]).tolist() == [END]


BAD = (
    (Grammar.regex("(["), "the regex is not valid"),
    (Grammar.lark("start: missing"), "the lark is not valid"),
    (Grammar.lark("\na|"), "the lark is not valid: Expected ::= at line 2"),
    (Grammar.json_schema({"type": "nothing"}), "the json_schema is not valid"),
    (Grammar.json_schema({"$ref": "#/nowhere"}), "the json_schema is not valid"),
    (Grammar.json_schema({"$ref": "http://example.com/x"}), "the json_schema is not valid"),
    (Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 3}), "the json_schema is not valid"),
    (Grammar.regex(r"(a|b)\1"), "the regex is not valid"),
)


@pytest.mark.parametrize(("grammar", "message"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_grammar_is_one_sentence(grammar: Grammar, message: str) -> None:
    engine = engine_of(asynchronous=False)
    with pytest.raises(GrammarError, match=message) as caught:
        engine.submit([1], SamplingParams(grammar=grammar))
    assert len(str(caught.value)) < 400
    assert not engine.has_work


def test_a_grammar_that_ends_the_child_is_told_from_one_that_is_too_complex() -> None:
    tokenizer = byte_tokenizer()
    trial = GrammarTrial(tokenizer.to_json(), (END,))
    for source, message in (
        ("root ::= missing", "the lark is not valid: its compiler could not read it"),
        ("\na|", "Expected ::="),
    ):
        with pytest.raises(GrammarError, match=message):
            trial.check(Grammar.lark(source))
    trial.check(Grammar.lark('start: "a"'))
    trial.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("bnf", "x"), "grammar kind is 'bnf'"),
        (lambda: Grammar.regex(""), "not empty"),
        (lambda: Grammar.regex("a" * 300_000), "at most 262144"),
        (lambda: Grammar.choice([]), "choice wants a list of texts"),
        (lambda: Grammar.json_schema("{"), "not valid JSON"),
        (lambda: Grammar.json_schema([1]), "of type list"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar="x"), "grammar is 'x'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=Grammar.regex("a"), min_tokens=1), "min_tokens is set with a grammar"),
        (lambda: SamplingParams(grammar=Grammar.regex("a"), allowed_token_ids=(1,)), "allowed_token_ids is set"),
    ],
)
def test_values_are_checked_when_they_are_made(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_answers_of_a_model_follow_their_grammars(llm: LLM) -> None:
    """The embedded model: schemas with penalties, seeds, log-probabilities and samples beside free requests."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    free = SamplingParams(max_tokens=20, seed=3)
    strict = SamplingParams(
        max_tokens=100,
        seed=1,
        n=2,
        grammar=Grammar.json_schema(schema),
        logprobs=1,
        repetition_penalty=1.1,
        logit_bias={5: 3.0},
    )
    alone = llm.generate("Once upon", free)[0].outputs[0].token_ids
    first, second = llm.generate(["Once upon", "Once upon"], [strict, free])
    for output in first.outputs:
        value = json.loads(output.text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 120
        assert output.finish_reason == "stop"
        assert all(entry.logprob <= 0 for entry in output.logprobs or ())
    assert second.outputs[0].token_ids == alone, "a neighbour of a structured answer draws what it draws alone"
    again = llm.generate("Once upon", strict)[0]
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in first.outputs]
