"""Grades worked solutions in mathematics: finds the final answer by a marker, and compares it with the truth by math-verify.

The comparison is symbolic: 0.5, 1/2, 50 % and $\\frac12$ are the same answer, and so are 1,000 and 1000. The comparison has no
time limit, and an answer may contain 9^9^9. So grade answers in workers (`workers.py`), which have a time limit.
"""

import logging
import re
from typing import Any

from tilewright.extras import MissingExtra

__all__ = ["MARKS", "final_answer", "grade"]

MARKS = ("####", "A:", "answer is", "Answer:")
"""Markers of a final answer, in addition to \\boxed{...}. The last marker in the text counts."""
_LONGEST = 200
"""Greatest number of characters in a final answer. A longer text does not count as an answer."""


def final_answer(text: str) -> str | None:
    """The text after the last marker, up to the end of its line, or in the last \\boxed{}; None if there is no marker."""
    boxed, place = text.rfind("\\boxed{"), max(text.rfind(mark) for mark in MARKS)
    if boxed < 0 and place < 0:
        return None
    if boxed > place:
        return _braced(text, boxed + len("\\boxed{"))
    mark = next(mark for mark in MARKS if text.startswith(mark, place))
    found = text[place + len(mark) :].lstrip(" :").partition("\n")[0].strip()
    return found[:_LONGEST] if 0 < len(found) <= _LONGEST else None


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for place in range(start, min(len(text), start + _LONGEST)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[start:place] or None
    return None


def grade(answer: str, truth: str) -> bool:
    """Whether the final answer in `answer` equals the one in `truth`. If `truth` has no marker, all of it is the final answer.

    Raises:
        MissingExtra: math-verify is not installed. It is in the extra [rl].
    """
    said, wanted = final_answer(answer), final_answer(truth) or truth.strip()
    if said is None:
        return False
    if _plain(said) == _plain(wanted):
        return True
    verify = _math_verify()
    # Without math-verify's own time limits: they use signals, which only a main thread may set, and workers have limits anyway.
    parsed = [verify.parse(_latex(text), parsing_timeout=None, raise_on_error=False) for text in (wanted, said)]
    return bool(parsed[0] and parsed[1] and verify.verify(*parsed, timeout_seconds=None, raise_on_error=False))


def _plain(text: str) -> str:
    """A number without spaces, currency signs, thousands separators or a final full stop."""
    return re.sub(r"(?<=\d),(?=\d{3})|[\s$]|\.$", "", text)


def _latex(text: str) -> str:
    return text if "$" in text.strip("$ ") else f"${_plain(text)}$"


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise MissingExtra(f"grading mathematics needs math-verify: pip install 'tilewright[rl]' ({error})") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # otherwise it warns at every call that there is no time limit
    return math_verify
