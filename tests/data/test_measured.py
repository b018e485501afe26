"""Steps that are held to figures on public sets: extraction, language, decontamination; and the quality classifier."""

import gzip
import json
import random
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.data.sets import books, folder, prose
from tilewright.data.decontaminate import Decontaminate
from tilewright.data.document import Document, Removed
from tilewright.data.extract import Extract, decode, main_text
from tilewright.data.language import Language, identify
from tilewright.data.quality import Quality, features, score, train, train_files

# ---- extraction

PAGE = """<html><head><title>T</title><script>var x = "hidden";</script></head><body>
<nav><a href="/">Home</a><a href="/a">About us</a><a href="/c">Contact</a></nav>
<article><h1>A title</h1>{}</article>
<div class="comments"><p>first comment by somebody</p></div><footer>All rights reserved</footer></body></html>"""


def test_the_article_without_what_stands_around_it() -> None:
    draw = random.Random(0)
    paragraphs = [prose(draw, 60).replace("\n", " ") for _ in range(6)]
    page = PAGE.format("".join(f"<p>{text}</p>" for text in paragraphs)).encode()
    document = Extract()(Document("", {}, html=page))
    assert isinstance(document, Document)
    assert document.html is None
    assert all(" ".join(text.split()) in " ".join(document.text.split()) for text in paragraphs)
    assert not any(word in document.text for word in ("hidden", "About us", "comment by", "rights reserved"))


@pytest.mark.parametrize(
    ("page", "want"),
    [
        ('<meta charset="iso-8859-2">žluťoučký'.encode("iso-8859-2"), "žluťoučký"),
        ("\ufeffgrün".encode("utf-16"), "grün"),
        ('<meta charset="shift_jis">日本'.encode("shift_jis"), "日本"),
        ("plain ünïcode".encode(), "plain ünïcode"),
        (b"bad \xff\xfe bytes\0", "bad"),
    ],
)
def test_characters(page: bytes, want: str) -> None:
    assert want in decode(page)
    assert "\0" not in decode(page)


@pytest.mark.parametrize(
    "page", [b"", b"<", b"<html>" * 3000, b"\0" * 1000, b"<p>" + b"<div>" * 20_000, b"\xff" * 5000, b"<!--" * 999]
)
def test_pages_that_are_none(page: bytes) -> None:
    answer = Extract()(Document("", {}, html=page))
    assert isinstance(answer, Document | Removed)
    assert main_text(decode(page)) is not None


def test_pages_that_are_too_large() -> None:
    answer = Extract(max_bytes=10)(Document("", {}, html=b"x" * 11))
    assert answer == Removed("page too large", "11 bytes, at most 10")


def counts(truth: str, found: str) -> tuple[int, int, int]:
    """(right, extra, missing) runs of four words, as the article extraction benchmark counts them."""
    runs = []
    for text in (truth, found):
        words = re.findall(r"\w+", text)
        runs.append(Counter(tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3)) if words))
    want, got = runs
    return (want & got).total(), (got - want).total(), (want - got).total()


def f1(rows: list[tuple[int, int, int]]) -> float:
    """Of mean precision and mean recall over pages; a page without a run to judge by is left out of a mean."""
    precision = statistics.mean(right / (right + extra) for right, extra, _ in rows if right + extra)
    recall = statistics.mean(right / (right + missing) for right, _, missing in rows if right + missing)
    return 2 * precision * recall / (precision + recall)


def test_the_measure() -> None:
    assert f1([counts("a b c d e", "a b c d e")]) == 1
    assert counts("a b c d e", "a b c d x") == (1, 1, 1)
    assert counts("a b", "a b") == (1, 0, 0)
    assert counts("a b c d", "") == (0, 0, 1)


