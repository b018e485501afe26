"""Words and sentences as the published rules use them: spaCy's tokenizer for English, and its rule-based sentence splitter.

datatrove uses both, so decisions agree with it. spaCy's blank pipeline needs no model files.
"""

from functools import cache, lru_cache
from typing import Any

from tilewright.extras import needed

__all__ = ["sentence_count", "words"]


@cache
def _pipeline() -> Any:
    spacy = needed("spacy", "data")
    pipeline = spacy.blank("en")
    pipeline.add_pipe("sentencizer")
    return pipeline


def _tokens(text: str) -> Any:
    pipeline = _pipeline()
    pipeline.max_length = len(text) + 10
    return pipeline(text)


@lru_cache(4)
def words(text: str) -> tuple[str, ...]:
    """The tokens of a text, with punctuation but without white space. The last texts are cached, because rules share them."""
    with _pipeline().memory_zone():
        tokens = (token.text.strip() for token in _tokens(text))
        return tuple(token for token in tokens if token)


def sentence_count(text: str) -> int:
    """The number of sentences of a text; 0 for an empty one."""
    with _pipeline().memory_zone():
        return sum(1 for _ in _tokens(text).sents)
