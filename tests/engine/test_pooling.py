"""Embeddings and scores: of the models of sentence-transformers, and of decoders by their definition."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.folders import rewrite_config
from tests.server.tiny_encoder import write_encoder
from tests.server.tiny_model import write_tiny_model
from tilewright import LLM
from tilewright.engine.pooling import Pooled, Text
from tilewright.models import ModelError

TEXTS = ["a man is playing guitar on the street", "cats", "the rates were raised by half a percent", "man on street", "zzz a"]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("sentence_transformers", reason="sentence-transformers, the oracle, is not installed")


@pytest.mark.parametrize(
    "modules",
    [("mean_tokens", "Normalize"), ("cls_token",), ("lasttoken", "Normalize"), ("mean_tokens",), None],
    ids=lambda modules: "no modules.json" if modules is None else "+".join(modules),
)
def test_embeddings_are_those_of_sentence_transformers(theirs: Any, modules: tuple[str, ...] | None, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", modules=modules)
    want = theirs.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=modules is None)
    llm = LLM(str(folder), device="cpu", max_seqs=4, max_tokens_per_step=12)  # several passes
    got = llm.embed(TEXTS)
    assert got.shape == (5, 32)
    assert got.dtype == np.float32
    assert np.abs(got - want).max() < 1e-5
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    assert np.abs(llm.embed(ids) - want).max() < 1e-5
    assert np.abs(llm.embed("cats") - want[1:2]).max() < 1e-5
    assert np.abs(np.array(llm.score("cats", TEXTS)) - theirs.util.cos_sim(want[1], want)[0].numpy()).max() < 1e-5


@pytest.mark.parametrize("options", [{}, {"types": False}, {"type_vocab_size": 1, "types": False}, {"identity": True}], ids=str)
def test_scores_are_those_of_cross_encoders(theirs: Any, options: dict[str, Any], tmp_path: Path) -> None:
    identity = options.pop("identity", False)
    folder = write_encoder(tmp_path / "model", labels=1, **options)
    if identity:
        rewrite_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    queries = ["a man", "cats", "cats is a", "street", "rates"]
    want = theirs.CrossEncoder(str(folder), device="cpu").predict(list(zip(queries, TEXTS, strict=True)))
    llm = LLM(str(folder), device="cpu")
    assert np.abs(np.array(llm.score(queries, TEXTS)) - want).max() < 1e-5
    one = theirs.CrossEncoder(str(folder), device="cpu").predict([("cats", text) for text in TEXTS])
    assert np.abs(np.array(llm.score("cats", TEXTS)) - one).max() < 1e-5
    assert np.ptp(want) > 1e-4  # else the limit would say nothing
    assert llm.score("cats", []) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    rewrite_config(folder, is_matryoshka=True, model_type="llama")
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", max_seqs=4, max_tokens_per_step=64, kv_cache_bytes=1 << 20)


def test_a_decoder_gives_its_last_token(decoder: LLM, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    oracle = transformers.AutoModel.from_pretrained(folder)
    texts = ["Once upon a time", "b", "a" * 60, "Call me"]
    got = decoder.embed(texts)
    for text, row in zip(texts, got, strict=True):
        with torch.no_grad():
            want = oracle(torch.tensor([decoder.tokenizer.encode(text)])).last_hidden_state[0, -1]
        assert np.abs(torch.nn.functional.normalize(want, dim=0).numpy() - row).max() < 1e-5
    assert np.allclose(np.linalg.norm(got, axis=1), 1, atol=1e-6)
    for text, row in zip(texts, got, strict=True):
        assert np.abs(decoder.embed(text)[0] - row).max() < 1e-5  # company changes nothing
    cut = decoder.embed(texts, dimensions=5)
    assert np.allclose(cut, got[:, :5] / np.linalg.norm(got[:, :5], axis=1, keepdims=True), atol=1e-6)


REFUSED = {
    "empty": ([[]], {}, "a text is empty"),
    "too long": ([[5] * 129], {}, "a text has 129 tokens, wanted at most 128: shorten it"),
    "a token id": ([[1, 259]], {}, "a text has the token id 259, wanted 0 to 25[0-9]"),
    "a negative one": ([[1, -1]], {}, "a text has the token id -1"),
    "dimensions": (["a"], {"dimensions": 33}, "dimensions is 33, wanted 1 to 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(decoder: LLM, name: str) -> None:
    texts, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        decoder.embed(texts, **options)


def test_refuses_what_is_no_score(tmp_path: Path) -> None:
    llm = LLM(str(write_encoder(tmp_path / "three", labels=3)), device="cpu")
    with pytest.raises(ValueError, match="the model's head gives 3 labels, which cannot be used as a score"):
        llm.score("a", ["b"])
    with pytest.raises(ValueError, match="2 queries and 3 documents, wanted as many of both, or one query"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(ValueError, match="this model is an encoder, which generates no text"):
        llm.generate("a")
    with pytest.raises(ValueError, match="dimensions is 8, but this model's embeddings cannot be cut: they have 32 numbers"):
        llm.embed("a", dimensions=8)
    with pytest.raises(ValueError, match=r"quantize is 'int8', but .* holds an encoder, which has none"):
        LLM(str(tmp_path / "three"), device="cpu", quantize="int8")


POOLINGS = {
    "a dense layer": (
        "modules.json", '[{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Dense"}]', "lists .*Dense;",
    ),
    "no list": ("modules.json", "{}", "must hold a list of modules"),
    "no JSON": ("modules.json", "[", "modules.json is not JSON"),
    "a path": (
        "modules.json", '[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../x"}]', "names '../x' as a folder",
    ),
    "two ways": (
        "1_Pooling/config.json", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "the pooling .*; supp",
    ),
    "another way": ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "has the pooling .*; supported: cls_token"),
    "no way": ("1_Pooling/config.json", "{}", "has the pooling"),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_that_are_refused(name: str, tmp_path: Path) -> None:
    file, text, message = POOLINGS[name]
    folder = write_encoder(tmp_path / "model", modules=("mean_tokens", "Normalize"))
    (folder / file).write_text(text)
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), device="cpu")


def test_the_newer_spelling_of_poolings(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", modules=("cls_token", "Normalize"))
    old = LLM(str(folder), device="cpu").embed("cats")
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "cls", "include_prompt": True}))
    assert np.array_equal(LLM(str(folder), device="cpu").embed("cats"), old)


def test_pieces_hold_all_texts_in_order() -> None:
    pooled = Pooled(width=4, vocab_size=9, max_tokens=10, pass_tokens=6)
    texts = [Text([1] * count) for count in (3, 3, 1, 9, 2, 4, 1)]
    pieces = list(pooled.pieces(texts))
    assert [len(piece) for piece in pieces] == [2, 1, 1, 2, 1]
    assert [text for piece in pieces for text in piece] == texts


def test_plain_values_need_no_torch() -> None:
    code = "import sys, tilewright.engine.pooling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
