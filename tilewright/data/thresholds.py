"""Every threshold of the published quality rules, with its source. Recipes may override them; no other file has thresholds.

Gopher: Rae et al. 2021, arXiv 2112.11446, section A1.1 and table A1. C4: Raffel et al. 2020, JMLR 21(140), section 2.2, and the
code that produced it (tensorflow_datasets, c4_utils.py). FineWeb: Penedo et al. 2024, arXiv 2406.17557, section 3.6.
"""

from typing import NamedTuple

__all__ = ["TABLE", "Threshold", "defaults"]


class Threshold(NamedTuple):
    """A number or a list of words, what it limits, and where it was published."""

    step: str
    name: str
    value: float | int | tuple[str, ...]
    meaning: str
    source: str


_GOPHER = "arXiv 2112.11446, A1.1"
_REPEAT = "arXiv 2112.11446, table A1"
_C4 = "JMLR 21(140), 2.2"
_C4_CODE = "tensorflow_datasets, c4_utils.py"
_FINEWEB = "arXiv 2406.17557, 3.6"

TABLE: tuple[Threshold, ...] = (
    Threshold("gopher-quality", "min_words", 50, "words that are not all punctuation, at least", _GOPHER),
    Threshold("gopher-quality", "max_words", 100_000, "and at most", _GOPHER),
    Threshold("gopher-quality", "min_word_length", 3, "mean characters of those words, at least", _GOPHER),
    Threshold("gopher-quality", "max_word_length", 10, "and at most", _GOPHER),
    Threshold("gopher-quality", "max_hash_ratio", 0.1, "number signs a word, at most", _GOPHER),
    Threshold("gopher-quality", "max_ellipsis_ratio", 0.1, "ellipses a word, at most", _GOPHER),
    Threshold("gopher-quality", "max_bullet_lines", 0.9, "share of lines that begin with a bullet, at most", _GOPHER),
    Threshold("gopher-quality", "max_ellipsis_lines", 0.3, "share of lines that end with an ellipsis, at most", _GOPHER),
    Threshold("gopher-quality", "min_alphabetic", 0.8, "share of words with a letter, at least", _GOPHER),
    Threshold("gopher-quality", "min_stop_words", 2, "different words of `stop_words`, at least", _GOPHER),
    Threshold(
        "gopher-quality", "stop_words", ("the", "be", "to", "of", "and", "that", "have", "with"), "the words meant", _GOPHER
    ),
    Threshold("gopher-repetition", "max_duplicate_paragraphs", 0.3, "share of paragraphs seen before, at most", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_paragraph_chars", 0.2, "the same by characters", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_lines", 0.3, "share of lines seen before, at most", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_line_chars", 0.2, "the same by characters", _REPEAT),
    Threshold("gopher-repetition", "max_top_2_gram", 0.2, "characters in the most frequent 2-gram of words, at most", _REPEAT),
    Threshold("gopher-repetition", "max_top_3_gram", 0.18, "of 3 words", _REPEAT),
    Threshold("gopher-repetition", "max_top_4_gram", 0.16, "of 4 words", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_5_gram", 0.15, "characters in 5-grams seen before, at most", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_6_gram", 0.14, "of 6 words", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_7_gram", 0.13, "of 7 words", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_8_gram", 0.12, "of 8 words", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_9_gram", 0.11, "of 9 words", _REPEAT),
    Threshold("gopher-repetition", "max_duplicate_10_gram", 0.10, "of 10 words", _REPEAT),
    Threshold("c4", "min_sentences", 5, "sentences in the lines that stay, at least", _C4),
    Threshold("c4", "min_line_words", 3, "words of a line that stays, at least", _C4_CODE),
    Threshold("c4", "max_word_chars", 1000, "characters of a word in a line that stays, at most", _C4_CODE),
    Threshold("c4", "line_ends", (".", "?", "!", '"', "'"), "what a line that stays ends with (not an ellipsis)", _C4_CODE),
    Threshold("c4", "line_words", ("javascript",), "a line with one of these goes", _C4),
    Threshold(
        "c4",
        "policy_phrases",
        ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"),
        "a line with one of these goes",
        _C4_CODE,
    ),
    Threshold("c4", "page_phrases", ("lorem ipsum",), "a page with one of these goes", _C4),
    Threshold("fineweb", "min_line_punctuation", 0.12, "share of lines that end a sentence, at least", _FINEWEB),
    Threshold("fineweb", "max_short_lines", 0.67, "share of lines of up to `short_line_chars`, at most", _FINEWEB),
    Threshold("fineweb", "short_line_chars", 30, "characters of a short line, at most", _FINEWEB),
    Threshold("fineweb", "max_duplicate_chars", 0.01, "characters in lines seen before, at most", _FINEWEB),
    Threshold("fineweb", "max_newlines", 0.3, "line ends a word, at most", _FINEWEB),
)


def defaults(step: str) -> dict[str, float | int | tuple[str, ...]]:
    """The published values for one step, by name."""
    return {row.name: row.value for row in TABLE if row.step == step}
