"""The order of data: every token once an epoch, the same from any position, shares as the weights say, masks of answers."""

import json
import lzma
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.tiny_model import write_tiny_model
from tilewright.data.shards import TokenShards, write
from tilewright.engine.chat_runs import chat_runs
from tilewright.engine.tokenizer import Tokenizer
from tilewright.train.batch import IGNORED, pack
from tilewright.train.config import TrainConfig
from tilewright.train.data import Conversations, Mixture, Texts, conversation_shards, text_shards

END = 999
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shards(folder: Path, documents: list[list[int]], shard_tokens: int = 50) -> TokenShards:
    write(folder, [np.array(document, dtype=np.int64) for document in documents], "uint16", shard_tokens, {})
    return TokenShards(folder)


def random_documents(seed: int, count: int = 30) -> list[list[int]]:
    """Tokens that say where they are from: no two documents have one in common."""
    lengths = np.random.default_rng(seed).integers(0, 40, count).tolist()
    starts = np.cumsum([0, *lengths]).tolist()
    return [[*range(start, start + length), END] if length else [] for start, length in zip(starts, lengths)]


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("length", [1, 16, 1000])
def test_an_epoch_has_every_token_and_every_next_token_once(tmp_path: Path, seed: int | None, length: int) -> None:
    given = random_documents(1)
    texts = Texts(shards(tmp_path, given), seed)
    total = sum(map(len, given))
    tokens, pairs, position = [], [], 0
    while position < 2 * total:
        row, position = texts.row(position, min(length, 2 * total - position))
        for ids, targets in row:
            tokens += ids.tolist()
            pairs += [(a, b) for a, b in zip(ids.tolist(), targets.tolist()) if b != IGNORED]
    assert position == 2 * total == len(tokens)
    wanted = Counter((a, b) for document in given for a, b in pairwise(document))
    assert Counter(pairs) == Counter({pair: 2 * times for pair, times in wanted.items()})
    assert Counter(tokens) == Counter(token for document in given for token in document * 2)
    in_order = [token for document in given for token in document]
    assert (tokens[:total] == in_order) == (seed is None)
    if seed is not None:
        assert tokens[:total] != tokens[total:], "the second epoch has the order of the first"


def test_long_documents_are_cut_before_they_are_shuffled(tmp_path: Path) -> None:
    given = [*random_documents(3), list(range(2000, 2500))]
    texts, total = Texts(shards(tmp_path, given), 0, piece=16), sum(map(len, given))
    tokens, places, position = [], [], 0
    while position < total:
        row, position = texts.row(position, min(16, total - position))
        for ids, targets in row:
            tokens += ids.tolist()
            assert ids.tolist()[1:] == targets.tolist()[: len(ids) - 1], "the next token of the same document"
            places += [one // 16 for one in (ids - 2000).tolist() if one >= 0]
    assert Counter(tokens) == Counter(token for document in given for token in document)
    steps = [b - a for a, b in pairwise(places) if a != b]
    assert sum(step != 1 for step in steps) > len(steps) // 2, "pieces of the long document follow each other"
    assert texts.piece_tokens < 16 < Texts(TokenShards(tmp_path), 0).piece_tokens


@pytest.mark.parametrize("more", [{"chat": True}, {"loss": "dpo"}, {"shuffle": False}], ids=str)
def test_pieces_that_nobody_would_cut_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="piece_tokens is only for texts that are shuffled"):
        TrainConfig(piece_tokens=16, **more)
    with pytest.raises(ValueError, match="piece_tokens is 1"):
        TrainConfig(piece_tokens=1)


def test_a_piece_is_of_one_document(tmp_path: Path) -> None:
    given = random_documents(2)
    texts, position = Texts(shards(tmp_path, given), 3), 0
    for _ in range(60):
        row, position = texts.row(position, 24)
        assert sum(len(ids) for ids, _ in row) == 24
        for ids, _ in row:
            assert any(ids.tolist() == document[i : i + len(ids)] for document in given for i in range(len(document)))