@pytest.mark.long
def test_extraction_of_the_benchmark() -> None:
    root = folder("extraction")
    truth = json.loads((root / "ground-truth.json").read_text(encoding="utf-8"))
    rows = []
    for name, row in truth.items():
        answer = Extract()(Document("", {}, html=gzip.decompress((root / "html" / f"{name}.html.gz").read_bytes())))
        rows.append(counts(row["articleBody"], answer.text if isinstance(answer, Document) else ""))
    draw = random.Random(0)
    again = sorted(f1(draw.choices(rows, k=len(rows))) for _ in range(2000))
    print(f"F1 {f1(rows):.4f}, 95 % of bootstraps from {again[50]:.4f} to {again[1949]:.4f}, {len(rows)} pages")
    assert f1(rows) >= 0.958


# ---- language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The quick brown fox jumps over the lazy dog and runs into the forest.", "en"),
        ("Der schnelle braune Fuchs springt über den faulen Hund und läuft in den Wald.", "de"),
        ("Le renard brun saute par-dessus le chien paresseux et court dans la forêt.", "fr"),
        ("這隻敏捷的棕色狐狸跳過了那隻懶狗，然後跑進森林裡。", "zh"),
        ("Быстрая коричневая лиса перепрыгнула через ленивую собаку и убежала в лес.", "ru"),
        ("", "unknown"),
        ("1234 5678 !!", "unknown"),
        ("x7 q", "unknown"),
    ],
)
def test_languages(text: str, language: str) -> None:
    answer = Language(min_confidence=0.5)(Document(text, {}))
    assert isinstance(answer, Document)
    assert answer.metadata["language"] == language
    kept = Language(keep=["en", "unknown"])(Document(text, {}))
    assert isinstance(kept, Removed) == (language not in ("en", "unknown"))


TWENTY = [
    "ar",
    "cs",
    "de",
    "en",
    "es",
    "fa",
    "fi",
    "fr",
    "hi",
    "hu",
    "it",
    "ja",
    "ko",
    "nl",
    "pl",
    "pt",
    "ru",
    "tr",
    "vi",
    "zh",
]


