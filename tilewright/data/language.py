"""Which language a text is in, by py3langid (Lui and Baldwin 2012; 140 languages, its model is in the package).

Its confidence is a probability: where it says 0.7, about seven of ten are right (docs/data.md has the figures). A text below
`min_confidence`, or without letters, is "unknown".
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tilewright.data.document import Document, Removed
from tilewright.data.extras import needed

__all__ = ["Language", "identify"]

_SAMPLE = 20_000  # characters looked at: the answer no longer changes behind some thousand
_SAME = {"nb": "no"}  # one label for what the model holds together


@cache
def _model() -> Any:
    langid = needed("py3langid.langid", "data")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def identify(text: str, min_confidence: float = 0.0) -> tuple[str, float]:
    """(ISO 639-1 code, probability that it is right); ("unknown", probability) below `min_confidence`."""
    if not any(map(str.isalpha, text[:_SAMPLE])):
        return "unknown", 0.0
    name, probability = _model().classify(text[:_SAMPLE])
    name = str(name)
    return (_SAME.get(name, name) if probability >= min_confidence else "unknown"), float(probability)


class Language:
    """The step: notes the language; `keep` names those that stay ("unknown" may be one), all by default."""

    def __init__(self, *, keep: Sequence[str] = (), min_confidence: float = 0.5) -> None:
        if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
            raise ValueError(f"language: keep = {keep!r}, wanted a list of codes such as ['en', 'de']")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"language: min_confidence = {min_confidence}, wanted 0 to 1")
        known = {*_SAME, *(_SAME.get(name, name) for name in _model().labels), "unknown"}
        if strange := sorted(set(keep) - known):
            raise ValueError(f"language: no language {strange[0]!r}; wanted ISO 639-1 codes such as en, de, zh")
        self.keep = {_SAME.get(name, name) for name in keep}
        self.min_confidence = min_confidence

    def __call__(self, document: Document) -> Document | Removed:
        """The document with `language` and `language_probability` in its metadata."""
        name, probability = identify(document.text, self.min_confidence)
        document.metadata |= {"language": name, "language_probability": round(probability, 4)}
        if self.keep and name not in self.keep:
            return Removed("unknown language" if name == "unknown" else "another language", f"{name}, {probability:.2f}")
        return document
