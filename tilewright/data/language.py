"""Detects the language of a text with py3langid (Lui and Baldwin 2012; 140 languages, the model is in that package).

Its confidence is too low for short texts. With `_SHIFT` added to its log-odds it is a calibrated probability: of the texts with
0.7, seven of ten are identified correctly (figures: docs/data.md). A text with a probability below `min_confidence`, or without
letters, is "unknown".
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from tilewright.data.document import Document, Removed
from tilewright.extras import needed

__all__ = ["Language", "identify"]

_SAMPLE = 4000  # characters examined, because the model is slow Python; the documents of docs/data.md are shorter
_SHIFT = 0.8  # fitted to sentences in 71 languages: in each tenth of the scale, within 0.1 of the share that is correct
_SAME = {"nb": "no"}  # labels of the model that count as the same language


@cache
def _model() -> Any:
    langid = needed("py3langid.langid", "data")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def identify(text: str, min_confidence: float = 0.0) -> tuple[str, float]:
    """(ISO 639-1 code, probability that it is right); ("unknown", probability) below `min_confidence`."""
    if not any(map(str.isalpha, text[:_SAMPLE])):
        return "unknown", 0.0
    name, probability = _model().classify(text[:_SAMPLE])
    odds = probability / max(1e-12, 1 - probability) * math.exp(_SHIFT)
    probability = odds / (1 + odds)
    return (_SAME.get(name, str(name)) if probability >= min_confidence else "unknown"), probability


class Language:
    """The step: records the language. keep: the languages to keep, possibly with "unknown"; by default all are kept."""

    def __init__(self, *, keep: Sequence[str] = (), min_confidence: float = 0.5) -> None:
        if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
            raise ValueError(f"language: keep is {keep!r}, wanted a list of language codes such as ['en', 'de']")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"language: min_confidence is {min_confidence}, wanted 0 to 1")
        known = {*_SAME, *(_SAME.get(name, name) for name in _model().labels), "unknown"}
        if strange := sorted(set(keep) - known):
            raise ValueError(
                f"language: keep contains {strange[0]!r}, which is not a known language; wanted ISO 639-1 codes such as "
                "en, de, zh"
            )
        self.keep = {_SAME.get(name, name) for name in keep}
        self.min_confidence = min_confidence

    def __call__(self, document: Document) -> Document | Removed:
        """The document with `language` and `language_probability` in its metadata."""
        name, probability = identify(document.text, self.min_confidence)
        document.metadata |= {"language": name, "language_probability": round(probability, 4)}
        if self.keep and name not in self.keep:
            return Removed("unknown language" if name == "unknown" else "another language", f"{name}, {probability:.2f}")
        return document
