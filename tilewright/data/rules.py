"""Quality rules of Gopher, C4 and FineWeb: a document passes, or is removed because of the first rule that it breaks.

Decisions are the same as those of datatrove, which produced FineWeb; a test compares them. The thresholds are in thresholds.py.
Where the papers are ambiguous (the definition of a word, strict or non-strict comparison), datatrove's choice is used. C4 also
removes lines of a document.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilewright.data.document import Document, Removed
from tilewright.data.punctuation import ENDS_SENTENCE, PUNCTUATION
from tilewright.data.thresholds import defaults
from tilewright.data.words import sentence_count, words

__all__ = ["C4", "RULES", "FineWeb", "GopherQuality", "GopherRepetition"]


class _Rule:
    """Thresholds by name; the defaults are the published ones. An unknown name or a wrong type raises ValueError."""

    name = ""

    def __init__(self, **changed: Any) -> None:
        self.limits: dict[str, Any] = defaults(self.name)
        if unknown := sorted(set(changed) - set(self.limits)):
            raise ValueError(
                f"step {self.name!r} has no setting {unknown[0]!r}; its settings are {', '.join(sorted(self.limits))}"
            )
        for setting, value in changed.items():
            self._check(setting, value)
        self.limits |= changed

    def _check(self, setting: str, value: Any) -> None:
        if isinstance(self.limits[setting], tuple):
            good = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
        else:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good:
            wanted = "a list of strings" if isinstance(self.limits[setting], tuple) else "a number"
            raise ValueError(f"step {self.name!r}: {setting} is {value!r}, wanted {wanted}")

    def __call__(self, document: Document) -> Document | Removed:
        """The document, or a `Removed` with the first rule that it breaks."""
        removed = self.broken(document)
        return document if removed is None else removed

    def broken(self, document: Document) -> Removed | None:
        """The first rule that a document breaks."""
        raise NotImplementedError


def _over(value: float, limit: float, reason: str) -> Removed | None:
    return Removed(reason, f"{value:.4g}, at most {limit:g}") if value > limit else None


def _under(value: float, limit: float, reason: str) -> Removed | None:
    return Removed(reason, f"{value:.4g}, at least {limit:g}") if value < limit else None


class GopherQuality(_Rule):
    """Length, mean word length, symbols, bullets, ellipses, letters, stop words."""

    name = "gopher-quality"

    def broken(self, document: Document) -> Removed | None:
        """The first rule that a document breaks."""
        text, limits = document.text, self.limits
        tokens = words(text)
        real = [token for token in tokens if not PUNCTUATION.issuperset(token)]
        if removed := _under(len(real), limits["min_words"], "too few words"):
            return removed
        if removed := _over(len(real), limits["max_words"], "too many words"):
            return removed
        if not real:
            return None  # only if min_words is 0: nothing counts as a word
        length = sum(map(len, real)) / len(real)
        lines = text.splitlines()
        ellipses = text.count("...") + text.count("…")
        bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
        trailing = sum(line.rstrip().endswith(("...", "…")) for line in lines)
        alphabetic = sum(any(map(str.isalpha, token)) for token in tokens)
        return (
            _under(length, limits["min_word_length"], "words too short")
            or _over(length, limits["max_word_length"], "words too long")
            or _over(text.count("#") / len(tokens), limits["max_hash_ratio"], "too many number signs")
            or _over(ellipses / len(tokens), limits["max_ellipsis_ratio"], "too many ellipses")
            or _over(bullets / len(lines), limits["max_bullet_lines"], "too many bullets")
            or _over(trailing / len(lines), limits["max_ellipsis_lines"], "too many lines end in an ellipsis")
            or _under(alphabetic / len(tokens), limits["min_alphabetic"], "too few words with letters")
            or _under(len(set(limits["stop_words"]).intersection(tokens)), limits["min_stop_words"], "too few stop words")
        )


class GopherRepetition(_Rule):
    """Repeated paragraphs, lines and n-grams of words."""

    name = "gopher-repetition"

    def broken(self, document: Document) -> Removed | None:
        """The first rule that a document breaks."""
        text, limits = document.text, self.limits
        if not text:
            return Removed("empty")
        for kind, parts in (("paragraph", re.split(r"\n{2,}", text.strip())), ("line", re.split(r"\n+", text))):
            count, chars = _repeated(parts)
            by_count, by_chars = limits[f"max_duplicate_{kind}s"], limits[f"max_duplicate_{kind}_chars"]
            if removed := _over(count / len(parts), by_count, f"duplicate {kind}s"):
                return removed
            if removed := _over(chars / len(text), by_chars, f"characters in duplicate {kind}s"):
                return removed
        tokens = words(text)
        for n in (2, 3, 4):
            limit = limits[f"max_top_{n}_gram"]
            if removed := _over(_top_gram_chars(tokens, n) / len(text), limit, f"most frequent {n}-gram"):
                return removed
        for n in range(5, 11):
            limit = limits[f"max_duplicate_{n}_gram"]
            if removed := _over(_duplicate_gram_chars(tokens, n) / len(text), limit, f"duplicate {n}-grams"):
                return removed
        return None


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    """(number of repeated parts, their characters)."""
    seen: set[str] = set()
    count = chars = 0
    for part in parts:
        if part in seen:
            count += 1
            chars += len(part)
        seen.add(part)
    return count, chars


def _top_gram_chars(tokens: Sequence[str], n: int) -> int:
    """Characters of the most frequent n-gram, with spaces between its words; the first one of equally frequent ones."""
    grams = Counter(zip(*(tokens[i:] for i in range(n))))
    if not grams:
        return 0
    gram, times = max(grams.items(), key=lambda item: item[1])  # the first of equals, because a Counter keeps insertion order
    return (sum(map(len, gram)) + n - 1) * times


def _duplicate_gram_chars(tokens: Sequence[str], n: int) -> int:
    """Characters of repeated n-grams, each character counted once; n-grams are compared by their letters only."""
    seen: set[str] = set()
    chars = at = 0
    while at <= len(tokens) - n:
        gram = "".join(tokens[at : at + n])
        if gram in seen:
            chars += len(gram)
            at += n
        else:
            seen.add(gram)
            at += 1
    return chars


class C4(_Rule):
    """Removes lines that do not end a sentence, are too short, or mention policies or javascript. Removes the document if too
    few sentences remain."""

    name = "c4"

    def broken(self, document: Document) -> Removed | None:
        """The first rule that a document breaks; a document that passes has lost its bad lines."""
        kept: list[str] = []
        sentences = 0
        for raw in document.text.splitlines():
            line = self._line(raw.strip())
            if line is None:
                continue
            lower = line.lower()
            if any(phrase in lower for phrase in self.limits["page_phrases"]):
                return Removed("lorem ipsum")
            if any(word in lower for word in self.limits["line_words"]):
                continue
            if "{" in line:
                return Removed("curly bracket")
            if any(phrase in lower for phrase in self.limits["policy_phrases"]):
                continue
            sentences += sentence_count(line)
            kept.append(line)
        if removed := _under(sentences, self.limits["min_sentences"], "too few sentences"):
            return removed
        document.text = "\n".join(kept).strip()
        return None

    def _line(self, line: str) -> str | None:
        """The line without citation marks; None if it is removed because of its form."""
        parts = line.split()
        if any(len(word) > self.limits["max_word_chars"] for word in parts):
            return None
        line = re.sub(r"\[\d*\]|\[edit\]|\[citation needed\]", "", line)
        if not line.endswith(tuple(self.limits["line_ends"])) or line.endswith("..."):
            return None
        return line if len(parts) >= self.limits["min_line_words"] else None


class FineWeb(_Rule):
    """Removes documents in which too many lines do not end a sentence, are short or repeated, and documents that are lists."""

    name = "fineweb"

    def broken(self, document: Document) -> Removed | None:
        """The first rule that a document breaks."""
        limits, text = self.limits, document.text
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return Removed("empty")
        ended = sum(line.endswith(ENDS_SENTENCE) for line in lines) / len(lines)
        short = sum(len(line) <= limits["short_line_chars"] for line in lines) / len(lines)
        repeated = _repeated(lines)[1] / len(text.replace("\n", ""))
        return (
            _under(ended, limits["min_line_punctuation"], "too few lines end a sentence")
            or _over(short, limits["max_short_lines"], "too many short lines")
            or _over(repeated, limits["max_duplicate_chars"], "characters in duplicate lines")
            or _over(text.count("\n") / max(1, len(words(text))), limits["max_newlines"], "a list")
        )


RULES: dict[str, type[_Rule]] = {rule.name: rule for rule in (GopherQuality, GopherRepetition, C4, FineWeb)}
