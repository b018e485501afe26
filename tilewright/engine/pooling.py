"""Results of a model for whole texts, as plain values: embeddings, and scores of pairs. pooler.py runs the passes.

embedding     features of the tokens, pooled as the model's folder specifies (models/sentence.py)
score         for an encoder with a head: the output of the head for a pair; for any other model: the cosine of two embeddings
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Pass", "Pooled", "Text", "cosines"]


class Text(NamedTuple):
    """One input: token ids and, for a model that reads pairs, the token types: to which of the two texts each token belongs."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


class Pass(NamedTuple):
    """Texts that go through the model together, and the kind of result."""

    texts: tuple[Text, ...]
    labels: bool = False
    """Compute the head's scores instead of embeddings."""
    dimensions: int | None = None
    """Dimensions of the embeddings; None: all."""


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """What a model supports.

    width: dimensions of an embedding.
    vocab_size: token ids are below this.
    max_tokens: most tokens of one text.
    pass_tokens: most tokens of a pass with several texts.
    labels: number of scores that the model's head computes; 0 without a head.
    sigmoid: whether the sigmoid is applied to the score of a head with one label.
    types: whether the model gets token types (first or second text).
    dimensions: sizes to which an embedding may be cut; None: it cannot be cut; (): any size.
    """

    width: int
    vocab_size: int
    max_tokens: int
    pass_tokens: int
    labels: int = 0
    sigmoid: bool = True
    types: bool = False
    dimensions: tuple[int, ...] | None = None

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError for a text that is empty, is too long, or contains an unknown token id."""
        if not ids:
            raise ValueError("a text is empty, wanted one token at least")
        if len(ids) > self.max_tokens:
            raise ValueError(f"a text has {len(ids)} tokens, wanted at most {self.max_tokens}: shorten it")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"a text has the token id {str(wrong)[:40]}, wanted 0 to {self.vocab_size - 1}")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise ValueError for a size that the model's embeddings cannot be cut to."""
        if dimensions is None:
            return
        if self.dimensions is None and dimensions != self.width:
            raise ValueError(
                f"dimensions is {dimensions}, but this model's embeddings cannot be cut: they have {self.width} numbers"
            )
        if self.dimensions is not None and dimensions not in (*(self.dimensions or range(1, self.width + 1)), self.width):
            wanted = " or ".join(map(str, self.dimensions)) or f"1 to {self.width}"
            raise ValueError(f"dimensions is {dimensions}, wanted {wanted}")

    def pieces(self, texts: Sequence[Text]) -> Iterator[tuple[Text, ...]]:
        """The texts in order, divided into passes."""
        piece: list[Text] = []
        tokens = 0
        for text in texts:
            if piece and tokens + len(text.ids) > self.pass_tokens:
                yield tuple(piece)
                piece, tokens = [], 0
            piece.append(text)
            tokens += len(text.ids)
        if piece:
            yield tuple(piece)


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines [N] float32 of the rows of two arrays [N, E]; the first may be [1, E]. 0 if one of the rows is 0."""
    products = (first * second).sum(1)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
