"""MinHash and its clusters: against Python integers, the theoretical curve, and any way of cutting documents into chunks."""

import itertools
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.data.sets import prose
from tilewright.data.document import Document, Removed
from tilewright.data.minhash import EMPTY, normal_words, parameters, shingles, signatures
from tilewright.data.near import NearDuplicates, band_keys, clusters
from tilewright.data.on_gpu import signatures_on, sorted_on
from tilewright.ops import band_keys as band_keys_op

BANDS, ROWS = 14, 8
Sets = list[NDArray[np.uint32]]


def pairs(jaccard: float, count: int, size: int, draw: np.random.Generator) -> tuple[Sets, float]:
    """Pairs of sets of `size` shingles, one behind the other, and the Jaccard similarity that they exactly have."""
    common = round(2 * size * jaccard / (1 + jaccard))
    sets: Sets = []
    for _ in range(count):
        found = draw.choice(2**32, 2 * size - common, replace=False).astype(np.uint32)
        sets += [np.sort(found[:size]), np.sort(found[size - common :])]
    return sets, common / (2 * size - common)


def test_signatures_are_what_the_definition_says() -> None:
    draw = np.random.default_rng(0)
    sizes = [0, 1, 2, 7, 0, 300, 16383, 16384, 16385, 5, 40000, 0]
    sets = [draw.integers(0, 2**32, size, dtype=np.uint64).astype(np.uint32) for size in sizes]
    a, b = parameters(5)
    found = signatures(sets, a, b)
    for row, part in zip(found, sets):
        for place, (factor, summand) in enumerate(zip(a.tolist(), b.tolist())):
            want = min((((factor * x + summand) % 2**64) >> 33 for x in part.tolist()), default=int(EMPTY))
            assert row[place] == want


@pytest.mark.parametrize("jaccard", [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])
def test_recall_follows_the_curve(jaccard: float) -> None:
    sets, exact = pairs(jaccard, 1000, 120, np.random.default_rng(round(jaccard * 100)))
    first = clusters(signatures(sets, *parameters(BANDS * ROWS)), BANDS, 0.4)
    recall = float((first[1::2] == first[::2]).mean())
    theory = 1 - (1 - exact**ROWS) ** BANDS
    spread = (theory * (1 - theory) / 1000) ** 0.5
    print(f"similarity {exact:.3f}: recall {recall:.4f}, theory {theory:.4f}")
    assert abs(recall - theory) <= 0.02 + 2 * spread


def test_recall_follows_the_curve_in_large_numbers() -> None:
    """10,000 pairs at the steepest point: the limit is 2 %, chance alone makes 0.5 %."""
    sets, exact = pairs(0.72, 10_000, 60, np.random.default_rng(7))
    first = clusters(signatures(sets, *parameters(BANDS * ROWS)), BANDS, 0.4)
    assert abs((first[1::2] == first[::2]).mean() - (1 - (1 - exact**ROWS) ** BANDS)) < 0.02


def test_false_merges_are_rare() -> None:
    merged = total = 0
    draw = np.random.default_rng(3)
    for _ in range(20):
        sets, exact = pairs(float(draw.uniform(0, 0.3)), 2000, 40, draw)
        assert exact < 0.31
        first = clusters(signatures(sets, *parameters(BANDS * ROWS)), BANDS, 0.4)
        merged += int((first != np.arange(len(first))).sum())
        total += 2000
    print(f"{merged} false merges of {total}")
    assert merged / total < 1e-4


def corpus(seed: int) -> list[Document]:
    draw = random.Random(seed)
    texts = [prose(draw, draw.randint(0, 300)) for _ in range(120)]
    for _ in range(120):
        words = draw.choice(texts).split(" ")
        for _ in range(draw.randint(0, 12)):
            words[draw.randrange(len(words))] = draw.choice(["changed", "words", ""])
        texts.append(" ".join(words))
    draw.shuffle(texts)
    return [Document(text, {"file": "x", "record": i}) for i, text in enumerate(texts)]


