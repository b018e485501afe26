"""The options of speculation, from a model folder to the answer: small models with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.tiny_model import write_tiny_model
from tilewright.engine.config import EngineConfig
from tilewright.engine.llm import LLM
from tilewright.engine.request import SamplingParams

SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 120, "kv_cache_bytes": 1 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def texts(llm: LLM) -> list[list[int]]:
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0, "allowed_token_ids": (97,)}, {"temperature": 0.6})
    params = [SamplingParams(max_tokens=60, seed=1, ignore_eos=True, **kind) for kind in kinds]
    return [done.outputs[0].token_ids for done in llm.generate(["one two one two one", "one two one two one"], params)]


def test_both_ways_give_the_same_answers(folder: Path) -> None:
    plain = texts(LLM(str(folder), **SIZES))
    for options in ({"speculate": "ngram"}, {"draft": str(folder), "draft_tokens": 3}):
        llm = LLM(str(folder), **SIZES, **options)
        assert texts(llm) == plain
        stats = llm.engine.stats()
        assert stats.accepted_tokens > 0
        if "draft" in options:
            assert llm.plan.page_bytes == 2 * LLM(str(folder), **SIZES).plan.page_bytes


def test_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"draft is .bookworm., which has .* tokens, the model .*; wanted a model with the same"
    ):
        LLM(str(folder), **SIZES, draft="bookworm")
    other = write_tiny_model(tmp_path)
    told = json.loads((other / "tokenizer.json").read_text())
    first, second = list(told["model"]["vocab"])[:2]
    vocab = told["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="gives other numbers to its tokens"):
        LLM(str(folder), **SIZES, draft=str(other))


def test_positions_that_end_early_are_refused(folder: Path, tmp_path: Path) -> None:
    short = write_tiny_model(tmp_path)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    with pytest.raises(ValueError, match="whose positions end at 100, and the model's contexts have up to 120 tokens"):
        LLM(str(folder), **SIZES, draft=str(short))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculate": "medusa"}, "speculate is 'medusa', wanted grammar or mtp or ngram"),
        ({"speculate": "ngram", "draft": "bookworm"}, "wanted one of them"),
        ({"draft": "bookworm", "bundle": "b"}, "no kernels of a draft model"),
        ({"draft_tokens": 0}, "draft_tokens is 0, wanted 1 to 15"),
        ({"draft_tokens": 16}, "draft_tokens is 16, wanted 1 to 15"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)
    with pytest.raises(ValueError, match="speculate is 1, wanted True or False"):
        SamplingParams(speculate=1)  # type: ignore[arg-type]