def test_a_mixture_goes_on_from_any_position(tmp_path: Path) -> None:
    def made() -> Mixture:
        sources = [Texts(TokenShards(tmp_path / name), seed) for name, seed in (("a", 0), ("b", 1), ("c", None))]
        return Mixture(sources, [0.5, 0.3, 0.2])

    for name, seed in (("a", 4), ("b", 5), ("c", 6)):
        shards(tmp_path / name, random_documents(seed))
    whole = made()
    states, rows = [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(whole.state())))
        rows.append([(ids.tolist(), targets.tolist()) for ids, targets in whole.row(32)])
    for start in (0, 1, 17, 39):
        again = made()
        again.load_state(states[start])
        assert [[(ids.tolist(), targets.tolist()) for ids, targets in again.row(32)] for _ in rows[start:]] == rows[start:]
    with pytest.raises(ValueError, match="the saved data position is for 3 sources, but this run has 1"):
        Mixture([Texts(TokenShards(tmp_path / "a"), 0)]).load_state(states[0])


def test_shares_are_those_of_the_weights(tmp_path: Path) -> None:
    sources = [Texts(shards(tmp_path / str(i), random_documents(i)), 0) for i in range(3)]
    mixture = Mixture(sources, [5, 3, 2])
    for _ in range(200):
        mixture.row(10)
    assert mixture.state()["tokens"] == [1000, 600, 400]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_weights_are_refused(tmp_path: Path, weights: list[float]) -> None:
    source = Texts(shards(tmp_path, [[1, 2]]), 0)
    with pytest.raises(ValueError, match="give one finite weight above 0 for each source"):
        Mixture([source, source], weights)


def test_a_source_without_tokens_is_refused_and_one_huge_document_is_not(tmp_path: Path) -> None:
    for i, documents in enumerate(([], [[]], [[], []])):
        with pytest.raises(ValueError, match="books has no tokens"):
            Texts(shards(tmp_path / str(i), documents), 0, "books")
    huge = Texts(shards(tmp_path / "huge", [list(range(900))]), 0)
    (piece,), position = huge.row(100, 50)
    assert (piece[0].tolist(), piece[1].tolist(), position) == (list(range(100, 150)), list(range(101, 151)), 150)


def test_texts_of_compressed_lines_are_tokenised_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "books.jsonl.xz", []
    with lzma.open(path, "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "", "xyz")))

    def encode(texts: object) -> list[list[int]]:
        calls.append(texts)
        return [[*text.encode(), END] for text in texts]  # pyright: ignore

    for _ in range(2):
        made = text_shards([path], encode, 1000, tmp_path / "data", identity="bytes")
        assert made.tokens(0, 99).tolist() == [97, 98, END, END, 120, 121, 122, END]
    assert len(calls) == 1
    text_shards([path], encode, 1000, tmp_path / "data", identity="another tokenizer")
    assert len(calls) == 2


def test_only_answers_have_targets(tmp_path: Path) -> None:
    settings = write_tiny_model(tmp_path / "model") / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHATML}))
    tokenizer = Tokenizer.load(tmp_path / "model")
    chats = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}],
        [
            {"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "two"}, {"role": "user", "content": "<eos> sure?"},
            {"role": "assistant", "content": "yes"},
        ],
    ]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    tokens, answers = conversation_shards([path], partial(chat_runs, tokenizer), 1000, tmp_path / "data", identity="x")
    row, position = Conversations(tokens, answers, None).row(0, len(tokens))
    assert position == len(row) == 2
    learned = [bytes(targets[targets != IGNORED].tolist()).decode() for _, targets in row]
    assert learned == ["Hello<|im_end|>\n", "two<|im_end|>\nyes<|im_end|>\n"]
    for (ids, targets), chat in zip(row, chats):
        assert bytes(ids.tolist()).decode() == tokenizer.apply_chat_template(chat, add_generation_prompt=False)
        known = targets[:-1] != IGNORED
        assert (targets[:-1][known] == ids[1:][known]).all()
    assert pack(row).n_targets == sum(map(len, learned))
    cut, position = Conversations(tokens, answers, None).row(0, 40)
    assert (len(cut), len(cut[0][0]), position) == (1, 40, 1), "a conversation that is too long loses its end"


@pytest.mark.parametrize("line", ["[]", "{}", "no json", '{"messages": []}', '{"messages": [{"role": "user"}]}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n\n" + line)
    with pytest.raises(ValueError, match=r"chats.jsonl, line 3: wanted"):
        conversation_shards([path], lambda messages: [([1], True)], 9, tmp_path / "data", identity="x")
