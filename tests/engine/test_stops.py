"""Stop strings against their definition, one character at a time, however the text is cut into pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import byte_tokenizer
from tests.engine.test_tokenizer import sentencepiece_like
from tilewright.engine.stops import OutputText, StopStrings
from tilewright.engine.tokenizer import Detokenizer


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the text ends before the stop string that it completes first, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    finder, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.flush(), None


CASES = [
    (["ab", "cd"], ["bc"], ("a", "bc")),
    (["a", "b", "a", "b", "c"], ["abc"], ("ab", "abc")),
    (["xabcy"], ["abc", "b"], ("xa", "b")),
    (["xabcy"], ["abc", "bc", "c"], ("x", "abc")),
    (["aaa", "ab"], ["aab"], ("aa", "aab")),
    (["\n", "\n"], ["\n\n"], ("", "\n\n")),
    (["ab"], ["abc"], ("ab", None)),
    (["ab", "abc"], ["abab", "bc"], ("", "abab")),
]


@pytest.mark.parametrize(("pieces", "stops", "wanted"), CASES)
def test_cases(pieces, stops, wanted):
    assert run(pieces, stops) == wanted == cut("".join(pieces), stops)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_text_ends_where_the_definition_says(pieces, stops):
    assert run(pieces, stops) == cut("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8), stop=st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop(pieces, stop):
    finder, shown, seen = StopStrings([stop]), "", ""
    for piece in pieces:
        text, found = finder.push(piece)
        seen, shown = seen + piece, shown + text
        if found is not None:
            return
        assert seen.startswith(shown)
        held = seen[len(shown) :]
        assert stop.startswith(held)
        longer = (seen[i:] for i in range(len(shown)))
        assert not any(stop.startswith(tail) for tail in longer), "may become a stop, and was shown"


def output(tokenizer, token_ids: list[int], stops: list[str], min_tokens: int = 0) -> tuple[str, str | None, int]:
    """(text, stop, tokens used)."""
    text, shown = OutputText(Detokenizer(tokenizer), stops, min_tokens), ""
    for used, token in enumerate(token_ids, start=1):
        piece, stop = text.push(token)
        shown += piece
        if stop is not None:
            return shown, stop, used
    return shown + text.finish(), None, len(token_ids)


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "wanted"),
    [
        ("a\nb", ["\n"], 0, ("a", "\n", 2)),
        ("a\n\nb", ["\n\n"], 0, ("a", "\n\n", 3)),
        ("aé!b", ["é!"], 0, ("a", "é!", 4)),
        ("aéb", ["é"], 0, ("a", "é", 3)),
        ("ab", ["\n"], 0, ("ab", None, 2)),
        ("a\n", ["\n\n"], 0, ("a\n", None, 2)),
        ("xxx", ["x"], 2, ("x", "x", 2)),
        ("xxx", ["x"], 3, ("xx", "x", 3)),
        ("xyxy", ["xy"], 2, ("", "xy", 2)),
        ("xyxy", ["xy"], 3, ("xy", "xy", 4)),
        ("xx", ["x"], 3, ("xx", None, 2)),
        ("x\nx\n", ["\n"], 3, ("x\nx", "\n", 4)),
    ],
)
@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), sentencepiece_like()], ids=["byte-level", "byte-fallback"])
def test_output(tokenizer, text, stops, min_tokens, wanted):
    """A byte-fallback decoder holds a newline back until its run of bytes ends; a stop still counts at its own token."""
    offset = 0 if tokenizer.vocab_size == 257 else 3
    assert output(tokenizer, [byte + offset for byte in text.encode()], stops, min_tokens) == wanted


@settings(max_examples=150, deadline=None)
@given(text=st.text("aé\n🙂", max_size=12), stops=st.lists(st.text("aé\n🙂", min_size=1, max_size=3), min_size=1, max_size=2))
def test_output_ends_where_the_definition_says(text, stops):
    for tokenizer, offset in ((byte_tokenizer(), 0), (sentencepiece_like(), 3)):
        shown, stop, _ = output(tokenizer, [byte + offset for byte in text.encode()], stops)
        assert (shown, stop) == cut(text, stops)