@pytest.fixture(scope="module")
def sentences() -> list[tuple[str, str]]:
    """(language, sentence) of the public set."""
    lines = (folder("language") / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t", 1) for line in lines]
    return [("no" if name == "nb" else name, text) for name, text in rows]


@pytest.mark.long
def test_documents_of_twenty_languages(sentences: list[tuple[str, str]]) -> None:
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, text in sentences:
        by_name[name].append(text)
    draw, right = random.Random(0), []
    for name in TWENTY:
        right += [identify("\n".join(draw.sample(by_name[name], 12)))[0] == name for _ in range(50)]
    print(f"{len(right)} documents of 12 sentences: {np.mean(right):.4f}")
    assert np.mean(right) >= 0.99


@pytest.mark.long
def test_sentences_and_how_sure_they_are(sentences: list[tuple[str, str]]) -> None:
    """Not below py3langid itself; of what it calls p likely, about p are right, in languages that it knows."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = {"no" if name == "nb" else name for name in model.labels}
    rows = [(name, text, *identify(text)) for name, text in sentences]
    library = np.mean([("no" if (found := model.classify(text)[0]) == "nb" else found) == name for name, text in sentences])
    ours = np.mean([name == found for name, _, found, _ in rows])
    judged = [(probability, name == found) for name, _, found, probability in rows if name in known]
    error = 0.0
    for low in np.arange(0, 1, 0.1):
        part = [(p, ok) for p, ok in judged if low <= p < low + 0.1 or (low > 0.85 and p == 1)]
        if part:
            said, was = np.mean([p for p, _ in part]), np.mean([ok for _, ok in part])
            error += abs(said - was) * len(part) / len(judged)
            print(f"said {said:.2f}, right {was:.2f}, {len(part)} sentences")
    print(f"sentences: {ours:.4f}, the library {library:.4f}; mean gap of probability and frequency {error:.3f}")
    assert ours >= library
    assert error < 0.02
    sure = [ok for p, ok in judged if p >= 0.5]
    unsure = [ok for p, ok in judged if p < 0.5]
    print(f"from 0.5 on {np.mean(sure):.4f} of {len(sure)}, below {np.mean(unsure):.4f} of {len(unsure)}")
    assert np.mean(sure) > 0.95
    assert np.mean(unsure) < 0.75


# ---- decontamination


def changed(text: str, share: float, draw: random.Random) -> str:
    words = text.split(" ")
    for i in draw.sample(range(len(words)), round(share * len(words))):
        words[i] = draw.choice(["other", "word", "seven", "blue"])
    return " ".join(words)


def recalls(questions: list[str], hosts: list[str], path: Path, share: float) -> float:
    step, draw = Decontaminate(evaluation=str(path)), random.Random(0)
    found = 0
    for question in questions:
        host = draw.choice(hosts)
        at = draw.randrange(max(1, len(host) - 4000))
        text = host[at : at + 2000] + "\n" + changed(question, share, draw) + "\n" + host[at + 2000 : at + 4000]
        found += isinstance(step(Document(text, {})), Removed)
    return found / len(questions)


def test_planted_questions_are_found(tmp_path: Path) -> None:
    draw = random.Random(5)
    questions = [prose(draw, draw.randint(20, 70)) for _ in range(300)]
    hosts = [prose(draw, 3000) for _ in range(10)]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "x"}) + "\n" for text in questions))
    assert recalls(questions, hosts, path, 0.0) == 1.0
    assert recalls(questions, hosts, path, 0.05) >= 0.95
    step = Decontaminate(evaluation=str(path))
    assert not any(isinstance(step(Document(host, {})), Removed) for host in hosts)
    answer = step(Document(f"Intro. {questions[41].upper()} Outro.", {}))
    assert answer == Removed("in an evaluation set", "set.jsonl line 42")


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"q": "text"}\n', "no line of .* has a text field named 'question' or 'text'"), ("{", "line 1 is not JSON")],
)
def test_evaluation_sets_that_are_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        Decontaminate(evaluation=str(tmp_path / "set.jsonl"))


@pytest.mark.long
def test_gsm8k_planted_into_books() -> None:
    path = folder("math") / "gsm8k-test.jsonl"
    questions = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    hosts = list(books("val"))
    exact, near = recalls(questions, hosts, path, 0.0), recalls(questions, hosts, path, 0.05)
    step = Decontaminate(evaluation=str(path))
    wrong = [answer.detail for book in books("train") if isinstance(answer := step(Document(book, {})), Removed)]
    print(
        f"recall {exact:.4f}, with 5 % of words changed {near:.4f}; {len(wrong)} of {len(books('train'))} clean books removed"
    )
    assert exact == 1.0
    assert near >= 0.95
    assert not wrong


# ---- quality classifier


def test_the_classifier_learns_and_repeats_itself(tmp_path: Path) -> None:
    draw = random.Random(2)
    good = [prose(draw, draw.randint(30, 120)) for _ in range(200)]
    bad = [" ".join(draw.choices(["buy", "now", "click", "here", "free", "offer", "the", "of", "a"], k=60)) for _ in range(200)]
    weights = train(good[:150], bad[:150])
    assert np.mean([score(weights, text) > 0.5 for text in good[150:]]) > 0.97
    assert np.mean([score(weights, text) < 0.5 for text in bad[150:]]) > 0.97
    assert np.array_equal(train(good[:150], bad[:150])["weight"], weights["weight"])
    for name, texts in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = train_files(tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "model.safetensors")
    assert found["accuracy"] > 0.97
    step = Quality(model=str(tmp_path / "model.safetensors"))
    assert isinstance(step(Document(bad[0], {})), Removed)
    answer = step(Document(good[0], {}))
    assert isinstance(answer, Document)
    assert answer.metadata["quality"] > 0.5


def test_classifier_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no model")
    with pytest.raises(ValueError, match="is not a model that tilewright data train-quality wrote"):
        Quality(model=str(tmp_path / "x.safetensors"))
    (tmp_path / "few.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match="only 1 records have text in the field 'text', but at least 20 are needed"):
        train_files(tmp_path / "few.jsonl", tmp_path / "few.jsonl", tmp_path / "m")


def test_features() -> None:
    columns, values = features("one two one")
    assert len(columns) == 4  # one, two, "one two", "two one"
    assert np.isclose((values**2).sum(), 1)
    assert len(features("")[0]) == 0
