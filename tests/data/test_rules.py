"""Rules against datatrove's, decision by decision; every threshold at its edge, from the table."""

import random

import pytest
from datatrove.data import Document as TheirDocument
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters.c4_filters import C4QualityFilter
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION

from tests.data.sets import books, prose
from tilewright.data.document import Document, Removed
from tilewright.data.punctuation import ENDS_SENTENCE, PUNCTUATION
from tilewright.data.rules import RULES
from tilewright.data.thresholds import TABLE

THEIRS = {
    "gopher-quality": GopherQualityFilter, "gopher-repetition": GopherRepetitionFilter, "c4": C4QualityFilter,
    "fineweb": FineWebQualityFilter,
}  # fmt: skip
REASONS = {
    "gopher_short_doc": "too few words", "gopher_long_doc": "too many words", "gopher_below_avg_threshold": "words too short",
    "gopher_above_avg_threshold": "words too long", "gopher_too_many_hashes": "too many number signs",
    "gopher_too_many_ellipsis": "too many ellipses", "gopher_too_many_bullets": "too many bullets",
    "gopher_too_many_end_ellipsis": "too many lines end in an ellipsis",
    "gopher_below_alpha_threshold": "too few words with letters", "gopher_enough_stop_words": "too few stop words",
    "dup_para_frac": "duplicate paragraphs", "dup_line_frac": "duplicate lines",
    "dup_para_char_frac": "characters in duplicate paragraphs", "dup_line_char_frac": "characters in duplicate lines",
    "lorem_ipsum": "lorem ipsum", "curly_bracket": "curly bracket", "too_few_sentences": "too few sentences", "empty": "empty",
    "line_punct_ratio": "too few lines end a sentence", "short_line_ratio": "too many short lines", "list_ratio": "a list",
    "char_dup_ratio": "characters in duplicate lines",
    **{f"top_{n}_gram": f"most frequent {n}-gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate {n}-grams" for n in range(5, 11)},
}  # fmt: skip


def spoiled(text: str, draw: random.Random) -> str:
    """A text with some of what the rules look for."""
    for _ in range(draw.randrange(4)):
        text = spoiled_once(text, text.split("\n"), text.split(), draw.randrange(200), draw)
    return text


def spoiled_once(text: str, lines: list[str], words: list[str], some: int, draw: random.Random) -> str:
    ends = ["。", "?", "... ", " Javascript. ", " {x}. ", " lorem ipsum. ", " use cookies. "]
    ways = [
        lambda: text.replace(" ", draw.choice(["... ", " # ", "… ", " 12 ", " - "]), some),
        lambda: "\n".join(lines + draw.choices(lines, k=draw.randrange(1, 1 + len(lines)))),
        lambda: "\n".join(draw.choice(["- ", "• ", "", "  - "]) + line for line in lines),
        lambda: "\n".join(line[: some + 1] + draw.choice(["...", "…", ".", "", " [12]", "!"]) for line in lines),
        lambda: text + " " + " ".join(words[some : some + draw.randrange(2, 12)] * draw.randrange(2, 40)),
        lambda: " ".join(word for word in words if len(word) > some % 8),
        lambda: text.replace(" ", "", 2 * some),
        lambda: text.replace(".", draw.choice(ends), 5),
        lambda: "".join(draw.choice("0123456789#  ./,") if draw.random() < 0.3 else c for c in text),
        lambda: "\n\n".join(lines),
        lambda: "\n".join(" ".join(words[i : i + draw.randrange(1, 9)]) for i in range(0, len(words), 6)),
        lambda: text + "\n\n" + draw.choice(text.split("\n\n")) * draw.randrange(3),
    ]
    return draw.choice(ways)()


def compared(texts: list[str], name: str) -> set[str]:
    """The reasons that came up; asserts that both say the same of each text and leave the same text."""
    theirs, ours, seen = THEIRS[name](), RULES[name](), set()
    for text in filter(str.strip, texts):
        document, other = Document(text, {}), TheirDocument(text=text, id="0")
        answer, verdict = ours(document), theirs.filter(other)
        want = REASONS[verdict[1]] if isinstance(verdict, tuple) else ""
        assert (answer.reason if isinstance(answer, Removed) else "") == want, repr(text[:300])
        assert want or document.text == other.text
        seen.add(want)
    return seen