def removed(documents: list[Document], cuts: list[int]) -> list[str | None]:
    step = NearDuplicates()
    edges = [0, *sorted(cuts), len(documents)]
    chunks = [documents[a:b] for a, b in itertools.pairwise(edges)]
    found, _ = step.join([step.index(chunk) for chunk in chunks], 1 << 20)
    answers = [step.apply(d, row, part) for chunk, part in zip(chunks, found) for row, d in enumerate(chunk)]
    return [answer.detail if isinstance(answer, Removed) else None for answer in answers]


@pytest.mark.parametrize("seed", range(4))
def test_clusters_do_not_depend_on_chunks(seed: int) -> None:
    documents = corpus(seed)
    want = removed(documents, [])
    assert 40 < sum(detail is not None for detail in want) < 200
    draw = random.Random(seed)
    for count in (1, 2, 7, 60):
        assert removed(documents, [draw.randrange(len(documents)) for _ in range(count)]) == want


def test_signatures_that_do_not_fit() -> None:
    step = NearDuplicates()
    with pytest.raises(
        ValueError,
        match="the signatures of 240 documents need 0 MB, but only 0 MB, half of the memory allowed, is available",
    ):
        step.join([step.index(corpus(0))], 240 * 112 * 4 - 1)


def test_clusters_join_what_is_connected() -> None:
    """Against plain union-find over all pairs that share a band and agree enough."""
    draw = np.random.default_rng(5)
    signature = draw.integers(0, 3, (200, 6)).astype(np.int32)
    found = clusters(signature, 3, 0.5)
    parent = list(range(200))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i in range(200):
        for j in range(i):
            same = signature[i] == signature[j]
            if same.reshape(3, 2).all(1).any() and same.mean() >= 0.5:
                parent[max(root(i), root(j))] = min(root(i), root(j))
    assert found.tolist() == [root(i) for i in range(200)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_texts_without_words_are_no_duplicates(count: int) -> None:
    step = NearDuplicates()
    index = step.index([Document("!?!", {"file": "f", "record": i}) for i in range(count)])
    (found,), facts = step.join([index], 1 << 20)
    assert found["like"].tolist() == [b""] * count
    assert facts["clusters"] == 0


def test_band_keys_tell_bands_apart() -> None:
    signature = np.arange(2000 * 28, dtype=np.int32).reshape(2000, 28) % 977
    keys = band_keys(signature, 7)
    parts = signature.reshape(2000, 7, 4)
    for band in range(7):
        assert len(np.unique(keys[:, band])) == len(np.unique(parts[:, band], axis=0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Crème brûlée, 3.14 times!", ["creme", "brulee", "0", "times"]),
        ("a_b  C\n1,000.5 x2", ["a_b", "c", "0", "x0"]),
        ("日本語 ひらがな", ["日本語", "ひらかな"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert normal_words(text) == words


def test_short_texts_have_one_shingle() -> None:
    assert [len(shingles(text)) for text in ("", "...", "one", "one two three four", "a b c d e", "a b c d e f")] == [
        0,
        0,
        1,
        1,
        1,
        2,
    ]
    assert not np.array_equal(shingles("one two"), shingles("two one"))


DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
def test_the_ops_have_the_bits_of_numpy(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    draw = np.random.default_rng(11)
    sizes = [*draw.integers(0, 400, 300).tolist(), 0, 70_000, 1]
    sets = [draw.integers(0, 2**32, size, dtype=np.uint64).astype(np.uint32) for size in sizes]
    a, b = parameters(BANDS * ROWS)
    want = signatures(sets, a, b)
    assert np.array_equal(signatures_on(device)(sets, a, b), want)
    keys = band_keys_op(torch.from_numpy(want).to(device), BANDS).cpu().numpy().view(np.uint64)
    assert np.array_equal(keys, band_keys(want, BANDS))
    assert np.array_equal(clusters(want % 7, BANDS, 0.2, sorted_on(device)), clusters(want % 7, BANDS, 0.2))
