"""What quantising costs the embedded model, in bits per byte of books that it has not seen.

A slice of what `scripts/quantize_quality.py` measures, with the same bounds.
"""

import json
import lzma

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import tilewright as tw
from tests.paths import SHARED
from tilewright.models import Model, load_model, prompt_inputs, resolve
from tilewright.ops.weights import WEIGHT_FORMATS

BOOKS = SHARED / "data/books/val.jsonl.xz"
BOUNDS = {"int8": 0.005, "fp8": 0.005, "fp8-block": 0.005, "mxfp8": 0.01, "int4": 0.03, "int8-weight": 0.005}
"""Relative to the float weights."""
TOKENS = 1024

pytestmark = pytest.mark.skipif(not BOOKS.exists(), reason=f"no books at {BOOKS}")


def loaded() -> Model:
    return load_model("bookworm", device="cpu", dtype=torch.float32)


@torch.inference_mode()
def nats(model: Model, windows: list[list[int]]) -> float:
    total = 0.0
    for ids in windows:
        logits = model.logits(model(*prompt_inputs(model, [0, *ids[:-1]])))
        total += F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
    return total


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    """One from the middle of each book."""
    tokenizer = Tokenizer.from_file(str(resolve("bookworm") / "tokenizer.json"))
    with lzma.open(BOOKS, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"].replace("\r\n", "\n") for line in lines]
    return [tokenizer.encode(text[len(text) // 2 :][:8000], add_special_tokens=False).ids[:TOKENS] for text in texts]


@pytest.fixture(scope="module")
def exact(windows: list[list[int]]) -> float:
    return nats(loaded(), windows)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_bits_per_byte_stay_within_the_bound(format: str, windows: list[list[int]], exact: float) -> None:
    model = loaded()
    tw.quantize(model, format)
    worse = nats(model, windows) / exact - 1
    assert abs(worse) < BOUNDS[format], f"{100 * worse:.3f} %"
