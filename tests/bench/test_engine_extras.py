"""`bench structured` and `bench adapters`: the rows they make, and the tokenizers they read."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright.bench.engine_extras import Sizes, run_adapters, run_structured
from tilewright.bench.vocabulary import read_tokenizer, two_parts
from tilewright.engine.config import EngineConfig
from tilewright.engine.tokenizer import TokenizerError
from tilewright.models import SHAPES

BOOKWORM = Path(__file__).parents[2] / "tilewright/assets/bookworm/tokenizer.json"
SIZES = Sizes(streams=4, tokens_in=8, tokens_out=24)


def tiny(vocab: int) -> Any:
    return replace(
        SHAPES["qwen3-0.6b"], num_hidden_layers=2, windows=(None, None), hidden_size=32, intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=vocab,
    )  # fmt: skip


def config(**more: Any) -> EngineConfig:
    return EngineConfig(max_seqs=4, max_model_len=64, device="cpu", dtype="float32", **more)


def test_structured_requests_beside_plain_ones() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: there are no grammars")
    tokenizer = read_tokenizer(BOOKWORM)
    said = list[str]()
    rows = list(run_structured(
        tiny(tokenizer.vocab_size), tokenizer, [1.0, 0.5], SIZES, runs=2, config=config(), progress=said.append
    ))  # fmt: skip
    assert [(row["run"], row["structured"]) for row in rows] == [(r, s) for r in (0, 1) for s in (0.0, 0.5, 1.0)]
    assert all(row["tokens_out"] == 4 * 24 and row["output_tok_per_s"] > 0 for row in rows)
    assert [row["of_plain"] for row in rows if not row["structured"]] == [1.0, 1.0]
    assert any("1, 0.5" in line for line in said)
    for row in rows:
        asked = round(4 * row["structured"])
        assert ("fill_ms" in row) is bool(asked)
        if asked:
            assert row["masks_per_step"] == asked
            assert min(row["commit_ms"], row["fill_ms"], row["send_ms"]) > 0 == row["late"]
    assert any("fill_ms" in line for line in said)


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    tokenizer = read_tokenizer(BOOKWORM)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ tokens and the model 100"):
        next(run_structured(tiny(100), tokenizer, [1.0], SIZES, runs=1, config=config(), progress=print))


def test_requests_with_adapters_beside_plain_ones() -> None:
    asked = config(max_adapters=3, max_adapter_rank=4)
    rows = list(run_adapters(tiny(256), 3, 4, SIZES, runs=1, config=asked, progress=lambda line: None))
    assert [(row["adapters"], row["tokens_out"]) for row in rows] == [(0, 96), (3, 96)]


def tekken(folder: Path) -> Path:
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b" t", b"he", b" the", b"abab"]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    numbers = {"pattern": r" ?\p{L}+|\s+|.", "default_num_special_tokens": 10, "default_vocab_size": 10 + len(tokens)}
    path = folder / "tekken.json"
    path.write_text(json.dumps({"config": numbers, "vocab": vocab}))
    return path


def test_a_tekken_file_is_read(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(tekken(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (271, (2,))
    ids = tokenizer.encode("ababa the é\n")
    assert tokenizer.decode(ids) == "ababa the é\n"
    assert [token - 10 for token in ids[:3]] == [260, ord("a"), 259]


def test_the_last_merge_of_a_token() -> None:
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abab": 257}
    assert two_parts(b"abab", ranks) == (b"ab", b"ab")
    with pytest.raises(ValueError, match="cannot be made from tokens of lower rank"):
        two_parts(b"xyz", {**ranks, b"xyz": 258})


@pytest.mark.parametrize("text", ["", "[1]", '{"vocab": 1, "config": {}}', '{"model": 1}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TokenizerError, match=r"neither a tokenizer\.json nor a tekken file"):
        read_tokenizer(path)
