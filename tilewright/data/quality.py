"""A quality classifier trained on two sets of texts: logistic regression over hashed words and pairs of words.

It has the form of fastText's supervised classifier (Joulin et al. 2017) without the hidden layer. Features are counts of words
and of pairs of neighbouring words, hashed into 2**18 columns, log-scaled, with each row normalised to length one. The
classifier is trained with scikit-learn and stored as numbers (`.safetensors`), so a model file cannot run code. The same texts
give the same weights.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tilewright.data.compressed import Limits
from tilewright.data.document import Document, Removed
from tilewright.data.hashing import hashed, windows
from tilewright.data.minhash import normal_words
from tilewright.data.read import documents, format_of
from tilewright.extras import needed

__all__ = ["Quality", "features", "score", "train", "train_files"]

_COLUMNS = 1 << 18
_WORDS = 2000


def features(text: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(sorted columns, values) of a text's first 2000 words. The squares of the values sum to 1. Empty for an empty text."""
    words = np.array([hashed(word) for word in normal_words(text[: _WORDS * 12])[:_WORDS]], np.uint64)
    found = np.concatenate([words, windows(words, 2)])
    columns, counts = np.unique((found >> np.uint64(64 - 18)).astype(np.int64), return_counts=True)
    values = np.log1p(counts).astype(np.float32)
    return columns, values / max(float(np.sqrt((values**2).sum())), 1e-9)


def train(good: Sequence[str], bad: Sequence[str], *, strength: float = 10.0) -> dict[str, NDArray[np.float32]]:
    """Train weights that separate `good` texts from `bad` ones. strength: the inverse of the L2 penalty."""
    if not good or not bad:
        raise ValueError(f"quality: training needs good and bad texts, got {len(good)} good and {len(bad)} bad")
    sparse, linear = needed("scipy.sparse", "data"), needed("sklearn.linear_model", "data")
    rows = [features(text) for text in (*good, *bad)]
    ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    matrix = sparse.csr_matrix(
        (np.concatenate([v for _, v in rows]), np.concatenate([c for c, _ in rows]), ends), (len(rows), _COLUMNS)
    )
    labels = np.array([1] * len(good) + [0] * len(bad))
    model = linear.LogisticRegression(C=strength, class_weight="balanced", solver="liblinear", random_state=0).fit(
        matrix, labels
    )
    return {"weight": model.coef_[0].astype(np.float32), "bias": model.intercept_.astype(np.float32)}


def score(weights: dict[str, NDArray[np.float32]], text: str) -> float:
    """The probability that a text is good."""
    columns, values = features(text)
    logit = float(weights["weight"][columns] @ values + weights["bias"][0])
    return float(1 / (1 + np.exp(-np.clip(logit, -50, 50))))


def train_files(good: Path, bad: Path, out: Path, *, text_field: str = "text") -> dict[str, float | int]:
    """Train on two files of texts and write the model; every tenth text of each file is held out for measurement.

    Returns the numbers of texts, and the accuracy and the area under the ROC curve for the held-out texts.
    """
    sets = []
    for path in (good, bad):
        found = documents(path, format_of(path), Limits(), Counter(), text_field=text_field)
        texts = [document.text for document in found if document.text.strip()]
        if len(texts) < 20:
            raise ValueError(
                f"{path}: only {len(texts)} records have text in the field {text_field!r}, but at least 20 are needed; "
                "give more, or name the field with text_field"
            )
        sets.append(([text for i, text in enumerate(texts) if i % 10], texts[::10]))
    weights = train(sets[0][0], sets[1][0])
    save_file(weights, out)
    scores = [np.array([score(weights, text) for text in held]) for _, held in sets]
    above = (scores[0][:, None] > scores[1]).mean() + 0.5 * (scores[0][:, None] == scores[1]).mean()
    right = (scores[0] >= 0.5).sum() + (scores[1] < 0.5).sum()
    counts = {"good": len(sets[0][0]), "bad": len(sets[1][0]), "held out": len(scores[0]) + len(scores[1])}
    return {**counts, "accuracy": round(right / counts["held out"], 4), "roc auc": round(float(above), 4)}


class Quality:
    """The step: records the score and removes documents below `min_score`. `model`: from `tilewright data train-quality`."""

    def __init__(self, *, model: str, min_score: float = 0.5) -> None:
        try:
            self.weights: dict[str, Any] = load_file(model)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"quality: {model} is not a model that tilewright data train-quality wrote: {error}") from None
        if {key: value.shape for key, value in self.weights.items()} != {"weight": (_COLUMNS,), "bias": (1,)}:
            raise ValueError(
                f"quality: {model} is not a model that tilewright data train-quality wrote; make one with that command"
            )
        self.min_score = min_score

    def __call__(self, document: Document) -> Document | Removed:
        """The document with `quality` in its metadata."""
        value = score(self.weights, document.text)
        document.metadata["quality"] = round(value, 4)
        return Removed("low quality score", f"{value:.3f}, at least {self.min_score:g}") if value < self.min_score else document
