"""What a model can say of whole texts, as plain values: embeddings, and scores of pairs. pooler.py has the passes.

embedding     features of the tokens, pooled as the model's folder says (models/sentence.py)
score         of an encoder with a head: what the head says of a pair; of any other model: the cosine of two embeddings
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Pass", "Pooled", "Text", "cosines"]


class Text(NamedTuple):
    """One input: token ids, and where a model reads pairs, which of the two texts each is of."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


class Pass(NamedTuple):
    """Texts that go through the model together, and what is asked of them."""

    texts: tuple[Text, ...]
    labels: bool = False
    """The head's scores instead of an embedding."""
    dimensions: int | None = None
    """Of the embedding; None: all."""


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """What may be asked of a model.

    width: numbers of an embedding.
    vocab_size: token ids are below it.
    max_tokens: of one text.
    pass_tokens: of a pass of several texts.
    labels: scores that the model's head gives; 0 without one.
    sigmoid: whether a score of one label goes through it.
    types: whether the model is told which of two texts a token is of.
    dimensions: to which an embedding may be cut; None: to none, () to any.
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
        """Raise ValueError for a text that the model cannot read."""
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
        """The texts in order, as many at a time as a pass takes."""
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
    """Of the rows of two arrays [N, E], the first may be [1, E]: [N] float32. 0 where one of them is 0."""
    products = (first * second).sum(1)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