@pytest.mark.parametrize("name", RULES)
def test_decisions_are_datatroves(name: str) -> None:
    draw = random.Random(name)
    seen = compared([spoiled(prose(draw, draw.randint(5, 400)), draw) for _ in range(80)], name)
    assert len(seen) >= 3, seen


@pytest.mark.long
@pytest.mark.parametrize("name", RULES)
def test_decisions_are_datatroves_on_5000_documents(name: str) -> None:
    draw, texts = random.Random(1), []
    for _ in range(5000):
        book = draw.choice(books("val"))
        length = int(10 ** draw.uniform(1.5, 4))
        at = draw.randrange(len(book) - length)
        texts.append(spoiled(book[at : at + length], draw))
    print(name, sorted(compared(texts, name)))


def test_punctuation_is_datatroves() -> None:
    assert PUNCTUATION == PUNCTUATION_SET
    assert set(ENDS_SENTENCE) == TERMINAL_PUNCTUATION


def words(n: int) -> str:
    """n different words of 5 letters with two stop words."""
    draw = random.Random(0)
    return " ".join(["the", "and", *("".join(draw.choices("bcdfghklmnp", k=5)) for _ in range(n - 2))])


LINE = "These are some plain words which end here."
SHORT = "It is a short one, yes."


def joined(*parts: tuple[int, str], by: str = "\n") -> str:
    """Each text so many times, one behind the other."""
    return by.join(text for count, text in parts for _ in range(count))


def numbered(*parts: tuple[int, str]) -> str:
    """The same, every line made different by a number."""
    return "\n".join(f"{i:02} {line}" for i, line in enumerate(joined(*parts).split("\n")))


def different(count: int) -> str:
    return "\n".join(map(str, range(10, 10 + count)))


def repeated(letters: int, by: str, between: int) -> str:
    return by.join(["a" * letters, "b" * between, "a" * letters])


NUMBERS, WORDS_TOO_FEW = "too few words with letters", "too few sentences"
# (step, threshold, text that just passes, text that just fails, reason), for the published values
EDGES = [
    ("gopher-quality", "min_words", words(50), words(49), "too few words"),
    ("gopher-quality", "min_word_length", "the and " + "abc " * 60, "the and " + "abc " * 60 + "ab", "words too short"),
    (
        "gopher-quality", "max_word_length",
        f"the and {'a' * 24} " + "abcdefghij " * 60, f"the and {'a' * 25} " + "abcdefghij " * 60, "words too long",
    ),
    ("gopher-quality", "max_hash_ratio", words(90) + " #" * 10, words(89) + " #" * 10, "too many number signs"),
    ("gopher-quality", "max_ellipsis_ratio", "… " * 10 + words(90), "… " * 10 + words(89), "too many ellipses"),
    ("gopher-quality", "max_bullet_lines", words(60) + "\n- word" * 9, words(60) + "\n- word" * 10, "too many bullets"),
    (
        "gopher-quality", "max_ellipsis_lines",
        joined((7, words(60)), (3, "some …")), joined((6, words(60)), (3, "some …")), "too many lines end in an ellipsis",
    ),
    ("gopher-quality", "min_alphabetic", words(80) + " 12" * 20, words(79) + " 12345" * 20, NUMBERS),
    ("gopher-quality", "min_stop_words", words(60), words(60).replace("and", "xyz"), "too few stop words"),
    (
        "gopher-repetition", "max_duplicate_paragraphs",
        f"{different(7)}\n10\n10\n10".replace("\n", "\n\n"), f"{different(6)}\n10\n10\n10".replace("\n", "\n\n"),
        "duplicate paragraphs",
    ),
    (
        "gopher-repetition", "max_duplicate_paragraph_chars",
        repeated(100, "\n\n", 296), repeated(101, "\n\n", 296), "characters in duplicate paragraphs",
    ),
    (
        "gopher-repetition", "max_duplicate_lines",
        f"{different(7)}\n10\n10\n10", f"{different(6)}\n10\n10\n10", "duplicate lines",
    ),
    (
        "gopher-repetition", "max_duplicate_line_chars",
        repeated(100, "\n", 298), repeated(101, "\n", 298), "characters in duplicate lines",
    ),
    ("c4", "min_sentences", joined((5, LINE)), joined((4, LINE)), WORDS_TOO_FEW),
    ("c4", "min_line_words", joined((5, "One two three.")), joined((50, "One two.")), WORDS_TOO_FEW),
    (
        "c4", "max_word_chars",
        joined((4, LINE), (1, f"a b {'c' * 999}.")), joined((4, LINE), (1, f"a b {'c' * 1000}.")), WORDS_TOO_FEW,
    ),
    ("c4", "line_ends", joined((4, LINE), (1, LINE[:-1] + '"')), joined((4, LINE), (1, LINE[:-1] + ";")), WORDS_TOO_FEW),
    ("c4", "line_words", joined((5, LINE)), joined((4, LINE), (1, "You need JavaScript for this.")), WORDS_TOO_FEW),
    ("c4", "policy_phrases", joined((5, LINE)), joined((4, LINE), (1, "Read our Privacy Policy now.")), WORDS_TOO_FEW),
    ("c4", "page_phrases", joined((5, LINE)), joined((5, LINE), (1, "Here is Lorem ipsum again.")), "lorem ipsum"),
    (
        "fineweb", "min_line_punctuation",
        numbered((3, LINE), (22, words(9))), numbered((3, LINE), (23, words(9))), "too few lines end a sentence",
    ),
    (
        "fineweb", "max_short_lines",
        numbered((33, LINE), (67, SHORT)), numbered((32, LINE), (67, SHORT)), "too many short lines",
    ),
    (
        "fineweb", "short_line_chars",
        numbered((20, "it is a longer short one, y.")), numbered((20, "it is a longer shor one, y.")), "too many short lines",
    ),
    (
        "fineweb", "max_duplicate_chars",
        f"{'a' * 9860}{' x' * 20}.\n{'b' * 98}.\n{'b' * 98}.", f"{'a' * 9660}{' x' * 20}.\n{'b' * 98}.\n{'b' * 98}.",
        "characters in duplicate lines",
    ),
    ("fineweb", "max_newlines", numbered((10, LINE)) + "\n" * 21, numbered((10, LINE)) + "\n" * 23, "a list"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "name", "passes", "fails", "reason"), EDGES, ids=[f"{row[0]}-{row[1]}" for row in EDGES])
