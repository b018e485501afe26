"""Scores of pairs of texts: the inputs of the model, and the conversion of its output to scores. Plain values, no torch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tilewright.engine.pooling import Pooled, Text, cosines
from tilewright.engine.tokenizer import Tokenizer

__all__ = ["Asked", "scores"]


class Asked:
    """The inputs of the model for pairs of texts: each pair as one input, or each text separately.

    texts: the inputs to run. labels: whether to run them with the classification head.
    """

    def __init__(self, pooled: Pooled, tokenizer: Tokenizer, queries: Sequence[str], documents: Sequence[str]):
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"{len(queries)} queries and {len(documents)} documents, wanted as many of both, or one query")
        if pooled.labels > 1:
            got = f"the model's head gives {pooled.labels} labels, which cannot be used as a score"
            raise ValueError(f"{got}; wanted a head with one label")
        self.labels = pooled.labels == 1
        self._queries = len(queries)
        if self.labels:
            each = queries if len(queries) == len(documents) else [queries[0]] * len(documents)
            both = [tokenizer.encode_pair(*pair) for pair in zip(each, documents, strict=True)]
            self.texts = [Text(ids, types if pooled.types else None) for ids, types in both]
        else:
            self.texts = [Text(tokenizer.encode(text)) for text in (*queries, *documents)]
        for text in self.texts:
            pooled.check(text.ids)

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.ids) for text in self.texts)

    def read(self, answer: np.ndarray) -> list[float]:
        """The score of each document, from the model's output for the texts."""
        if self.labels:
            return answer[:, 0].tolist()
        return cosines(answer[: self._queries], answer[self._queries :]).tolist()


class _Runs(Protocol):
    pooled: Pooled

    def run_all(self, texts: Sequence[Text], *, labels: bool = False, dimensions: int | None = None) -> np.ndarray:
        """As `Pooler.run_all`."""
        ...


def scores(pooler: _Runs, tokenizer: Tokenizer, queries: Sequence[str], documents: Sequence[str]) -> list[float]:
    """The score of each document with its query. Raises ValueError if their numbers or lengths do not fit."""
    pairs = Asked(pooler.pooled, tokenizer, queries, documents)
    return pairs.read(pooler.run_all(pairs.texts, labels=pairs.labels)) if documents else []
