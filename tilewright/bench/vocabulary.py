"""Reads a tokenizer for measurements with random weights: a `tokenizer.json`, or Mistral's `tekken` file.

A tekken file (`mistral_common/data/tekken_*.json` in the package mistral-common, of 131,072 tokens) lists tokens by rank, with
neither merges nor names. The merges of a token are the two parts into which byte-pair encoding with lower ranks divides it.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tilewright.engine.tokenizer import Tokenizer, TokenizerError

__all__ = ["read_tokenizer", "two_parts"]

_LARGEST_FILE = 64 << 20
_END = 2
"""Number of the special token that ends a text, in tekken files."""
_ENDS = ("</s>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|eos|>", "<|return|>")
"""Names of that token in the tokenizers of well-known models."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file.

    Raises:
        OSError: the file cannot be read.
        TokenizerError: the file is too large, is no tokenizer, or has no token that ends a text.
    """
    if path.stat().st_size > _LARGEST_FILE:
        raise TokenizerError(f"{path} has more than {_LARGEST_FILE >> 20} MiB")
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
        if "vocab" in content and "config" in content:
            return _tekken(content)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (the library raises plain exceptions)
        raise TokenizerError(f"{path} is neither a tokenizer.json nor a tekken file: {str(error)[:200]}") from None
    ends = [number for number, token in backend.get_added_tokens_decoder().items() if token.content in _ENDS]
    if not ends:
        raise TokenizerError(f"{path} names no token that ends a text; the known ones are {', '.join(_ENDS)}")
    return Tokenizer(backend, eos_ids=ends)


def _tekken(content: Mapping[str, Any]) -> Tokenizer:
    special = int(content["config"]["default_num_special_tokens"])
    count = int(content["config"]["default_vocab_size"]) - special
    tokens = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][:count]]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    names = {token: "".join(map(_BYTE_NAMES.__getitem__, token)) for token in tokens}
    vocabulary = {name: special + ranks[token] for token, name in names.items()}
    merges = [(names[a], names[b]) for token in tokens if len(token) > 1 for a, b in [two_parts(token, ranks)]]
    specials = ["</s>" if number == _END else f"<special_{number}>" for number in range(special)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary | dict(zip(specials, range(special), strict=True)), merges))
    pattern = tokenizers.Regex(content["config"]["pattern"])
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return Tokenizer(backend, eos_ids=[_END])


def two_parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that makes a token of at least two bytes: byte-pair encoding with the ranks below its own."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: _rank(parts, i, ranks))
        if _rank(parts, best, ranks) >= ranks[token]:
            raise ValueError(f"{token!r} cannot be made from tokens of lower rank")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _rank(parts: Sequence[bytes], i: int, ranks: Mapping[bytes, int]) -> float:
    return ranks.get(parts[i] + parts[i + 1], float("inf"))


def _byte_names() -> Iterator[str]:
    """How GPT-2's encoding writes each byte: printable ones as themselves, the others as characters from U+0100 on."""
    other = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte)
        else:
            yield chr(other)
            other += 1


_BYTE_NAMES = tuple(_byte_names())