def test_thresholds_at_their_edge(step: str, name: str, passes: str, fails: str, reason: str) -> None:
    # Repetition of one kind is repetition of others: the other limits stand aside.
    others = {row.name: 1.0 for row in TABLE if row.step == step and row.name != name and step == "gopher-repetition"}
    answer = RULES[step](**others)(Document(passes, {}))
    assert not isinstance(answer, Removed), answer
    answer = RULES[step](**others)(Document(fails, {}))
    assert isinstance(answer, Removed)
    assert answer.reason == reason
    if not others:
        assert compared([passes], step) == {""}
        assert compared([fails], step) == {reason}


def test_too_many_words() -> None:
    assert {row.name: row.value for row in TABLE}["max_words"] == 100_000
    rule = RULES["gopher-quality"](max_words=80)
    assert not isinstance(rule(Document(words(80), {})), Removed)
    assert rule(Document(words(81), {})) == Removed("too many words", "81, at most 80")


@pytest.mark.parametrize("n", range(2, 11))
def test_gram_thresholds_at_their_edge(n: int) -> None:
    """The limit is moved to the value that a text has: it passes there, and fails just below."""
    gram = words(30).split()[3 : 3 + n]
    text = words(400) + f" {' '.join(gram)}" * 4  # the text begins with the same words: the gram stands five times
    share = (5 * len(" ".join(gram)) if n < 5 else 4 * len("".join(gram))) / len(text)
    others = {row.name: 1.0 for row in TABLE if row.step == "gopher-repetition"}
    name = f"max_{'top' if n < 5 else 'duplicate'}_{n}_gram"
    for limit, gone in ((share, False), (share - 1e-9, True)):
        answer = RULES["gopher-repetition"](**others | {name: limit})(Document(text, {}))
        assert isinstance(answer, Removed) == gone, (share, answer)


def test_every_threshold_is_tested() -> None:
    tested = {(step, name) for step, name, *_ in EDGES} | {("gopher-quality", "max_words"), ("gopher-quality", "stop_words")}
    tested |= {("gopher-repetition", f"max_{'top' if n < 5 else 'duplicate'}_{n}_gram") for n in range(2, 11)}
    assert {(row.step, row.name) for row in TABLE} == tested
    assert all(row.source and row.meaning for row in TABLE)
